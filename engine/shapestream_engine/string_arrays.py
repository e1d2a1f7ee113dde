"""String tensors: elements of any length, `str` (text, UTF-8 in bytes) or `bytes`, as one buffer.

In a layout, the shape of a string tensor is followed by one more size, the bytes of all its elements together: `[2, 3, 40]`
are 2 x 3 elements of 40 bytes in all. The buffer has the length of each element, u32 and little-endian, in C order, and
then their bytes, one after the other. So a layout tells the buffer's exact size, as it does for numbers.

In NumPy a string tensor is an array of objects, `str` or `bytes`. Arrays of the types `S`, `U` and `StringDType` are read
as well.
"""

from __future__ import annotations

import sys
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, TypeAlias

import numpy as np

from shapestream_engine.errors import ElementTypeError, ShapeError

Array: TypeAlias = "np.ndarray[Any, Any]"

STRING_TYPES = ("str", "bytes")
"""The element types whose elements have any length."""

_KINDS = "OSUT"
"""Kinds of the NumPy types that hold strings: objects, `S`, `U` and `StringDType`."""

LENGTH = np.dtype("<u4")
"""Type of the lengths at the beginning of the buffer."""

PIECE_NBYTES = 64 * 1024
"""Bytes that are decoded at once to be checked. 8 MiB at once, whose text fits no cache, take 6 to 8 ms; in pieces 3.5."""

Sizes: TypeAlias = tuple[int, ...]


def nbytes_of(shape: Sizes) -> int:
    """Return the size in bytes of the buffer; `shape` is that of the layout, with the bytes of all elements last."""
    return LENGTH.itemsize * prod(shape[:-1]) + shape[-1]


def pack(element_type: str, array: Array) -> tuple[Sizes, bytes]:
    """Return the layout's shape and the buffer; raises `ElementTypeError` for elements that are no `str` or `bytes`.

    A `str` may have no lone surrogate, since UTF-8 has none.
    """
    elements = array.ravel().tolist()
    _check_elements(element_type, elements)
    if element_type == "str":
        text = "".join(elements)
        contents = text.encode() if text.isascii() else b"".join(elements := _encoded(elements))
    else:
        contents = b"".join(elements)
    lengths = np.fromiter(map(len, elements), LENGTH, len(elements))
    return (*array.shape, len(contents)), lengths.tobytes() + contents


def unpack(element_type: str, shape: Sizes, buffer: Any) -> Array:
    """Return the elements as an array of objects; raises `ShapeError` where `check` does."""
    contents, lengths = _parts(shape, buffer)
    places = pairwise(accumulate(lengths.tolist(), initial=0))
    elements: Sequence[str | bytes]
    if element_type == "bytes":
        elements = [bytes(contents[begin:end]) for begin, end in places]
    elif (whole := bytes(contents)).isascii():
        text = str(whole, "ascii")
        elements = [text[begin:end] for begin, end in places]
    else:
        try:
            elements = [str(whole[begin:end], "utf-8") for begin, end in places]
        except UnicodeDecodeError:
            check(element_type, shape, buffer)  # it names the element
            raise
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape[:-1])


def is_masked(value: Any) -> bool:
    """Tell whether an array has masked elements.

    NumPy imports its module for such arrays when it is first named, which takes 20 ms and more of an event loop. Where it
    was not imported, there is none.
    """
    masked: Any = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(value, masked.MaskedArray) and bool(masked.is_masked(value))


def as_strings(element_type: str, value: Any) -> Array:
    """Return strings as an array of objects: of an array, or of nested lists. Raises `ElementTypeError` for others.

    A list does not become an array of the type `S` first, which would lose zeros at the end of its elements.
    """
    array = value if isinstance(value, np.ndarray) else np.array(value, object)
    if is_masked(array):
        raise ElementTypeError("masked elements are no strings; fill them, with .filled(value)")
    if array.dtype.kind not in _KINDS:
        raise ElementTypeError(f"elements are {element_type}, not {array.dtype}")
    objects = array if array.dtype == object else array.astype(object)
    _check_elements(element_type, objects.ravel().tolist())
    return objects


