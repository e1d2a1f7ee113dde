"""The inputs and outputs that an endpoint for texts uses, found in a model's signature.

A model of texts takes `str [texts]`, gives a vector for each, and perhaps the number of each text's tokens. An encoder
takes tokens that a caller has made, and gives vectors. A tokenizer takes texts, and gives the tokens of each.

A server checks its models against these before any gateway runs, so this needs no library of a gateway's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from shapestream.gateway.errors import NotGiven
from shapestream_engine.element_types import dtype_of
from shapestream_engine.layout import value
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.signature import ModelSignature

TEXT = "str"
"""The element type of texts."""
FLOATS = ("f32", "f16", "bf16", "f64")
EMBEDDING = ("embedding", "sentence_embedding")
"""Names of the output with the vectors, the first of which the model has."""
TOKENS = "tokens"
"""The output with the number of tokens of each text. Without it, a usage of 0 is told."""
SPARSE = "sparse"
"""The output with vectors that are mostly 0, for TEI's `/embed_sparse`."""
QUERY = "query"
"""The input of a model that scores texts, with the first text of each pair: one for all, one for each text, or none."""
SCORE = "score"
"""Its output, with a number for each label and text."""
UNCUT = "uncut"
"""The output with the number of tokens that each text, with its query, would have if none were cut."""
IDS = "input_ids"
"""The encoder's input, and the tokenizer's output, with the numbers of tokens."""
FILLED = {"attention_mask": 1, "token_type_ids": 0}
"""Inputs of encoders that follow from the tokens alone: each number of them."""
SCORING_MODEL = (
    f"it needs two inputs of element type str, `{QUERY}` [queries] and another one [texts], whose sizes may differ, and an "
    f"output `{SCORE}` of floating numbers with a row for each text"
)
TEXT_MODEL = (
    "it needs one input of element type str and shape [texts], and an output `embedding` of floating numbers with a "
    "vector for each text"
)


@value
class TextPorts:
    """The ports of a model of texts."""

    text: str
    embedding: str
    element_type: str
    size: int | None
    """Numbers of a vector; None where the signature does not tell."""
    counts_tokens: bool
    tells_cuts: bool
    """True if it has the output `uncut`."""
    is_sparse: bool


def text_ports(signature: ModelSignature) -> TextPorts:
    """Return the ports of a model of texts; raises `NotGiven` for other models, and says what it needs."""
    output = _embedding(signature.outputs)
    text = text_input(signature)
    if text is None or output is None:
        raise NotGiven(f"{signature.name!r} embeds no texts: {TEXT_MODEL}")
    last = output.shape.dimensions[-1] if output.item is None else output.item.dimensions[-1]
    names = [port.name for port in signature.outputs]
    return TextPorts(
        text=text,
        embedding=output.name,
        element_type=output.element_type,
        size=None if last.is_dynamic else last.minimum,
        counts_tokens=TOKENS in names,
        tells_cuts=TOKENS in names and UNCUT in names,
        is_sparse=SPARSE in names,
    )


@value
class ScorePorts:
    """The ports of a model that scores texts, alone or in pairs with a query."""

    text: str
    element_type: str
    labels: int | None
    """Scores of a text; None where the signature does not tell."""
    counts_tokens: bool
    tells_cuts: bool
    """True if it has the output `uncut`."""


def scores_texts(signature: ModelSignature) -> bool:
    """Tell whether a model scores texts: its output with the scores has their name."""
    return any(port.name == SCORE for port in signature.outputs)


def score_ports(signature: ModelSignature) -> ScorePorts:
    """Return the ports of a model that scores texts; raises `NotGiven` for other models, and says what it needs."""
    outputs = {port.name: port for port in signature.outputs}
    output = outputs.get(SCORE)
    text = second_text(signature)
    if text is None or output is None or output.element_type not in FLOATS or not _has_vectors(output):
        raise NotGiven(f"{signature.name!r} scores no texts: {SCORING_MODEL}")
    last = (output.shape if output.item is None else output.item).dimensions[-1]
    return ScorePorts(
        text=text,
        element_type=output.element_type,
        labels=None if last.is_dynamic else last.minimum,
        counts_tokens=TOKENS in outputs,
        tells_cuts=TOKENS in outputs and UNCUT in outputs,
    )


