"""The answer to an inference request: a JSON object, and behind it the bytes of the outputs that are sent as binary data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shapestream.client.results import Result
from shapestream.gateway.errors import OWN_ID
from shapestream.gateway.infer_request import AskedOutput
from shapestream.gateway.infer_tensors import datatype_of
from shapestream.gateway.json_text import SLICE_NUMBERS, flat_numbers, list_of, write_json
from shapestream.gateway.model_pages import VERSION
from shapestream.gateway.strings import strings_nbytes, to_binary, to_json
from shapestream.slices import Slices
from shapestream.web.messages import Buffer, HttpError, HttpResponse

HEAD_LENGTH = "Inference-Header-Content-Length"


def infer_response(
    model: str, request_id: str | None, asked: Sequence[AskedOutput], result: Result
) -> Slices[HttpResponse]:
    """Return the answer with the outputs that were asked for, and the request's id. Those in binary are views of the result.

    Many numbers are written as JSON in slices.

    Raises `HttpError` 400 for a number that JSON does not have, and `InvalidRequest` for bytes that are no text.
    """
    outputs: list[dict[str, Any]] = []
    pieces: list[Buffer] = []
    for output in asked:
        array = result.tensor(output.name)
        told: dict[str, Any] = {
            "name": output.name,
            "datatype": datatype_of(array),
            "shape": array.shape,
        }
        is_string = array.dtype == object
        if output.binary:
            # As bytes: not every element type (bfloat16) can be exported as a memoryview of its own.
            data = (yield from to_binary(array)) if is_string else array.reshape(-1).view(np.uint8).data
            told["parameters"] = {"binary_data_size": len(data)}
            if len(data):
                pieces.append(data)
        elif is_string:
            told["data"] = yield from to_json(output.name, array)
        else:
            told["data"] = yield from _written(output.name, flat_numbers(array))
        outputs.append(told)
    content: dict[str, Any] = {"model_name": model, "model_version": VERSION, "outputs": outputs}
    if request_id is not None:
        content["id"] = request_id
    head = write_json(content)
    own_id = (OWN_ID, result.request_id)
    if not pieces:
        return HttpResponse(body=(head,), headers=(own_id,))
    return HttpResponse(
        body=(head, *pieces),
        headers=((HEAD_LENGTH, str(len(head))), own_id),
        content_type="application/octet-stream",
    )


def converted_nbytes(asked: Sequence[AskedOutput], result: Result) -> int:
    """Return the bytes of the outputs that are not sent as they are: numbers in JSON, and strings."""
    arrays = [(result.tensor(output.name), output.binary) for output in asked]
    return sum(
        [
            strings_nbytes(array) if array.dtype == object else array.nbytes
            for array, binary in arrays
            if array.dtype == object or not binary
        ]
    )


def _written(name: str, numbers: npt.NDArray[Any]) -> Slices[Any]:
    """Return the numbers, or their list as text where they are many, as `write_json` takes them."""
    if len(numbers) <= SLICE_NUMBERS:
        return _finite(name, numbers)
    lists: list[bytes] = []
    for begin in range(0, len(numbers), SLICE_NUMBERS):
        lists.append(write_json(_finite(name, numbers[begin : begin + SLICE_NUMBERS])))
        yield
    return list_of(lists)


def _finite(name: str, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
        raise HttpError(
            400, f"output {name!r} has NaN or infinity, which JSON does not have: ask for binary data"
        )
    return numbers
