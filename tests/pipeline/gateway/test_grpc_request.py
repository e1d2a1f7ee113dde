"""Requests as protobuf: how their bytes are divided, and which arrays they become."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("google.protobuf", reason="the extra [grpc] is not installed")
from tests.pipeline.gateway.gateway_site import port_of

from shapestream.errors import InvalidRequest, RequestError, TooLarge
from shapestream.gateway.errors import Unsupported
from shapestream.gateway.grpc_messages import (
    MOST_FIELDS,
    MOST_REST_BYTES,
    STEP_ELEMENTS,
    read_inputs,
    read_message,
    read_outputs,
    split_raw,
)
from shapestream.gateway.infer_tensors import DATATYPES
from shapestream.gateway.open_inference_pb2 import InferParameter, ModelInferRequest
from shapestream_engine.element_types import ELEMENT_TYPES, dtype_of
from shapestream_engine.signature import ModelSignature

TYPED = {
    "boolean": ("bool_contents", [True, False]),
    "i8": ("int_contents", [-128, 127]),
    "i16": ("int_contents", [-(2**15), 2**15 - 1]),
    "i32": ("int_contents", [-(2**31), 2**31 - 1]),
    "i64": ("int64_contents", [-(2**63), 2**63 - 1]),
    "u8": ("uint_contents", [0, 255]),
    "u16": ("uint_contents", [0, 2**16 - 1]),
    "u32": ("uint_contents", [0, 2**32 - 1]),
    "u64": ("uint64_contents", [0, 2**64 - 1]),
    "f32": ("fp32_contents", [1.5, float("inf")]),
    "f64": ("fp64_contents", [-1e300, 0.1]),
}


def signature_of(element_type: str) -> ModelSignature:
    """A model with one input and one output of this type."""
    ports = [port_of("n", kind, name, element_type) for kind, name in (("input", "x"), ("output", "y"))]
    return ModelSignature(name="m", inputs=(ports[0],), outputs=(ports[1],))


def message_of(element_type: str, shape: Any, raw: bytes | None = None, **contents: Any) -> bytes:
    """A request with the input `x`."""
    message = ModelInferRequest(model_name="m")
    entry = message.inputs.add(name="x", datatype=DATATYPES[element_type], shape=shape)
    if raw is not None:
        message.raw_input_contents.append(raw)
    for field, values in contents.items():
        getattr(entry.contents, field).extend(values)
    return bytes(message.SerializeToString())


def read(message: bytes, element_type: str = "f32") -> npt.NDArray[Any]:
    """The array of a request."""
    return read_inputs(read_message(message, 1), signature_of(element_type))["x"]


@pytest.mark.parametrize("element_type", ELEMENT_TYPES)
def test_raw_contents_of_each_type(element_type: str) -> None:
    """They are a view of the message, without a copy."""
    dtype = dtype_of(element_type)
    values = np.array([0, 1, 1, 0]).astype(dtype)
    message = message_of(element_type, [4], values.tobytes())
    found = read(message, element_type)
    assert (dtype, values.tobytes()) == (found.dtype, found.tobytes())
    assert np.shares_memory(found.view(np.uint8), np.frombuffer(message, np.uint8))


@pytest.mark.parametrize("element_type", ELEMENT_TYPES)
def test_typed_contents_of_each_type(element_type: str) -> None:
    """Those of 16-bit floats are none, by the protocol."""
    if element_type not in TYPED:
        with pytest.raises(Unsupported):
            read(message_of(element_type, [2], fp32_contents=[1, 2]), element_type)
        return
    field, values = TYPED[element_type]
    found = read(message_of(element_type, [2], **{field: values}), element_type)
    assert (dtype_of(element_type), values) == (found.dtype, found.tolist())


@pytest.mark.parametrize(
    ("element_type", "field", "number"),
    [("i8", "int_contents", 128), ("i16", "int_contents", -(2**15) - 1), ("u8", "uint_contents", 256)],
)
def test_a_number_beyond_its_type_is_refused(element_type: str, field: str, number: int) -> None:
    """The list of the small types holds larger ones."""
    with pytest.raises(InvalidRequest, match="beyond its range"):
        read(message_of(element_type, [1], **{field: [number]}), element_type)


def raw_strings(*contents: bytes) -> bytes:
    """Each with its length before it."""
    return b"".join(len(each).to_bytes(4, "little") + each for each in contents)


@pytest.mark.parametrize(
    ("element_type", "elements"), [("str", ["né", "", "a\0b"]), ("bytes", [b"\xff", b"", b"a"])]
)
def test_strings_are_typed_or_raw(element_type: str, elements: list[Any]) -> None:
    """As `bytes_contents`, or each with its length in the raw contents."""
    contents = [each.encode() if isinstance(each, str) else each for each in elements]
    assert elements == read(message_of(element_type, [3], bytes_contents=contents), element_type).tolist()
    assert elements == read(message_of(element_type, [3], raw_strings(*contents)), element_type).tolist()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (message_of("str", [1], bytes_contents=[b"\xff"]), "'x', element 0: no UTF-8"),
        (message_of("str", [1], raw_strings(b"\xff")), "'x', element 0: no UTF-8"),
        (message_of("str", [3], bytes_contents=[b"a", b"b"]), "2 elements"),
        (message_of("str", [1], int_contents=[1]), "not in int_contents"),
        (message_of("str", [2], b"abc"), "at least 8 bytes, and raw_input_contents has 3"),
    ],
)
def test_wrong_strings_are_refused(message: bytes, words: str) -> None:
    """By the input and the element."""
    with pytest.raises(InvalidRequest, match=words):
        read(message, "str")


def test_raw_truth_values_are_0_and_1() -> None:
    """As over HTTP."""
    with pytest.raises(InvalidRequest, match="takes BOOL"):
        read(message_of("boolean", [2], b"\0\2"), "boolean")


def test_many_typed_elements() -> None:
    """More than one step takes, and not a whole number of steps."""
    values = np.arange(2 * STEP_ELEMENTS + 3, dtype=np.float32)
    assert np.array_equal(values, read(message_of("f32", [len(values)], fp32_contents=values)))


def test_limits_of_a_message() -> None:
    """Fields, and bytes besides the raw ones; as many as these limits say are read."""
    padding = b"\x1a\x00"  # an empty id
    rest, raw = split_raw(padding * (MOST_FIELDS - 1) + b"\x3a\x01z")
    assert ([b"z"], 2 * MOST_FIELDS - 2) == (raw, len(rest))
    with pytest.raises(InvalidRequest, match="fields"):
        split_raw(padding * (MOST_FIELDS + 1))
    name = ModelInferRequest(id="x" * (MOST_REST_BYTES - 5)).SerializeToString()
    assert MOST_REST_BYTES == len(name)
    assert name == split_raw(name)[0]
    with pytest.raises(TooLarge):
        split_raw(name + padding)


def test_outputs_and_options() -> None:
    """Those that are asked for, in order; parameters of each kind, and those without a value."""
    message = ModelInferRequest(model_name="m", parameters={"none": InferParameter()})
    message.parameters["timeout"].int64_param = 2_000_000
    message.parameters["priority"].uint64_param = 3
    message.parameters["own"].double_param = 0.5
    found = read_message(message.SerializeToString(), 2)
    assert (2.0, -1) == (found.options.deadline_s, found.options.priority)
    assert ["y"] == read_outputs(found, signature_of("f32"))
    message.outputs.add(name="y")
    assert ["y"] == read_outputs(read_message(message.SerializeToString(), 2), signature_of("f32"))
    message.outputs.add(name="z")
    with pytest.raises(InvalidRequest, match="no output 'z'"):
        read_outputs(read_message(message.SerializeToString(), 2), signature_of("f32"))


@given(st.binary(max_size=60))
def test_any_bytes_are_divided_or_refused(message: bytes) -> None:
    """What is divided is read by protobuf as the whole is, or refused by it as well."""
    try:
        rest, raw = split_raw(message)
    except RequestError:
        return
    try:
        whole = ModelInferRequest.FromString(message)
    except Exception:  # noqa: BLE001 - protobuf's
        return
    divided = ModelInferRequest.FromString(rest)
    divided.raw_input_contents.extend(bytes(piece) for piece in raw)
    assert whole.SerializeToString(deterministic=True) == divided.SerializeToString(deterministic=True)


GOOD = message_of("f32", [2, 3], bytes(24))


@given(st.lists(st.tuples(st.integers(0, len(GOOD)), st.integers(0, 4), st.binary(max_size=4)), max_size=4))
def test_a_damaged_request_raises_nothing_but_the_blame_of_its_caller(
    cuts: list[tuple[int, int, bytes]],
) -> None:
    """A good request, some bytes of which are replaced."""
    message = GOOD
    for place, length, word in cuts:
        message = message[:place] + word + message[place + length :]
    signature = ModelSignature(
        name="m",
        inputs=(port_of("a, b", "input", "x", "f32"),),
        outputs=(port_of("a, b", "output", "y", "f32"),),
    )
    refusal: RequestError | None = None
    arrays: dict[str, npt.NDArray[Any]] = {}
    try:
        found = read_message(message, 1)
        read_outputs(found, signature)
        arrays = read_inputs(found, signature)
    except RequestError as error:
        refusal = error
    assert all(array.dtype == np.float32 for array in arrays.values())
    if refusal is not None:
        assert isinstance(refusal, InvalidRequest | TooLarge)
        assert len(refusal.message) < 1000
        assert message != GOOD
