"""Layouts on the wire: the receiver recognises a repeated tensor description by its bytes.

A layout travels as a msgpack `bin` that holds its own msgpack encoding. Requests repeat a few layouts, so the
receiver looks the bytes up among checked ones: one dictionary access instead of a walk over names, types and
dimensions. Bytes are compared, not values, so that an equal layout of other types (`True == 1 == 1.0`) is no match.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import msgpack

from shapestream.errors import InvalidRequest
from shapestream.wire.limits import MAX_INTEGER, MAX_RANK, MAX_TENSORS
from shapestream_engine.element_types import ELEMENT_TYPES
from shapestream_engine.layout import Layout
from shapestream_engine.string_arrays import LENGTH, STRING_TYPES

# Layouts remembered; when full, the book starts afresh. A longer encoding than this is checked every time, so
# that hostile layouts cannot make the book large.
MAX_REMEMBERED = 4096
MAX_REMEMBERED_BYTES = 512
_MAX_PACKED_BYTES = MAX_TENSORS * (16 + 9 * (MAX_RANK + 1))
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in ELEMENT_TYPES.items()} | dict.fromkeys(
    STRING_TYPES, LENGTH.itemsize
)
"""Bytes of one element; of a string those of its length, since the shape ends with the bytes of all strings."""


class LayoutError(InvalidRequest):
    """A layout that no model can take; the message names the tensor and the reason."""


class CheckedLayout(NamedTuple):
    """A layout after all checks that need no model."""

    layout: Layout
    packed: bytes
    nbytes: tuple[int, ...]
    """The exact byte length of each tensor."""


def _check_row(index: int, row: Any) -> int:
    """Check one tensor's description, and return its byte length."""
    if type(row) is not tuple or len(row) != 3:
        raise LayoutError(f"tensor {index}: its description must be [port, element type, shape]")
    port, element_type, shape = row
    if type(port) is not int or not 0 <= port < MAX_TENSORS:
        raise LayoutError(f"tensor {index}: the port must be an integer from 0 to {MAX_TENSORS - 1}")
    if type(element_type) is not str or element_type not in _ITEM_BYTES:
        known = ", ".join(_ITEM_BYTES)
        shown = element_type[:32] if type(element_type) is str else type(element_type).__name__
        raise LayoutError(f"tensor {index}: element type {shown!r} is not one of {known}")
    of_strings = element_type in STRING_TYPES
    if type(shape) is not tuple or not of_strings <= len(shape) <= MAX_RANK + of_strings:
        most = f"{MAX_RANK} integers" + of_strings * ", and one more: the bytes of all strings"
        raise LayoutError(f"tensor {index}: the shape must be an array of at most {most}")
    for axis, size in enumerate(shape):
        if type(size) is not int:
            raise LayoutError(f"tensor {index}: dimension {axis} is {type(size).__name__}, not an integer")
        if not 0 <= size <= MAX_INTEGER:
            raise LayoutError(f"tensor {index}: dimension {axis} is {size}, and not from 0 to 2^63-1")
    sizes, contents = (shape[:-1], shape[-1]) if of_strings else (shape, 0)
    item_bytes = _ITEM_BYTES[element_type]
    # As NumPy counts: dimensions of 0 do not excuse the others.
    if prod(size or 1 for size in sizes) * item_bytes + contents > MAX_INTEGER:
        raise LayoutError(f"tensor {index}: shape {list(shape)} of {element_type} overflows 2^63-1 bytes")
    return prod(sizes) * item_bytes + contents


def _check(layout: Any) -> tuple[int, ...]:
    if type(layout) is not tuple or len(layout) > MAX_TENSORS:
        raise LayoutError(f"the layout must be an array of at most {MAX_TENSORS} tensor descriptions")
    nbytes = tuple(_check_row(index, row) for index, row in enumerate(layout))
    if len({row[0] for row in layout}) != len(layout):
        raise LayoutError(f"two tensors name the same port: {[row[0] for row in layout]}")
    return nbytes


class LayoutBook:
    """Layouts that have been checked, by their bytes and by their value; bounded."""

    def __init__(self) -> None:
        self._by_bytes: dict[bytes, CheckedLayout] = {}
        self._by_value: dict[Layout, CheckedLayout] = {}

    def read(self, packed: bytes) -> CheckedLayout:
        """Return the checked layout of these bytes; raises `LayoutError`."""
        known = self._by_bytes.get(packed)
        return self._unpack(packed) if known is None else known

    def write(self, layout: Layout) -> CheckedLayout:
        """Return the checked layout with its encoding; raises `LayoutError`."""
        known = self._by_value.get(layout)
        return self._pack(layout) if known is None else known

    def _unpack(self, packed: bytes) -> CheckedLayout:
        if type(packed) is not bytes or len(packed) > _MAX_PACKED_BYTES:
            raise LayoutError(f"the layout must be a bin of at most {_MAX_PACKED_BYTES} bytes")
        try:
            layout = msgpack.unpackb(
                packed,
                use_list=False,
                max_str_len=32,
                max_bin_len=0,
                max_array_len=max(MAX_TENSORS, MAX_RANK),
                max_map_len=0,
                max_ext_len=0,
                ext_hook=refuse_extension,
            )
        except ValueError as error:
            raise LayoutError(
                "the layout is not msgpack of at most 64 x [port, element type, shape]"
            ) from error
        checked = CheckedLayout(layout, packed, _check(layout))
        if len(packed) <= MAX_REMEMBERED_BYTES:
            if len(self._by_bytes) >= MAX_REMEMBERED:
                self._by_bytes.clear()
            self._by_bytes[packed] = checked
        return checked

    def _pack(self, layout: Layout) -> CheckedLayout:
        # A layout is remembered by value after a check for exact types, so that an equal layout of other
        # types (bool, float, NumPy integers) is refused here or written as the integers that it equals.
        nbytes = _check(layout)
        checked = CheckedLayout(layout, msgpack.packb(layout), nbytes)
        if len(checked.packed) <= MAX_REMEMBERED_BYTES:
            if len(self._by_value) >= MAX_REMEMBERED:
                self._by_value.clear()
            self._by_value[layout] = checked
        return checked


def refuse_extension(code: int, data: bytes) -> Any:
    """Refuse every msgpack extension."""
    raise ValueError(f"msgpack extension type {code} is not part of the protocol")
