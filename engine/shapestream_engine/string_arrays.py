"""String tensors: elements of any length, `str` (text, UTF-8 in bytes) or `bytes`, as one buffer.

In a layout, the shape of a string tensor is followed by one more size, the bytes of all its elements together: `[2, 3, 40]`
are 2 x 3 elements of 40 bytes in all. The buffer has the length of each element, u32 and little-endian, in C order, and
then their bytes, one after the other. So a layout tells the buffer's exact size, as it does for numbers.

In NumPy a string tensor is an array of objects, `str` or `bytes`. Arrays of the types `S`, `U` and `StringDType` are read
as well.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import prod
from typing import Any, TypeAlias

import numpy as np

from shapestream_engine.errors import ElementTypeError, ShapeError
from shapestream_engine.layout import Buffer

Array: TypeAlias = "np.ndarray[Any, Any]"

STRING_TYPES = ("str", "bytes")
"""The element types whose elements have any length."""

_KINDS = "OSUT"
"""Kinds of the NumPy types that hold strings: objects, `S`, `U` and `StringDType`."""

LENGTH = np.dtype("<u4")
"""Type of the lengths at the beginning of the buffer."""

Sizes: TypeAlias = tuple[int, ...]


def nbytes_of(shape: Sizes) -> int:
    """Return the size in bytes of the buffer; `shape` is that of the layout, with the bytes of all elements last."""
    return LENGTH.itemsize * prod(shape[:-1]) + shape[-1]


def pack(element_type: str, array: Array) -> tuple[Sizes, bytes]:
    """Return the layout's shape and the buffer; raises `ElementTypeError` for elements that are no `str` or `bytes`.

    A `str` may have no lone surrogate, since UTF-8 has none.
    """
    elements = [_encoded(element_type, each) for each in array.ravel().tolist()]
    lengths = np.fromiter(map(len, elements), LENGTH, len(elements))
    contents = b"".join(elements)
    return (*array.shape, len(contents)), lengths.tobytes() + contents


def unpack(element_type: str, shape: Sizes, buffer: Buffer) -> Array:
    """Return the elements as an array of objects; raises `ShapeError` where `check` does."""
    contents, ends = _parts(shape, buffer)
    array = np.empty(len(ends) - 1, object)
    try:
        for index, (begin, end) in enumerate(pairwise(ends)):
            element = contents[begin:end]
            array[index] = str(element, "utf-8") if element_type == "str" else bytes(element)
    except UnicodeDecodeError as error:
        raise ShapeError(f"element {index} is no UTF-8: {error.reason}") from None
    return array.reshape(shape[:-1])


def as_strings(element_type: str, value: Any) -> Array:
    """Return strings as an array of objects: of an array, or of nested lists. Raises `ElementTypeError` for others.

    A list does not become an array of the type `S` first, which would lose zeros at the end of its elements.
    """
    array = value if isinstance(value, np.ndarray) else np.array(value, object)
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise ElementTypeError("masked elements are no strings; fill them, with .filled(value)")
    if array.dtype.kind not in _KINDS:
        raise ElementTypeError(f"elements are {element_type}, not {array.dtype}")
    objects = array if array.dtype == object else array.astype(object)
    for element in objects.ravel().tolist():
        _check_element(element_type, element)
    return objects


def check(element_type: str, shape: Sizes, buffer: Buffer) -> int:
    """Return the bytes of the longest element.

    Raises `ShapeError` where the lengths do not fit the bytes, and for an element of the type `str` that is no UTF-8.
    """
    contents, ends = _parts(shape, buffer)
    if element_type == "str":
        try:
            str(contents, "utf-8")
        except UnicodeDecodeError as error:
            index = next(index for index, end in enumerate(ends) if end > error.start) - 1
            raise ShapeError(f"element {index} is no UTF-8: {error.reason}") from None
        # Together they may be UTF-8 although a character is cut: no element begins within one.
        for index, begin in enumerate(ends[:-1]):
            if begin < len(contents) and contents[begin] & 0xC0 == 0x80:
                raise ShapeError(f"element {index} is no UTF-8: it begins within a character")
    return max((end - begin for begin, end in pairwise(ends)), default=0)


def _parts(shape: Sizes, buffer: Buffer) -> tuple[memoryview, list[int]]:
    """Return the bytes of all elements, and where each begins; the last number is their end."""
    whole = memoryview(buffer).cast("B")
    count, nbytes = prod(shape[:-1]), shape[-1]
    if whole.nbytes != nbytes_of(shape):
        raise ShapeError(
            f"{count} strings of {nbytes} bytes have {nbytes_of(shape)} bytes, not {whole.nbytes}"
        )
    begin = LENGTH.itemsize * count
    lengths: list[int] = np.frombuffer(whole[:begin], LENGTH).tolist()
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] != nbytes:
        raise ShapeError(f"{count} strings have lengths of {ends[-1]} bytes in all, but {nbytes} bytes came")
    return whole[begin:], ends


def _check_element(element_type: str, element: Any) -> None:
    if not isinstance(element, str if element_type == "str" else bytes):
        raise ElementTypeError(f"elements are {element_type}, not {type(element).__name__}")


def _encoded(element_type: str, element: Any) -> bytes:
    _check_element(element_type, element)
    if isinstance(element, str):
        try:
            return element.encode()
        except UnicodeEncodeError as error:
            raise ElementTypeError(
                f"an element has {error.object[error.start]!r}, a lone surrogate, which is no character"
            ) from None
    return bytes(element)
