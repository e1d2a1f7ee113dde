"""Services for texts: the models behind OpenAI's and text-embeddings-inference's endpoints, read from the YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shapestream.chains.spec import ChainSpec, Source
from shapestream.gateway.gateway_errors import NotGiven
from shapestream.gateway.text_ports import EMBEDDING, text_ports
from shapestream.settings import ChainSettings, HttpSettings, LoadedSettings
from shapestream_engine.signature import ModelSignature


def service_options(settings: HttpSettings, chains: Sequence[ChainSettings]) -> list[str]:
    """Return the options of a gateway's command line for its services."""
    options: list[str] = []
    specs = {chain.name: chain.spec() for chain in chains}
    for name in settings.openai.embeddings if settings.openai is not None else ():
        options += ["--openai", name]
    if settings.tei is not None:
        options += ["--tei", settings.tei]
    for name in dict.fromkeys(name for _, name in settings.services()):
        if (spec := specs.get(name)) is not None:
            for option, model in _parts(spec):
                options += [option, f"{name}={model}"]
    return options


def _parts(chain: ChainSpec) -> Iterator[tuple[str, str]]:
    """Yield the models that a chain of texts is made of.

    The encoder makes the vectors, and takes another stage's outputs; the tokenizer takes the texts.
    """
    source = next((chain.outputs[name] for name in EMBEDDING if name in chain.outputs), "")
    encoder = chain.stage(Source.parse(source).stage)
    if encoder is not None and any(Source.parse(text).stage for text in encoder.inputs.values()):
        yield "--encoder", encoder.model
    for text in chain.inputs.values():
        tokenizer = chain.stage(Source.parse(text).stage)
        if tokenizer is not None and tokenizer is not encoder:
            yield "--tokenizer", tokenizer.model


def service_problems(loaded: LoadedSettings, signatures: Mapping[str, ModelSignature]) -> Iterator[str]:
    """Yield a line for each service whose model or chain embeds no texts; those without a signature are left out."""
    http = loaded.settings.server.http
    for place, name in () if http is None else http.services():
        if name in signatures:
            try:
                text_ports(signatures[name])
            except NotGiven as error:
                yield loaded.problem(("server", "http", *place), error.message)
