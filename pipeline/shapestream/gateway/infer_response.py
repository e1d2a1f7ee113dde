"""The response to an inference request: JSON, perhaps with the bytes of tensors behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shapestream.gateway.datatypes import DATATYPE_OF
from shapestream.gateway.http_messages import Buffer, HttpResponse
from shapestream.gateway.infer_request import InferRequest
from shapestream.gateway.json_text import data_of, write_json
from shapestream_engine.element_types import element_type_of

MODEL_VERSION = "1"
"""The one version of each model."""


async def infer_response(
    model: str, request: InferRequest, result: Mapping[str, npt.NDArray[Any]]
) -> HttpResponse:
    """Return the outputs that the request asks for. Bytes are the result's own, and are not copied.

    Raises HttpError 400 for an output that JSON cannot hold.
    """
    head = {"model_name": model, "model_version": MODEL_VERSION}
    if request.id is not None:
        head = {"id": request.id, **head}
    pieces: list[Buffer] = [write_json(head)[:-1], b',"outputs":[']
    binary: list[Buffer] = []
    for number, wanted in enumerate(request.outputs):
        array = result[wanted.name]
        described: dict[str, Any] = {
            "name": wanted.name,
            "datatype": DATATYPE_OF[element_type_of(array.dtype)],
            "shape": list(array.shape),
        }
        if number:
            pieces.append(b",")
        if wanted.is_binary:
            described["parameters"] = {"binary_data_size": array.nbytes}
            binary.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            pieces.append(write_json(described))
        else:
            pieces += [
                write_json(described)[:-1],
                b',"data":',
                *await data_of(f"output {wanted.name!r}", array),
                b"}",
            ]
    text = b"".join([*pieces, b"]}"])
    if not any(wanted.is_binary for wanted in request.outputs):
        return HttpResponse(body=(text,))
    return HttpResponse(
        body=(text, *binary),
        headers=(("Inference-Header-Content-Length", str(len(text))),),
        content_type="application/octet-stream",
    )
