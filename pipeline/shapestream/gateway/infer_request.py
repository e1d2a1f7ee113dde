"""An inference request of the Open Inference Protocol: JSON, perhaps with the bytes of tensors behind it.

    {"id"?, "inputs": [{"name", "datatype", "shape", "data" | "parameters": {"binary_data_size"}}],
     "outputs"?: [{"name", "parameters"?: {"binary_data"}}], "parameters"?}

The header `Inference-Header-Content-Length` is the length of the JSON where bytes follow it. They belong to the inputs with
a `binary_data_size`, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from shapestream.gateway.datatypes import DATATYPE_OF, ELEMENT_TYPE_OF
from shapestream.gateway.http_messages import Buffer, HttpError, HttpRequest
from shapestream.gateway.json_text import array_of, read_json
from shapestream.wire.limits import MAX_PRIORITY, MAX_RANK, MAX_TENSORS
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import ShapeError
from shapestream_engine.shapes import MAX_SIZE, exact_nbytes
from shapestream_engine.signature import ModelSignature

JSON_LENGTH = "inference-header-content-length"
"""Header with the length of the JSON, in a request or response with bytes behind it."""
HARMLESS = ("triton_enable_empty_final_response",)
"""Parameters of Triton that change nothing where every request has one response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedOutput:
    """One output that the caller asks for."""

    name: str
    is_binary: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """One request, checked against its model as far as bytes and elements go; the SDK checks the sizes."""

    id: str | None
    inputs: Mapping[str, npt.NDArray[Any]]
    """Arrays over the request's body where it holds bytes."""
    outputs: tuple[WantedOutput, ...]
    """In the order of the response."""
    deadline_s: float | None
    """Seconds from now."""
    priority: int


async def read_infer(
    request: HttpRequest, signature: ModelSignature, *, default_priority_level: int = 0
) -> InferRequest:
    """Read a request. Raises HttpError 400, and 413 for too long a JSON."""
    text, binary = _divided(request)
    found = read_json(text)
    parameters = _parameters_of("the request", found)
    _refuse_foreign("parameter", parameters)
    request_id = found.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise HttpError(400, "id must be a string")
    inputs = await _inputs(found.get("inputs"), signature, binary)
    return InferRequest(
        id=request_id,
        inputs=inputs,
        outputs=_outputs(found.get("outputs"), signature, is_binary=_flag(parameters, "binary_data_output")),
        deadline_s=_deadline_s(parameters),
        priority=_priority(parameters, default_priority_level),
    )


def _divided(request: HttpRequest) -> tuple[Buffer, memoryview]:
    """Return the JSON and the bytes behind it."""
    given = request.headers.get(JSON_LENGTH)
    body = memoryview(request.body)
    if given is None:
        return request.body, body[len(body) :]
    if not (given.isascii() and given.isdigit()) or not 0 < int(given[:20]) <= len(body):
        message = f"Inference-Header-Content-Length must be 1 to {len(body)}, the bytes of the body, not {given[:40]!r}"
        raise HttpError(400, message)
    length = int(given)
    return body[:length], body[length:]


def _parameters_of(where: str, holder: Mapping[str, Any]) -> dict[str, Any]:
    parameters = holder.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise HttpError(400, f"{where}: parameters must be an object")
    return parameters


def _refuse_foreign(what: str, parameters: Mapping[str, Any]) -> None:
    """Refuse what would change the answer and is not served. Other unknown parameters are ignored."""
    for name, value in parameters.items():
        foreign = name.startswith(("triton_", "sequence_")) and name not in HARMLESS
        # Clients say that there is no sequence by sequence_id 0.
        if foreign and value not in (0, False, "", None):
            raise HttpError(400, f"{what} {name!r} is not supported")
    for name in ("shared_memory_region", "classification"):
        if parameters.get(name):
            raise HttpError(400, f"{what} {name!r} is not supported")


def _flag(parameters: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise HttpError(400, f"parameter {name!r} must be true or false")
    return value


def _deadline_s(parameters: Mapping[str, Any]) -> float | None:
    """Return the seconds of `timeout`, which counts microseconds; 0 is none."""
    return _integer(parameters, "timeout", 0, MAX_SIZE) / 1e6 or None


def _priority(parameters: Mapping[str, Any], default_level: int) -> int:
    """Return our priority, where larger goes first, of Triton's level, where 1 is highest and 0 the default."""
    level = _integer(parameters, "priority", 0, MAX_PRIORITY)
    return default_level - level if level else 0


def _integer(parameters: Mapping[str, Any], name: str, least: int, most: int | float = inf) -> int:
    value = parameters.get(name, 0)
    # Some clients send parameters as text.
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value[:20])
    if type(value) is not int or not least <= value <= most:
        raise HttpError(400, f"parameter {name!r} must be an integer of at least {least}")
    return value


