"""`python -m benchmarks.reloads`: what do clients notice of reloads? Each answer is compared, and so are the waits.

Four clients (`reload_clients.py`) ask a server all the while, 100 times per second in all, with deadlines of a second.
Meanwhile reloads change the code of a model, its version, its delay of batches and its signature, or break: the file is
missing or damaged, rows depend on each other, the process dies at its start, or hangs there. Kinds take turns, five times
each, in the life of one server.

Before each reload stands a control: processes of the same model start beside the server, by `shapestream check`, and
nothing is reloaded. The table has the ratio of the p99 of the two, for each kind of reload. A wrong, lost or failed request
makes the program exit with 1. `--slope RELOADS` measures memory instead: the PSS of the server and of its gateways by
reload, less that of the same time without reloads, and the pages that a request touches, before and after.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import psutil
import typer

from benchmarks.cold import ANONYMOUS, PAGE_KB, Way, count_pages, without_huge_pages
from benchmarks.processes import Child, child_process, wait_for_slots
from benchmarks.reload_clients import (
    BESIDE,
    CHANGED,
    DEADLINE_S,
    HOST,
    PER_S,
    Addresses,
    Clients,
    clients_of,
)
from benchmarks.report import Figure, Report, print_reports
from shapestream import blocking
from shapestream_workers.reload import AdminAddress, reload_server

RELOAD_S = 5.0
"""`server.reload_s`, where a process does not come up."""
PATIENT_S = 120.0
"""`server.reload_s`, where it does."""
AIM_P99 = 3.0
"""p99 during a reload / p99 while the same processes start beside the server."""
AIM_LATE = 1.0
"""Deadlines missed during reloads, of 10,000, above those of the controls."""
QUIET_S = 0.5
LEAST_S = 4.0
"""Shortest time of a reload or a control: 400 requests have a p99."""
LOG_S = 30.0
"""Seconds to wait for a line of the log, after the slots are there."""
AIM_SLOPE_KB = 20.0
"""Growth of a process with each reload, above that of the same time without."""
AIM_SPREADS = 3.0
"""Growth of the pages that a request touches, in spreads: the range of `PAGE_COUNTS` counts before the first reload."""
PAGE_COUNTS = 5

CODE = """\
import numpy as np

ADDED = {added}


def plus(x):
    return x + np.float32(ADDED)


def centred(x):
    return (x - x.mean()).astype(x.dtype)
