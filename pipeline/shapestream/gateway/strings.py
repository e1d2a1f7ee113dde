"""Strings as the Open Inference Protocol has them, as `BYTES`: JSON strings, or binary data.

In binary data the length of each element, u32 and little-endian, stands before that element. Our own buffers have all
lengths first. Text (`str`) is UTF-8 in both; `bytes` are those of UTF-8 in JSON, and anything in binary data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from shapestream.errors import InvalidRequest
from shapestream.gateway.json_text import list_of, type_name, write_json
from shapestream.slices import Slices
from shapestream_engine.ports import InputPort
from shapestream_engine.string_arrays import LENGTH

BYTES = "BYTES"
"""The datatype of strings."""
SLICE_STRINGS = 8 * 1024
"""Strings that are read or written in a turn of the event loop: 1 to 3 ms, unless they are long."""
SLICE_BYTES = 1024 * 1024
"""Bytes after which a slice of strings ends earlier."""


def from_binary(port: InputPort, shape: tuple[int, ...], data: memoryview) -> Slices[npt.NDArray[Any]]:
    """Return the strings of binary data, in slices. Raises `InvalidRequest` that names the element at fault."""
    strings = np.empty(prod(shape), object)
    offset = slice_end = 0
    for index in range(len(strings)):
        if index % SLICE_STRINGS == 0 or offset >= slice_end:
            slice_end = offset + SLICE_BYTES
            yield
        begin = offset + LENGTH.itemsize
        offset = begin + int.from_bytes(data[offset:begin], "little")
        if offset > len(data) or begin > len(data):
            raise InvalidRequest(
                f"input {port.name!r}, element {index}: its length, 4 bytes, and its contents go beyond the "
                f"{len(data)} bytes of the input, which has {len(strings)} elements"
            )
        strings[index] = decoded(port, index, data[begin:offset])
    if offset != len(data):
        raise InvalidRequest(
            f"input {port.name!r}: {len(strings)} elements with their lengths take {offset} bytes, and "
            f"{len(data)} came"
        )
    return strings.reshape(shape)


def from_contents(port: InputPort, shape: tuple[int, ...], contents: Iterable[bytes]) -> npt.NDArray[Any]:
    """Return strings that come one by one. Raises `InvalidRequest` for text that is no UTF-8."""
    strings = np.empty(prod(shape), object)
    for index, content in enumerate(contents):
        strings[index] = decoded(port, index, content)
    return strings.reshape(shape)


def from_json(port: InputPort, shape: tuple[int, ...], elements: Sequence[Any]) -> Slices[npt.NDArray[Any]]:
    """Return the strings of a JSON list, in slices. Raises `InvalidRequest` for other elements."""
    strings = np.empty(len(elements), object)
    for begin in range(0, len(elements), SLICE_STRINGS):
        if begin:
            yield
        some = elements[begin : begin + SLICE_STRINGS]
        for index, element in enumerate(some, begin):
            if type(element) is not str:
                raise InvalidRequest(
                    f"input {port.name!r} takes BYTES, which are strings in JSON: element {index} is "
                    f"{type_name(element)}"
                )
        strings[begin : begin + len(some)] = some if port.element_type == "str" else [*map(str.encode, some)]
    return strings.reshape(shape)


def decoded(port: InputPort, index: int, content: bytes | memoryview) -> str | bytes:
    """Return an element as the input takes it. Raises `InvalidRequest` for text that is no UTF-8."""
    if port.element_type == "bytes":
        return bytes(content)
    try:
        return str(content, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input {port.name!r}, element {index}: no UTF-8 ({error.reason})") from None


def to_binary(strings: npt.NDArray[Any]) -> Slices[bytes]:
    """Return an output's strings as binary data, in slices."""
    pieces: list[bytes] = []
    for some in _parts(strings):
        for element in some:
            content = element.encode() if isinstance(element, str) else element
            pieces += [len(content).to_bytes(LENGTH.itemsize, "little"), content]
        yield
    return b"".join(pieces)


def to_json(name: str, strings: npt.NDArray[Any]) -> Slices[Any]:
    """Return an output's strings as one list of text for `write_json`, in slices.

    Raises `InvalidRequest` for bytes that are no UTF-8.
    """
    lists: list[bytes] = []
    for some in _parts(strings):
        try:
            texts = [each if isinstance(each, str) else str(each, "utf-8") for each in some]
        except UnicodeDecodeError:
            raise InvalidRequest(
                f"output {name!r} has bytes that are no UTF-8, which JSON does not have: ask for binary data"
            ) from None
        lists.append(write_json(texts))
        yield
    return list_of(lists)


def strings_nbytes(strings: npt.NDArray[Any]) -> int:
    """Return about the bytes of strings, to tell how long it takes to read or write them."""
    return strings.nbytes + sum(map(len, strings.ravel().tolist()))


def _parts(strings: npt.NDArray[Any]) -> Iterator[list[Any]]:
    """Yield the elements in parts, each of one turn of the event loop."""
    part: list[Any] = []
    nbytes = 0
    for element in strings.ravel().tolist():
        part.append(element)
        nbytes += len(element)
        if len(part) == SLICE_STRINGS or nbytes >= SLICE_BYTES:
            yield part
            part, nbytes = [], 0
    if part:
        yield part
