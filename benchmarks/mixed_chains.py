"""Small requests beside large chains: their p99, against the same requests without the large ones (`chains.py`).

95 clients send a request for the recogniser, or a chain of 0 to 3 rows; five send chains of 150 to 200 rows, each the next
one as soon as it has an answer. The small ones do the same (*without a pause*), or send at times of their own, the same ones
with and without the large chains (*at leisure*). The recogniser sleeps, so that only the order of work is measured. Every
answer is compared.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import trio

import shapestream
from benchmarks.processes import child_process
from benchmarks.report import Figure, Report, median_ratio

SMALL, LARGE = 95, 5
MOST_SMALL = 3
LEAST_LARGE, MOST_LARGE = 150, 200
LEISURE_PER_S = 50.0
"""Requests of all small clients together. Alone, these keep the slot at work for a third of the time."""
AIM = 2.0
_ROWS = [np.random.default_rng(count).random((count, 64), np.float32) for count in range(MOST_LARGE + 1)]
_YAML = """
server: {{listen: ['{address}']}}
models:
  - name: find
    function: benchmarks.models:identity
    trust: true
    inputs: {{x: {{shape: 'count, 64', element_type: f32}}}}
    outputs: {{y: {{shape: 'count, 64', element_type: f32, rule: whole}}}}
  - name: read
    function: benchmarks.models:reading
    trust: true
    inputs: {{x: {{shape: 'batch:1..64, 64', element_type: f32}}}}
    outputs: {{y: {{shape: 'batch:1..64, 64', element_type: f32, rule: rows}}}}
chains:
  - name: reading
    inputs: {{x: find.x}}
    stages:
      - {{name: find, model: find, inputs: {{x: x}}}}
      - {{name: read, model: read, inputs: {{x: find.y}}, each: row of find.y}}
    outputs: {{y: read.y}}
in_process: {{slots: 1, threads: 1}}
logging: {{level: warning}}
"""
Pause: TypeAlias = Callable[[random.Random], float] | None
"""The seconds from a small request's time to the next one's; None: the next one follows the answer."""


@dataclass(slots=True, kw_only=True)
class Load:
    """One way in which small clients ask, and its figures by round, in milliseconds."""

    name: str
    pause: Pause
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    p50_beside_ms: list[float] = field(default_factory=list)
    p99_beside_ms: list[float] = field(default_factory=list)
    large_s: list[float] = field(default_factory=list)

    async def measure(self, clients: list[shapestream.Client], seed: int, stretch_s: float) -> None:
        """One round: a stretch without large chains, and one beside them."""
        alone = await _stretch(clients[LARGE:], self.pause, seed, stretch_s)
        self.p50_ms.append(1e3 * float(np.percentile(alone, 50)))
        self.p99_ms.append(1e3 * float(np.percentile(alone, 99)))
        async with trio.open_nursery() as nursery:
            for number, client in enumerate(clients[:LARGE]):
                nursery.start_soon(_send_large, client, random.Random(seed + number), self.large_s)
            beside = await _stretch(clients[LARGE:], self.pause, seed, stretch_s)
            nursery.cancel_scope.cancel()
        self.p50_beside_ms.append(1e3 * float(np.percentile(beside, 50)))
        self.p99_beside_ms.append(1e3 * float(np.percentile(beside, 99)))


async def _stretch(
    clients: list[shapestream.Client], pause: Pause, seed: int, stretch_s: float
) -> list[float]:
    """Return the seconds of each small request, from its time to its answer."""
    seconds: list[float] = []
    until = time.perf_counter() + stretch_s
    async with trio.open_nursery() as nursery:
        for number, client in enumerate(clients):
            nursery.start_soon(
                _send_small, client, random.Random(1000 * seed + number), pause, until, seconds
            )
    return seconds


async def _send_small(
    client: shapestream.Client, chance: random.Random, pause: Pause, until: float, seconds: list[float]
) -> None:
    async with trio.open_nursery() as nursery:
        at = time.perf_counter()
        while True:
            if pause is not None:
                at += pause(chance)
            if at > until:
                return
            await trio.sleep(max(0.0, at - time.perf_counter()))
            rows = chance.randint(-1, MOST_SMALL)  # -1: no chain, but the recogniser itself
            model, x = ("read", _ROWS[1]) if rows < 0 else ("reading", _ROWS[rows])
            if pause is None:
                await _ask(client, model, x, at, seconds)
                at = time.perf_counter()
            else:
                nursery.start_soon(_ask, client, model, x, at, seconds)


async def _send_large(client: shapestream.Client, chance: random.Random, seconds: list[float]) -> None:
    while True:
        x = _ROWS[chance.randint(LEAST_LARGE, MOST_LARGE)]
        await _ask(client, "reading", x, time.perf_counter(), seconds)


async def _ask(
    client: shapestream.Client, model: str, x: np.ndarray, at: float, seconds: list[float]
) -> None:
    if not np.array_equal((await client.infer(model, {"x": x}))["y"], x):
        raise RuntimeError("an answer is wrong")
    seconds.append(time.perf_counter() - at)


def measure_mixed(folder: Path, *, stretch_s: float, rounds: int) -> Report:
    """Run both loads in turn."""
    address = f"ipc://{folder}/mixed.sock"
    path, log = folder / "mixed.yaml", folder / "mixed.log"
    path.write_text(_YAML.format(address=address))
    loads = [
        Load(name="without a pause", pause=None),
        Load(name="at leisure", pause=lambda chance: chance.expovariate(LEISURE_PER_S / SMALL)),
    ]

    async def main() -> None:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(shapestream.connect(address, connect_timeout=60))
                for _ in range(SMALL + LARGE)
            ]
            await _stretch(clients, None, 0, stretch_s / 4)
            for seed in range(1, rounds + 1):
                for load in loads:
                    await load.measure(clients, seed, stretch_s)

    # The recogniser's costs are measured anew: they are none of a machine's.
    environment = {"SHAPESTREAM_COST_CACHE": str(folder / "costs")}
    with child_process(["-m", "shapestream_workers", "serve", str(path)], log=log, environment=environment):
        trio.run(main)
    return _report(loads)


def _report(loads: list[Load]) -> Report:
    report = Report(title=f"{SMALL} small clients beside {LARGE} with chains of {MOST_LARGE} rows")
    report.columns = ("small clients", "p50 ms", "p99 ms", "p50 beside", "p99 beside", "p99 / alone")
    for load in loads:
        ratio = Figure(median_ratio(load.p99_beside_ms, load.p99_ms), "x", at_most=AIM)
        figures = (load.p50_ms, load.p99_ms, load.p50_beside_ms, load.p99_beside_ms)
        report.rows.append((load.name, *(Figure(statistics.median(each), "ms") for each in figures), ratio))
    return report
