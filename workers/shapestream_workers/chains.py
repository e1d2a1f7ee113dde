"""Chains as text, and the services for texts of a YAML: the options of gateways, with errors that point into the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shapestream.chains.spec import ChainSpec, Source
from shapestream.gateway.errors import NotGiven
from shapestream.gateway.text_ports import (
    EMBEDDING,
    IDS,
    SCORE,
    score_ports,
    scores_texts,
    text_ports,
)
from shapestream.settings import HttpSettings, LoadedSettings, ModelSettings, Settings
from shapestream.settings.version_settings import served_name
from shapestream.versions import parted
from shapestream_engine.ports import shapes_of
from shapestream_engine.signature import ModelSignature


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


def service_options(
    settings: HttpSettings, loaded: Settings, labels: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> list[str]:
    """Return the options of a gateway's command line for its services. `labels`: of each folder's model that has them."""
    options: list[str] = []
    specs = {chain.name: chain.spec() for chain in loaded.chains}
    for name in dict.fromkeys(settings.texts):
        spec = specs.get(served_name(name, loaded.versions))
        # Of a chain with versions each part is named without one: the server draws it, or the caller names it.
        told: dict[str, Any] = (
            {} if spec is None else {part: parted(model)[0] for part, model in _parts(spec)}
        )
        if "encoder" in told and (most := _largest_token(loaded.meant_by(told["encoder"]))) is not None:
            told["largest_token"] = most
        if labels.get(name):
            told["labels"] = labels[name]
        options += ["--texts", f"{name}={json.dumps(told)}" if told else name]
    return options


def _parts(chain: ChainSpec) -> Iterator[tuple[str, str]]:
    """Yield the models that a chain of texts is made of.

    The encoder makes the vectors or scores, and takes another stage's outputs; the tokenizer takes the texts.
    """
    source = next((chain.outputs[name] for name in (*EMBEDDING, SCORE) if name in chain.outputs), "")
    encoder = chain.stage(Source.parse(source).stage)
    if encoder is not None and any(Source.parse(text).stage for text in encoder.inputs.values()):
        yield "encoder", encoder.model
    for stage in dict.fromkeys(Source.parse(text).stage for text in chain.inputs.values()):
        tokenizer = chain.stage(stage)
        if tokenizer is not None and tokenizer is not encoder:
            yield "tokenizer", tokenizer.model


def _largest_token(encoder: ModelSettings) -> int | None:
    """Return the largest token that the encoder was proved with, which its `probe` tells."""
    probe = encoder.probe.get(IDS) if isinstance(encoder.probe, dict) else None
    return None if probe is None or probe.integers is None else probe.integers[1]


def service_problems(loaded: LoadedSettings, signatures: Mapping[str, ModelSignature]) -> Iterator[str]:
    """Yield a line for each service whose model or chain neither embeds nor scores texts; those without a signature are
    left out.
    """
    http = loaded.settings.server.http
    for place, name in () if http is None else http.services():
        if name in signatures:
            try:
                (score_ports if scores_texts(signatures[name]) else text_ports)(signatures[name])
            except NotGiven as error:
                yield loaded.problem(("server", "http", *place), error.message)