"""
FILES = {
    "never_changes": "def same(x):\n    return x + 0\n",
    "dies_at_start": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "hangs_at_start": "import threading\nthreading.Event().wait()\n",
}


class Kind(NamedTuple):
    """One way to reload, as the entry of the model that it changes."""

    name: str
    result: str = "incomplete"
    code: bool = False
    """True if it brings other code, and so other answers."""
    version: bool = False
    """True if it brings another version."""
    bound: int = 64
    """The largest row. Another bound is another signature."""
    starts: int = 1
    """Processes that are started."""
    function: str = "changed_model:plus"
    more: str = "trust: true"
    path: str = ""
    reload_s: float = PATIENT_S


KINDS = (
    Kind("other code", "ok", code=True, starts=2),
    Kind("another version", "ok", code=True, version=True, starts=2),
    Kind("batching alone", "ok", more="trust: true, batching: {max_delay_ms: 1}", starts=0),
    Kind("another signature", "ok", code=True, bound=96, starts=2),
    Kind("a missing file", "refused", path="missing.onnx", starts=0),
    Kind("a damaged file", path="damaged.onnx"),
    Kind("a refuted proof", function="changed_model:centred", more="batching: {max_batch: 8}"),
    Kind("a process that dies", function="dies_at_start:f", reload_s=RELOAD_S),
    Kind("a process that hangs", function="hangs_at_start:f", reload_s=RELOAD_S),
)
SLOPED = (KINDS[0], KINDS[1], KINDS[3])
SMOKE = (KINDS[0], KINDS[1], KINDS[2], KINDS[3], KINDS[4], KINDS[6])


Periods = dict[str, list[tuple[float, float]]]
"""Begins and ends by kind."""


class Setting:
    """A server's YAML and the functions that it serves, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "server.yaml"
        self.added = 0
        """The number that the model adds, when it is written."""
        self.version = 1
        folder.mkdir(exist_ok=True)
        for name, text in FILES.items():
            (folder / f"{name}.py").write_text(text)
        (folder / "damaged.onnx").write_bytes(bytes(100))
        self.write(KINDS[0])

    def write(self, kind: Kind) -> None:
        """Write the YAML as a reload of this kind reads it, with other code and another version where it brings them."""
        self.added += kind.code
        self.version += kind.version
        (self.folder / "changed_model.py").write_text(CODE.format(added=self.added))
        ports = (
            'inputs: {{x: {{shape: "batch:1..8, n:1..{}", element_type: f32}}}}, '
            'outputs: {{y: {{shape: "batch, n", element_type: f32, rule: rows}}}}'
        )
        source = f"path: {kind.path}"
        if not kind.path:
            source = f'function: "{kind.function}", {ports.format(kind.bound)}'
        self.path.write_text(
            f"server: {{listen: [ipc://s.sock], admin: {HOST}:0, http: {HOST}:0, grpc: {HOST}:0, "
            f"reload_s: {kind.reload_s:g}}}\n"
            "models:\n"
            f'  - {{name: {CHANGED}, version: "v{self.version}", {source}, calibration_s: 0, {kind.more}}}\n'
            f'  - {{name: {BESIDE}, function: "never_changes:same", {ports.format(64)}, calibration_s: 0, trust: true}}\n'
            "workers:\n"
            f"  - {{models: [{CHANGED}], count: 2, slots: 1, threads: 1}}\n"
            f"  - {{models: [{BESIDE}], slots: 1, threads: 1}}\n"
        )

    def allowed(self) -> dict[int, str]:
        """The numbers that an answer may add, each with the version that it then names."""
        return {self.added: f"v{self.version}"}


class Running:
    """A server under measurement."""

    def __init__(self, setting: Setting, child: Child, log: Path) -> None:
        self._log = log
        self.setting = setting
        self.child = child
        listen = f"ipc://{setting.folder}/s.sock"
        wait_for_slots(child, listen, 3, log)
        self.admin = AdminAddress(host=HOST, port=self._port("admin port ready"), token=None)
        self.addresses = Addresses(listen, self._port("http ready"), self._port("grpc ready"))

    def _port(self, event: str) -> int:
        give_up_at = time.monotonic() + LOG_S
        while time.monotonic() < give_up_at:
            for line in self._log.read_text(errors="replace").splitlines():
                told = json.loads(line) if f'"{event}"' in line and line.startswith("{") else {}
                if told.get("event") == event:
                    return int(told["address"].rpartition(":")[2])
            time.sleep(0.05)
        raise RuntimeError(f"no {event!r}:\n{self._log.read_text(errors='replace')[-4000:]}")

    def reload(self, kind: Kind) -> None:
        """Reload; raises AssertionError for another result than expected."""
        self.setting.write(kind)
        found = reload_server(self.admin, "changes", timeout_s=LOG_S)
        if found["state"] != kind.result:
            raise AssertionError(f"{kind.name}: {found['state']} instead of {kind.result}: {found}")


@contextmanager
def serving(folder: Path) -> Iterator[Running]:
    """A server that may be reloaded."""
    setting, log = Setting(folder), folder / "server.log"
    arguments = ["-m", "shapestream_workers", "serve", str(setting.path)]
    with child_process(arguments, log=log, environment={"PYTHONPATH": str(folder)}) as child:
        yield Running(setting, child, log)


def start_beside(setting: Setting, kind: Kind) -> None:
    """Start as many processes as a reload of this kind does, one after the other; they load its models and end."""
    setting.write(kind)
    path = str(setting.path)
    command = [sys.executable, "-P", "-m", "shapestream_workers", "check", path, "--any-function"]
    for _ in range(kind.starts):
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                command, cwd=setting.folder, capture_output=True, check=False, timeout=kind.reload_s
            )


def _period(do: Callable[[Kind], None], kind: Kind) -> tuple[float, float]:
    """Do this, wait, and return the begin and the end."""
    begin = time.monotonic()
    do(kind)
    time.sleep(max(QUIET_S, LEAST_S - (time.monotonic() - begin)))
    return begin, time.monotonic()


