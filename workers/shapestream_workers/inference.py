"""`shapestream infer`: ask a running server from the shell."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import isinf
from pathlib import Path
from typing import Any

import numpy as np
import trio

import shapestream
from shapestream.client.opened_models import Result
from shapestream.errors import InvalidRequest, ShapestreamError
from shapestream.wire.tensor_frames import string_type_of
from shapestream_engine.element_types import element_type_of
from shapestream_engine.ports import InputPort
from shapestream_engine.signature import ModelSignature
from shapestream_workers.target import ServerAccess

SHOWN_ELEMENTS = 24
"""Elements of an output that are printed; --json and --save give all of them."""
SHOWN_CHARACTERS = 200
"""Characters shown of a value that cannot be read."""
PATIENCE_S = 3.0
"""Seconds without an answer after which the command prints what the request waits for."""


def read_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Return the VALUE of each NAME=VALUE. Raises `InvalidRequest`."""
    given: dict[str, str] = {}
    for argument in arguments:
        name, separator, text = argument.partition("=")
        if not separator or not name:
            raise InvalidRequest(f"{argument!r} is not NAME=VALUE (VALUE is text, a .npy file or JSON)")
        if name in given:
            raise InvalidRequest(f"input {name!r} is given twice (remove one)")
        given[name] = text
    return given


def read_inputs(given: Mapping[str, str], signature: ModelSignature) -> dict[str, Any]:
    """Read `name=file.npy` as an array, `name=[[1, 2]]` as a list, and for an input of strings anything else as text.

    Raises `InvalidRequest`.
    """
    strings = {port.name: port for port in signature.inputs if port.is_string}
    return {
        name: _read_strings(strings[name], text) if name in strings else _read_value(name, text)
        for name, text in given.items()
    }


def _read_strings(port: InputPort, text: str) -> Any:
    """Return a list of JSON, or one element in the input's rank: a text in JSON, the content of @FILE, or else the text."""
    if text.endswith(".npy"):
        return _read_value(port.name, text)
    value: Any = text
    if text.startswith("@"):
        value = _content(port, Path(text[1:]))
    elif text[:1] in ("[", '"'):
        with suppress(ValueError, RecursionError):  # otherwise it is a text that begins like that
            value = json.loads(text)
    if isinstance(value, list):
        return _as_bytes(value) if port.element_type == "bytes" else value
    if port.element_type == "bytes" and isinstance(value, str):
        value = value.encode(errors="surrogateescape")  # as the shell gave them
    array = np.empty((1,) * port.shape.rank, object)
    array[...] = value
    return array


def _content(port: InputPort, path: Path) -> str | bytes:
    try:
        content = path.read_bytes()
        return content if port.element_type == "bytes" else str(content, "utf-8")
    except OSError as error:
        raise InvalidRequest(f"input {port.name!r}: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input {port.name!r}: {path} is no UTF-8: {error.reason}") from error


def _as_bytes(value: Any) -> Any:
    """Return nested lists with the UTF-8 of each text."""
    if isinstance(value, list):
        return [_as_bytes(each) for each in value]
    return value.encode() if isinstance(value, str) else value


def _read_value(name: str, text: str) -> Any:
    if text.endswith(".npy"):
        try:
            # np.load would also open archives, and raises other errors for a file of another format.
            with open(text, "rb") as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        except (OSError, ValueError, MemoryError) as error:
            raise InvalidRequest(f"input {name!r}: {text}: {error}") from error
    try:
        return json.loads(text, parse_float=_read_float)
    except (ValueError, RecursionError) as error:  # also for a number of thousands of digits
        shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
        message = f"input {name!r}: {shown!r} is neither a .npy file nor JSON ({error})"
        raise InvalidRequest(message) from error


def _read_float(text: str) -> float:
    """Read a JSON number with a point or an exponent. Raises ValueError for one beyond the range of f64."""
    number = float(text)
    mantissa = text.lower().partition("e")[0]
    if isinf(number) or (number == 0 and any(digit in mantissa for digit in "123456789")):
        raise ValueError(f"{text} is beyond the range of f64")
    return number


