"""Arrays as they are sent, and arrays for `infer(inputs)`, converted to what a port takes. Slots gather bytes instead.

A conversion that would lose something is refused: masked elements, integers that a float type does not hold exactly,
numbers beyond the range. The client uses the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np

from shapestream_engine import string_arrays
from shapestream_engine.element_types import EXACT_BITS, dtype_of
from shapestream_engine.errors import ElementTypeError, ShapeError
from shapestream_engine.layout import Buffer, Tensors
from shapestream_engine.ports import InputPort
from shapestream_engine.string_arrays import STRING_TYPES, Array

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


# ---------------------------------------------------------------- inputs of a call

InputArrays: TypeAlias = "Mapping[str, Any] | Sequence[Any]"
"""For each input an array, a value that NumPy converts, or a tensor; by name or in the signature's order."""


def in_port_order(ports: Sequence[InputPort], inputs: InputArrays) -> list[Any]:
    """Return the values in the order of the ports; raises `ShapeError` that names missing and unknown inputs."""
    names = [port.name for port in ports]
    if isinstance(inputs, Mapping):
        # Both are reported: a misspelt name is unknown, and the right one missing.
        wrong = {"unknown": set(inputs) - set(names), "missing": set(names) - set(inputs)}
        found = [f"{what}: {', '.join(sorted(map(str, those)))}" for what, those in wrong.items() if those]
        if found:
            raise ShapeError(f"{'; '.join(found)}; the model takes {', '.join(names)}")
        return [inputs[name] for name in names]
    if isinstance(inputs, str | bytes | np.ndarray):
        raise ShapeError(f"inputs come as a list or a mapping, with one entry for each of {', '.join(names)}")
    if len(inputs) != len(names):
        raise ShapeError(f"{len(inputs)} inputs were given; the model takes {', '.join(names)}")
    return list(inputs)


def as_port_array(port: InputPort, value: Any) -> np.ndarray[Any, Any]:
    """Convert the value to the port's element type; raises `ElementTypeError` if numbers would change.

    Floats are rounded, as from f64 to f32. Fractions are not rounded to integers, and integers must be exact in a float
    type. No number becomes infinite or zero. Strings come as lists or arrays, and become an array of objects.
    """
    if port.is_string:
        try:
            return string_arrays.as_strings(port.element_type, value)
        except ElementTypeError as error:
            raise ElementTypeError(f"input {port.name!r}: {error}") from None
    dtype = dtype_of(port.element_type)
    try:
        array = plain_array(value)
    except ElementTypeError as error:
        raise ElementTypeError(f"input {port.name!r}: {error}") from None
    source, target = array.dtype.kind, dtype.kind
    if source in "iu" and target in "iu":
        fits = _within(array, dtype)
    elif target == "V":  # bf16, whose kind NumPy does not know
        fits = source in "biuf" or array.dtype == dtype
    else:
        fits = source in "biuf" and np.can_cast(array.dtype, dtype, "same_kind")
    if not fits:
        raise ElementTypeError(
            f"input {port.name!r} is {port.element_type}, which does not hold {array.dtype}"
        )
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
    if not same_numbers(array, converted, port.element_type):
        raise ElementTypeError(
            f"input {port.name!r} is {port.element_type}, which cannot hold all of the given values"
        )
    return converted


def plain_array(value: Any) -> np.ndarray[Any, Any]:
    """Make a NumPy array; raises `ElementTypeError` if that would silently lose something.

    Losses are masked elements, and integers beside floats that have no exact f64.
    """
    if _has_masked(value):
        raise ElementTypeError(
            "a masked array has elements that are masked, and tensors have no mask; fill them, with .filled(value)"
        )
    array: np.ndarray[Any, Any] = np.asarray(value)
    if array.dtype == np.float64 and isinstance(value, list | tuple):
        large = np.abs(array) >= 2.0**53
        if large.any():
            numbers = np.array(value, object)
            if all(map(_is_integer, numbers.flat)) and numbers.min() >= 0 and numbers.max() < 1 << 64:
                # NumPy converts integers to floats if one needs u64 and another does not; a narrower float type would
                # then round them silently.
                return numbers.astype(np.uint64)
            pairs = zip(numbers[large].tolist(), array[large].tolist(), strict=True)
            if any(_is_integer(number) and int(number) != other for number, other in pairs):
                raise ElementTypeError(
                    "integers beside floats are too large to be the same numbers as floats"
                )
    return array


def same_numbers(array: np.ndarray[Any, Any], converted: np.ndarray[Any, Any], element_type: str) -> bool:
    """Tell whether the conversion to floats kept the numbers; rounding of floats within the range is allowed."""
    bits = EXACT_BITS.get(element_type)
    if bits is None or array.size == 0:
        return True
    if array.dtype.kind in "iu":
        # The comparison uses integers, because NumPy would round the integer to a float first.
        large = (array > 1 << bits) | (array < -(1 << bits)) if array.dtype.itemsize * 8 > bits else None
        if large is None or not large.any():
            return bool(np.isfinite(converted).all())
        pairs = zip(array[large].tolist(), converted[large].astype(np.float64).tolist(), strict=True)
        return bool(np.isfinite(converted).all()) and all(given == other for given, other in pairs)
    if array.dtype.kind == "f":
        lost = (np.isfinite(array) & ~np.isfinite(converted)) | ((array != 0) & (converted == 0))
        return not bool(lost.any())
    return True


def _is_integer(number: object) -> bool:
    return isinstance(number, Integral) or (isinstance(number, np.ndarray) and number.dtype.kind in "iu")


def _has_masked(value: Any, depth: int = 0) -> bool:
    if isinstance(value, list | tuple):
        if depth > _DEEPEST:
            return False  # NumPy refuses deeper lists
        return any(type(each) not in _NUMBERS and _has_masked(each, depth + 1) for each in value)
    return string_arrays.is_masked(value)


_NUMBERS = frozenset({int, float, bool})
_DEEPEST = 64
"""Deepest nesting of lists; NumPy has no array of more dimensions."""


def _within(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bool:
    if array.size == 0:
        return True
    limits = np.iinfo(dtype)
    return int(array.min()) >= int(limits.min) and int(array.max()) <= int(limits.max)