def measure(folder: Path, *, kinds: Sequence[Kind], rounds: int, problems: list[str]) -> Iterator[Report]:
    """Reload in each of these ways, so often, in turns, with a control before each; append what went wrong."""
    controls: Periods = {kind.name: [] for kind in kinds}
    reloads: Periods = {kind.name: [] for kind in kinds}
    control = Setting(folder / "beside")
    with serving(folder / "served") as running:
        setting = running.setting
        clients = Clients(setting.allowed())
        known = clients_of(running.addresses)
        with clients.asking({name: client for name, client in known.items() if client is not None}):
            time.sleep(QUIET_S)  # they connect
            for _ in range(rounds):
                for kind in kinds:
                    controls[kind.name].append(_period(lambda one: start_beside(control, one), kind))
                    if kind.code:
                        clients.allowed[setting.added + 1] = f"v{setting.version + kind.version}"
                    reloads[kind.name].append(_period(running.reload, kind))
                    clients.allowed = setting.allowed()
    yield _by_kind(clients, kinds, controls, reloads)
    yield _by_client(clients, [name for name, client in known.items() if client is None])
    yield _of_deadlines(clients, controls, reloads)
    for name, seen in clients.seen.items():
        problems += [f"{name}: {problem}" for problem in (seen.wrong + seen.failed)[:5]]
        problems += [f"{name}: {seen.lost} lost"] if seen.lost else []


def _by_kind(clients: Clients, kinds: Sequence[Kind], controls: Periods, reloads: Periods) -> Report:
    rounds, broken = len(reloads[kinds[0].name]), sum(kind.result != "ok" for kind in kinds)
    report = Report(
        title=f"{rounds * len(kinds)} reloads, {rounds * broken} of them broken, "
        f"{len(clients.seen) * PER_S:.0f} requests/s by {len(clients.seen)} clients",
        columns=("reload", "result", "s", "p99", "control's p99", "ratio"),
    )
    for kind in kinds:
        during = [clients.p99(*period) for period in reloads[kind.name]]
        beside = [clients.p99(*period) for period in controls[kind.name]]
        ratios = [one / other for one, other in zip(during, beside, strict=True)]
        report.rows.append(
            (
                kind.name,
                kind.result,
                Figure(statistics.median(end - begin for begin, end in reloads[kind.name]), "s"),
                Figure(1e3 * statistics.median(during), "ms"),
                Figure(1e3 * statistics.median(beside), "ms"),
                Figure(statistics.median(ratios), "x", at_most=AIM_P99),
            )
        )
    return report


def _by_client(clients: Clients, missing: Sequence[str]) -> Report:
    report = Report(
        title="By client; each answer is compared",
        columns=("client", "answers", "wrong", "failed", "lost", "late"),
    )
    for name, seen in clients.seen.items():
        bad = [Figure(found, "", at_most=0) for found in (len(seen.wrong), len(seen.failed), seen.lost)]
        report.rows.append((name, Figure(len(seen.waits), ""), *bad, Figure(len(seen.late), "")))
    report.rows += [(name, "not run", "", "", "", "") for name in missing]
    return report


def _of_deadlines(clients: Clients, controls: Periods, reloads: Periods) -> Report:
    report = Report(
        title=f"Deadlines of {DEADLINE_S:g} s",
        columns=("during", "requests", "missed", "of 10,000, above controls"),
    )
    shares = []
    for name, periods in (("controls", controls), ("reloads", reloads)):
        counts = [clients.missed(*period) for of_kind in periods.values() for period in of_kind]
        late, answered = (sum(column) for column in zip(*counts, strict=True))
        shares.append(1e4 * late / max(1, late + answered))
        above = Figure(shares[-1] - shares[0], "", at_most=AIM_LATE if len(shares) > 1 else None)
        report.rows.append((name, Figure(late + answered, ""), Figure(late, ""), above))
    return report


MEMORY = ("Pss", "Pss_Anon")
"""Lines of `smaps_rollup`: the proportional set size, and its anonymous part, which other programs do not move."""


