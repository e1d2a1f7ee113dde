"""The strings of a request, as their users have them: lists, plain strings, and NumPy's arrays of any kind of strings."""

from __future__ import annotations

from typing import Any

from shapestream.errors import InvalidRequest
from shapestream_engine import string_arrays
from shapestream_engine.errors import ElementTypeError
from shapestream_engine.ports import InputPort


def encoded_strings(port: InputPort, value: Any) -> tuple[tuple[int, ...], bytes]:
    """Return the layout's shape and the buffer of an input's strings.

    Raises `InvalidRequest` for other elements and another number of axes, with the input's name.
    """
    element_type = port.element_type
    try:
        array = string_arrays.as_strings(element_type, value)
        shape, buffer = string_arrays.pack(element_type, array)
    except ElementTypeError as error:
        raise InvalidRequest(f"input {port.name!r}: {error}") from None
    except Exception as error:  # ragged lists; foreign code, where an object's __array__ may raise anything
        raise InvalidRequest(f"input {port.name!r} is no array: {error}") from error
    if array.ndim != port.shape.rank:
        wanted = f"a list or array of {element_type}" if port.shape.rank else f"one {element_type}"
        raise InvalidRequest(
            f"input {port.name!r} has {port.shape.rank} dimensions, [{port.shape}], not {array.ndim}: give {wanted}"
        )
    return shape, buffer
