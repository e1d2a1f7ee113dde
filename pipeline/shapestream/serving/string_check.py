"""Checks of strings where the server takes them in: requests from clients, and results from workers.

The codec has checked the bytes of a string tensor against its layout, and not what they say: the length of each element,
UTF-8, and the bound of each element. Behind these checks nothing looks at them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from shapestream.errors import InvalidRequest
from shapestream.wire.string_limits import check_strings_fit
from shapestream_engine import string_arrays
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import Tensors
from shapestream_engine.ports import InputPort, OutputPort

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