async def run_one(
    access: ServerAccess,
    model: str,
    given: Mapping[str, str],
    deadline_s: float | None,
    waits: Callable[[str], None],
) -> Result:
    """Read the inputs as the model takes them, send one request and return its answer.

    Raises the errors of `read_inputs` and of the client, in groups.

    `waits` is called once with the reason for the wait if there is no answer after `PATIENCE_S`.
    """

    async def tell() -> None:
        await trio.sleep(PATIENCE_S)
        with suppress(ShapestreamError):
            waits(_reason_to_wait(await client.statistics(), model))

    async with (
        shapestream.connect(access.address, **access.options) as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(tell)
        began = trio.current_time()
        inputs = read_inputs(given, await client.signature(model, deadline=deadline_s))
        left_s = None if deadline_s is None else began + deadline_s - trio.current_time()
        result = await client.infer(model, inputs, deadline=left_s)
        nursery.cancel_scope.cancel()
    return result


def _reason_to_wait(statistics: Mapping[str, Any], model: str) -> str:
    """Return the reason why a request has no answer yet, from the server's statistics."""
    scheduler = statistics["scheduler"]
    slots = scheduler["models"].get(model, {}).get("slots", 0)
    if not slots:
        return (
            f"no worker serves {model!r} yet: the request waits for one (--deadline SECONDS limits the wait)"
        )
    return (
        f"no answer yet: {model!r} has {slots} slots, and {scheduler['queued']} requests wait at the server"
    )


def save_outputs(result: Result, folder: Path) -> None:
    """Write `folder/NAME.npy` for each output, or `folder/NAME.INDEX.npy` for each array of a list.

    Strings become `.json`, as `format_result` writes them: a .npy file has none of any length.

    Other characters than letters, digits, `-`, `_` and `.` become `_`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in result.items():
        stem = "".join(character if character.isalnum() or character in "-_." else "_" for character in name)
        if isinstance(value, list):
            for index, array in enumerate(value):
                _save(folder, f"{stem}.{index}", array)
        else:
            _save(folder, stem, value)


def _save(folder: Path, stem: str, array: np.ndarray[Any, Any]) -> None:
    if array.dtype == object:
        (folder / f"{stem}.json").write_text(json.dumps(_described(array), ensure_ascii=False), "utf-8")
    else:
        np.save(folder / f"{stem}.npy", array)


def format_result(result: Result, *, as_json: bool) -> str:
    """Return the outputs and their timings as text, or as JSON. A list of arrays is a list in JSON."""
    timings = result.timings
    if as_json:
        outputs = {
            name: [_described(array) for array in value] if isinstance(value, list) else _described(value)
            for name, value in result.items()
        }
        said = {
            name: getattr(timings, name) for name in ("queue_us", "run_us", "total_us", "worker", "digest")
        }
        return json.dumps({"outputs": outputs, "timings": said})
    lines: list[str] = []
    for name, value in result.items():
        if isinstance(value, list):
            lines.append(f"{name}: {len(value)} arrays")
            for index, array in enumerate(value):
                lines += _shown(f"{name}[{index}]", array)
        else:
            lines += _shown(name, value)
    lines.append(f"queued {timings.queue_us} us, ran {timings.run_us} us on {timings.worker}")
    return "\n".join(lines)


def _shown(name: str, array: np.ndarray[Any, Any]) -> list[str]:
    header = f"{name}: {_element_type(array)} {list(array.shape)}"
    if array.dtype == object:
        return [header, *_shown_strings(array.ravel().tolist())]
    shown = np.array2string(array, threshold=SHOWN_ELEMENTS, edgeitems=3)
    return [header, *(f"  {line}" for line in shown.splitlines())]


def _shown_strings(elements: Sequence[str | bytes]) -> Iterator[str]:
    """Yield a line for each element, as Python writes it: no character of it reaches the terminal as a command."""
    for element in elements[:SHOWN_ELEMENTS]:
        cut = element[:SHOWN_CHARACTERS]
        yield f"  {cut!r}" + ("" if len(cut) == len(element) else f"... of {len(element)}")
    if len(elements) > SHOWN_ELEMENTS:
        yield f"  ... of {len(elements)}"


def _element_type(array: np.ndarray[Any, Any]) -> str:
    return string_type_of(array) or element_type_of(array.dtype)


def _described(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return an array for JSON. Bytes are text if they are UTF-8; otherwise all of them are base64, and it is said."""
    described: dict[str, Any] = {"element_type": _element_type(array), "shape": list(array.shape)}
    if described["element_type"] != "bytes":
        return {**described, "data": _plain(array)}
    try:
        return {**described, "data": _each(array, lambda element: str(element, "utf-8"))}
    except UnicodeDecodeError:
        encoded = _each(array, lambda element: base64.b64encode(element).decode())
        return {**described, "encoding": "base64", "data": encoded}


def _each(array: np.ndarray[Any, Any], convert: Callable[[bytes], str]) -> Any:
    converted = np.empty(array.shape, object)
    converted.ravel()[:] = [convert(element) for element in array.ravel().tolist()]
    return converted.tolist()


def _plain(array: np.ndarray[Any, Any]) -> Any:
    """Return an array as nested lists. Numbers that JSON cannot hold become texts: "nan", "inf"."""
    if array.dtype.kind == "V":
        array = array.astype(np.float32)  # bf16, which NumPy does not have; f32 holds all its values
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return np.where(np.isfinite(array), array.astype(object), array.astype(str)).tolist()
    return array.tolist()
