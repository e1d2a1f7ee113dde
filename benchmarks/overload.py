"""`python -m benchmarks.overload`: what becomes of a server's work when clients ask for ten times what it can do?

One worker with one slot serves a model that sleeps (`models.py`), so its capacity is known, and measured as well: in
turn, many requests are kept waiting (capacity), and clients ask at ten times that rate, at times of their own choosing
(Poisson), each request with a deadline; the first time as soon as the server is there. *Goodput* is what was answered in
time. Then fairness: three clients ask for half of their fair share each, beside one that asks for ten times everything.
All answers are compared.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import trio
import typer
from rich.console import Console

import shapestream
from benchmarks.models import CALL_S, MOST_ROWS, ROW_S
from benchmarks.processes import child_process, wait_for_slots
from benchmarks.report import Figure, Report

MODEL = "sleeping"
CLIENTS = 4
OVERLOAD = 10.0
DEADLINE_S = 0.5
FIRST_S = 1.5
"""How long the first overload lasts, of which nothing could be learned before."""
BUSY = 32
"""Requests that are kept waiting to measure the capacity: some batches ahead."""
AIM_GOODPUT = 0.9
AIM_MODEST = 0.9
AIM_REFUSAL = 0.1
CAPACITY = MOST_ROWS / (CALL_S + MOST_ROWS * ROW_S)
"""Requests per second that the model could do if nothing were lost between two calls."""


@dataclass(slots=True)
class Tally:
    """What one client got."""

    offered: int = 0
    served_s: list[float] = field(default_factory=list)
    """Seconds from asking to the answer, of each that was answered in time."""
    refused_s: list[float] = field(default_factory=list)
    """The same of those that were told no."""
    codes: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Round:
    """What one stretch of overload gave, by client."""

    tallies: list[Tally]
    elapsed_s: float

    @property
    def goodput(self) -> float:
        """Answers in time, per second, of all clients."""
        return sum(len(tally.served_s) for tally in self.tallies) / self.elapsed_s


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 5,
) -> None:
    """Measures goodput, refusals and fairness at ten times the capacity; checks every answer."""
    console = Console(stderr=as_json)
    with tempfile.TemporaryDirectory(prefix="ss-bench-") as name:
        report = measure(Path(name), rounds=1 if smoke else rounds, stretch_s=1.5 if smoke else 6.0)
    console.print(report.table())
    if as_json:
        print(json.dumps(report.plain(), indent=2))


def measure(folder: Path, *, rounds: int, stretch_s: float) -> Report:
    """The table: medians over the rounds."""
    address = f"ipc://{folder}/overload.sock"
    config, log = folder / "overload.yaml", folder / "overload.log"
    config.write_text(_yaml(address))
    command = ["-m", "shapestream_workers", "serve", str(config)]
    # Costs are learned anew: the first second of an overload is to be that of a new server.
    environment = {"SHAPESTREAM_ANY_FUNCTION": "1", "SHAPESTREAM_COST_CACHE": str(folder / "costs")}
    with child_process(command, log=log, environment=environment) as server:
        wait_for_slots(server, address, 1, log)
        return trio.run(_measure, address, rounds, stretch_s)


def _yaml(address: str) -> str:
    shape = f"batch:1..{MOST_ROWS}, 16"
    return (
        f"server: {{listen: ['{address}']}}\n"
        f"models:\n  - {{name: {MODEL}, function: 'benchmarks.models:sleeping', trust: true,\n"
        f"     inputs: {{x: {{shape: '{shape}', element_type: f32}}}},\n"
        f"     outputs: {{y: {{shape: '{shape}', element_type: f32, rule: rows}}}}}}\n"
        "workers: [{count: 1, slots: 1, threads: 1}]\nlogging: {level: warning}\n"
    )


async def _measure(address: str, rounds: int, stretch_s: float) -> Report:
    capacities: list[float] = []
    equal: list[Round] = []
    unequal: list[Round] = []
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(shapestream.connect(address, connect_timeout=60))
            for _ in range(CLIENTS)
        ]
        everyone = OVERLOAD * CAPACITY / CLIENTS
        # Nothing is known yet but a calibration: of costs as they are here, and of how far to trust estimates.
        first = await _overload(clients, [everyone] * CLIENTS, FIRST_S)
        for _ in range(rounds):
            capacities.append(await _capacity(clients[0], stretch_s))
            equal.append(await _overload(clients, [everyone] * CLIENTS, stretch_s))
            modest = CAPACITY / CLIENTS / 2
            rates = [OVERLOAD * CAPACITY, *[modest] * (CLIENTS - 1)]
            unequal.append(await _overload(clients, rates, stretch_s))
    return _report(capacities, first, equal, unequal)


async def _capacity(client: shapestream.Client, stretch_s: float) -> float:
    """Requests per second where enough of them always wait."""
    done = 0
    give_up_at = time.perf_counter() + stretch_s

    async def ask_on() -> None:
        nonlocal done
        while time.perf_counter() < give_up_at:
            await _ask(client, None)
            done += time.perf_counter() < give_up_at

    async with trio.open_nursery() as nursery:
        for _ in range(BUSY):
            nursery.start_soon(ask_on)
    return done / stretch_s


async def _ask(client: shapestream.Client, deadline_s: float | None) -> None:
    x = np.full((1, 16), random.randint(0, 1000), np.float32)
    result = await client.infer(MODEL, {"x": x}, deadline=deadline_s)
    if not np.array_equal(result["y"], x + 1):
        raise AssertionError("a wrong answer")


async def _overload(clients: Sequence[shapestream.Client], rates: Sequence[float], stretch_s: float) -> Round:
    """Each client asks at its own rate. What is answered after the stretch belongs to it, and so does that time."""
    tallies = [Tally() for _ in clients]
    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for client, rate, tally in zip(clients, rates, tallies, strict=True):
            nursery.start_soon(_offer, client, rate, tally, stretch_s)
    return Round(tallies, time.perf_counter() - started)


async def _offer(client: shapestream.Client, rate: float, tally: Tally, stretch_s: float) -> None:
    due = started = trio.current_time()
    async with trio.open_nursery() as nursery:
        while due < started + stretch_s:
            await trio.sleep_until(due)
            tally.offered += 1
            nursery.start_soon(_count, client, tally)
            due += random.expovariate(rate)


async def _count(client: shapestream.Client, tally: Tally) -> None:
    asked = time.perf_counter()
    try:
        await _ask(client, DEADLINE_S)
    except shapestream.RequestError as error:
        tally.codes[error.code] += 1
        tally.refused_s.append(time.perf_counter() - asked)
    else:
        tally.served_s.append(time.perf_counter() - asked)


def _report(capacities: list[float], first: Round, equal: list[Round], unequal: list[Round]) -> Report:
    ratios = [round_.goodput / capacity for round_, capacity in zip(equal, capacities, strict=True)]
    unequal_ratios = [round_.goodput / capacity for round_, capacity in zip(unequal, capacities, strict=True)]
    shares = [
        min(len(tally.served_s) for tally in round_.tallies)
        / max(len(tally.served_s) for tally in round_.tallies)
        for round_ in equal
    ]
    modest = [
        min(len(tally.served_s) / max(1, tally.offered) for tally in round_.tallies[1:]) for round_ in unequal
    ]
    served = [seconds for round_ in equal for tally in round_.tallies for seconds in tally.served_s]
    refused = [seconds for round_ in equal for tally in round_.tallies for seconds in tally.refused_s]
    offered = sum(tally.offered for round_ in equal for tally in round_.tallies)
    patient = sum(seconds > DEADLINE_S / 2 for seconds in refused)
    seconds = sum(round_.elapsed_s for round_ in equal)
    report = Report(
        title=f"Overload: {offered:,} requests in {seconds:.0f} s, {offered / seconds / statistics.median(capacities):.1f} x"
        f" the capacity, deadlines of {DEADLINE_S:g} s",
        columns=("what", "figure"),
    )
    report.rows += [
        ("capacity", Figure(statistics.median(capacities), "/s")),
        (
            f"goodput / capacity, the first {FIRST_S:g} s of a new server",
            Figure(first.goodput / statistics.median(capacities), "x", at_least=AIM_GOODPUT),
        ),
        ("goodput / capacity, equal clients", Figure(statistics.median(ratios), "x", at_least=AIM_GOODPUT)),
        (
            "goodput / capacity, one greedy client",
            Figure(statistics.median(unequal_ratios), "x", at_least=AIM_GOODPUT),
        ),
        ("equal clients: least / most served", Figure(statistics.median(shares), "x")),
        (
            "beside the greedy one: served / asked",
            Figure(statistics.median(modest), "x", at_least=AIM_MODEST),
        ),
        ("time of an answer, median", Figure(statistics.median(served) * 1e3, "ms")),
        ("time of a refusal, median", Figure(statistics.median(refused) * 1e3, "ms")),
        (
            "refusal / answer, medians",
            Figure(statistics.median(refused) / statistics.median(served), "x", at_most=AIM_REFUSAL),
        ),
        ("refused only after half of the deadline", Figure(100 * patient / len(refused), "%")),
    ]
    return report


if __name__ == "__main__":
    os.environ.setdefault("SHAPESTREAM_ANY_FUNCTION", "1")
    typer.run(main)
