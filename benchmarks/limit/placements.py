"""`python -m benchmarks.limit.placements`: slots and threads of one process, in several regimes of MiniLM in f32.

The servers differ in `in_process` alone and run side by side; only one works at a time. Every figure is a median of
rounds, and every ratio the median of the rounds' ratios. The turns of a regime in one round are thrown away if other
processes and the host took more than `--others` of the CPUs in one of them, or unequal parts: another process on a CPU
stops all threads of a call that wait for one another.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import trio
import typer
from rich.console import Console

import shapestream
from benchmarks.limit.answers import References
from benchmarks.limit.engine import Minilm, read_minilm
from benchmarks.limit.pipeline_run import MODEL, Served, ServerSetting, serving
from benchmarks.limit.poisson import Arrivals, through_server
from benchmarks.limit.traces import Trace, lognormal
from benchmarks.processes import cpu_s
from benchmarks.report import Figure, Report
from shapestream_engine.machine import resident_bytes_of
from shapestream_engine.probing.inputs import Integers

MOST_UNEQUAL = 0.1
"""Difference between the parts of the CPUs that others take in two turns that are compared."""
RATES = (30.0, 60.0, 90.0)
"""Random arrivals per second; two cores answer 155 one at a time."""
LONE = 60
"""Requests that are sent one after another."""
LONG_TOKENS = 256
LONG = 12
BLOCK_ROWS = 16
"""Rows of the long requests that come beside short ones, one per second."""

Figures = dict[str, float]


@dataclass(slots=True, kw_only=True)
class Turns:
    """The figures of one server, a mapping per round that counted."""

    served: Served
    rounds: list[Figures] = field(default_factory=list)


def main(
    slots: Annotated[
        str,
        typer.Option(
            help="Numbers of slots on as many threads as CPUs, or SxT: S slots with T threads in all, as 2x4. "
            "The first is compared with."
        ),
    ] = "1,2",
    rounds: Annotated[int, typer.Option(min=1)] = 8,
    others: Annotated[float, typer.Option(help="Part of all CPUs that others may take.")] = 0.1,
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
) -> None:
    """Compares divisions of the CPUs into slots; every answer is checked."""
    console = Console()
    divisions = [_division(word) for word in slots.split(",")]
    seconds = 0.3 if smoke else 3.0
    with tempfile.TemporaryDirectory(prefix="ss-slots-") as name, ExitStack() as stack:
        minilm = read_minilm()
        servers = {}
        for count, threads in dict.fromkeys(divisions):
            setting = ServerSetting(
                label=f"slots{count}x{threads}",
                placement=f"in_process: {{slots: {count}, threads: {threads}}}",
                calibration_s=0.3 if smoke else 5.0,
            )
            served = stack.enter_context(serving(setting, Path(name), slots=count))
            servers[f"{count} of {threads / count:g}"] = Turns(served=served)
        regimes = Regimes(minilm, seconds, lambda line: print(line, file=sys.stderr, flush=True))
        dropped = regimes.play(servers, 1 if smoke else rounds, 2.0 if smoke else others)
    console.print(table(servers, dropped).table())


def _division(word: str) -> tuple[int, int]:
    """Slots and their threads in all, from `S` or `SxT`; raises BadParameter for anything else."""
    count, times, threads = word.strip().partition("x")
    try:
        found = int(count), int(threads) if times else len(os.sched_getaffinity(0))
    except ValueError:
        raise typer.BadParameter(f"{word!r} is neither S nor SxT", param_hint="--slots") from None
    if min(found) < 1:
        raise typer.BadParameter(f"{word!r}: there is one slot and one thread at least", param_hint="--slots")
    return found


class Regimes:
    """What clients do, each a function from a server to its figures."""

    def __init__(self, minilm: Minilm, seconds: float, say: Callable[[str], None]) -> None:
        self._say = say
        self._trace = lognormal(round(9_000 * seconds))
        self._references = References(minilm, self._trace)
        long = lognormal(1_000_000)
        self._long = Trace(name="long", ids=[ids for ids in long.ids if len(ids) == LONG_TOKENS][:LONG])
        self._long_references = References(minilm, self._long)
        self._seconds = seconds
        self._all: dict[str, Callable[[Served, int], Figures]] = {
            "lone": lambda served, _: self._lone(served, self._trace.cut(0, LONE), "a lone request, ms"),
            "long": lambda served, _: self._lone(served, self._long, "a lone request of 256 tokens, ms"),
            "64": lambda served, _: self._saturated(served, 64),
            "256": lambda served, _: self._saturated(served, 256),
            **{f"{rate:g}/s": self._poisson(rate) for rate in RATES},
            "blocks": self._beside_blocks,
        }

    def play(self, servers: Mapping[str, Turns], rounds: int, most_others: float) -> int:
        """Warm all servers up and play rounds in turns; return how many of the turns were thrown away."""
        for turns in servers.values():
            for in_flight in (64, 256, 1):
                self._saturated(turns.served, in_flight)
        dropped = 0
        order = list(servers.values())
        for number in range(rounds):
            for turns in order:
                turns.rounds.append({})
            for name, regime in self._all.items():
                order = order[1:] + order[:1]
                played = [_watched(regime, turns.served, number) for turns in order]
                parts = [others for _, others in played]
                for turns, (figures, part) in zip(order, played, strict=True):
                    words = ", ".join(f"{what} {value:.1f}" for what, value in figures.items())
                    self._say(
                        f"round {number + 1}, {name}, {turns.served.setting.label}, others {part:.2f}: {words}"
                    )
                if max(parts) > most_others or max(parts) - min(parts) > max(MOST_UNEQUAL, most_others - 1):
                    dropped += 1
                    continue
                for turns, (figures, _) in zip(order, played, strict=True):
                    turns.rounds[-1].update(figures)
        for turns in order:
            turns.rounds[-1]["resident, MB"] = resident_bytes_of(turns.served.child.pid) / 1e6
        return dropped

    def _lone(self, served: Served, trace: Trace, what: str) -> Figures:
        answers, latency_s = trio.run(_one_by_one, served.address, trace)
        references = self._long_references if trace is self._long else self._references
        references.check(answers, what, places=np.arange(len(trace)))
        return {what: 1e3 * float(np.median(latency_s))}

    def _saturated(self, served: Served, in_flight: int) -> Figures:
        run = served.stream(self._trace, in_flight)
        self._references.check(run.answers, f"{in_flight} in flight")
        return {f"{in_flight} in flight, requests/s": len(self._trace) / run.seconds}

    def _poisson(self, rate: float) -> Callable[[Served, int], Figures]:
        def run(served: Served, number: int) -> Figures:
            arrivals = Arrivals.draw(self._trace, rate, 2 * self._seconds, seed=number)
            answered = through_server(served, self._trace, arrivals)
            self._references.check(answered.answers, f"{rate:g}/s", places=arrivals.places)
            return _percentiles(f"{rate:g}/s at random", answered.latency_s)

        return run

    def _beside_blocks(self, served: Served, number: int) -> Figures:
        """Short requests at random while a long one of many rows comes each second."""
        arrivals = Arrivals.draw(self._trace, RATES[0], 2 * self._seconds, seed=number)
        ids = Integers(1, 30521).draw((BLOCK_ROWS, LONG_TOKENS), np.random.default_rng(number))
        answers, latency_s, blocks_s = trio.run(_beside, served.address, self._trace, arrivals, ids)
        self._references.check(answers, "beside blocks", places=arrivals.places)
        return {
            **_percentiles(f"{RATES[0]:g}/s beside long ones", latency_s),
            "the long ones, p50 ms": 1e3 * float(np.median(blocks_s)),
        }


def _percentiles(what: str, latency_s: Any) -> Figures:
    return {
        f"{what}, p50 ms": 1e3 * float(np.median(latency_s)),
        f"{what}, p99 ms": 1e3 * float(np.percentile(latency_s, 99)),
    }


def _watched(regime: Callable[[Served, int], Figures], served: Served, number: int) -> tuple[Figures, float]:
    """The figures of a turn, and the part of all CPUs that neither the server nor this process used."""
    before, own, began = _busy_s(), cpu_s(served.child.pid) + time.process_time(), time.perf_counter()
    figures = regime(served, number)
    mine = cpu_s(served.child.pid) + time.process_time() - own
    others = _busy_s() - before - mine
    return figures, others / (psutil.cpu_count() or 1) / (time.perf_counter() - began)


def _busy_s() -> float:
    """CPU time of all processes, and what the host took away."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


