"""`python -m benchmarks.scheduler`: what a decision costs, in the pure core, with few and with many requests waiting.

Real events in steady state: whenever a batch ends, as many requests arrive as are needed to keep so many waiting. Time is
virtual, and only `Scheduler.handle` is measured.
"""

from __future__ import annotations

import heapq
import json
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, product
from math import prod
from typing import Annotated, Literal, assert_never

import numpy as np
import typer
from rich.console import Console

from benchmarks.report import Figure, Report
from shapestream.scheduling.actions import (
    Action,
    CancelBatch,
    DeliverResults,
    FailRequest,
    ForgetRequest,
    KillSlot,
    RecallBatch,
    RejoinSlots,
    ReportFault,
    StartBatch,
    TellLoneRun,
)
from shapestream.scheduling.batches import Batch
from shapestream.scheduling.events import (
    Arrival,
    BatchFailed,
    BatchFinished,
    Event,
    ModelAdded,
    ModelProfile,
    RequestsArrived,
    SlotJoined,
    TimePassed,
)
from shapestream.scheduling.scheduler import Scheduler
from shapestream_engine.batch import ErrorCode
from shapestream_engine.cost_table import CostPoint, CostTable

MODEL = "m"
DIMENSIONS = ("batch", "height", "width")
MAX_BATCH = 64
AIM_US = 15.0
AIM_GROWTH = 1.67
"""From 1,000 to 100,000 waiting, logarithms grow by this."""
CALL_S, TOKEN_S = 0.0012, 0.000110
"""Like MiniLM's on one core: a call's fixed part, and each token's, or that of 256 pixels."""
PREFETCH_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Who asks for what, and what there is to run it."""

    shapes: Literal["equal", "lognormal", "new lengths", "new pictures", "pictures apart"]
    """`new`: hardly two that wait are equal. `apart`: nor are they padded, so hardly two share a call."""
    slots: int
    clients: int = 1
    prefetch: bool = False

    def __str__(self) -> str:
        extras = ("" if self.clients == 1 else f", {self.clients} clients") + ", prefetch" * self.prefetch
        return f"{self.shapes}, {self.slots} slot{'s' * (self.slots > 1)}{extras}"


SCENARIOS = (
    Scenario(shapes="equal", slots=1),
    Scenario(shapes="equal", slots=64),
    Scenario(shapes="equal", slots=64, clients=100),
    Scenario(shapes="lognormal", slots=1),
    Scenario(shapes="lognormal", slots=1, clients=100),
    Scenario(shapes="lognormal", slots=1, prefetch=True),
    Scenario(shapes="lognormal", slots=64),
    Scenario(shapes="lognormal", slots=64, clients=100, prefetch=True),
    Scenario(shapes="new lengths", slots=1),
    Scenario(shapes="new pictures", slots=1),
    Scenario(shapes="pictures apart", slots=2, prefetch=True),
)


def call_s(sizes: tuple[int, ...]) -> float:
    """What a call takes on this imaginary device."""
    return CALL_S + TOKEN_S * prod(sizes) / (1.0 if len(sizes) == 2 else 256.0)


class World:
    """Everything around the scheduler: arrivals, and slots that take their time."""

    def __init__(self, scenario: Scenario, queued: int) -> None:
        self._scenario = scenario
        self._queued = queued
        self._scheduler = Scheduler(10 * queued + 1000, 1 << 60)
        self._arrivals = _arrivals(scenario)
        self._now = 0.0
        self._ends: list[tuple[float, int]] = []
        """A heap of when the running batches end."""
        self._running: dict[int, Batch] = {}
        """By slot."""
        self._behind: defaultdict[int, deque[Batch]] = defaultdict(deque)
        self._waiting = 0
        self.handled_s = 0.0
        self.delivered = 0
        self.batches = 0
        self._start()

    def _start(self) -> None:
        scenario = self._scenario
        axes = 2 if "pictures" in scenario.shapes else 1
        profile = ModelProfile(
            name=MODEL,
            dimensions=DIMENSIONS[: 1 + axes],
            has_batch=True,
            paddable=(False, *[scenario.shapes != "pictures apart"] * axes),
            max_batch=MAX_BATCH,
            bounds=(None, 4096, 4096) if axes == 2 else (None, 1 << 20),
        )
        self._handle(ModelAdded(model=profile))
        costs = {MODEL: _table(profile.dimensions)}
        for slot in range(scenario.slots):
            self._handle(
                SlotJoined(
                    slot=slot,
                    models=frozenset([MODEL]),
                    worker=f"w{slot // 2}",
                    costs=costs,
                    prefetch_s=PREFETCH_S if scenario.prefetch else None,
                )
            )

    def run(self, requests: int) -> None:
        """Until so many more have their results."""
        until = self.delivered + requests
        while self.delivered < until:
            if (missing := self._queued - self._waiting) > 0:
                arrived = tuple(next(self._arrivals) for _ in range(missing))
                self._waiting += missing
                self._handle(RequestsArrived(requests=arrived))
            wakeup = self._scheduler.next_wakeup()
            if wakeup is not None and not (self._ends and self._ends[0][0] <= wakeup):
                self._now = wakeup  # a slot has waited for company
                self._handle(TimePassed())
            else:
                self._end_one()

    def _end_one(self) -> None:
        """End the next batch; the one that waits behind it begins."""
        self._now, slot = heapq.heappop(self._ends)
        batch = self._running.pop(slot)
        if self._behind[slot]:
            self._run(self._behind[slot].popleft())
        self._handle(BatchFinished(batch=batch.id, busy_s=call_s(batch.sizes)))

    def _run(self, batch: Batch) -> None:
        self._running[batch.slot.id] = batch
        heapq.heappush(self._ends, (self._now + call_s(batch.sizes), batch.slot.id))

    def _handle(self, event: Event) -> None:
        # CPU of this thread: other processes of the machine do not count.
        started = time.thread_time()
        actions = self._scheduler.handle(event, self._now)
        self.handled_s += time.thread_time() - started
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case StartBatch():
                for batch in action.batches:
                    self._waiting -= len(batch.arrivals)
                    self.batches += 1
                    if batch.slot.id in self._running:
                        self._behind[batch.slot.id].append(batch)
                    else:
                        self._run(batch)
            case DeliverResults():
                self.delivered += len(action.requests)
            case RecallBatch():
                batch = action.batch
                if batch in self._behind[batch.slot.id]:
                    self._behind[batch.slot.id].remove(batch)
                    self._waiting += len(batch.arrivals)
                    self._handle(BatchFailed(batch=batch.id, code=ErrorCode.RECALLED, message=""))
            case (
                FailRequest()
                | ForgetRequest()
                | CancelBatch()
                | KillSlot()
                | TellLoneRun()
                | ReportFault()
                | RejoinSlots()
            ):
                raise AssertionError(f"nothing here asks for {action}")
            case _:
                assert_never(action)


def _arrivals(scenario: Scenario) -> Iterator[Arrival]:
    draw = np.random.default_rng(0)
    sizes: list[tuple[int, ...]]
    match scenario.shapes:
        case "equal":
            sizes = [(1, 32)]
        case "lognormal":
            drawn = np.rint(24 * np.exp(0.9 * draw.standard_normal(50_021)))
            sizes = [(1, length) for length in np.clip(drawn, 4, 256).astype(int).tolist()]
        case "new lengths":
            sizes = [(1, length) for length in draw.integers(16, 100_000, 50_021).tolist()]
        case "new pictures" | "pictures apart":
            sizes = [(1, *size) for size in draw.integers(32, 1024, (50_021, 2)).tolist()]
        case _:
            assert_never(scenario.shapes)
    for number in count():
        own = sizes[number % len(sizes)]
        yield Arrival(
            id=number,
            client=number % scenario.clients,
            model=MODEL,
            sizes=own,
            nbytes=8 * prod(own),
            priority=0,
        )


def _table(dimensions: tuple[str, ...]) -> CostTable:
    points = tuple(
        CostPoint(sizes=sizes, seconds=call_s(sizes))
        for sizes in product(
            (1, 2, 4, 8, 16, 32, 64), *[(4, 8, 16, 32, 64, 128, 256)] * (len(dimensions) - 1)
        )
    )
    return CostTable(key="imaginary", dimensions=dimensions, points=points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How many requests are measured, in so many stretches, with how many waiting."""

    requests: int
    queued: tuple[int, ...]
    stretches: int = 3