def check(element_type: str, shape: Sizes, buffer: Any) -> int:
    """Return the bytes of the longest element; no object is made of any.

    Raises `ShapeError` where the lengths do not fit the bytes, and for an element of the type `str` that is no UTF-8.
    """
    contents, lengths = _parts(shape, buffer)
    if element_type == "str":
        try:
            is_ascii = _is_ascii(contents)
        except UnicodeDecodeError as error:
            index = int(np.searchsorted(_ends(lengths), error.start, side="right"))
            raise ShapeError(f"element {index} is no UTF-8: {error.reason}") from None
        if not is_ascii:
            _check_beginnings(contents, lengths)
    return int(lengths.max(initial=0))


def divided(shape: Sizes, buffer: Any, counts: Sequence[int]) -> list[tuple[int, bytes]]:
    """Return the elements in groups of these counts, in order: of each group the bytes of its elements, and its buffer.

    Raises `ShapeError` where the lengths do not fit the bytes, or the counts do not add up to the elements.
    """
    contents, lengths = _parts(shape, buffer)
    if sum(counts) != len(lengths):
        raise ShapeError(f"there are {len(lengths)} strings, and {sum(counts)} are asked for")
    ends = [0, *_ends(lengths).tolist()]
    groups, first = [], 0
    for last in accumulate(counts):
        begin, end = ends[first], ends[last]
        groups.append((end - begin, lengths[first:last].tobytes() + contents[begin:end]))
        first = last
    return groups


def joined(parts: Iterable[tuple[Sizes, Any]]) -> tuple[int, bytes]:
    """Return the bytes of the elements of all parts, one part after the other, and their buffer; `divided` undoes it."""
    lengths, contents = [], []
    for shape, buffer in parts:
        own, lengths_ = _parts(shape, buffer)
        lengths.append(lengths_.tobytes())
        contents.append(own)
    return sum(map(len, contents)), b"".join([*lengths, *contents])


def _is_ascii(contents: memoryview) -> bool:
    """Tell whether all of it is ASCII. Raises `UnicodeDecodeError` where it is no UTF-8, with the place in all of it."""
    begin, nbytes = 0, len(contents)
    ascii_only = True
    while begin < nbytes:
        end = begin + PIECE_NBYTES
        try:
            # A character that a piece cuts begins the next one.
            text, used = utf_8_decode(contents[begin:end], "strict", end >= nbytes)
        except UnicodeDecodeError as error:
            error.start += begin
            raise
        ascii_only = ascii_only and text.isascii()
        begin += used
    return ascii_only


def _check_beginnings(contents: memoryview, lengths: Array) -> None:
    """Together they are UTF-8, although a character may be cut: no element begins within one."""
    begins = _ends(lengths)[:-1]
    begins = begins[begins < len(contents)]
    cut = np.frombuffer(contents, np.uint8)[begins] & 0xC0 == 0x80
    if cut.any():
        raise ShapeError(f"element {int(cut.argmax()) + 1} is no UTF-8: it begins within a character")


def _parts(shape: Sizes, buffer: Any) -> tuple[memoryview, Array]:
    """Return the bytes of all elements, and the length of each."""
    whole = memoryview(buffer)
    whole = whole.cast("B") if whole.nbytes else memoryview(b"")  # a view without elements cannot be cast
    count, nbytes = prod(shape[:-1]), shape[-1]
    if whole.nbytes != nbytes_of(shape):
        raise ShapeError(
            f"{count} strings of {nbytes} bytes have {nbytes_of(shape)} bytes, not {whole.nbytes}"
        )
    lengths = np.frombuffer(whole, LENGTH, count)
    if (total := int(lengths.sum(dtype=np.uint64))) != nbytes:
        raise ShapeError(f"{count} strings have lengths of {total} bytes in all, but {nbytes} bytes came")
    return whole[lengths.nbytes :], lengths


def _ends(lengths: Array) -> Array:
    """Return where each element ends."""
    return np.cumsum(lengths, dtype=np.int64)


def _check_elements(element_type: str, elements: Sequence[Any]) -> None:
    wanted = str if element_type == "str" else bytes
    if {*map(type, elements)} <= {wanted}:
        return
    for index, element in enumerate(elements):
        if not isinstance(element, wanted):
            raise ElementTypeError(
                f"elements are {element_type}, not {type(element).__name__}, as element {index} is"
            )


def _encoded(elements: Iterable[str]) -> list[bytes]:
    encoded: list[bytes] = []
    try:
        for element in elements:
            encoded.append(element.encode())
    except UnicodeEncodeError as error:
        raise ElementTypeError(
            f"element {len(encoded)} has {error.object[error.start]!r}, a lone surrogate, which is no character"
        ) from None
    return encoded
