"""The limits on the strings of a request. The server checks them; the client does so before a request costs a round trip."""

from __future__ import annotations

from math import prod

import numpy as np

from shapestream.errors import TooLarge
from shapestream.wire.limits import MAX_STRINGS, MAX_TEXT_BYTES
from shapestream_engine import string_arrays
from shapestream_engine.layout import Buffer
from shapestream_engine.ports import InputPort
from shapestream_engine.string_arrays import LENGTH


def check_strings_fit(port: InputPort, shape: tuple[int, ...], buffer: Buffer) -> None:
    """Raise `TooLarge` for more strings or text than a request may have, and as `check_longest` does."""
    count, nbytes = prod(shape[:-1]), string_arrays.nbytes_of(shape)
    if count > MAX_STRINGS:
        raise TooLarge(
            f"input {port.name!r} has {count} elements; a request has at most {MAX_STRINGS} strings"
        )
    if port.element_type == "str" and nbytes > MAX_TEXT_BYTES:
        raise TooLarge(
            f"input {port.name!r} has {nbytes} bytes of text; a request has at most {MAX_TEXT_BYTES}: send fewer texts "
            "at once"
        )
    check_longest(port, shape, buffer)


def check_longest(port: InputPort, shape: tuple[int, ...], buffer: Buffer) -> None:
    """Raise `TooLarge` for an element beyond the input's bound, by its index. Lengths are taken as they are."""
    count, most = prod(shape[:-1]), port.at_most_bytes
    if most is None or shape[-1] <= most or not count:
        return
    lengths = np.frombuffer(buffer, LENGTH, count)
    index = int(lengths.argmax())
    if lengths[index] > most:
        raise TooLarge(
            f"input {port.name!r}, element {index}: {lengths[index]} bytes; at most {most} are taken of each"
        )
