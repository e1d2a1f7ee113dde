"""Replays of a trace at a server, and their results.

*Closed*: a constant number of requests in flight, whatever the trace's times: the throughput. *Open*: each request at
its own time, whatever became of the others: the latency, counted from the time at which it was due.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter

import numpy as np
import trio

from shapestream.client.trio_client import Client
from shapestream.errors import DeadlineExceeded, RequestError
from shapestream.telemetry.trace import TraceRequest
from shapestream_workers.lab.workload import InputMaker

__all__ = ["Round", "replay_closed", "replay_open"]

MOST_AT_ONCE = 4096
"""Requests that an open replay has in flight; others count as late, without being sent."""


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


class _OpenReplay:
    """Requests at their times, each in a task of its own."""

    def __init__(self, client: Client, model: str, maker: InputMaker) -> None:
        self._client = client
        self._model = model
        self._maker = maker
        self.under_way = 0
        self.late = 0
        self.latencies: list[float] = []
        self.failures: list[str] = []

    async def send(self, request: TraceRequest, due: float) -> None:
        """Send one request; its latency counts from `due`."""
        self.under_way += 1
        try:
            await self._client.infer(
                self._model,
                self._maker.arrays(request.sizes),
                deadline=request.deadline_s,
                priority=request.priority,
            )
            self.latencies.append(trio.current_time() - due)
        except DeadlineExceeded:
            self.late += 1
        except RequestError as error:
            self.failures.append(str(error))
        finally:
            self.under_way -= 1


async def replay_open(
    client: Client, model: str, requests: Sequence[TraceRequest], maker: InputMaker
) -> Round:
    """Replay each of `requests` when it is due, counted from the first of them."""
    replay = _OpenReplay(client, model, maker)
    for request in requests:
        maker.arrays(request.sizes)  # made before the clock starts
    began = trio.current_time()
    first = requests[0].at_s if requests else 0.0
    async with trio.open_nursery() as nursery:
        for request in requests:
            due = began + request.at_s - first
            await trio.sleep_until(due)
            if replay.under_way >= MOST_AT_ONCE:
                replay.late += 1
                continue
            nursery.start_soon(replay.send, request, due)
    return Round(
        requests=len(requests),
        seconds=trio.current_time() - began,
        latencies_s=tuple(replay.latencies),
        late=replay.late,
        failures=tuple(replay.failures),
    )
