"""The chain beside other ways to read the same pages, in interleaved rounds: pages per second, and CPU per page."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import trio
from rich import box
from rich.console import Console
from rich.table import Table

import shapestream
from examples.ocr import stages
from examples.ocr.alone import Cut, Plain
from examples.ocr.beside import Package
from examples.ocr.oracle import Oracle, measure_best_rows
from examples.ocr.pages import Page

CHAIN, PADDED_CHAIN = "ocr", "padded_ocr"
MAX_IN_FLIGHT = 16
THREADS = 1  # of every way, as configs/ocr.yaml has them

Run = Callable[[], Awaitable[None]]


@dataclass(slots=True, kw_only=True)
class Contender:
    """One way to read all pages once."""

    name: str
    run: Run
    seconds: list[float] = field(default_factory=list)
    """Of all pages, a figure per round."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU of this process and all below it, for all pages, a figure per round."""

    async def measure(self) -> None:
        """Run one round."""
        cpu_s, began = _cpu_s(), time.perf_counter()
        await self.run()
        self.seconds.append(time.perf_counter() - began)
        self.cpu_s.append(_cpu_s() - cpu_s)

    def row(self, pages: int) -> dict[str, Any]:
        """Medians of the rounds, for a script."""
        per_s, cpu_s = pages / statistics.median(self.seconds), statistics.median(self.cpu_s) / pages
        return {"way": self.name, "pages per s": per_s, "CPU s per page": cpu_s}


@dataclass(slots=True, kw_only=True)
class Chain:
    """One of the server's chains, and how many lines its recogniser had in a call."""

    name: str
    client: shapestream.Client
    pages: Sequence[Page]
    rows: int = 0
    calls: int = 0

    async def run(self) -> None:
        """Read all pages, 16 at a time."""
        before = (await self.client.statistics())["totals"]["recogniser"]
        await stream(self.client, self.name, self.pages)
        after = (await self.client.statistics())["totals"]["recogniser"]
        self.rows += after["rows"] - before["rows"]
        self.calls += after["calls"] - before["calls"]


async def stream(client: shapestream.Client, chain: str, pages: Sequence[Page]) -> list[shapestream.Result]:
    """The answers of a chain for all pages, with 16 in flight."""
    inputs = ({"image": page.pixels} for page in pages)
    async with client.stream(chain, inputs, max_in_flight=MAX_IN_FLIGHT) as results:
        return [result async for result in results if isinstance(result, shapestream.Result)]


async def measure(
    console: Console,
    client: shapestream.Client,
    pages: Sequence[Page],
    plain: Plain,
    package: Package,
    rounds: int,
) -> list[dict[str, Any]]:
    """Print two tables, of lines as wide as they are and of lines as the package fills them up; and a page alone.

    Returns a row for each way: its name, pages per second, and seconds of CPU per page.
    """
    best_rows = await trio.to_thread.run_sync(measure_best_rows, plain)
    console.print(f"\nrows of a call with the least time per line, by width: {best_rows}")
    page_s: dict[str, list[float]] = {"chain": [], "plain": []}

    async def lone() -> None:
        for page in pages:
            began = time.perf_counter()
            await client.infer(CHAIN, {"image": page.pixels})
            page_s["chain"].append(time.perf_counter() - began)

    def alone(cut: Cut, seconds: list[float]) -> None:
        for page in pages:
            began = time.perf_counter()
            plain.read(page.pixels, cut)
            seconds.append(time.perf_counter() - began)

    def loop(reader: Package) -> None:
        for page in pages:
            reader.read(page.pixels)

    tables, chains = [], []
    for name, cut in ((CHAIN, stages.cut_lines), (PADDED_CHAIN, stages.cut_padded_lines)):
        chain = Chain(name=name, client=client, pages=pages)
        seconds = page_s["plain"] if name == CHAIN else []
        oracle = await trio.to_thread.run_sync(Oracle, plain, pages, cut, best_rows)
        chains.append(chain)
        tables.append(
            [
                Contender(name=f"chain {name}, {MAX_IN_FLIGHT} pages in flight", run=chain.run),
                Contender(name="plain OpenVINO, a line at a time", run=_in_thread(alone, cut, seconds)),
                Contender(
                    name=f"oracle, {oracle.rows_per_call:.1f} lines a call", run=_in_thread(oracle.run)
                ),
            ]
        )
    tables[0].append(Contender(name="chain ocr, one page at a time", run=lone))
    tables[1].append(Contender(name="rapidocr in a loop, one thread", run=_in_thread(loop, package)))
    tables[1].append(Contender(name="rapidocr in a loop, as it comes", run=_in_thread(loop, Package(None))))
    contenders = [each for table in tables for each in table]
    console.print(f"measuring {len(contenders)} ways in {rounds} rounds, {THREADS} thread each")
    for contender in contenders:
        await contender.run()
    page_s["chain"].clear()
    page_s["plain"].clear()
    for _ in range(rounds):
        for contender in contenders:
            await contender.measure()
    for chain, table in zip(chains, tables, strict=True):
        console.print(_table(table, len(pages)))
        console.print(f"chain {chain.name}: {chain.rows / chain.calls:.2f} lines in a call of the recogniser")
    one, other = (1e3 * statistics.median(page_s[name]) for name in ("chain", "plain"))
    console.print(f"one page at a time, p50: chain ocr {one:.0f} ms, plain OpenVINO {other:.0f} ms")
    _tell_first(console, tables[0][0], tables[1][-2:])
    return [each.row(len(pages)) for each in contenders]


def _tell_first(console: Console, chain: Contender, others: Sequence[Contender]) -> None:
    """The chain of the first table beside the package, which stands in the second."""
    for other in others:
        rate, cpu = _ratio(other.seconds, chain.seconds), _ratio(chain.cpu_s, other.cpu_s)
        console.print(f"chain ocr / {other.name}: rate {rate:.2f}, CPU {cpu:.2f}")


def _table(contenders: Sequence[Contender], pages: int) -> Table:
    """Medians of the rounds; the first contender is compared with each other one."""
    lines = Table(
        "", "pages/s", "CPU s/page", "rate: first /", "CPU: first /", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in lines.columns[1:]:
        column.justify = "right"
    first = contenders[0]
    for each in contenders:
        lines.add_row(
            each.name,
            f"{pages / statistics.median(each.seconds):.2f}",
            f"{statistics.median(each.cpu_s) / pages:.2f}",
            f"{_ratio(each.seconds, first.seconds):.2f}",
            f"{_ratio(first.cpu_s, each.cpu_s):.2f}",
        )
    return lines


def _in_thread(work: Callable[..., object], *arguments: object) -> Run:
    """What blocks, run beside the event loop, so that the connection to the server lives."""

    async def run() -> None:
        await trio.to_thread.run_sync(lambda: work(*arguments))

    return run


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


def _cpu_s() -> float:
    this = psutil.Process()
    below = this.children(recursive=True)
    return sum(sum(process.cpu_times()[:2]) for process in [this, *below])
