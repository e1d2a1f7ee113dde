"""Inference requests and answers as protobuf. Of a request its tensors' bytes come first, then the rest of the message.

    message ─▶ split_raw ─┬─▶ the bytes of raw tensors: views of the message, without a copy
                          └─▶ the rest ─▶ protobuf ─▶ read_inputs, checked against the model's signature

protobuf copies each field of bytes, and its objects take up to 50 times the bytes of a message that is made for that. So it
reads the rest only, which is bounded in bytes and in fields before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from shapestream.client.opened_models import Result
from shapestream.errors import InvalidRequest, TooLarge
from shapestream.gateway.errors import Unsupported
from shapestream.gateway.infer_tensors import (
    BYTES,
    DATATYPES,
    InferOptions,
    admitted_shape,
    array_over,
    check_datatype,
    check_nbytes,
    check_output,
    check_truth_values,
    datatype_of,
    from_contents,
    input_port,
    read_options,
    refuse_classification,
    refuse_shared_memory,
    to_binary,
)
from shapestream.gateway.open_inference_pb2 import (
    InferParameter,
    InferTensorContents,
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
)
from shapestream.slices import at_once
from shapestream.wire.limits import MAX_RANK, MAX_TENSORS
from shapestream_engine.element_types import dtype_of
from shapestream_engine.ports import InputPort
from shapestream_engine.signature import ModelSignature

MOST_REST_BYTES = 4 * 1024 * 1024
"""Bytes of a request besides its raw tensors: as many as gRPC takes in a whole message by default."""
MOST_FIELDS = 1024
"""Fields of a request. One with the most tensors has 64 inputs, 64 outputs, and 64 fields of bytes."""
STEP_ELEMENTS = 65_536
"""Elements that are taken from protobuf in one step, about 2 ms. Other threads run between two steps."""

RAW_TAG = ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | 2

_CONTENTS = {
    "BOOL": ("bool_contents", "u1"),
    "INT8": ("int_contents", "i4"),
    "INT16": ("int_contents", "i4"),
    "INT32": ("int_contents", "i4"),
    "INT64": ("int64_contents", "i8"),
    "UINT8": ("uint_contents", "u4"),
    "UINT16": ("uint_contents", "u4"),
    "UINT32": ("uint_contents", "u4"),
    "UINT64": ("uint64_contents", "u8"),
    "FP32": ("fp32_contents", "f4"),
    "FP64": ("fp64_contents", "f8"),
    BYTES: ("bytes_contents", "O"),
}
"""The list of typed contents by datatype, and the type of its elements. FP16 and BF16 have none."""


@dataclass(frozen=True, slots=True)
class InferMessage:
    """One request, before it is compared with the model's signature."""

    request: ModelInferRequest
    """Without the raw tensors."""
    raw: list[memoryview]
    options: InferOptions


def read_message(message: bytes, default_priority_level: int) -> InferMessage:
    """Read a `ModelInferRequest`, and its options; raises `InvalidRequest`, `TooLarge`."""
    rest, raw = split_raw(message)
    try:
        request = ModelInferRequest.FromString(rest)
    except DecodeError as error:
        raise InvalidRequest(f"the message is no ModelInferRequest: {error}") from None
    for what, tensors in ("inputs", request.inputs), ("outputs", request.outputs):
        if len(tensors) > MAX_TENSORS:
            raise InvalidRequest(f"{len(tensors)} {what}; at most {MAX_TENSORS} are taken")
    return InferMessage(request, raw, read_options(parameters_of(request.parameters), default_priority_level))


# ---------------------------------------------------------------- the bytes of a message


