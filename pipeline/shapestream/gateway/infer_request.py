"""The bodies of an inference over HTTP: a JSON object, and behind it the bytes of the tensors that are sent as binary data.

Everything is checked before an array is made: the numbers of inputs and of elements, each shape in exact arithmetic, and the
bytes that the shapes need against those that were sent. Arrays of binary data are views of the body, without a copy.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from shapestream.client.opened_models import Result
from shapestream.errors import RequestError
from shapestream.gateway.errors import OWN_ID, VERSION
from shapestream.gateway.infer_tensors import (
    DATATYPES,
    InferOptions,
    admitted_shape,
    array_over,
    check_datatype,
    check_nbytes,
    check_output,
    check_truth_values,
    datatype_of,
    flag,
    from_json,
    input_port,
    read_options,
    read_parameters,
    refuse_classification,
    refuse_shared_memory,
    strings_nbytes,
    to_binary,
    to_json,
)
from shapestream.gateway.json_text import (
    SLICE_NUMBERS,
    dropped,
    dropped_after,
    flat_numbers,
    joined_lists,
    read_object,
    type_name,
    write_json,
)
from shapestream.slices import Slices
from shapestream.web.messages import Buffer, HttpError, HttpRequest, HttpResponse
from shapestream.wire.limits import MAX_TENSORS
from shapestream_engine.element_types import dtype_of
from shapestream_engine.layout import value
from shapestream_engine.ports import InputPort
from shapestream_engine.signature import ModelSignature

HEAD_LENGTH = "inference-header-content-length"
"""Header with the bytes of the JSON object, where binary data follow it."""


@value
class AskedOutput:
    """An output that a request asks for."""

    name: str
    binary: bool


@value
class InferBody:
    """The body of a request, before it is compared with the model's signature."""

    id: str | None
    """None also for an empty one, as at Triton."""
    options: InferOptions
    inputs: list[Any]
    outputs: list[Any]
    binary: memoryview
    """The bytes behind the JSON object."""
    content: dict[str, Any]
    """The whole object."""
    nbytes: int
    """Bytes of its text."""


def read_body(request: HttpRequest, default_priority_level: int) -> Slices[InferBody]:
    """Read the JSON object of a request, and its options; raises `HttpError`."""
    body = memoryview(request.body)
    length = json_nbytes(request)
    content = yield from read_object(body[:length])
    try:
        return _body_of(content, length, body[length:], default_priority_level)
    except (HttpError, RequestError):
        yield from dropped(content)
        raise


def _body_of(
    content: dict[str, Any], nbytes: int, binary: memoryview, default_priority_level: int
) -> InferBody:
    request_id = content.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise HttpError(400, f'"id" is a string, not {type_name(request_id)}')
    return InferBody(
        id=request_id or None,
        options=read_options(read_parameters(content), default_priority_level),
        inputs=_list(content, "inputs"),
        outputs=_list(content, "outputs"),
        binary=binary,
        content=content,
        nbytes=nbytes,
    )


def json_nbytes(request: HttpRequest) -> int:
    """Return the bytes of the JSON object at the beginning of a body; raises `HttpError` where the headers tell none."""
    stated, total = request.headers.get(HEAD_LENGTH), len(request.body)
    if stated is None:
        return total
    # Not more digits than 64 bits have: converting a long number takes quadratic time.
    if not (stated.isascii() and stated.isdecimal() and len(stated) < 20 and 0 < int(stated) <= total):
        raise HttpError(
            400,
            f"Inference-Header-Content-Length is {stated[:40]!r}; it is a number from 1 to {total}, the "
            f"length of the body",
        )
    return int(stated)


def _list(content: Mapping[str, Any], key: str) -> list[Any]:
    value = content.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise HttpError(400, f'"{key}" is a list, not {type_name(value)}')
    if len(value) > MAX_TENSORS:
        raise HttpError(400, f'"{key}" has {len(value)} entries; at most {MAX_TENSORS} are taken')
    return value


def refused(body: InferBody, error: RequestError) -> Slices[NoReturn]:
    """Drop what a body has, and raise the error."""
    yield from dropped(body.content)
    raise error


def read_tensors(
    body: InferBody, signature: ModelSignature
) -> Slices[tuple[dict[str, npt.NDArray[Any]], list[AskedOutput]]]:
    """Return the input arrays by name, and the outputs that are asked for. The body is empty afterwards."""
    return (yield from dropped_after(body.nbytes, body.content, _tensors_of(body, signature)))


def _tensors_of(
    body: InferBody, signature: ModelSignature
) -> Slices[tuple[dict[str, npt.NDArray[Any]], list[AskedOutput]]]:
    inputs = yield from read_inputs(body, signature)
    return inputs, read_outputs(body, signature)


# ---------------------------------------------------------------- outputs


