"""JSON of requests and responses: strict, bounded, and in steps between which other connections have their turn."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import trio

from shapestream.gateway.http_messages import Buffer, HttpError
from shapestream_engine.element_types import dtype_of

MAX_JSON_BYTES = 4 << 20
"""Largest JSON of a request: reading more would hold up other connections. Tensors may follow it as bytes."""
STEP_ELEMENTS = 1 << 15
"""Elements that are converted in one step: a few milliseconds."""


def read_json(text: Buffer) -> dict[str, Any]:
    """Return the object of a request. Raises HttpError 400, and 413 for a text that is too long."""
    if len(text) > MAX_JSON_BYTES:
        message = (
            f"{len(text)} bytes of JSON; at most {MAX_JSON_BYTES} are taken (send tensors as binary data)"
        )
        raise HttpError(413, message)
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise HttpError(400, f"the request is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise HttpError(400, "the request is no JSON object")
    return found


def write_json(value: Any) -> bytes:
    """Return plain data as JSON."""
    return orjson.dumps(value)


async def array_of(
    where: str, data: Any, datatype: str, element_type: str, shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    """Return the elements of a tensor that JSON holds: flat, or nested as its shape, in row-major order.

    Raises HttpError 400 for elements that are missing, too many, of another kind or out of range.
    """
    elements = _flat(where, data, shape)
    dtype = dtype_of(element_type)
    array = np.empty(len(elements), dtype)
    for start in range(0, len(elements), STEP_ELEMENTS):
        if start:
            await trio.lowlevel.checkpoint()
        array[start : start + STEP_ELEMENTS] = _converted(
            where, elements[start : start + STEP_ELEMENTS], datatype, element_type, dtype
        )
    return array.reshape(shape)


def _flat(where: str, data: Any, shape: tuple[int, ...]) -> list[Any]:
    if not isinstance(data, list):
        raise HttpError(400, f"{where}: data must be an array")
    count = 1
    for size in shape:
        count *= size
    level = data
    if data and isinstance(data[0], list):
        nested = f"{where}: nested data do not have the shape {list(shape)}"
        if len(data) != (shape or (0,))[0]:
            raise HttpError(400, nested)
        for size in shape[1:]:
            if not all(isinstance(row, list) and len(row) == size for row in level):
                raise HttpError(400, nested)
            level = list(chain.from_iterable(level))
    if len(level) != count:
        raise HttpError(400, f"{where}: {len(level)} elements, but the shape {list(shape)} has {count}")
    return level


def _converted(
    where: str, elements: list[Any], datatype: str, element_type: str, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Return a part of the elements in the tensor's type. Python's own types of JSON's values decide what they are."""
    types, is_float = set(map(type, elements)), "f" in element_type
    if element_type == "boolean":
        # 0 and 1 are what some clients make of booleans.
        if not types <= {bool, int} or not {*elements} <= {0, 1}:
            raise HttpError(400, f"{where}: {datatype} takes true and false")
    elif not types <= ({int, float} if is_float else {int}):
        raise HttpError(400, f"{where}: {datatype} takes {'numbers' if is_float else 'integers'}")
    try:
        if not is_float:
            return np.array(elements, dtype)  # raises OverflowError for what does not fit
        wide = np.array(elements, np.float64)
        with np.errstate(over="ignore"):
            array = wide.astype(dtype)
    except OverflowError:
        raise HttpError(400, f"{where}: a number does not fit {datatype}") from None
    if not np.isfinite(array).all():
        raise HttpError(400, f"{where}: a number does not fit {datatype}")
    return array


async def data_of(where: str, array: npt.NDArray[Any]) -> list[bytes]:
    """Return the elements of a tensor as the pieces of a flat JSON array.

    Raises HttpError 400 for floats that are not finite, which JSON does not have.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    pieces = []
    for start in range(0, flat.size, STEP_ELEMENTS):
        if start:
            await trio.lowlevel.checkpoint()
        part = flat[start : start + STEP_ELEMENTS]
        if part.dtype.kind not in "biu":
            if part.dtype.itemsize < 4:
                part = part.astype(np.float32)
            if not np.isfinite(part).all():
                message = (
                    f"{where} has a number that is not finite, which JSON does not have (ask for binary data)"
                )
                raise HttpError(400, message)
        pieces.append(orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1])
    return [b"[", b",".join(pieces), b"]"]