FULL = Effort(requests=20_000, queued=(10, 1_000, 100_000))
SMOKE = Effort(requests=120, queued=(10, 100))


def measure(effort: Effort) -> Report:
    """A row per scenario, a column per number of requests that wait; medians of the stretches."""
    queued = effort.queued
    report = Report(
        title="Scheduler: us of its own time per request, by how many wait",
        columns=("scenario", *(f"{number:,}" for number in queued), "batch", "growth"),
    )
    for scenario in SCENARIOS:
        costs_us, mean_batch = zip(*(_measure(scenario, number, effort) for number in queued), strict=True)
        report.rows.append(
            (
                str(scenario),
                *(Figure(cost_us, "us", at_most=AIM_US) for cost_us in costs_us),
                f"{mean_batch[-1]:.1f}",
                Figure(costs_us[-1] / costs_us[-2], "x", at_most=AIM_GROWTH),
            )
        )
    return report


def _measure(scenario: Scenario, queued: int, effort: Effort) -> tuple[float, float]:
    """Microseconds per request, and requests per batch."""
    world = World(scenario, queued)
    # The first filling of the queue is not the steady state; a short queue soon has it.
    world.run(min(effort.requests, max(512, queued // 8)))
    stretches: list[float] = []
    delivered_before, batches_before = world.delivered, world.batches
    for _ in range(effort.stretches):
        delivered, handled_s = world.delivered, world.handled_s
        world.run(effort.requests // effort.stretches)
        stretches.append((world.handled_s - handled_s) / (world.delivered - delivered) * 1e6)
    mean_batch = (world.delivered - delivered_before) / max(1, world.batches - batches_before)
    return statistics.median(stretches), mean_batch


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    smoke: Annotated[bool, typer.Option(help="Seconds: figures mean little.")] = False,
) -> None:
    """Measure the scheduler alone: no sockets, no tensors, no model."""
    console = Console(stderr=as_json)
    report = measure(SMOKE if smoke else FULL)
    console.print(report.table())
    if as_json:
        print(json.dumps(report.plain(), indent=2))


if __name__ == "__main__":
    typer.run(main)