# ---------------------------------------------------------------- tensors


def _entries(given: Any, what: str) -> list[dict[str, Any]]:
    """Return the objects of an array of named tensors."""
    if not isinstance(given, list) or not all(isinstance(entry, dict) for entry in given):
        raise HttpError(400, f"{what}s must be an array of objects")
    if len(given) > MAX_TENSORS:
        raise HttpError(400, f"{len(given)} {what}s; at most {MAX_TENSORS} are taken")
    names = [entry.get("name") for entry in given]
    if not all(isinstance(name, str) for name in names):
        raise HttpError(400, f"each {what} needs a name")
    if len(set(names)) < len(names):
        raise HttpError(400, f"{what}s with the same name")
    return given


async def _inputs(given: Any, signature: ModelSignature, binary: memoryview) -> dict[str, npt.NDArray[Any]]:
    entries = _entries(given, "input")
    if not entries:
        raise HttpError(400, "inputs are missing")
    element_types = {port.name: port.element_type for port in signature.inputs}
    arrays = {}
    for entry in entries:
        name = entry["name"]
        where = f"input {name!r}"
        if name not in element_types:
            known = ", ".join(element_types)
            raise HttpError(400, f"model {signature.name!r} has no {where}; it takes {known}")
        datatype, shape = _type_and_shape(where, entry, element_types[name])
        parameters = _parameters_of(where, entry)
        _refuse_foreign(f"{where}: parameter", parameters)
        if "binary_data_size" in parameters:
            if "data" in entry:
                raise HttpError(400, f"{where} has both data and binary_data_size")
            nbytes = _integer(parameters, "binary_data_size", 0)
            if nbytes > len(binary):
                raise HttpError(400, f"{where}: {len(binary)} of its {nbytes} bytes are left in the body")
            arrays[name] = _array_over(where, binary[:nbytes], element_types[name], shape)
            binary = binary[nbytes:]
        elif "data" in entry:
            arrays[name] = await array_of(where, entry["data"], datatype, element_types[name], shape)
        else:
            raise HttpError(400, f"{where} needs data, or the parameter binary_data_size")
    if len(binary):
        raise HttpError(400, f"{len(binary)} bytes of the body belong to no input")
    return arrays


def _type_and_shape(where: str, entry: Mapping[str, Any], element_type: str) -> tuple[str, tuple[int, ...]]:
    datatype, shape = entry.get("datatype"), entry.get("shape")
    if datatype == "BYTES":
        raise HttpError(400, f"{where}: BYTES is not served")
    if not isinstance(datatype, str) or ELEMENT_TYPE_OF.get(datatype) != element_type:
        raise HttpError(
            400, f"{where}: its datatype is {DATATYPE_OF[element_type]}, not {str(datatype)[:40]}"
        )
    if not isinstance(shape, list) or len(shape) > MAX_RANK:
        raise HttpError(400, f"{where}: shape must be an array of at most {MAX_RANK} sizes")
    if not all(type(size) is int and 0 <= size <= MAX_SIZE for size in shape):
        raise HttpError(400, f"{where}: shape must hold integers from 0")
    return datatype, tuple(shape)


def _array_over(where: str, data: memoryview, element_type: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    dtype = dtype_of(element_type)
    try:
        nbytes = exact_nbytes(dtype.itemsize, shape)
    except ShapeError as error:
        raise HttpError(400, f"{where}: {error}") from None
    if nbytes != len(data):
        raise HttpError(400, f"{where}: {len(data)} bytes, but the shape {list(shape)} has {nbytes}")
    return np.frombuffer(data, dtype).reshape(shape)


def _outputs(given: Any, signature: ModelSignature, *, is_binary: bool) -> tuple[WantedOutput, ...]:
    names = [port.name for port in signature.outputs]
    if given is None or given == []:
        return tuple([WantedOutput(name=name, is_binary=is_binary) for name in names])
    wanted = []
    for entry in _entries(given, "output"):
        name = entry["name"]
        where = f"output {name!r}"
        if name not in names:
            raise HttpError(400, f"model {signature.name!r} has no {where}; it gives {', '.join(names)}")
        parameters = _parameters_of(where, entry)
        _refuse_foreign(f"{where}: parameter", parameters)
        wanted.append(WantedOutput(name=name, is_binary=_flag(parameters, "binary_data", is_binary)))
    return tuple(wanted)