def memory_kb(pid: int) -> list[float]:
    """Return these of a process, in KiB."""
    told = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return [float(re.search(rf"^{line}: +(\d+)", told, re.M)[1]) for line in MEMORY]  # type: ignore[index]  # each has it


def slopes(folder: Path, *, reloads: int) -> Iterator[Report]:
    """Growth by reload of the server and its gateways, the first quarter left out, and the same without reloads.

    Also the kilobytes of the heap that a lone request touches, before and after.
    """
    report = Report(
        title=f"Memory over {reloads} reloads, KiB by reload",
        columns=("process", "with reloads", "without", "growth", "anonymous"),
    )
    with (
        without_huge_pages(),
        serving(folder) as running,
        blocking.connect(running.addresses.listen) as client,
    ):
        server = psutil.Process(running.child.pid)
        gateways = [one for one in server.children() if "gateway" in one.cmdline()]
        pids = {"server": server.pid, **{f"gateway {n}": one.pid for n, one in enumerate(gateways, 1)}}
        row = {"x": np.ones((1, 8), np.float32)}
        way = Way(name="", child=running.child, ask=lambda: _ask(client, row), huge=False)
        before = [_pages_kb(way) for _ in range(PAGE_COUNTS)]
        began = time.monotonic()
        samples = _sampled(pids, reloads, lambda number: running.reload(SLOPED[number % len(SLOPED)]))
        pause_s = (time.monotonic() - began) / reloads / 4
        after = [_pages_kb(way) for _ in range(PAGE_COUNTS)]
        still = _sampled(pids, reloads, lambda _: time.sleep(pause_s))
        for name in pids:
            grown, alone = (_slopes(found[name][reloads // 4 :]) for found in (samples, still))
            growth = [
                Figure(one - other, "", at_most=AIM_SLOPE_KB) for one, other in zip(grown, alone, strict=True)
            ]
            report.rows.append((name, f"{grown[0]:.1f}", f"{alone[0]:.1f}", *growth))
    yield report
    yield _of_pages(before, after)


def _sampled(pids: dict[str, int], times: int, do: Callable[[int], None]) -> dict[str, list[list[float]]]:
    """Do this so often, and return the memory of each process after each time."""
    samples: dict[str, list[list[float]]] = {name: [] for name in pids}
    for number in range(times):
        do(number)
        for name, pid in pids.items():
            samples[name].append(memory_kb(pid))
    return samples


def _ask(client: blocking.Client, row: dict[str, Any]) -> None:
    client.infer(CHANGED, row)


def _pages_kb(way: Way) -> float:
    count_pages(way)
    return float(way.touched[ANONYMOUS])


def _of_pages(before: Sequence[float], after: Sequence[float]) -> Report:
    report = Report(
        title="kB of the heap that a lone request touches",
        columns=("first", "spread", "last", "growth in spreads"),
    )
    first, last = statistics.median(before), statistics.median(after)
    spread = max(before) - min(before)
    in_spreads = (last - first) / max(spread, PAGE_KB)
    cells = (Figure(first, ""), Figure(spread, ""), Figure(last, ""))
    report.rows.append((str(cells[0]), *cells[1:], Figure(in_spreads, "", at_most=AIM_SPREADS)))
    return report


def _slopes(samples: Sequence[Sequence[float]]) -> list[float]:
    return [float(one) for one in np.polyfit(np.arange(len(samples)), np.array(samples), 1)[0]]


def main(
    smoke: Annotated[
        bool, typer.Option(help="One round of six kinds, in less than a minute: answers are compared.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all kinds; medians are printed.")] = 5,
    slope: Annotated[
        int | None,
        typer.Option(min=12, metavar="RELOADS", help="Measure memory over so many reloads instead."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure what clients notice of reloads, or what reloads leave in memory."""
    problems: list[str] = []

    def run(folder: Path) -> Iterator[Report]:
        if slope is not None:
            return slopes(folder, reloads=slope)
        kinds, times = (SMOKE, 1) if smoke else (KINDS, rounds)
        return measure(folder, kinds=kinds, rounds=times, problems=problems)

    print_reports(run, as_json=as_json)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