def split_raw(message: bytes) -> tuple[bytes, list[memoryview]]:
    """Return a request without its raw tensors, and the bytes of these. Raises `InvalidRequest`, `TooLarge`."""
    whole = memoryview(message)
    kept: list[memoryview] = []
    raw: list[memoryview] = []
    offset = kept_from = rest = 0
    for _ in range(MOST_FIELDS):
        if offset >= len(message):
            break
        start = offset
        tag, offset = _read_varint(message, offset)
        begin, offset = _field(message, tag, offset)
        if tag == RAW_TAG:
            kept.append(whole[kept_from:start])
            rest += start - kept_from
            raw.append(whole[begin:offset])
            kept_from = offset
    else:
        if offset < len(message):
            raise InvalidRequest(f"the message has more than {MOST_FIELDS} fields")
    kept.append(whole[kept_from:])
    rest += len(message) - kept_from
    if rest > MOST_REST_BYTES:
        raise TooLarge(
            f"{rest} bytes besides raw_input_contents; at most {MOST_REST_BYTES} are taken: send tensors raw"
        )
    return b"".join(kept), raw


def _field(message: bytes, tag: int, offset: int) -> tuple[int, int]:
    """Return where the content of a field begins, and where the field ends."""
    match tag & 7:
        case 0:
            begin, (_, end) = offset, _read_varint(message, offset)
        case 1:
            begin, end = offset, offset + 8
        case 2:
            length, begin = _read_varint(message, offset)
            end = begin + length
        case 5:
            begin, end = offset, offset + 4
        case kind:
            raise InvalidRequest(f"the message is no ModelInferRequest: a field of wire type {kind}")
    if end > len(message):
        raise InvalidRequest("the message is no ModelInferRequest: it is cut off")
    return begin, end


def _read_varint(message: bytes, offset: int) -> tuple[int, int]:
    """Return the integer at an offset, and the offset behind it."""
    number = shift = 0
    for byte in message[offset : offset + 10]:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number, offset + shift // 7
    raise InvalidRequest("the message is no ModelInferRequest: an integer does not end")


# ---------------------------------------------------------------- parameters and outputs


