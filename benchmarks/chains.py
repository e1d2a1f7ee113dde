"""`python -m benchmarks.chains`: what a chain saves a client, and what its stages cost the server.

The models are identities in the server's process, on one slot, so that the rest is measured. Every answer is compared.
One at a time: a chain of two and of four stages, beside one model and beside two calls, one after the other, of a client
that is `AWAY_S` away: it waits that long, busily, before each request and after each answer. 64 at a time: the chain of two
beside the best two-step client, which asks the second model as soon as the first one has answered. Fan-out: rows of a
chain, beside the same rows as requests of their own, sent by one client. Last, on a server of their own, small requests
beside large chains (`mixed_chains.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import trio
import typer

import shapestream
from benchmarks.mixed_chains import measure_mixed
from benchmarks.processes import Child, child_process
from benchmarks.report import Figure, Report, median_ratio, print_reports
from shapestream import blocking

AWAY_S = 100e-6
"""One way: two calls are 200 us away each, there and back."""
IN_FLIGHT = 64
ROWS = 50
_IDENTITY = (
    "  - {{name: {name}, function: benchmarks.models:identity, trust: true,\n"
    "     inputs: {{x: {{shape: 'batch:1..64, 64', element_type: f32}}}},\n"
    "     outputs: {{y: {{shape: 'batch:1..64, 64', element_type: f32, rule: rows}}}}}}\n"
)
_CHAIN = "  - {{name: {name}, inputs: {{x: s0.x}}, stages: [{stages}], outputs: {{y: s{last}.y}}}}\n"
X = np.random.default_rng(0).random((1, 64), np.float32)
XS = np.random.default_rng(1).random((ROWS, 64), np.float32)


@dataclass(slots=True, kw_only=True)
class Way:
    """One way to have two stages run, and its figures by round."""

    name: str
    run: Callable[[int], list[float]]
    """Make so many requests; return the seconds of each, or nothing."""
    requests: int
    p50_us: list[float] = field(default_factory=list)
    server_us: list[float] = field(default_factory=list)
    per_s: list[float] = field(default_factory=list)

    def measure(self, server: Child) -> None:
        """One round."""
        cpu_s, began = server.cpu_s(), time.perf_counter()
        seconds = self.run(self.requests)
        self.per_s.append(self.requests / (time.perf_counter() - began))
        self.server_us.append((server.cpu_s() - cpu_s) / self.requests * 1e6)
        if seconds:
            self.p50_us.append(statistics.median(seconds) * 1e6)


def _stages(*models: str, each: str = "") -> str:
    sources = ["x", *[f"s{number}.y" for number in range(len(models))]]
    return ", ".join(
        f"{{name: s{number}, model: {model}, inputs: {{x: {sources[number]}}}{each if number else ''}}}"
        for number, model in enumerate(models)
    )


def _served(stack: ExitStack, folder: Path) -> tuple[Child, str]:
    address = f"ipc://{folder}/chains.sock"
    chains = (
        _CHAIN.format(name="two", stages=_stages("first", "second"), last=1)
        + _CHAIN.format(name="four", stages=_stages("first", "second", "first", "second"), last=3)
        + _CHAIN.format(name="rows", stages=_stages("first", "second", each=", each: row of s0.y"), last=1)
    )
    path = folder / "chains.yaml"
    path.write_text(
        f"server: {{listen: ['{address}']}}\nmodels:\n"
        + _IDENTITY.format(name="first")
        + _IDENTITY.format(name="second")
        + f"chains:\n{chains}in_process: {{slots: 1, threads: 1}}\nlogging: {{level: warning}}\n"
    )
    command = ["-m", "shapestream_workers", "serve", str(path)]
    server = stack.enter_context(child_process(command, log=folder / "chains.log"))
    with blocking.connect(address, connect_timeout=60) as client:
        client.signature("rows")
    return server, address


def _check(found: np.ndarray, given: np.ndarray) -> np.ndarray:
    if not np.array_equal(found, given):
        raise RuntimeError("an answer is wrong")
    return found


def _alone(client: blocking.Client, models: tuple[str, ...], count: int) -> list[float]:
    """One at a time, of a client that is away."""
    seconds = []
    for _ in range(count):
        began, tensor = time.perf_counter(), X
        for model in models:
            _wait()
            tensor = _check(client.infer(model, {"x": tensor})["y"], X)
            _wait()
        seconds.append(time.perf_counter() - began)
    return seconds


def _wait() -> None:
    until = time.perf_counter() + AWAY_S
    while time.perf_counter() < until:
        pass


def _together(address: str, models: tuple[str, ...], count: int) -> list[float]:
    """64 at a time, each asking its next model at once."""

    async def ask(client: shapestream.Client, times: int) -> None:
        for _ in range(times):
            tensor = X
            for model in models:
                tensor = _check((await client.infer(model, {"x": tensor}))["y"], X)

    async def main() -> None:
        async with shapestream.connect(address) as client, trio.open_nursery() as nursery:
            for _ in range(IN_FLIGHT):
                nursery.start_soon(ask, client, count // IN_FLIGHT)

    trio.run(main)
    return []


def _rows(client: blocking.Client, model: str, count: int) -> list[float]:
    """A stream of so many rows, `ROWS` to a request for the chain."""
    inputs = [XS] * (count // ROWS) if model == "rows" else [row[None] for row in XS] * (count // ROWS)
    in_flight = 16 if model == "rows" else 16 * ROWS
    with client.stream(model, ({"x": each} for each in inputs), max_in_flight=in_flight) as results:
        for each, result in zip(inputs, results, strict=True):
            _check(result["y"], each)
    return []


def measure(folder: Path, *, requests: int, rounds: int, stretch_s: float) -> list[Report]:
    """Run everything; `requests` of each way and round, and `stretch_s` seconds of each mixed load."""
    return [
        *_measure_ways(folder, requests=requests, rounds=rounds),
        measure_mixed(folder, stretch_s=stretch_s, rounds=rounds),
    ]


def _measure_ways(folder: Path, *, requests: int, rounds: int) -> list[Report]:
    with ExitStack() as stack:
        server, address = _served(stack, folder)
        client = stack.enter_context(blocking.connect(address))
        one_by_one = [
            Way(name=name, run=partial(_alone, client, models), requests=max(10, requests // 10))
            for name, models in (
                ("one model", ("first",)),
                ("chain of two", ("two",)),
                ("chain of four", ("four",)),
                ("two calls", ("first", "second")),
            )
        ]
        together = [
            Way(name=name, run=partial(_together, address, models), requests=max(IN_FLIGHT, requests))
            for name, models in (("chain of two", ("two",)), ("two-step client", ("first", "second")))
        ]
        rows = [
            Way(name=name, run=partial(_rows, client, model), requests=max(ROWS, requests))
            for name, model in (("rows of a chain", "rows"), ("rows as requests", "second"))
        ]
        ways = [*one_by_one, *together, *rows]
        for way in ways:
            way.run(way.requests // 4 + ROWS)
        for _ in range(rounds):
            for way in ways:
                way.measure(server)
    return [_of_one_by_one(one_by_one), _of_together(together), _of_rows(rows)]


def _of_one_by_one(ways: list[Way]) -> Report:
    lone, two, four, calls = ways
    report = Report(title=f"One at a time, {2 * AWAY_S * 1e6:g} us away")
    report.columns = ("way", "p50 us", "/ two calls", "server us", "per stage / one model")
    stage_us = [(more - less) / 2 for more, less in zip(four.server_us, two.server_us, strict=True)]
    for way in ways:
        report.rows.append(
            (
                way.name,
                Figure(statistics.median(way.p50_us), "us"),
                Figure(median_ratio(way.p50_us, calls.p50_us), "x", at_most=0.67 if way is two else None),
                Figure(statistics.median(way.server_us), "us"),
                Figure(median_ratio(stage_us, lone.server_us), "x", at_most=0.5) if way is four else "",
            )
        )
    return report


def _of_together(ways: list[Way]) -> Report:
    chain, steps = ways
    report = Report(title=f"Two stages, {IN_FLIGHT} in flight")
    report.columns = ("way", "per s", "/ two-step client", "server us")
    for way in ways:
        ratio = Figure(median_ratio(way.per_s, steps.per_s), "x", at_least=0.9 if way is chain else None)
        report.rows.append(
            (
                way.name,
                Figure(statistics.median(way.per_s), "/s"),
                ratio,
                Figure(statistics.median(way.server_us), "us"),
            )
        )
    return report


def _of_rows(ways: list[Way]) -> Report:
    _, direct = ways
    report = Report(title=f"{ROWS} rows a request")
    report.columns = ("way", "rows per s", "/ requests", "server us a row")
    for way in ways:
        report.rows.append(
            (
                way.name,
                Figure(statistics.median(way.per_s), "/s"),
                Figure(median_ratio(way.per_s, direct.per_s), "x"),
                Figure(statistics.median(way.server_us), "us"),
            )
        )
    return report


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 5,
) -> None:
    """Measure chains beside calls one after the other."""
    requests, stretch_s, rounds = (200, 1.0, 1) if smoke else (6000, 4.0, rounds)
    print_reports(partial(measure, requests=requests, rounds=rounds, stretch_s=stretch_s), as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
