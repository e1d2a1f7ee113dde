"""Tensors as they are sent: a layout of plain tuples beside the bytes, so that nothing is parsed twice.

A signature makes a `RequestShape` from a layout. Numbers are sent as their own bytes, strings are packed
(`string_arrays.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias, TypeVar, dataclass_transform

import numpy as np

from shapestream_engine import string_arrays
from shapestream_engine.element_types import dtype_of
from shapestream_engine.string_arrays import STRING_TYPES, Array

# One entry per tensor: (port number in the signature, element type such as "f32", shape). The shape of strings has one
# more size at its end, the bytes of all elements together (string_arrays.py).
Layout: TypeAlias = tuple[tuple[int, str, tuple[int, ...]], ...]
# Any object with contiguous bytes: bytes, memoryview, a ZeroMQ frame, a contiguous NumPy array.
Buffer: TypeAlias = Any

REMEMBERED = 4096
"""Values that a model's `lru_cache` keeps, by layout, shape or sizes: clients choose these, so there may be any number."""


T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Make a slotted, keyword-only dataclass that is frozen for type checkers only.

    Each request makes several such values, and a dataclass that is frozen at run time takes three times as long to make.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)


@value
class Tensors:
    """The tensors of one request or result.

    `buffers` are parallel to `layout`: each tensor's bytes, C-contiguous and little-endian.
    """

    layout: Layout
    buffers: Sequence[Buffer]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """The sizes of a request whose layout fits its model's signature."""

    sizes: tuple[int, ...]
    """The request's size of each of the signature's `dimensions`."""
    rows: int
    """Size along the batch axis; 1 for a model without one."""
    nbytes: tuple[int, ...]
    """Bytes of each tensor, parallel to the layout."""
    total_nbytes: int
    positions: tuple[int | None, ...]
    """Position in the layout of each input of the signature; None for a mask that the request lacks."""
    rounded: tuple[int, ...] = ()
    """Sizes after the strategy's padding, rows excepted; requests with equal ones share calls. Empty: its own sizes."""
    answer: Tensors | None = None
    """The results of a request without elements, if its ports determine them; it needs no call."""
    elements: int = field(init=False)
    """The product of its sizes, before any padding."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounded", self.rounded or self.sizes)
        object.__setattr__(self, "elements", prod(self.sizes))


# ---------------------------------------------------------------- arrays as they are sent


def array_dtype(element_type: str) -> np.dtype[Any]:
    """Return the type of NumPy arrays of an element type: objects for strings. Raises `ElementTypeError` as `dtype_of`."""
    return np.dtype(object) if element_type in STRING_TYPES else dtype_of(element_type)


def array_of(element_type: str, shape: tuple[int, ...], buffer: Buffer) -> Array:
    """Return the array of a layout's shape and a buffer: of numbers as a view of the buffer, of strings as objects.

    Raises `ShapeError` for strings that do not fit the shape, and for text that is no UTF-8.
    """
    if element_type in STRING_TYPES:
        return string_arrays.unpack(element_type, shape, buffer)
    return np.ndarray(shape, dtype_of(element_type), buffer)


def arrays_of(tensors: Tensors) -> list[Array]:
    """Return the arrays of a request or a result, in the order of its layout; raises `ShapeError` as `array_of` does."""
    return [
        array_of(element_type, shape, buffer)
        for (_, element_type, shape), buffer in zip(tensors.layout, tensors.buffers, strict=True)
    ]


def sent_array(element_type: str, array: Array) -> tuple[tuple[int, ...], bytes]:
    """Return the layout's shape and the bytes of an array of this element type.

    Raises `ElementTypeError` for elements that are no strings of it.
    """
    if element_type in STRING_TYPES:
        return string_arrays.pack(element_type, array)
    return array.shape, array.tobytes()
