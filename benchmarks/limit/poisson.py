"""Arrivals at random times that wait for nobody: latencies from the time at which a request was *meant* to be sent."""

from __future__ import annotations

import select
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import openvino as ov
import trio
from examples.embeddings.corpus import Ids

import shapestream
from benchmarks.limit.answers import WIDTH, Answers
from benchmarks.limit.engine import Array, InProcess
from benchmarks.limit.pipeline_run import MODEL, Served
from benchmarks.limit.traces import Trace

Seconds = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
PATIENCE_S = 120.0
"""After the last arrival, for the last answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When requests are to be sent, from the start, and which of the trace's sentences they hold."""

    at_s: Seconds
    places: Places

    @classmethod
    def draw(cls, trace: Trace, rate: float, seconds: float, seed: int) -> Arrivals:
        """A Poisson process: gaps are independent and exponential."""
        count = max(1, round(rate * seconds))
        gaps = np.random.default_rng(seed).exponential(1.0 / rate, count)
        return cls(at_s=np.cumsum(gaps), places=np.arange(count) % len(trace))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What came of them, in the order of arrival."""

    answers: Answers
    latency_s: Seconds


def through_server(served: Served, trace: Trace, arrivals: Arrivals) -> Answered:
    """An open loop through the SDK: sends on time, whatever has come back."""
    answered = trio.run(_open_loop, served.address, trace, arrivals)
    served.elements += int(trace.lengths[arrivals.places].sum())
    return answered


async def _open_loop(address: str, trace: Trace, arrivals: Arrivals) -> Answered:
    count = len(arrivals.at_s)
    answers = np.full((count, WIDTH), np.nan, np.float32)
    latency_s = np.full(count, np.nan)
    async with shapestream.connect(address) as client:
        await client.signature(MODEL)
        started = trio.current_time()

        async def requests() -> AsyncIterator[tuple[int, dict[str, Any]]]:
            for number, (at_s, place) in enumerate(zip(arrivals.at_s, arrivals.places, strict=True)):
                await trio.sleep_until(started + at_s)
                yield number, {"input_ids": trace.ids[place][None]}

        async with client.stream(MODEL, requests(), max_in_flight=count, ordered=False) as results:
            async for result in results:
                assert isinstance(result, shapestream.Result)
                latency_s[result.key] = trio.current_time() - started - arrivals.at_s[result.key]
                answers[result.key] = result["embedding"][0]
    return Answered(answers=answers, latency_s=latency_s)


class Line(Protocol):
    """A client that does nothing but its protocol, and never waits; it numbers requests from 0."""

    def fileno(self) -> int:
        """A descriptor that is readable where something has arrived since the last `take`."""

    def ask(self, ids: Ids) -> None:
        """Send one sentence."""

    def take(self) -> Iterable[tuple[int, Array]]:
        """The numbers and embeddings that have arrived, perhaps none."""

    def stream(self, trace: Trace) -> Iterator[tuple[int, Array]]:
        """The places and embeddings of a trace, with a fixed number of requests outstanding."""


def on_line(line: Line, trace: Trace, arrivals: Arrivals) -> Answered:
    """An open loop without the SDK, in the caller's thread: it sends on time, whatever has come back."""
    count = len(arrivals.at_s)
    answers = np.full((count, WIDTH), np.nan, np.float32)
    latency_s = np.full(count, np.nan)
    started = time.perf_counter()
    due_s = [*arrivals.at_s.tolist(), arrivals.at_s[-1] + PATIENCE_S]
    sent = received = 0
    while received < count:
        early_s = started + due_s[sent] - time.perf_counter()
        if early_s > 0:
            # To the microsecond; an epoll would wait for whole milliseconds.
            select.select([line], [], [], early_s)
        elif sent == count:
            raise AssertionError(f"{received} answers to {count} requests within {PATIENCE_S:g} s")
        else:
            line.ask(trace.ids[arrivals.places[sent]])
            sent += 1
        for number, row in line.take():
            latency_s[number] = time.perf_counter() - started - arrivals.at_s[number]
            answers[number] = row
            received += 1
    return Answered(answers=answers, latency_s=latency_s)


def one_at_a_time(model: InProcess, trace: Trace, arrivals: Arrivals) -> Answered:
    """The same through an AsyncInferQueue in this process: first come, first served, and no way to go."""
    count = len(arrivals.at_s)
    answers = np.full((count, WIDTH), np.nan, np.float32)
    latency_s = np.full(count, np.nan)
    queue = ov.AsyncInferQueue(model.compiled, len(_streams(model)))
    started = time.perf_counter()

    def answer(request: ov.InferRequest, number: int) -> None:
        answers[number] = request.get_output_tensor(0).data[0]
        latency_s[number] = time.perf_counter() - started - arrivals.at_s[number]

    queue.set_callback(answer)
    for number, (at_s, place) in enumerate(zip(arrivals.at_s, arrivals.places, strict=True)):
        ids: Array = trace.ids[place][None]
        if (early_s := started + at_s - time.perf_counter()) > 0:
            time.sleep(early_s)
        queue.start_async({0: ids, 1: np.ones_like(ids)}, userdata=number)
    queue.wait_all()
    return Answered(answers=answers, latency_s=latency_s)


def _streams(model: InProcess) -> Sequence[int]:
    return range(int(model.compiled.get_property("NUM_STREAMS")))