def read_outputs(body: InferBody, signature: ModelSignature) -> list[AskedOutput]:
    """Return the outputs to be sent, in order: those that the body names, or all. Raises `HttpError`."""
    binary = body.options.binary_outputs
    if not body.outputs:
        return [AskedOutput(name=port.name, binary=binary) for port in signature.outputs]
    asked: dict[str, AskedOutput] = {}
    for entry in body.outputs:
        name = _name(entry, "output")
        check_output(signature, name, asked)
        parameters = read_parameters(entry)
        refuse_shared_memory(name, parameters)
        refuse_classification(name, parameters)
        own = flag(parameters, "binary_data")
        asked[name] = AskedOutput(name=name, binary=binary if own is None else own)
    return list(asked.values())


# ---------------------------------------------------------------- inputs


def read_inputs(body: InferBody, signature: ModelSignature) -> Slices[dict[str, npt.NDArray[Any]]]:
    """Return the input arrays by name, those of many numbers in JSON in slices; raises `HttpError`.

    Missing inputs, and sizes that contradict those of another input, are found by the client of the server.
    """
    inputs: dict[str, npt.NDArray[Any]] = {}
    offset = 0
    for entry in body.inputs:
        name = _name(entry, "input")
        port = input_port(signature, name, inputs)
        check_datatype(port, entry.get("datatype"))
        shape, nbytes = _shape(port, entry.get("shape"))
        parameters = read_parameters(entry)
        refuse_shared_memory(name, parameters)
        size = parameters.get("binary_data_size")
        if size is None:
            inputs[name] = yield from _from_json(port, shape, entry.get("data"))
        else:
            if "data" in entry:
                raise HttpError(400, f'input {name!r} has both "data" and "binary_data_size"')
            inputs[name] = yield from _from_binary(port, shape, nbytes, size, body.binary, offset)
            offset += size
    if offset != len(body.binary):
        raise HttpError(
            400, f"{len(body.binary)} bytes follow the JSON object; the inputs take {offset} of them"
        )
    return inputs


def _name(entry: Any, kind: str) -> str:
    if not isinstance(entry, dict):
        raise HttpError(400, f"an {kind} is an object, not {type_name(entry)}")
    name = entry.get("name")
    if not isinstance(name, str):
        raise HttpError(400, f'an {kind}\'s "name" is a string, not {type_name(name)}')
    return name


def _shape(port: InputPort, shape: Any) -> tuple[tuple[int, ...], int]:
    """Return a shape that the input takes and that arrays can have, and the bytes that it needs."""
    if not isinstance(shape, list):
        raise HttpError(400, f'input {port.name!r}: "shape" is a list of integers, not {type_name(shape)}')
    return admitted_shape(port, shape)


def _from_binary(
    port: InputPort, shape: tuple[int, ...], nbytes: int, size: Any, binary: memoryview, offset: int
) -> Slices[npt.NDArray[Any]]:
    if type(size) is not int or size < 0:
        raise HttpError(400, f'input {port.name!r}: "binary_data_size" is an integer of 0 or more')
    check_nbytes(port, shape, nbytes, size, '"binary_data_size" is')
    if size > len(binary) - offset:
        raise HttpError(400, f"input {port.name!r}: {size} bytes; the body has {len(binary) - offset} left")
    return (yield from array_over(port, shape, binary[offset : offset + size]))


