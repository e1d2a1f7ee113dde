"""Bodies of inference requests as arrays, and back: every datatype and shape, in JSON and as binary data, to the bit."""

from __future__ import annotations

import json
from math import prod

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tests.pipeline.gateway.infer_bodies import Array, answered, entry, posted, read, refuse, signature_of

from shapestream.gateway.infer_tensors import DATATYPES
from shapestream.web.messages import HttpError, HttpRequest
from shapestream.wire.limits import MAX_TENSORS
from shapestream_engine.element_types import ELEMENT_TYPES, dtype_of
from shapestream_engine.ports import InputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, Array]:
    """An array of any bits, with its element type: scalars, empty ones and NaN included."""
    element_type = draw(st.sampled_from(sorted(ELEMENT_TYPES)))
    shape = draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    dtype = dtype_of(element_type)
    size = prod(shape) * dtype.itemsize
    if element_type == "boolean":
        data = bytes(draw(st.lists(st.sampled_from([0, 1]), min_size=size, max_size=size)))
    else:
        data = draw(st.binary(min_size=size, max_size=size))
    return element_type, np.frombuffer(data, dtype).reshape(shape)


@given(arrays(), st.integers(0, 7))
def test_binary_data_go_through_to_the_bit(given_array: tuple[str, Array], blanks: int) -> None:
    """Also NaN, with its payload, and wherever the bytes begin."""
    element_type, array = given_array
    signature = signature_of(element_type, array.ndim)
    sent = entry(DATATYPES[element_type], array.shape, parameters={"binary_data_size": array.nbytes})
    text = json.dumps({"inputs": [sent]}).encode() + b" " * blanks
    length = {"inference-header-content-length": str(len(text))}
    found = read(posted(text, array.tobytes(), **length), signature)["x"]
    assert (array.dtype, array.shape) == (found.dtype, found.shape)
    output, data = answered(found, binary=True)
    assert array.tobytes() == data
    assert (DATATYPES[element_type], list(array.shape)) == (output["datatype"], output["shape"])
    assert {"binary_data_size": array.nbytes} == output["parameters"]
    assert "data" not in output


@given(arrays(), st.booleans())
def test_finite_numbers_go_through_json_to_the_bit(given_array: tuple[str, Array], nested: bool) -> None:
    """Minus zero and numbers that are not normal included; what is not finite is replaced here."""
    element_type, array = given_array
    if array.dtype.kind in "fV":
        finite = np.isfinite(array)
        array = np.where(finite, array, np.ones_like(array))
    signature = signature_of(element_type, array.ndim)
    plain = array.astype(np.float64) if array.dtype.kind in "fV" else array
    data = plain.tolist() if nested and array.ndim else plain.ravel().tolist()
    found = read(posted({"inputs": [entry(DATATYPES[element_type], array.shape, data=data)]}), signature)["x"]
    assert (array.dtype, array.shape) == (found.dtype, found.shape)
    assert array.tobytes() == found.tobytes()
    output, rest = answered(found, binary=False)
    assert b"" == rest
    back = read(posted({"inputs": [{**output, "name": "x"}]}), signature)["x"]
    assert array.tobytes() == back.tobytes()


@pytest.mark.parametrize("element_type", sorted(ELEMENT_TYPES))
def test_the_largest_numbers_of_each_type_are_taken_and_those_beyond_are_not(element_type: str) -> None:
    """Both ends of integers and floats; booleans are 0 and 1 as well."""
    dtype = dtype_of(element_type)
    match dtype.kind:
        case "b":
            ends, beyond = [0, 1, False, True], [2, -1, 256]
        case "i" | "u":
            limits = np.iinfo(dtype)
            ends, beyond = [int(limits.min), int(limits.max)], [int(limits.min) - 1, int(limits.max) + 1, 0.5]
        case _:
            most = {"bf16": 3.3895314e38, "f16": 65504.0, "f32": float(np.finfo(np.float32).max)}
            ends = [most.get(element_type, 1.7976931348623157e308)]
            ends += [-ends[0]]
            beyond = [] if element_type == "f64" else [2 * end for end in ends]
    signature = signature_of(element_type, 1)
    found = read(posted({"inputs": [entry(DATATYPES[element_type], [len(ends)], data=ends)]}), signature)["x"]
    assert (
        ends == found.astype(np.float64 if dtype.kind in "fV" else dtype).tolist() or element_type == "bf16"
    )
    for number in (*beyond, "1", None, [], {}):
        refuse(posted({"inputs": [entry(DATATYPES[element_type], [1], data=[number])]}), signature)
    other = "FP32" if element_type != "f32" else "FP16"
    refuse(posted({"inputs": [entry(other, [1], data=[1])]}), signature)


