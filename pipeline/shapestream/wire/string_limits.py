"""The limits on the strings of a request, and the checks of strings where they come in.

The client checks limits before a round trip; behind the server's checks nothing looks at lengths, UTF-8 and bounds again.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from shapestream.errors import InvalidRequest, TooLarge
from shapestream.wire.limits import MAX_STRINGS, MAX_TEXT_BYTES
from shapestream_engine import string_arrays
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import Tensors
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.string_arrays import LENGTH, STRING_TYPES, nbytes_of


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
