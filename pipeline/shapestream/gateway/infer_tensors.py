"""The parameters and tensors of an inference request, over HTTP or gRPC, against the model's signature.

Everything is checked before an array is made: names, datatypes, and each shape in exact arithmetic.

Strings are `BYTES`: JSON strings, or binary data. In binary data the length of each element, u32 and little-endian, stands
before that element. Our own buffers have all lengths first. Text (`str`) is UTF-8 in both; `bytes` are those of UTF-8 in
JSON, and anything in binary data.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from shapestream.errors import InvalidRequest, TooLarge
from shapestream.gateway.errors import Unsupported
from shapestream.gateway.json_text import type_name, write_json
from shapestream.slices import Slices
from shapestream.wire.limits import MAX_INTEGER, MAX_PRIORITY, MAX_RANK, MAX_STRINGS
from shapestream.wire.tags import REQUEST_ID, can_be_sent
from shapestream_engine.element_types import dtype_of, element_type_of
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import value
from shapestream_engine.ports import InputPort
from shapestream_engine.shapes import exact_nbytes
from shapestream_engine.signature import ModelSignature
from shapestream_engine.string_arrays import LENGTH


def input_port(signature: ModelSignature, name: str, given: Container[str]) -> InputPort:
    """Return the input of this name. Raises `InvalidRequest` where the model has none, or where it is `given` already."""
    if name in given:
        raise InvalidRequest(f"input {shown(name)} is given twice")
    for port in signature.inputs:
        if port.name == name:
            return port
    known = ", ".join(port.name for port in signature.inputs) or "none"
    raise InvalidRequest(f"model {signature.name!r} has no input {shown(name)}; it takes {known}")


def check_output(signature: ModelSignature, name: str, asked: Container[str]) -> None:
    """Raise `InvalidRequest` where the model has no output of this name, or where it is `asked` for already."""
    known = [port.name for port in signature.outputs]
    if name not in known:
        raise InvalidRequest(
            f"model {signature.name!r} has no output {shown(name)}; it has {', '.join(known)}"
        )
    if name in asked:
        raise InvalidRequest(f"output {name!r} is asked for twice")


def refuse_classification(name: str, parameters: Mapping[str, Any]) -> None:
    """Raise `Unsupported` where an output is to be answered by classes."""
    if parameters.get("classification"):
        raise Unsupported(f"output {name!r}: classification is not supported")


def refuse_shared_memory(name: str, parameters: Mapping[str, Any]) -> None:
    """Raise `Unsupported` where a tensor is to be read from, or written to, shared memory."""
    if any(parameter.startswith("shared_memory_") for parameter in parameters):
        raise Unsupported(f"tensor {name!r}: shared memory is not supported")


def check_datatype(port: InputPort, datatype: Any) -> None:
    """Raise `InvalidRequest` for another datatype than the input's own."""
    wanted = DATATYPES[port.element_type]
    if datatype == wanted:
        return
    raise InvalidRequest(f'input {port.name!r}: "datatype" is {wanted}, not {shown(datatype)}')


def admitted_shape(port: InputPort, shape: Sequence[Any]) -> tuple[tuple[int, ...], int]:
    """Return a shape that the input takes and that arrays can have, and the bytes that it needs: of strings, the least."""
    if len(shape) > MAX_RANK:
        raise InvalidRequest(
            f"input {port.name!r}: a shape of {len(shape)} axes; at most {MAX_RANK} are taken"
        )
    try:
        sizes = port.admitted(shape)
    except ShapeError as error:
        raise InvalidRequest(str(error)) from None
    if port.is_string and prod(sizes) > MAX_STRINGS:
        raise TooLarge(f"input {port.name!r}: {list(sizes)} strings; a request has at most {MAX_STRINGS}")
    try:
        itemsize = LENGTH.itemsize if port.is_string else dtype_of(port.element_type).itemsize
        return sizes, exact_nbytes(itemsize, sizes)
    except ShapeError as error:
        raise InvalidRequest(f"input {port.name!r}: {error}") from None


def check_nbytes(port: InputPort, shape: tuple[int, ...], nbytes: int, given: int, where: str) -> None:
    """Raise `InvalidRequest` unless so many bytes are `given` as the shape needs; of strings, at least so many."""
    if given < nbytes or (given > nbytes and not port.is_string):
        needs = f"at least {nbytes}" if port.is_string else f"{nbytes}"
        raise InvalidRequest(
            f"input {port.name!r}: {DATATYPES[port.element_type]} {list(shape)} takes {needs} bytes, and {where} {given}"
        )


