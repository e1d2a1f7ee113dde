"""`shapestream infer` and `models`: ask a running server from the shell."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isinf
from pathlib import Path
from typing import Any

import numpy as np
import trio

import shapestream
from shapestream.client.results import Result
from shapestream.errors import InvalidRequest, ShapestreamError
from shapestream_engine.element_types import element_type_of
from shapestream_engine.signature import ModelSignature
from shapestream_workers.target import ServerAccess

SHOWN_ELEMENTS = 24
"""Elements of an output that are printed; --json and --save give all of them."""
SHOWN_CHARACTERS = 200
"""Characters shown of a value that cannot be read."""
PATIENCE_S = 3.0
"""Seconds without an answer after which the command prints what the request waits for."""


def read_inputs(arguments: Sequence[str]) -> dict[str, Any]:
    """Read `name=file.npy` as an array, and `name=[[1, 2]]` as a list. Raises `InvalidRequest`."""
    inputs: dict[str, Any] = {}
    for argument in arguments:
        name, separator, text = argument.partition("=")
        if not separator or not name:
            raise InvalidRequest(f"{argument!r} is not NAME=VALUE (VALUE is a .npy file or JSON)")
        if name in inputs:
            raise InvalidRequest(f"input {name!r} is given twice (remove one)")
        inputs[name] = _read_value(name, text)
    return inputs


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
    inputs: Mapping[str, Any],
    deadline_s: float | None,
    waits: Callable[[str], None],
) -> Result:
    """Send one request and return its answer. Raises the errors of the client, in groups.

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
        result = await client.infer(model, inputs, deadline=deadline_s)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedModels:
    """The models and chains that a server offers."""

    signatures: tuple[ModelSignature, ...]
    chains: frozenset[str]
    """The names among `signatures` that are chains; older servers tell none."""
    unavailable: Mapping[str, str]
    """The reasons of unavailable models, by name."""
    digests: Mapping[str, str]
    """The digests of the models' files, by name; older servers tell none."""


def models_of(access: ServerAccess) -> OfferedModels:
    """Ask a server for all that it offers."""
    with access.connect() as client:
        statistics = client.statistics()
        unavailable = statistics["unavailable"]
        served = [name for name in statistics["models"] if name not in unavailable]
        return OfferedModels(
            signatures=tuple([client.signature(name) for name in served]),
            chains=frozenset(statistics.get("chains", ())),
            unavailable=unavailable,
            digests=statistics.get("digests", {}),
        )


def save_outputs(result: Result, folder: Path) -> None:
    """Write `folder/NAME.npy` for each output, or `folder/NAME.INDEX.npy` for each array of a list.

    Other characters than letters, digits, `-`, `_` and `.` become `_`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in result.items():
        stem = "".join(character if character.isalnum() or character in "-_." else "_" for character in name)
        if isinstance(value, list):
            for index, array in enumerate(value):
                np.save(folder / f"{stem}.{index}.npy", array)
        else:
            np.save(folder / f"{stem}.npy", value)


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
    shown = np.array2string(array, threshold=SHOWN_ELEMENTS, edgeitems=3)
    header = f"{name}: {element_type_of(array.dtype)} {list(array.shape)}"
    return [header, *(f"  {line}" for line in shown.splitlines())]


def _described(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        "element_type": element_type_of(array.dtype),
        "shape": list(array.shape),
        "data": _plain(array),
    }


def _plain(array: np.ndarray[Any, Any]) -> Any:
    """Return an array as nested lists. Numbers that JSON cannot hold become texts: "nan", "inf"."""
    if array.dtype.kind == "V":
        array = array.astype(np.float32)  # bf16, which NumPy does not have; f32 holds all its values
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return np.where(np.isfinite(array), array.astype(object), array.astype(str)).tolist()
    return array.tolist()
