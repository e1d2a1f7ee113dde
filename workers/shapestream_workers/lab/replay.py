"""Replays of a trace at a server: one model's requests, made-up inputs of their sizes, and the results.

*Closed*: a constant number of requests in flight, whatever the trace's times: the throughput. *Open*: each request at
its own time, whatever became of the others: the latency, counted from the time at which it was due.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import trio

from shapestream.client.async_face import Client
from shapestream.errors import ConfigurationError, DeadlineExceeded, RequestError
from shapestream.settings import ModelSettings
from shapestream.telemetry.trace import TraceReader, TraceRequest
from shapestream_engine.element_types import dtype_of
from shapestream_engine.probing.examination import values_of
from shapestream_engine.probing.inputs import complete_values, make_request
from shapestream_engine.signature import ModelSignature
from shapestream_workers.proof import probe_options

MOST_AT_ONCE = 4096
"""Requests that an open replay has in flight; others count as late, without being sent."""
MOST_REQUESTS = 200_000
"""Requests read from the beginning of a trace: more than any budget replays."""
MAX_KEPT_BYTES = 256 << 20
"""Bytes of inputs that are kept for their next use; the least recently used go first."""
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of one model, in the order of their times."""

    model: str
    requests: tuple[TraceRequest, ...]
    cut_off: bool = False
    """True if the trace holds more requests."""

    def counts(self) -> Counter[tuple[int, ...]]:
        """Number of requests per combination of sizes."""
        return Counter(request.sizes for request in self.requests)

    def hot(self, *, most: int, least_share: float) -> tuple[tuple[int, ...], ...]:
        """The most frequent sizes, each of at least this share of the requests; small ones first among equals."""
        needed = least_share * len(self.requests)
        hot = [(-count, sizes) for sizes, count in self.counts().items() if count >= needed]
        return tuple(sizes for _, sizes in sorted(hot)[:most])


def read_workload(path: Path, model: str, signature: ModelSignature) -> Workload:
    """The requests of `model` in the trace at `path`.

    Raises `ConfigurationError` for a file that is no trace, a trace without requests of the model or with other
    dimensions, and for sizes that the model does not take.
    """
    reader = TraceReader(path)
    kept = list(islice(_of_model(reader, model), MOST_REQUESTS + 1))
    if not kept:
        known = ", ".join(name for name in reader.models if name != model)
        hint = f"; it is about {known} (name the model by --model)" if known else ""
        raise ConfigurationError([f"{path}: has no request of the model {model!r}{hint}"])
    dimensions = reader.models[model]
    if dimensions != signature.dimensions:
        found, expected = (f"[{', '.join(names)}]" for names in (dimensions, signature.dimensions))
        message = f"recorded {model!r} with the dimensions {found}, but the model has {expected}"
        hint = "(a trace of another model, or of other names in its inputs' shapes)"
        raise ConfigurationError([f"{path}: {message} {hint}"])
    _check_bounds(path, kept, signature)
    return Workload(
        model=model,
        requests=tuple(kept[:MOST_REQUESTS]),
        cut_off=len(kept) > MOST_REQUESTS,
    )


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
        self._kept: OrderedDict[tuple[int, ...], dict[str, np.ndarray[Any, Any]]] = OrderedDict()
        self._kept_bytes = 0

    def arrays(self, sizes: tuple[int, ...]) -> dict[str, np.ndarray[Any, Any]]:
        """Inputs as a client takes them, by name. Masks that the server generates are left out."""
        if (known := self._kept.get(sizes)) is not None:
            self._kept.move_to_end(sizes)
            return known
        tensors = make_request(self._signature, self._values, sizes)
        made = self._kept[sizes] = {
            self._signature.inputs[number].name: np.frombuffer(buffer, dtype_of(element_type)).reshape(shape)
            for (number, element_type, shape), buffer in zip(tensors.layout, tensors.buffers, strict=True)
        }
        self._kept_bytes += _nbytes(made)
        while self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= _nbytes(dropped)
        return made


def _nbytes(arrays: Mapping[str, np.ndarray[Any, Any]]) -> int:
    return sum(array.nbytes for array in arrays.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Results of one replay."""

    requests: int
    seconds: float
    latencies_s: tuple[float, ...]
    """Latencies of the requests with a result."""
    late: int = 0
    """Requests that missed their deadline, or were not sent since too many were in flight."""
    failures: tuple[str, ...] = ()
    """Errors of the other requests."""

    @property
    def goodput_per_s(self) -> float:
        """Results per second."""
        return len(self.latencies_s) / self.seconds if self.seconds > 0 else 0.0

    @property
    def p99_s(self) -> float:
        """The p99 of all requests in seconds; infinite where more than one in a hundred had no result."""
        values = [*self.latencies_s, *([inf] * (self.requests - len(self.latencies_s)))]
        return float(np.quantile(values, 0.99, method="inverted_cdf")) if values else inf


async def replay_closed(
    client: Client,
    model: str,
    requests: Iterable[TraceRequest],
    maker: InputMaker,
    *,
    in_flight: int,
    most_s: float,
) -> Round:
    """Replay `requests`, `in_flight` at a time; none is sent after `most_s` seconds.

    Deadlines are left out.
    """
    sent: dict[int, float] = {}
    latencies: list[float] = []
    failures: list[str] = []

    async def source() -> AsyncIterator[tuple[int, object]]:
        for number, request in enumerate(requests):
            inputs = maker.arrays(request.sizes)
            now = perf_counter()
            if now - began > most_s:
                return
            sent[number] = now
            yield number, inputs

    began = perf_counter()
    async with client.stream(
        model, source(), max_in_flight=in_flight, ordered=False, on_error="yield"
    ) as results:
        async for result in results:
            if result.ok:
                latencies.append(perf_counter() - sent[result.key])
            else:
                failures.append(str(getattr(result, "error", result)))
    return Round(
        requests=len(sent),
        seconds=perf_counter() - began,
        latencies_s=tuple(latencies),
        failures=tuple(failures),
    )


async def replay_open(
    client: Client, model: str, requests: Sequence[TraceRequest], maker: InputMaker
) -> Round:
    """Replay each of `requests` in its own task when it is due, counted from the first of them."""
    in_flight = late = 0
    latencies: list[float] = []
    failures: list[str] = []

    async def send(request: TraceRequest, due: float) -> None:
        nonlocal in_flight, late
        in_flight += 1
        arrays = maker.arrays(request.sizes)
        try:
            await client.infer(model, arrays, deadline=request.deadline_s, priority=request.priority)
            latencies.append(trio.current_time() - due)
        except DeadlineExceeded:
            late += 1
        except RequestError as error:
            failures.append(str(error))
        finally:
            in_flight -= 1

    for request in requests:
        maker.arrays(request.sizes)  # made before the clock starts
    began = trio.current_time()
    first = requests[0].at_s if requests else 0.0
    async with trio.open_nursery() as nursery:
        for request in requests:
            due = began + request.at_s - first
            await trio.sleep_until(due)
            if in_flight >= MOST_AT_ONCE:
                late += 1
                continue
            nursery.start_soon(send, request, due)
    return Round(
        requests=len(requests),
        seconds=trio.current_time() - began,
        latencies_s=tuple(latencies),
        late=late,
        failures=tuple(failures),
    )