def array_over(port: InputPort, shape: tuple[int, ...], data: memoryview) -> Slices[npt.NDArray[Any]]:
    """Return the array of the binary data of an input, `check_nbytes` of them. Numbers lie over them; strings are copies."""
    if port.is_string:
        return (yield from from_binary(port, shape, data))
    dtype = dtype_of(port.element_type)
    if dtype.kind == "b":
        check_truth_values(port, np.frombuffer(data, np.uint8))
    return np.ndarray(shape, dtype, buffer=data)


def check_truth_values(port: InputPort, numbers: npt.NDArray[Any]) -> None:
    """Raise `InvalidRequest` for booleans but 0 and 1. The server refuses them as well, but not by the input's name."""
    if numbers.max(initial=0) > 1:
        raise InvalidRequest(f"input {port.name!r} takes BOOL: true, false, 1 or 0")


def shown(value: Any) -> str:
    """Return a value for messages, cut to 100 characters."""
    return repr(value)[:100] if isinstance(value, str | int | float) else type(value).__name__


DATATYPES: Mapping[str, str] = MappingProxyType(
    {
        "boolean": "BOOL",
        "u8": "UINT8",
        "u16": "UINT16",
        "u32": "UINT32",
        "u64": "UINT64",
        "i8": "INT8",
        "i16": "INT16",
        "i32": "INT32",
        "i64": "INT64",
        "f16": "FP16",
        "f32": "FP32",
        "f64": "FP64",
        "bf16": "BF16",
        "str": "BYTES",
        "bytes": "BYTES",
    }
)
"""Element type -> datatype. `BYTES` is text for one model, and bytes of any meaning for another."""


def datatype_of(array: npt.NDArray[Any]) -> str:
    """Return the datatype of an output's array."""
    return "BYTES" if array.dtype == object else DATATYPES[element_type_of(array.dtype)]


def config_datatype(element_type: str) -> str:
    """Return the name of an element type in a Triton model configuration, such as `TYPE_FP32`."""
    datatype = DATATYPES[element_type]
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


DEFAULT_PRIORITY_LEVEL = 1
"""Triton's priority level of requests that state none: as high as the highest, level 1."""
_IGNORED = "triton_enable_empty_final_response"
"""Asks for an empty last response of a stream. A request has one response here, which is the last."""


@value
class InferOptions:
    """The wishes of a request's parameters."""

    deadline_s: float | None = None
    """Seconds from the request's arrival."""
    priority: int = 0
    """The priority for `Client.infer`: a higher number goes first."""
    binary_outputs: bool = False
    """Outputs that do not say themselves how they are sent come as binary data."""


def read_options(parameters: Mapping[str, Any], default_priority_level: int) -> InferOptions:
    """Return the options of a request; raises `InvalidRequest` for wrong values. Unknown parameters are ignored.

    A `timeout` is in microseconds; 0 is none. Triton's highest priority is 1, and 0 stands for `default_priority_level`.
    """
    for name in parameters:
        if name.startswith(("triton_", "sequence_")) and name != _IGNORED:
            raise Unsupported(f"the parameter {name!r} is not supported")
    timeout_us = _number(parameters, "timeout")
    level = _number(parameters, "priority")
    return InferOptions(
        deadline_s=timeout_us / 1e6 if timeout_us else None,
        priority=max(default_priority_level - level, -MAX_PRIORITY) if level else 0,
        binary_outputs=flag(parameters, "binary_data_output") is True,
    )


def read_parameters(holder: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `parameters` of a request, an input or an output; raises `InvalidRequest` where they are no object."""
    parameters = holder.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidRequest('"parameters" is an object')
    return parameters


def flag(parameters: Mapping[str, Any], name: str) -> bool | None:
    """Return a parameter that is true or false, None where it is absent; raises `InvalidRequest` for other values."""
    value = parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"the parameter {name!r} is true or false")
    return value


def _number(parameters: Mapping[str, Any], name: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise InvalidRequest(f"the parameter {name!r} is an integer from 0 to {MAX_INTEGER}")
    return value


def own_id(*wishes: str | None) -> str | None:
    """Return the first of a caller's ids for its request that the server takes, or None."""
    for wish in wishes:
        if wish is not None and can_be_sent(REQUEST_ID, wish):
            return wish
    return None


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


def to_json(name: str, strings: npt.NDArray[Any]) -> Slices[list[bytes]]:
    """Return an output's strings as JSON lists, in slices.

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
    return lists


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