_INTEGER_CODES = {"i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}
"""NumPy's names of integer types without the byte order -> those of the standard library's `array`."""


def _from_json(port: InputPort, shape: tuple[int, ...], data: Any) -> Slices[npt.NDArray[Any]]:
    """Return the array of a list, flat or nested as its shape, of numbers or strings. Booleans are numbers as well."""
    if not isinstance(data, list):
        raise HttpError(
            400,
            f'input {port.name!r} needs "data", a list, or "binary_data_size"; "data" is {type_name(data)}',
        )
    flat = yield from _flattened(port, shape, data)
    return (yield from dropped_after(8 * len(flat), flat, _array_of(port, shape, flat)))


def _array_of(port: InputPort, shape: tuple[int, ...], flat: list[Any]) -> Slices[npt.NDArray[Any]]:
    if len(flat) != math.prod(shape):
        raise HttpError(
            400,
            f'input {port.name!r}: "data" has {len(flat)} elements; the shape {list(shape)} has '
            f"{math.prod(shape)}",
        )
    if port.is_string:
        return (yield from from_json(port, shape, flat))
    dtype = dtype_of(port.element_type)
    # `array` takes numbers alone, in C. NumPy would make room for the longest string beside each number.
    code = _INTEGER_CODES.get(dtype.str[1:], "B" if dtype.kind == "b" else "d")
    numbers = np.empty(len(flat), dtype)
    # From the end, so that each slice drops the numbers that it has read.
    while flat:
        part = flat[-SLICE_NUMBERS:]
        del flat[-SLICE_NUMBERS:]
        numbers[len(flat) : len(flat) + len(part)] = _converted(port, part, code, dtype)
        del part
        if flat:
            yield
    return numbers.reshape(shape)


def _converted(port: InputPort, part: list[Any], code: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        given = np.array(array(code, part))
    except (TypeError, OverflowError) as error:
        raise HttpError(400, f"input {port.name!r} takes {DATATYPES[port.element_type]}: {error}") from None
    if dtype.kind == "b":
        check_truth_values(port, given)
    with np.errstate(over="ignore"):
        converted = given.astype(dtype, copy=False)
    if code == "d" and not np.isfinite(converted).all():
        raise HttpError(
            400, f"input {port.name!r} takes {DATATYPES[port.element_type]}; a number is beyond its range"
        )
    return converted


def _flattened(port: InputPort, shape: tuple[int, ...], data: list[Any]) -> Slices[list[Any]]:
    """Return the elements of `data`, and empty it where it is nested, which must be as the shape says."""
    if not data or not isinstance(data[0], list):
        return data
    if not shape or len(data) != shape[0]:
        raise _otherwise_nested(port, shape)
    level = data
    for size in shape[1:]:
        rows = max(1, min(SLICE_ROWS, SLICE_NUMBERS // max(1, size)))
        elements: list[Any] = []
        for begin in range(0, len(level), rows):
            if begin:
                yield
            some = level[begin : begin + rows]
            if {*map(type, some)} != {list} or {*map(len, some)} != {size}:
                raise _otherwise_nested(port, shape)
            elements.extend(chain.from_iterable(some))
        while len(level) > rows:
            del level[-rows:]
            yield
        level.clear()
        level = elements
    return level


SLICE_ROWS = 8 * 1024
"""Lists that are looked at in a turn of the event loop, in 1 ms."""


def _otherwise_nested(port: InputPort, shape: tuple[int, ...]) -> HttpError:
    return HttpError(400, f'input {port.name!r}: "data" is nested otherwise than {list(shape)}')


def infer_response(
    model: str, request_id: str | None, asked: Sequence[AskedOutput], result: Result
) -> Slices[HttpResponse]:
    """Return the answer with the outputs that were asked for, and the request's id. Those in binary are views of the result.

    Many numbers are written as JSON in slices.

    Raises `HttpError` 400 for a number that JSON does not have, and `InvalidRequest` for bytes that are no text.
    """
    head: list[Buffer] = [
        write_json({"model_name": model, "model_version": result.version})[:-1],
        b',"outputs":[',
    ]
    pieces: list[Buffer] = []
    for number, output in enumerate(asked):
        if number:
            head.append(b",")
        array = result.tensor(output.name)
        told: dict[str, Any] = {
            "name": output.name,
            "datatype": datatype_of(array),
            "shape": array.shape,
        }
        is_string = array.dtype == object
        if output.binary:
            # As bytes: not every element type (bfloat16) can be exported as a memoryview of its own.
            data = (yield from to_binary(array)) if is_string else array.reshape(-1).view(np.uint8).data
            told["parameters"] = {"binary_data_size": len(data)}
            if len(data):
                pieces.append(data)
            head.append(write_json(told))
        else:
            written = to_json(output.name, array) if is_string else _written(output.name, flat_numbers(array))
            lists = yield from written
            head += (write_json(told)[:-1], b',"data":[', *joined_lists(lists), b"]}")
    head += [b"]}"] if request_id is None else [b'],"id":', write_json(request_id), b"}"]
    headers: list[tuple[str, str]] = [(OWN_ID, result.request_id)]
    if (version := result.timings.version) is not None:
        headers.append((VERSION, version))
    if not pieces:
        return HttpResponse(body=head, headers=tuple(headers))
    return HttpResponse(
        body=(*head, *pieces),
        headers=(("Inference-Header-Content-Length", str(sum(map(len, head)))), *headers),
        content_type="application/octet-stream",
    )


def converted_nbytes(asked: Sequence[AskedOutput], result: Result) -> int:
    """Return the bytes of the outputs that are not sent as they are: numbers in JSON, and strings."""
    arrays = [(result.tensor(output.name), output.binary) for output in asked]
    return sum(
        [
            strings_nbytes(array) if array.dtype == object else array.nbytes
            for array, binary in arrays
            if array.dtype == object or not binary
        ]
    )


def _written(name: str, numbers: npt.NDArray[Any]) -> Slices[list[bytes]]:
    """Return the numbers as JSON lists."""
    lists: list[bytes] = []
    for begin in range(0, len(numbers), SLICE_NUMBERS):
        if begin:
            yield
        lists.append(write_json(_finite(name, numbers[begin : begin + SLICE_NUMBERS])))
    return lists


def _finite(name: str, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
        raise HttpError(
            400, f"output {name!r} has NaN or infinity, which JSON does not have: ask for binary data"
        )
    return numbers