def parameters_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as plain values. One without a value is left out."""
    return {
        name: getattr(parameter, choice)
        for name, parameter in parameters.items()
        if (choice := parameter.WhichOneof("parameter_choice")) is not None
    }


def read_outputs(message: InferMessage, signature: ModelSignature) -> list[str]:
    """Return the names of the outputs to be sent, in order: those that are asked for, or all."""
    if not message.request.outputs:
        return [port.name for port in signature.outputs]
    asked: dict[str, None] = {}
    for entry in message.request.outputs:
        check_output(signature, entry.name, asked)
        parameters = parameters_of(entry.parameters)
        refuse_shared_memory(entry.name, parameters)
        refuse_classification(entry.name, parameters)
        asked[entry.name] = None
    return list(asked)


# ---------------------------------------------------------------- inputs


def read_inputs(message: InferMessage, signature: ModelSignature) -> dict[str, npt.NDArray[Any]]:
    """Return the input arrays by name; raises `InvalidRequest`.

    Missing inputs, and sizes that contradict those of another input, are found by the client of the server.
    """
    entries, raw = message.request.inputs, message.raw
    inputs: dict[str, npt.NDArray[Any]] = {}
    for number, entry in enumerate(entries):
        port = input_port(signature, entry.name, inputs)
        check_datatype(port, entry.datatype)
        refuse_shared_memory(entry.name, parameters_of(entry.parameters))
        shape, nbytes = admitted_shape(port, list(islice(entry.shape, MAX_RANK + 1)))
        if not raw:
            inputs[entry.name] = _typed(port, shape, entry.contents)
            continue
        if entry.HasField("contents"):
            raise InvalidRequest(f"input {entry.name!r} has contents, and the request raw_input_contents")
        if number < len(raw):
            inputs[entry.name] = _raw(port, shape, nbytes, raw[number])
    if raw and len(raw) != len(entries):
        raise InvalidRequest(f"{len(entries)} inputs, and {len(raw)} raw_input_contents")
    return inputs


def _raw(port: InputPort, shape: tuple[int, ...], nbytes: int, data: memoryview) -> npt.NDArray[Any]:
    check_nbytes(port, shape, nbytes, len(data), "raw_input_contents has")
    return at_once(array_over(port, shape, data))


def _typed(port: InputPort, shape: tuple[int, ...], contents: InferTensorContents) -> npt.NDArray[Any]:
    """Return the array of typed contents."""
    datatype, count = DATATYPES[port.element_type], math.prod(shape)
    own = _CONTENTS.get(datatype)
    if own is None:
        raise Unsupported(f"input {port.name!r}: {datatype} has no typed contents: send raw_input_contents")
    name, code = own
    others = [field.name for field, _ in contents.ListFields() if field.name != name]
    if others:
        raise InvalidRequest(f"input {port.name!r} takes {datatype}, in {name}, not in {', '.join(others)}")
    elements = getattr(contents, name)
    if len(elements) != count:
        raise InvalidRequest(
            f"input {port.name!r}: {name} has {len(elements)} elements; the shape {list(shape)} has {count}"
        )
    if port.is_string:
        return from_contents(port, shape, elements)
    numbers, left = np.empty(count, code), iter(elements)
    for start in range(0, count, STEP_ELEMENTS):
        step = numbers[start : start + STEP_ELEMENTS]
        step[:] = np.fromiter(islice(left, len(step)), numbers.dtype, len(step))
    dtype = dtype_of(port.element_type)
    if dtype.kind == "b":
        check_truth_values(port, numbers)
    converted = numbers.astype(dtype, copy=False)
    if dtype.itemsize < numbers.itemsize and dtype.kind in "iu" and not np.array_equal(converted, numbers):
        raise InvalidRequest(f"input {port.name!r} takes {datatype}; a number is beyond its range")
    return converted.reshape(shape)


# ---------------------------------------------------------------- answers

RAW_OUTPUT_TAG = bytes([ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | 2])
RESPONSE_TAG = bytes([ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | 2])
FINAL = "triton_final_response"
"""The parameter that says of an answer in a stream whether its request has no further one."""


def infer_response(model: str, request_id: str, names: Sequence[str], result: Result) -> bytes:
    """Return a `ModelInferResponse` with these outputs, as raw bytes."""
    return b"".join(_pieces(_head(model, result.version, request_id), names, result))


def stream_response(model: str, request_id: str, names: Sequence[str], result: Result) -> bytes:
    """Return a `ModelStreamInferResponse` with these outputs. It is the last one of its request, and says so."""
    pieces = _pieces(_last(_head(model, result.version, request_id)), names, result)
    return b"".join([RESPONSE_TAG, _written_varint(sum(map(len, pieces))), *pieces])


def stream_error(model: str, version: str, request_id: str, message: str) -> bytes:
    """Return a `ModelStreamInferResponse` that says why a request failed."""
    answer = ModelStreamInferResponse(
        error_message=message, infer_response=_last(_head(model, version, request_id))
    )
    return bytes(answer.SerializeToString())


def _head(model: str, version: str, request_id: str) -> ModelInferResponse:
    return ModelInferResponse(model_name=model, model_version=version, id=request_id)


def _last(response: ModelInferResponse) -> ModelInferResponse:
    response.parameters[FINAL].CopyFrom(_TRUE)
    return response


_TRUE = InferParameter(bool_param=True)


def _pieces(response: ModelInferResponse, names: Sequence[str], result: Result) -> list[bytes | memoryview]:
    raw: list[bytes | memoryview] = []
    for name in names:
        array = result.tensor(name)
        response.outputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        # As bytes: not every element type (bfloat16) can be exported as a memoryview of its own.
        data = at_once(to_binary(array)) if array.dtype == object else array.reshape(-1).view(np.uint8).data
        raw += [RAW_OUTPUT_TAG, _written_varint(len(data)), data]
    return [response.SerializeToString(), *raw]


def _written_varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
