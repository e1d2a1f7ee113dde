"""The tensors of an inference request against the model's signature, however they were sent.

Everything is checked before an array is made: names, datatypes, and each shape in exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from shapestream.errors import InvalidRequest, TooLarge
from shapestream.gateway.errors import Unsupported
from shapestream.gateway.strings import from_binary
from shapestream.slices import Slices
from shapestream.wire.limits import MAX_RANK, MAX_STRINGS
from shapestream_engine.element_types import dtype_of, element_type_of
from shapestream_engine.errors import ShapeError
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
