"""`python -m benchmarks.cold`: a request that comes alone, when nothing of its server is left in the processor's caches.

Three servers take turns: the floor (`floors.py loop`: an event loop, ZeroMQ, msgpack and NumPy in one process), the
product with an identity in process, and the same with small pages: the kernel is told to refuse it huge ones.

*Pages*: those of 4 KiB that one request touches, counted by the kernel (`clear_refs`, then `Referenced` of `smaps`), the
lower quartile of 40: beside some requests the server does something else, the more often the slower the machine is. Of a
huge page the count says nothing, so only servers without them have one.
*Cold*: before each request the client walks 64 MiB and sleeps for 5 ms. CPU by thread, from `schedstat`.

`--at-most KB` counts the pages alone, and fails where a request touches more kilobytes of anonymous memory (the heap, not
the code of libraries: what of that counts as touched depends on the page cache).
"""

from __future__ import annotations

import ctypes
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgpack
import numpy as np
import typer
import zmq

from benchmarks.models import TINY, TINY_WIDTH, write_configuration
from benchmarks.processes import Child, child_process, wait_for_slots
from benchmarks.report import Figure, Report, print_reports
from shapestream import blocking

WALKED_BYTES = 64 * 1024 * 1024
COLD_PAUSE_S = 0.005
WARM_UP = 300
COUNTED = 40
COUNT_PAUSE_S = 0.1
START_S = 30.0
_COUNTED_ON = 3, 11
"""The version of CPython that `make pages` has its bound for: objects and code differ by version."""
_PR_SET_THP_DISABLE = 41
ANONYMOUS = "anonymous"
"""The heap, among the mappings."""
PAGE_KB = 4


@dataclass(slots=True, kw_only=True)
class Way:
    """A server, how it is asked, and what each round measured."""

    name: str
    child: Child
    ask: Callable[[], None]
    huge: bool
    touched: Counter[str] = field(default_factory=Counter)
    """Kilobytes by mapping."""
    loop_ms: dict[str, list[float]] = field(default_factory=lambda: {"hot": [], "cold": []})
    other_ms: dict[str, list[float]] = field(default_factory=lambda: {"hot": [], "cold": []})
    p50_ms: dict[str, list[float]] = field(default_factory=lambda: {"hot": [], "cold": []})


