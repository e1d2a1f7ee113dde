"""NumPy arrays to and from the wire: an element type, a shape and contiguous little-endian bytes.

A string tensor's shape on the wire ends with the bytes of all its strings (`string_arrays`).

Behind the server's checks of strings (`check_inputs`) nothing looks at their lengths, UTF-8 and bounds again. The client
checks limits before a round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from shapestream.errors import InvalidRequest, TooLarge
from shapestream.wire.limits import MAX_STRINGS, MAX_TEXT_BYTES
from shapestream_engine import string_arrays
from shapestream_engine.element_types import dtype_of, element_type_of
from shapestream_engine.errors import ElementTypeError, ShapeError
from shapestream_engine.layout import Buffer, Tensors
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.string_arrays import LENGTH, STRING_TYPES, nbytes_of

# Below this size a copy costs less than a reference that must be kept; the transport copies such frames too.
COPY_BELOW_BYTES = 64 * 1024


def from_array(array: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], Buffer]:
    """Return the element type, the shape and the bytes of `array`.

    Big-endian and non-contiguous arrays are converted, which copies. A large contiguous array is *not*
    copied: it must not change before its result arrives. Strings are copied, and may be objects: all `str`, or all `bytes`.
    Raises `InvalidRequest` for other types.
    """
    if (strings := string_type_of(array)) is not None:
        return from_strings(strings, array)
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and not _NATIVE_IS_LITTLE):
        array = array.astype(array.dtype.newbyteorder("<"))
    try:
        element_type = element_type_of(array.dtype)
    except ShapeError as error:
        raise InvalidRequest(str(error)) from error
    if array.nbytes < COPY_BELOW_BYTES:
        return element_type, array.shape, array.tobytes()
    contiguous = np.asarray(array, order="C")
    # As bytes: not every element type (bfloat16) can be exported as a memoryview of its own.
    return element_type, array.shape, contiguous.reshape(-1).view(np.uint8).data


def string_type_of(array: npt.NDArray[Any]) -> str | None:
    """Return the element type of an array of strings, `str` or `bytes`; None for an array of numbers."""
    if array.dtype.kind == "O":
        return "bytes" if array.size and type(array.flat[0]) is bytes else "str"
    return _STRING_KINDS.get(array.dtype.kind)


_STRING_KINDS = {"U": "str", "T": "str", "S": "bytes"}
"""NumPy's kinds of arrays of strings; `T` is `StringDType`."""


def from_strings(element_type: str, array: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    """Return the element type, the shape on the wire and the bytes of an array of strings, `str` or `bytes`.

    Raises `InvalidRequest` for other elements, lone surrogates among them.
    """
    try:
        return (element_type, *string_arrays.pack(element_type, array))
    except ElementTypeError as error:
        raise InvalidRequest(str(error)) from error


def to_array(element_type: str, shape: tuple[int, ...], data: Buffer) -> npt.NDArray[Any]:
    """Return a read-only array over the given bytes, without a copy; raises `InvalidRequest` where they do not fit.

    It keeps `data` alive, and is unaligned where the bytes are. Strings become an array of objects, `str` or `bytes`, which
    are copies.
    """
    if element_type in STRING_TYPES:
        try:
            strings = string_arrays.unpack(element_type, shape, data)
        except ShapeError as error:
            raise InvalidRequest(str(error)) from error
        strings.flags.writeable = False
        return strings
    try:
        dtype = dtype_of(element_type)
    except ShapeError as error:
        raise InvalidRequest(str(error)) from error
    immutable = type(data) is bytes
    nbytes = len(data) if immutable else memoryview(data).nbytes
    if nbytes != prod(shape) * dtype.itemsize:
        raise InvalidRequest(
            f"{nbytes} bytes were given; {element_type} {list(shape)} takes {prod(shape) * dtype.itemsize}"
        )
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=data)
    if not immutable:
        array.flags.writeable = False
    return array


_NATIVE_IS_LITTLE = np.dtype("<i4").isnative


def check_strings_fit(ports: Sequence[InputPort], tensors: Tensors) -> None:
    """Raise `TooLarge` for more strings or text than a request may have, and as `check_longest` does."""
    count = nbytes = 0
    for _, element_type, shape in tensors.layout:
        if element_type in STRING_TYPES:
            count += prod(shape[:-1])
            nbytes += nbytes_of(shape) if element_type == "str" else 0
    if count > MAX_STRINGS:
        raise TooLarge(f"{count} strings; a request has at most {MAX_STRINGS}: send fewer at once")
    if nbytes > MAX_TEXT_BYTES:
        raise TooLarge(
            f"{nbytes} bytes of text; a request has at most {MAX_TEXT_BYTES}: send fewer texts at once"
        )
    check_longest(ports, tensors)


def check_longest(ports: Sequence[InputPort], tensors: Tensors) -> None:
    """Raise `TooLarge` for an element beyond its input's bound, by its index. Lengths are taken as they are."""
    for (number, element_type, shape), buffer in zip(tensors.layout, tensors.buffers, strict=True):
        if element_type not in STRING_TYPES:
            continue
        port, count = ports[number], prod(shape[:-1])
        most = port.at_most_bytes
        if most is None or shape[-1] <= most or not count:
            continue
        lengths = np.frombuffer(buffer, LENGTH, count)
        index = int(lengths.argmax())
        if lengths[index] > most:
            raise TooLarge(
                f"input {port.name!r}, element {index}: {lengths[index]} bytes; at most {most} are taken of each"
            )


BYTES_PER_POINT = 16 * 1024
"""Bytes of strings per point of the inbox: to check so many takes 15 us."""


def check_inputs(ports: Sequence[InputPort], tensors: Tensors) -> None:
    """Raise `TooLarge` as `check_strings_fit` does, and `InvalidRequest` for wrong strings, by input and element."""
    check_strings_fit(ports, tensors)
    for (number, element_type, shape), buffer in zip(tensors.layout, tensors.buffers, strict=True):
        if ports[number].is_string:
            try:
                string_arrays.check(element_type, shape, buffer)
            except ShapeError as error:
                raise InvalidRequest(f"input {ports[number].name!r}: {error}") from None


def check_outputs(ports: Sequence[OutputPort], tensors: Tensors) -> None:
    """Raise ValueError for strings of a result whose lengths or contents are wrong, by their output's name."""
    for (number, element_type, shape), buffer in zip(tensors.layout, tensors.buffers, strict=True):
        if ports[number].is_string:
            try:
                string_arrays.check(element_type, shape, buffer)
            except ShapeError as error:
                raise ValueError(f"output {ports[number].name!r}: {error}") from None
