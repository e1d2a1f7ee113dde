"""The limits on the strings of a request. The server checks them; the client does so before a request costs a round trip."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from shapestream.errors import TooLarge
from shapestream.wire.limits import MAX_STRINGS, MAX_TEXT_BYTES
from shapestream_engine.layout import Tensors
from shapestream_engine.ports import InputPort
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
