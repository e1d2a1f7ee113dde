"""The inputs and outputs that endpoints for texts find in a signature, and what they say of others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.pipeline.gateway.text_site import ENCODER, LISTED, NUMBERS, SENTENCES, TEXT, TOKENS

from shapestream.gateway.errors import NotGiven
from shapestream.gateway.text_ports import (
    TextPorts,
    encoder_ports,
    most_tokens,
    text_ports,
    tokenizer_input,
)
from shapestream_engine.output_rules import Rows, Whole
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature


def out(name: str, shape: str = "rows, 8", element_type: str = "f32") -> OutputPort:
    """An output."""
    named = NamedShape.parse(shape)
    return OutputPort(name, element_type, named, Rows() if "batch" in named.names else Whole())


def model(*outputs: OutputPort, inputs: Any = (TEXT,)) -> ModelSignature:
    """A model of texts, or of other inputs."""
    return ModelSignature("m", tuple(inputs), outputs)


def test_a_chains_ports() -> None:
    """By their names, and the size of vectors where the signature fixes it."""
    assert TextPorts(
        text="text",
        embedding="embedding",
        element_type="f32",
        size=4,
        counts_tokens=True,
        tells_cuts=True,
        is_sparse=True,
    ) == text_ports(SENTENCES)
    assert TextPorts(
        text="text",
        embedding="embedding",
        element_type="f16",
        size=None,
        counts_tokens=False,
        tells_cuts=False,
        is_sparse=False,
    ) == text_ports(LISTED)


@pytest.mark.parametrize(
    ("outputs", "name"),
    [
        ([out("variable")], "variable"),
        ([out("label", "rows", "i64"), out("variable")], "variable"),
        ([out("other"), out("sentence_embedding")], "sentence_embedding"),
        ([out("sentence_embedding"), out("embedding")], "embedding"),
        ([out("all", "rows, tokens, 8"), out("pooled")], "pooled"),
    ],
)
def test_the_vectors_are_found(outputs: list[OutputPort], name: str) -> None:
    """By name, or as the only output that can have them: what an ONNX file calls them is not in our hands."""
    assert name == text_ports(model(*outputs)).embedding


@pytest.mark.parametrize(
    "signature",
    [
        NUMBERS,
        ENCODER,
        TOKENS,
        model(out("one"), out("other")),
        model(out("embedding", "rows")),
        model(out("embedding", "rows, 8", "i64")),
        model(out("embedding"), inputs=[InputPort("text", "str", NamedShape.parse("texts, 2"))]),
        model(out("embedding"), inputs=[InputPort("text", "str", NamedShape.parse(""))]),
        model(out("embedding"), inputs=[InputPort("text", "bytes", NamedShape.parse("texts"))]),
        model(out("embedding"), inputs=[TEXT, InputPort("more", "f32", NamedShape.parse("n"))]),
    ],
    ids=lambda signature: ", ".join(map(str, (*signature.inputs, *signature.outputs))),
)
def test_other_models_embed_no_texts(signature: ModelSignature) -> None:
    """They are told what it takes."""
    with pytest.raises(
        NotGiven, match=f"{signature.name!r} embeds no texts: it needs one input of element type str"
    ):
        text_ports(signature)


def ids(
    name: str = "input_ids", element_type: str = "i64", shape: str = "batch, seq:1..512", **more: Any
) -> InputPort:
    """An input of an encoder."""
    return InputPort(name, element_type, NamedShape.parse(shape), **more)


def test_an_encoders_inputs_follow_from_the_tokens() -> None:
    """A mask of ones, types of zeros, each of its own element type; a mask that the server makes is left to it."""
    tokens = np.array([5, 6, 7])
    found = encoder_ports(ENCODER)
    assert ("sentence_embedding", 512) == (found.embedding, most_tokens(ENCODER))
    inputs = found.inputs_of(tokens)
    assert {"input_ids": [[5, 6, 7]], "attention_mask": [[1, 1, 1]], "token_type_ids": [[0, 0, 0]]} == {
        name: array.tolist() for name, array in inputs.items()
    }
    masked = model(
        out("embedding", "batch, 8"), inputs=[ids(), ids("mask", "i32", "batch, seq", mask_of="input_ids")]
    )
    assert ["input_ids"] == [*encoder_ports(masked).inputs_of(tokens)]
    open_ = model(
        out("embedding", "batch, 8"),
        inputs=[ids(shape="batch, seq"), ids("attention_mask", "f32", "batch, seq")],
    )
    assert most_tokens(open_) is None
    assert np.float32 == encoder_ports(open_).inputs_of(tokens)["attention_mask"].dtype


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        (NUMBERS, "needs the input input_ids"),
        (SENTENCES, "needs the input input_ids"),
        (model(out("embedding", "seq, 8"), inputs=[ids(shape="seq")]), "needs the input input_ids"),
        (model(out("hidden", "batch, seq, 8"), inputs=[ids()]), "an output with a vector for each row"),
        (model(out("embedding", "batch, 8"), inputs=[ids(), ids("pixels")]), "nobody has its input pixels"),
    ],
)
def test_other_models_embed_no_tokens(signature: ModelSignature, words: str) -> None:
    """They are told why."""
    with pytest.raises(NotGiven, match=f"{signature.name!r} embeds no tokens: .*{words}"):
        encoder_ports(signature)


def test_a_tokenizers_input() -> None:
    """Of a model that makes a list of tokens of each text."""
    assert "text" == tokenizer_input(TOKENS)
    for other in (SENTENCES, ENCODER, model(out("input_ids", "texts, n", "i64"))):
        with pytest.raises(NotGiven, match="is no tokenizer: it needs one input of element type str"):
            tokenizer_input(other)
