"""Tensors as they are sent: a layout of plain tuples beside the bytes, so that nothing is parsed twice.

A signature makes a `RequestShape` from a layout. Numbers are sent as their own bytes, strings are packed
(`arrays.py`, `string_arrays.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias, TypeVar, dataclass_transform

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
    """Position in the layout of each input of the signature; None for one that the request lacks."""
    rounded: tuple[int, ...] = ()
    """Sizes after the strategy's padding, rows excepted; requests with equal ones share calls. Empty: its own sizes."""
    answer: Tensors | None = None
    """The results of a request without elements, if its ports determine them; it needs no call."""
    elements: int = field(init=False)
    """The product of its sizes, before any padding."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounded", self.rounded or self.sizes)
        object.__setattr__(self, "elements", prod(self.sizes))
