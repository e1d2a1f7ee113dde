"""Chains of a YAML held against the signatures of its models, with errors that point into the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shapestream.chains.plan import Chain, ChainRefused, plan_chain
from shapestream.errors import ConfigurationError
from shapestream.settings import LoadedSettings
from shapestream_engine.ports import shapes_of
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


def describe_chain(signature: ModelSignature) -> Iterator[str]:
    """Yield a chain of a server as text: its inputs and outputs, which are all that a client is told."""
    yield f"chain {signature.name}"
    yield from (f"  input  {port.name}: {port.element_type} [{port.shape}]" for port in signature.inputs)
    shapes = {shapes_of(port.name) for port in signature.outputs if port.item is not None}
    for port in signature.outputs:
        if port.item is not None:
            yield f"  output {port.name}: list of {port.element_type} [{port.item}]"
        elif port.name not in shapes:
            yield f"  output {port.name}: {port.element_type} [{port.shape}]"
