"""Strings of requests and answers: BYTES in JSON, in binary data, and in protobuf."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline.gateway.infer_bodies import Array, answered, entry, posted, read, refuse, signature_of

from shapestream.errors import InvalidRequest
from shapestream.gateway.infer_tensors import SLICE_BYTES, SLICE_STRINGS, from_binary, from_json
from shapestream.slices import Slices, at_once
from shapestream.web.messages import HttpError

SHAPES = st.sampled_from([(), (0,), (1,), (3,), (2, 2), (2, 0)])
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
BLOBS = st.binary(max_size=8)


def objects(elements: list[Any], shape: tuple[int, ...]) -> Array:
    """An array of objects."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)


def as_binary(elements: list[Any]) -> bytes:
    """Each with its length before it, as the protocol says."""
    contents = [each.encode() if isinstance(each, str) else each for each in elements]
    return b"".join(len(each).to_bytes(4, "little") + each for each in contents)


@st.composite
def strings(draw: st.DrawFn, *, valid: bool = False) -> tuple[str, tuple[int, ...], list[Any]]:
    """An element type, a shape, and its elements; `valid`: bytes that are UTF-8."""
    element_type = draw(st.sampled_from(["str", "bytes"]))
    kind = TEXTS if element_type == "str" else TEXTS.map(str.encode) if valid else BLOBS
    shape = draw(SHAPES)
    return element_type, shape, draw(st.lists(kind, min_size=prod(shape), max_size=prod(shape)))


@given(strings())
def test_binary_data_go_through(case: tuple[str, tuple[int, ...], list[Any]]) -> None:
    """Of any shape, scalars and nothing included."""
    element_type, shape, elements = case
    data = as_binary(elements)
    sent = entry("BYTES", shape, parameters={"binary_data_size": len(data)})
    text = json.dumps({"inputs": [sent]}).encode()
    length = {"inference-header-content-length": str(len(text))}
    found = read(posted(text, data, **length), signature_of(element_type, len(shape)))["x"]
    assert (shape, elements) == (found.shape, found.ravel().tolist())
    output, out = answered(found, binary=True)
    assert ("BYTES", list(shape), data) == (output["datatype"], output["shape"], out)
    assert {"binary_data_size": len(data)} == output["parameters"]


@given(strings(valid=True), st.booleans())
def test_json_strings_go_through(case: tuple[str, tuple[int, ...], list[Any]], nested: bool) -> None:
    """Flat, or nested as the shape; bytes are those of UTF-8."""
    element_type, shape, elements = case
    texts = [str(each, "utf-8") if isinstance(each, bytes) else each for each in elements]
    data = objects(texts, shape).tolist() if nested and shape else texts
    found = read(
        posted({"inputs": [entry("BYTES", shape, data=data)]}), signature_of(element_type, len(shape))
    )["x"]
    assert (shape, elements) == (found.shape, found.ravel().tolist())
    output, rest = answered(found, binary=False)
    assert ("BYTES", list(shape), texts, b"") == (output["datatype"], output["shape"], output["data"], rest)


@pytest.mark.parametrize("wrong", [1, 1.5, None, True, ["a"], {}])
def test_other_elements_in_json_are_refused_by_their_place(wrong: Any) -> None:
    """Strings are strings."""
    words = refuse(posted({"inputs": [entry("BYTES", [2], data=["a", wrong])]}), signature_of("str", 1))
    assert "'x'" in words
    assert "element 1" in words


def test_a_lone_surrogate_is_no_json() -> None:
    """As the standard has it."""
    text = b'{"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["\\ud800"]}]}'
    assert "no JSON" in refuse(posted(text), signature_of("str", 1))


@pytest.mark.parametrize(
    ("data", "shape", "words"),
    [
        (as_binary([b"\xff"]), [1], "element 0: no UTF-8"),
        (as_binary(["a", b"\xc3"]), [2], "element 1: no UTF-8"),
        (as_binary(["a"]) + b"x", [1], "take 5 bytes, and 6 came"),
        (b"\x05\0\0\0abc\0", [1], "element 0: its length"),
        (as_binary(["abc"])[:-1] + b"", [1], "element 0: its length"),
        (as_binary(["abcdef"]), [2], "element 1: its length"),
        (b"\xff\xff\xff\xff", [1], "element 0: its length"),
        (b"abc", [1], "takes at least 4 bytes"),
        (b"a", [0], "take 0 bytes, and 1 came"),
    ],
)
def test_wrong_binary_data_are_refused_by_their_place(data: bytes, shape: list[int], words: str) -> None:
    """Lengths that do not fit, and text that is no UTF-8."""
    sent = entry("BYTES", shape, parameters={"binary_data_size": len(data)})
    found = refuse(posted({"inputs": [sent]}, data), signature_of("str", 1))
    assert "'x'" in found
    assert words in found


@pytest.mark.parametrize("shape", [[65_537], [256, 257]])
def test_more_strings_than_a_request_may_have_are_refused_by_their_shape(shape: list[int]) -> None:
    """Before one is made of the bytes: of empty ones, 4 bytes each, a body may have millions."""
    sent = entry("BYTES", shape, parameters={"binary_data_size": 4 * 65_792})
    words = refuse(posted({"inputs": [sent]}, bytes(4 * 65_792)), signature_of("bytes", len(shape)))
    assert "at most 65536" in words


def test_bytes_that_are_no_text_need_binary_data() -> None:
    """JSON does not have them."""
    with pytest.raises(InvalidRequest, match="ask for binary data"):
        answered(objects([b"\xff"], (1,)), binary=False)


def test_a_model_of_strings_takes_no_numbers_and_the_reverse() -> None:
    """Each is told what the input takes."""
    assert "BYTES" in refuse(posted({"inputs": [entry("FP32", [1], data=[1])]}), signature_of("str", 1))
    assert "FP32" in refuse(posted({"inputs": [entry("BYTES", [1], data=["a"])]}), signature_of("f32", 1))


def slices_of(work: Slices[Array]) -> tuple[int, Array]:
    """The number of slices of some work, and its result."""
    count = 1
    while True:
        try:
            next(work)
        except StopIteration as end:
            return count, end.value
        count += 1


def test_many_and_long_strings_are_read_in_slices() -> None:
    """So that the event loop goes on between two."""
    (port,) = signature_of("str", 1).inputs
    many, long = ["é"] * (3 * SLICE_STRINGS), ["a" * (SLICE_BYTES + 1)] * 3
    for elements in (many, long):
        count, found = slices_of(from_binary(port, (len(elements),), memoryview(as_binary(elements))))
        assert elements == found.tolist()
        assert count > 2
    count, found = slices_of(from_json(port, (len(many),), many))
    assert (3, many) == (count, found.tolist())
    assert many == answered(found, binary=False)[0]["data"]
    assert as_binary(many) == answered(found, binary=True)[1]


@given(st.binary(max_size=40), SHAPES)
def test_any_binary_data_are_read_or_refused(data: bytes, shape: tuple[int, ...]) -> None:
    """What is read was written just so."""
    (port,) = signature_of("bytes", len(shape)).inputs
    try:
        found = at_once(from_binary(port, shape, memoryview(data)))
    except (InvalidRequest, HttpError):
        return
    assert data == as_binary(found.ravel().tolist())