def second_text(signature: ModelSignature) -> str | None:
    """Return the name of the input whose texts stand beside those of `query`; None if it takes other things."""
    shapes = {
        port.name: port.shape.names[0]
        for port in signature.inputs
        if port.element_type == TEXT and port.shape.rank == 1
    }
    if len(signature.inputs) != 2 or len(shapes) != 2 or QUERY not in shapes:
        return None
    size = shapes.pop(QUERY)
    ((name, own),) = shapes.items()
    return None if size is not None and size == own else name


def text_input(signature: ModelSignature) -> str | None:
    """Return the name of the only input, if it takes texts."""
    match signature.inputs:
        case [port] if port.element_type == TEXT and port.shape.rank == 1:
            return port.name
        case _:
            return None


def _embedding(outputs: Iterable[OutputPort]) -> OutputPort | None:
    """Return the output with the vectors: by its name, or as the only one that can have them."""
    found = [port for port in outputs if port.element_type in FLOATS and _has_vectors(port)]
    named = [port for name in EMBEDDING for port in found if port.name == name]
    if named:
        return named[0]
    return found[0] if len(found) == 1 else None


def _has_vectors(port: OutputPort) -> bool:
    if port.item is not None:
        return port.item.rank in (1, 2)
    return port.shape.rank == 2


@value
class EncoderPorts:
    """The ports of an encoder."""

    ids: InputPort
    filled: Mapping[str, tuple[npt.DTypeLike, int]]
    """The inputs that have the same number for each token: its type, and the number."""
    embedding: str

    def inputs_of(self, tokens: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.generic]]:
        """Return the inputs for the tokens of one text. The SDK refuses numbers that the encoder's type lacks."""
        ids = tokens[np.newaxis]
        return {
            self.ids.name: ids,
            **{name: np.full(ids.shape, number, dtype) for name, (dtype, number) in self.filled.items()},
        }


def encoder_ports(signature: ModelSignature) -> EncoderPorts:
    """Return the ports of an encoder; raises `NotGiven` for other models."""
    ids = [port for port in signature.inputs if port.name == IDS and port.shape.rank == 2]
    others = [port for port in signature.inputs if port.name != IDS and not port.may_lack]
    strange = [port.name for port in others if port.name not in FILLED]
    output = _embedding(signature.outputs)
    if not ids or strange or output is None:
        needs = f"it needs the input {IDS} [batch, tokens] and an output with a vector for each row"
        unknown = f", and nobody has its input {strange[0]}" if strange else ""
        raise NotGiven(f"{signature.name!r} embeds no tokens: {needs}{unknown}")
    filled = {port.name: (dtype_of(port.element_type), FILLED[port.name]) for port in others}
    return EncoderPorts(
        ids=ids[0],
        filled=filled,
        embedding=output.name,
    )


def most_tokens(signature: ModelSignature) -> int | None:
    """Return how many tokens of one text an encoder takes at most; None where it takes no tokens, or any number."""
    ids = [port for port in signature.inputs if port.name == IDS and port.shape.rank == 2]
    return ids[0].shape.dimensions[1].maximum if ids else None


def tokenizer_input(signature: ModelSignature) -> str:
    """Return the input of a tokenizer, which may take a query as well; raises `NotGiven` for other models."""
    text = text_input(signature) or second_text(signature)
    if text is None or all(port.name != IDS or port.item is None for port in signature.outputs):
        raise NotGiven(
            f"{signature.name!r} is no tokenizer: it needs one input of element type str and an output {IDS}, a list of "
            f"arrays"
        )
    return text
