"""Arrays as they are sent: as a shape and a buffer, and back. Numbers are their own bytes, strings are packed."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from shapestream_engine import string_arrays
from shapestream_engine.element_types import dtype_of
from shapestream_engine.layout import Buffer
from shapestream_engine.string_arrays import STRING_TYPES, Array

_Sizes: TypeAlias = tuple[int, ...]


def array_dtype(element_type: str) -> np.dtype[Any]:
    """Return the type of NumPy arrays of an element type: objects for strings. Raises `ElementTypeError` as `dtype_of`."""
    return np.dtype(object) if element_type in STRING_TYPES else dtype_of(element_type)


def array_of(element_type: str, shape: _Sizes, buffer: Buffer) -> Array:
    """Return the array of a layout's shape and a buffer: of numbers as a view of the buffer, of strings as objects.

    Raises `ShapeError` for strings that do not fit the shape, and for text that is no UTF-8.
    """
    if element_type in STRING_TYPES:
        return string_arrays.unpack(element_type, shape, buffer)
    return np.ndarray(shape, dtype_of(element_type), buffer)


def sent_array(element_type: str, array: Array) -> tuple[_Sizes, bytes]:
    """Return the layout's shape and the bytes of an array of this element type.

    Raises `ElementTypeError` for elements that are no strings of it.
    """
    if element_type in STRING_TYPES:
        return string_arrays.pack(element_type, array)
    return array.shape, array.tobytes()