@pytest.mark.parametrize("data", [b"\x02", b"\xff", b"\0\x07", b"\1" * 70_000 + b"\x02"])
def test_booleans_of_other_bytes_are_refused_by_the_name_of_their_input(data: bytes) -> None:
    """A model may index by them, or take them for 0 and 1."""
    sent = entry("BOOL", [len(data)], parameters={"binary_data_size": len(data)})
    assert "'x' takes BOOL" in refuse(posted({"inputs": [sent]}, data), signature_of("boolean", 1))


def test_several_inputs_in_both_forms_take_their_own_bytes() -> None:
    """In the order in which the request names them, which is not the model's."""
    any_size = NamedShape.parse("n")
    ports = tuple(InputPort(name, kind, any_size) for name, kind in (("a", "u8"), ("b", "f64"), ("c", "i16")))
    signature = ModelSignature("m", ports, signature_of("f32", 1).outputs)
    b, a = np.array([1.5, -2]), np.array([7, 8, 9], np.uint8)
    inputs = [
        {"name": "b", "datatype": "FP64", "shape": [2], "parameters": {"binary_data_size": 16}},
        {"name": "c", "datatype": "INT16", "shape": [1], "data": [-5]},
        {"name": "a", "datatype": "UINT8", "shape": [3], "parameters": {"binary_data_size": 3}},
    ]
    found = read(posted({"inputs": inputs}, b.tobytes() + a.tobytes()), signature)
    assert {"a": [7, 8, 9], "b": [1.5, -2.0], "c": [-5]} == {
        name: array.tolist() for name, array in found.items()
    }


@pytest.mark.parametrize("key", ["inputs", "outputs"])
def test_more_tensors_than_a_message_holds_are_refused(key: str) -> None:
    """A million of them take no longer than their JSON."""
    for count in (MAX_TENSORS + 1, 1_000_000):
        text = b'{"%s":[%s0]}' % (key.encode(), b"0," * (count - 1))
        assert f"at most {MAX_TENSORS}" in refuse(posted(text), signature_of("f32"))


GOOD = json.dumps(
    {
        "id": "7",
        "parameters": {"timeout": 1, "priority": 2, "binary_data_output": True},
        "inputs": [entry("FP32", [1, 2], parameters={"binary_data_size": 8})],
        "outputs": [{"name": "y", "parameters": {"binary_data": False}}],
    }
).encode()
BINARY = np.ones(2, np.float32).tobytes()
WORDS = [b"-1", b"1e400", b"null", b"[]", b"{}", b"[[", b'"', b"\0", b"18446744073709551616", b"true", b"NaN"]


@given(
    st.lists(st.tuples(st.integers(0, len(GOOD)), st.integers(0, 12), st.sampled_from(WORDS)), max_size=3),
    st.sampled_from([None, "-5", "0", "abc", "1", str(len(GOOD)), str(len(GOOD) + 8), "9" * 30]),
    st.binary(max_size=12) | st.just(BINARY),
)
@example([], str(len(GOOD)), BINARY)
def test_a_damaged_request_raises_nothing_but_the_blame_of_its_caller(
    cuts: list[tuple[int, int, bytes]], stated: str | None, binary: bytes
) -> None:
    """A good request, some bytes of which are replaced; whole, it is read."""
    text = GOOD
    for place, length, word in cuts:
        text = text[:place] + word + text[place + length :]
    headers = {} if stated is None else {"inference-header-content-length": stated}
    request = HttpRequest(
        method="POST", path="/", query="", headers=headers, body=text + binary, peer="127.0.0.1"
    )
    refusal = None
    try:
        found = read(request, signature_of("f32"))
    except HttpError as error:
        refusal = error
    if refusal is None:
        assert all(array.dtype == np.float32 for array in found.values())
        return
    assert refusal.status in (400, 413)
    assert len(refusal.message) < 1000
    assert (text + binary, stated) != (GOOD + BINARY, str(len(GOOD)))


def test_an_infinity_among_many_numbers_is_found() -> None:
    """They are written in slices, of which the last has it."""
    many = np.ones((1, 150_000), np.float32)
    assert many.ravel().tolist() == answered(many, binary=False)[0]["data"]
    many[0, -1] = np.inf
    with pytest.raises(HttpError, match="infinity"):
        answered(many, binary=False)
