"""NumPy arrays to and from the wire: an element type, a shape and contiguous little-endian bytes."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from shapestream.errors import InvalidRequest
from shapestream_engine.element_types import dtype_of, element_type_of
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import Buffer

# Below this size a copy costs less than a reference that must be kept; the transport copies such frames too.
_COPY_BELOW_BYTES = 64 * 1024


def from_array(array: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], Buffer]:
    """Return the element type, the shape and the bytes of `array`.

    Big-endian and non-contiguous arrays are converted, which copies. A large contiguous array is *not*
    copied: it must not change before its result arrives. Raises `InvalidRequest` for other types.
    """
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and not _NATIVE_IS_LITTLE):
        array = array.astype(array.dtype.newbyteorder("<"))
    try:
        element_type = element_type_of(array.dtype)
    except ShapeError as error:
        raise InvalidRequest(str(error)) from error
    if array.nbytes < _COPY_BELOW_BYTES:
        return element_type, array.shape, array.tobytes()
    contiguous = np.asarray(array, order="C")
    # As bytes: not every element type (bfloat16) can be exported as a memoryview of its own.
    return element_type, array.shape, contiguous.reshape(-1).view(np.uint8).data


def to_array(element_type: str, shape: tuple[int, ...], data: Buffer) -> npt.NDArray[Any]:
    """Return a read-only array over the given bytes, without a copy; raises `InvalidRequest` where they do not fit.

    It keeps `data` alive, and is unaligned where the bytes are.
    """
    try:
        dtype = dtype_of(element_type)
    except ShapeError as error:
        raise InvalidRequest(str(error)) from error
    immutable = type(data) is bytes
    nbytes = len(data) if immutable else memoryview(data).nbytes
    if nbytes != prod(shape) * dtype.itemsize:
        raise InvalidRequest(f"{nbytes} bytes are not a tensor of {element_type} {list(shape)}")
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=data)
    if not immutable:
        array.flags.writeable = False
    return array


_NATIVE_IS_LITTLE = np.dtype("<i4").isnative
