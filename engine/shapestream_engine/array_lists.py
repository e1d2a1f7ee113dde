"""A list of arrays, each of any shape, as two tensors: the elements of all arrays in one row, and the arrays' shapes.

`OutputPort.item` says which shapes an array may have, `list_ports` names both outputs. The arrays are copied once, into the
row. Their receiver gets views of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shapestream_engine import string_arrays
from shapestream_engine.arrays import array_dtype
from shapestream_engine.errors import ElementTypeError, InferenceError, ShapeError
from shapestream_engine.ports import OutputPort
from shapestream_engine.shapes import NamedShape, exact_nbytes
from shapestream_engine.tensor import Array


def checked_array(port: OutputPort, value: Any) -> Array:
    """Return `value` if it is an array of the port's element type and rank; raises `InferenceError` otherwise.

    Strings may also be lists, and arrays of NumPy's own types of strings; they become an array of objects.
    """
    return _checked(f"output {port.name!r}", port, port.shape, value)


def pack(port: OutputPort, arrays: Any) -> tuple[Array, Array]:
    """Return the elements of all arrays in one row, and their shapes, i64 [arrays, rank].

    Raises `InferenceError` unless `arrays` is a list or tuple of arrays within `port.item`. The message has the index of the
    array that is not.
    """
    item = port.item
    assert item is not None  # the port is a list
    if not isinstance(arrays, list | tuple):
        words = f"is {type(arrays).__name__}, not a list or tuple of NumPy arrays"
        raise InferenceError(f"output {port.name!r} {words}")
    arrays = [_checked_item(port, item, index, array) for index, array in enumerate(arrays)]
    shapes = np.array([array.shape for array in arrays], np.int64).reshape(len(arrays), item.rank)
    # Not np.concatenate: parts of a picture are not contiguous, so flattening each would be a second copy.
    elements = np.empty(sum(array.size for array in arrays), array_dtype(port.element_type))
    begin = 0
    for array in arrays:
        elements[begin : begin + array.size].reshape(array.shape)[...] = array
        begin += array.size
    return elements, shapes


def unpack(elements: Array, shapes: Array) -> list[Array]:
    """Return the arrays of a list as views of `elements`; raises `ShapeError` where the two tensors do not fit."""
    if elements.ndim != 1 or shapes.ndim != 2 or shapes.dtype.kind not in "iu":
        raise ShapeError(
            f"a list has elements [n] and whole shapes [arrays, rank], not {list(elements.shape)} and "
            f"{shapes.dtype} {list(shapes.shape)}"
        )
    itemsize = elements.itemsize
    return [
        elements[begin // itemsize : end // itemsize].reshape(shape)
        for shape, begin, end in places(shapes.tolist(), itemsize, elements.nbytes)
    ]


MANY_ARRAYS = 32
"""Arrays from which NumPy finds their places sooner than Python does: those of 2,048 in 1 ms instead of 5."""
MOST_EXACT = 2.0**52
"""Bytes below which f64 counts exactly, with a bit to spare. More are counted one by one, and so are wrong shapes."""


def places(
    shapes: Sequence[Sequence[int]], itemsize: int, nbytes: int
) -> list[tuple[tuple[int, ...], int, int]]:
    """Return the shape of each array of a list, and where its bytes begin and end among those of all elements.

    It needs no arrays: code that has only buffers reads lists with it. Raises `ShapeError` for a negative size, and if all
    arrays together have not `nbytes` bytes.
    """
    if len(shapes) >= MANY_ARRAYS:
        sizes = np.array(shapes, np.float64).reshape(len(shapes), -1)
        with np.errstate(over="ignore"):  # 17 sizes of 2^62 are beyond f64
            extent = np.maximum(sizes, 1).prod(axis=1).sum() * itemsize
        if extent < MOST_EXACT and (sizes >= 0).all():
            ends = (sizes.prod(axis=1).cumsum() * itemsize).astype(np.int64).tolist()
            if ends[-1] == nbytes:
                return list(zip(map(tuple, shapes), [0, *ends[:-1]], ends, strict=True))
    found, end = [], 0
    for index, row in enumerate(shapes):
        shape = tuple(row)
        if min(shape, default=0) < 0:
            raise ShapeError(f"array {index} of the list has the shape {[*shape]}; no size is negative")
        begin, end = end, end + exact_nbytes(itemsize, shape)
        found.append((shape, begin, end))
    if end != nbytes:
        raise ShapeError(f"a list of {len(shapes)} arrays of {end} bytes came with {nbytes} bytes")
    return found


def _checked_item(port: OutputPort, item: NamedShape, index: int, value: Any) -> Array:
    where = f"output {port.name!r}, array {index},"
    array = _checked(where, port, item, value)
    shape = array.shape
    named: dict[str, int] = {}
    equal = all(
        name is None or named.setdefault(name, size) == size
        for name, size in zip(item.names, shape, strict=True)
    )
    if not equal or not item.admits(shape):
        raise InferenceError(f"{where} has the shape {list(shape)}, declared is [{item}]")
    return array


def _checked(where: str, port: OutputPort, shape: NamedShape, value: Any) -> Array:
    if port.is_string:
        try:
            value = string_arrays.as_strings(port.element_type, value)
        except ElementTypeError as error:
            raise InferenceError(f"{where}: {error}") from None
    if isinstance(value, np.generic):
        value = np.asarray(value)  # what NumPy returns for an array without axes: `x.sum()`
    if not isinstance(value, np.ndarray):
        raise InferenceError(f"{where} is {type(value).__name__}, not a NumPy array")
    if string_arrays.is_masked(value):
        raise InferenceError(f"{where} has masked elements, and tensors have no mask; return .filled(value)")
    if value.dtype != array_dtype(port.element_type):
        raise InferenceError(f"{where} is of type {value.dtype}, declared is {port.element_type}")
    if value.ndim != shape.rank:
        raise InferenceError(f"{where} has the shape {list(value.shape)}, declared is [{shape}]")
    return value
