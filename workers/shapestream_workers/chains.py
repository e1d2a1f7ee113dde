"""Chains of a YAML held against the signatures of its models, with errors that point into the file."""

from __future__ import annotations

from collections.abc import Mapping

from shapestream.chains.plan import Chain, ChainRefused, plan_chain
from shapestream.errors import ConfigurationError
from shapestream.settings import LoadedSettings
from shapestream_engine.signature import ModelSignature


def plan_chains(loaded: LoadedSettings, signatures: Mapping[str, ModelSignature]) -> list[Chain]:
    """Return the chains. Raises `ConfigurationError` with a line for each mistake.

    A chain whose models are not all here is left out: what is wrong with them has been said.
    """
    chains: list[Chain] = []
    problems: list[str] = []
    for index, settings in enumerate(loaded.settings.chains):
        if any(stage.model not in signatures for stage in settings.stages):
            continue
        try:
            chains.append(plan_chain(settings.spec(), signatures))
        except ChainRefused as error:
            problems += [loaded.problem(("chains", index, *key), words) for key, words in error.problems]
    if problems:
        raise ConfigurationError(problems)
    return chains
