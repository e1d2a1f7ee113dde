"""The requests of a trace at a server: one model's requests, made-up inputs of their sizes, and the rate of results."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from shapestream.client.async_face import Client
from shapestream.errors import ConfigurationError
from shapestream.settings import ModelSettings
from shapestream.telemetry.trace import TraceReader, TraceRequest
from shapestream_engine.array_bytes import array_of
from shapestream_engine.probing.examination import values_of
from shapestream_engine.probing.inputs import complete_values, make_request
from shapestream_engine.signature import ModelSignature
from shapestream_workers.proof import probe_options

MOST_REQUESTS = 200_000
"""Requests read from the beginning of a trace: more than any budget replays."""
MAX_KEPT_BYTES = 256 << 20
"""Bytes of inputs that are kept for their next use."""
_SHOWN = 3


def read_requests(path: Path, signature: ModelSignature) -> list[TraceRequest]:
    """Return the first `MOST_REQUESTS` requests of the signature's model in the trace at `path`, in the order of their
    times.

    Raises `ConfigurationError` for a file that is no trace, a trace without requests of the model or with other
    dimensions, and for sizes that the model does not take.
    """
    reader, model = TraceReader(path), signature.name
    found = list(islice(_of_model(reader, model), MOST_REQUESTS))
    if not found:
        known = ", ".join(name for name in reader.models if name != model)
        hint = f"; it is about {known} (name the model by --model)" if known else ""
        raise ConfigurationError([f"{path}: has no request of the model {model!r}{hint}"])
    dimensions = reader.models[model]
    if dimensions != signature.dimensions:
        recorded, expected = (f"[{', '.join(names)}]" for names in (dimensions, signature.dimensions))
        message = f"recorded {model!r} with the dimensions {recorded}, but the model has {expected}"
        hint = "(a trace of another model, or of other names in its inputs' shapes)"
        raise ConfigurationError([f"{path}: {message} {hint}"])
    _check_bounds(path, found, signature)
    return found


def _of_model(reader: TraceReader, model: str) -> Iterator[TraceRequest]:
    for request in reader:
        # Looked up for each: a model may join the trace's list while it is read.
        if model in reader.models and request.model == list(reader.models).index(model):
            yield request


def _check_bounds(path: Path, requests: Sequence[TraceRequest], signature: ModelSignature) -> None:
    problems: list[str] = []
    for number, (name, bounds) in enumerate(zip(signature.dimensions, signature.bounds, strict=True)):
        outside = sorted({each.sizes[number] for each in requests if each.sizes[number] not in bounds})
        if outside:
            shown = ", ".join(map(str, outside[:_SHOWN])) + (", ..." if len(outside) > _SHOWN else "")
            problems.append(f"{path}: {name} {shown}: the model takes {bounds} (a trace of another model?)")
    if problems:
        raise ConfigurationError(problems)


class InputMaker:
    """Make inputs of given sizes, the same for the same sizes, with values as the probe draws them.

    Traces hold shapes, never data. Inputs are kept, so that making them does not weigh on measurements.
    """

    def __init__(self, settings: ModelSettings, signature: ModelSignature) -> None:
        self._values = complete_values(signature, values_of(signature, probe_options(settings)))
        self._signature = signature
        self._kept: dict[tuple[int, ...], dict[str, np.ndarray[Any, Any]]] = {}
        self._kept_bytes = 0

    def arrays(self, sizes: tuple[int, ...]) -> dict[str, np.ndarray[Any, Any]]:
        """Return inputs as a client takes them, by name. Masks that the server generates are left out."""
        if (known := self._kept.get(sizes)) is not None:
            return known
        tensors = make_request(self._signature, self._values, sizes)
        made = {
            self._signature.inputs[number].name: array_of(element_type, shape, buffer)
            for (number, element_type, shape), buffer in zip(tensors.layout, tensors.buffers, strict=True)
        }
        nbytes = sum(memoryview(buffer).nbytes for buffer in tensors.buffers)
        if self._kept_bytes + nbytes > MAX_KEPT_BYTES:
            self._kept.clear()
            self._kept_bytes = 0
        self._kept[sizes] = made
        self._kept_bytes += nbytes
        return made


async def replay(
    client: Client,
    model: str,
    requests: Iterable[TraceRequest],
    maker: InputMaker,
    *,
    in_flight: int,
    most_s: float,
) -> float:
    """Return the results per second of `requests`, `in_flight` at a time; none is sent after `most_s` seconds.

    Their times and deadlines are left out. Raises the `RequestError` of the first request that fails.
    """

    async def inputs() -> AsyncIterator[dict[str, np.ndarray[Any, Any]]]:
        for request in requests:
            arrays = maker.arrays(request.sizes)
            if perf_counter() - began > most_s:
                return
            yield arrays

    began, count = perf_counter(), 0
    async with client.stream(model, inputs(), max_in_flight=in_flight, ordered=False) as results:
        async for _ in results:
            count += 1
    return count / (perf_counter() - began)