async def _one_by_one(address: str, trace: Trace) -> tuple[Any, Any]:
    answers, latency_s = [], []
    async with shapestream.connect(address) as client:
        await client.signature(MODEL)
        for ids in trace.ids:
            began = time.perf_counter()
            result = await client.infer(MODEL, {"input_ids": ids[None]})
            latency_s.append(time.perf_counter() - began)
            answers.append(result["embedding"][0])
    return np.stack(answers), np.array(latency_s)


async def _beside(address: str, trace: Trace, arrivals: Arrivals, block: Any) -> tuple[Any, Any, Any]:
    count = len(arrivals.at_s)
    answers: list[Any] = [None] * count
    latency_s, blocks_s = np.full(count, np.nan), []
    async with shapestream.connect(address) as client:
        await client.signature(MODEL)
        started = trio.current_time()

        async def one(number: int) -> None:
            at_s = started + arrivals.at_s[number]
            await trio.sleep_until(at_s)
            result = await client.infer(MODEL, {"input_ids": trace.ids[arrivals.places[number]][None]})
            latency_s[number] = trio.current_time() - at_s
            answers[number] = result["embedding"][0]

        async def blocks() -> None:
            for second in range(int(arrivals.at_s[-1])):
                await trio.sleep_until(started + second)
                began = trio.current_time()
                await client.infer(MODEL, {"input_ids": block})
                blocks_s.append(trio.current_time() - began)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(blocks)
            for number in range(count):
                nursery.start_soon(one, number)
    return np.stack(answers), latency_s, np.array(blocks_s or [np.nan])


def table(servers: Mapping[str, Turns], dropped: int) -> Report:
    """A row per figure: the medians, and the ratios to the first server."""
    (first, base), *others = servers.items()
    report = Report(
        title=f"slots of one process; {dropped} turns thrown away",
        columns=("figure", first, *(word for name, _ in others for word in (name, f"/ {first}", "rounds"))),
    )
    for what in dict.fromkeys(key for figures in base.rounds for key in figures):
        cells: list[str | Figure] = [what, f"{statistics.median(_known(base, what)):.1f}"]
        for _, turns in others:
            ratios = [
                mine[what] / theirs[what]
                for mine, theirs in zip(turns.rounds, base.rounds, strict=True)
                if what in mine and what in theirs
            ]
            low, middle, high = statistics.quantiles([*ratios, *ratios], n=4)
            cells += [
                f"{statistics.median(_known(turns, what)):.1f}",
                f"{middle:.2f} ({low:.2f} to {high:.2f})",
                str(len(ratios)),
            ]
        report.rows.append(tuple(cells))
    return report


def _known(turns: Turns, what: str) -> list[float]:
    return [figures[what] for figures in turns.rounds if what in figures]


if __name__ == "__main__":
    typer.run(main)
