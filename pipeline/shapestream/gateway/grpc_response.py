"""The answer to an inference request as protobuf. Its tensors' bytes are joined to it without copies by protobuf."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shapestream.client.results import Result
from shapestream.gateway.datatypes import datatype_of
from shapestream.gateway.model_pages import VERSION
from shapestream.gateway.open_inference_pb2 import (
    InferParameter,
    ModelInferResponse,
    ModelStreamInferResponse,
)
from shapestream.gateway.strings import to_binary
from shapestream.slices import at_once

RAW_TAG = bytes([ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | 2])
RESPONSE_TAG = bytes([ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | 2])
FINAL = "triton_final_response"
"""The parameter that says of an answer in a stream whether its request has no further one."""


def infer_response(model: str, request_id: str, names: Sequence[str], result: Result) -> bytes:
    """Return a `ModelInferResponse` with these outputs, as raw bytes."""
    return b"".join(_pieces(_head(model, request_id), names, result))


def stream_response(model: str, request_id: str, names: Sequence[str], result: Result) -> bytes:
    """Return a `ModelStreamInferResponse` with these outputs. It is the last one of its request, and says so."""
    pieces = _pieces(_last(_head(model, request_id)), names, result)
    return b"".join([RESPONSE_TAG, _varint(sum(map(len, pieces))), *pieces])


def stream_error(model: str, request_id: str, message: str) -> bytes:
    """Return a `ModelStreamInferResponse` that says why a request failed."""
    answer = ModelStreamInferResponse(error_message=message, infer_response=_last(_head(model, request_id)))
    return bytes(answer.SerializeToString())


def _head(model: str, request_id: str) -> ModelInferResponse:
    return ModelInferResponse(model_name=model, model_version=VERSION, id=request_id)


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
        raw += [RAW_TAG, _varint(len(data)), data]
    return [response.SerializeToString(), *raw]


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