@contextmanager
def without_huge_pages() -> Iterator[None]:
    """Let processes that are started in this block have no huge pages, as far as the kernel knows the option."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)


def touched(pid: int) -> Counter[str]:
    """Return the kilobytes that a process has touched since `clear_refs`, by mapping."""
    kilobytes: Counter[str] = Counter()
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if mapping := re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+\s*(.*)", line):
            name = ANONYMOUS if mapping[1] in ("", "[heap]") else mapping[1].rsplit("/", 1)[-1]
        elif line.startswith("Referenced:"):
            kilobytes[name] += int(line.split()[1])
    return kilobytes


def count_pages(way: Way) -> None:
    """Count the pages of lone requests; keep those of the lower quartile."""
    for _ in range(WARM_UP):
        way.ask()
    seen = []
    for _ in range(COUNTED):
        time.sleep(COUNT_PAUSE_S)
        Path(f"/proc/{way.child.pid}/clear_refs").write_text("1")
        way.ask()
        seen.append(touched(way.child.pid))
    way.touched = sorted(seen, key=lambda kilobytes: kilobytes[ANONYMOUS])[len(seen) // 4]


def resident_mb(pid: int, name: str) -> float:
    """Return a figure of `smaps_rollup` in megabytes."""
    told = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(rf"^{name}: +(\d+) kB", told, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def time_requests(way: Way, state: str, requests: int) -> None:
    """Measure one round."""
    walked = np.ones(WALKED_BYTES // 8)
    seconds = []
    before = way.child.loop_cpu_s(), way.child.cpu_s()
    for _ in range(requests):
        if state == "cold":
            walked += 1.0
            time.sleep(COLD_PAUSE_S)
        began = time.perf_counter()
        way.ask()
        seconds.append(time.perf_counter() - began)
    time.sleep(COLD_PAUSE_S)  # what follows an answer counts, too
    loop_s, all_s = way.child.loop_cpu_s() - before[0], way.child.cpu_s() - before[1]
    way.loop_ms[state].append(loop_s / requests * 1e3)
    way.other_ms[state].append((all_s - loop_s) / requests * 1e3)
    way.p50_ms[state].append(statistics.median(seconds) * 1e3)


@contextmanager
def floor(folder: Path) -> Iterator[Way]:
    """Run the floor."""
    address = f"ipc://{folder}/floor.sock"
    with without_huge_pages():
        started = child_process(["-m", "benchmarks.floors", "loop", address], log=folder / "floor.log")
        child = started.__enter__()
    socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(address)
    row = np.ones((1, TINY_WIDTH), np.float32)

    def ask() -> None:
        socket.send_multipart([msgpack.packb({"id": 1, "shape": [1, TINY_WIDTH]}), row.tobytes()])
        socket.recv_multipart()

    try:
        yield Way(name="floor", child=child, ask=ask, huge=False)
    finally:
        socket.close(0)
        started.__exit__(None, None, None)


@contextmanager
def product(folder: Path, *, huge: bool) -> Iterator[Way]:
    """Run a server with an identity in its process, and a client."""
    label = "huge" if huge else "small"
    path, address = write_configuration(folder, label=label, models=[TINY])
    log = folder / f"{label}.log"
    started = child_process(["-m", "shapestream_workers", "serve", str(path)], log=log)
    if huge:
        child = started.__enter__()
    else:
        with without_huge_pages():
            child = started.__enter__()
    row = {"x": np.ones((1, TINY_WIDTH), np.float32)}
    try:
        wait_for_slots(child, address, 1, log)
        with blocking.connect(address, connect_timeout=START_S) as client:
            name = "ours" if huge else "small pages"
            yield Way(name=name, child=child, ask=lambda: _check(client.infer(TINY, row)), huge=huge)
    finally:
        started.__exit__(None, None, None)


def _check(result: Any) -> None:
    if result["y"].shape != (1, TINY_WIDTH):
        raise AssertionError("an answer differs")


def measure(folder: Path, *, requests: int, rounds: int) -> list[Report]:
    """Count pages, then measure all ways in turns."""
    with floor(folder) as least, product(folder, huge=True) as ours, product(folder, huge=False) as small:
        ways = [least, ours, small]
        for way in ways:
            count_pages(way)
        for _ in range(rounds):
            for way in ways:
                for state in ("hot", "cold"):
                    time_requests(way, state, requests)
        return [_of_pages(ways), _of_times(ways)]


def _of_pages(ways: list[Way]) -> Report:
    report = Report(title="kB that one lone request touches, in pages of 4 KiB")
    report.columns = ("way", "all", "heap", "libraries", "resident", "in huge pages")
    for way in ways:
        pid, whole, heap = way.child.pid, way.touched.total(), way.touched[ANONYMOUS]
        told = ["" if way.huge else Figure(kilobytes, "kB") for kilobytes in (whole, heap, whole - heap)]
        report.rows.append(
            (
                way.name,
                *told,
                Figure(resident_mb(pid, "Rss"), "MB"),
                Figure(resident_mb(pid, "AnonHugePages"), "MB"),
            )
        )
    return report


def _of_times(ways: list[Way]) -> Report:
    report = Report(title="A lone request, caches hot and cold; ms per request")
    report.columns = ("way", "loop hot", "loop cold", "slot hot", "slot cold", "p50 hot", "p50 cold")
    for way in ways:
        cells = [
            Figure(statistics.median(figures[state]), "ms")
            for figures in (way.loop_ms, way.other_ms, way.p50_ms)
            for state in ("hot", "cold")
        ]
        report.rows.append((way.name, *cells))
    return report


def judge_pages(at_most_kb: int) -> None:
    """Count the pages of the product alone. Exits with 1 where there are too many."""
    if not Path("/proc/self/clear_refs").exists() or not Path("/proc/self/smaps").exists():
        print("not run: this kernel does not tell which pages a process touches")
        return
    with TemporaryDirectory(prefix="ss-bench-") as name, product(Path(name), huge=False) as way:
        count_pages(way)
        if resident_mb(way.child.pid, "AnonHugePages"):
            print("not run: this kernel refuses no huge pages, so it does not tell pages of 4 KiB")
            return
    heap, whole = way.touched[ANONYMOUS], way.touched.total()
    found = f"one lone request touches {heap} kB of anonymous memory ({whole} kB in all)"
    if sys.version_info[:2] != _COUNTED_ON:
        print(f"not run: the bound is for another version of Python; here {found}")
        return
    print(f"pages: {found}, {at_most_kb} allowed")
    if heap > at_most_kb:
        raise typer.Exit(1)


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 5,
    requests: Annotated[int, typer.Option(min=1, help="Of each way, state and round.")] = 200,
    at_most: Annotated[
        int | None, typer.Option(help="Only count, and fail above so many kB of anonymous memory.")
    ] = None,
) -> None:
    """Count the pages that a lone request touches, and measure it with cold caches."""
    if at_most is not None:
        judge_pages(at_most)
        return
    requests, rounds = (20, 1) if smoke else (requests, rounds)
    print_reports(lambda folder: measure(folder, requests=requests, rounds=rounds), as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
