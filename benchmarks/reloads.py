"""`python -m benchmarks.reloads`: what do clients notice of reloads? Each answer is compared, and so are the waits.

Three clients ask a server all the while, each by so many requests per second: one that does nothing but the protocol, the
SDK with deadlines of a second, and one over HTTP. They ask a model that reloads change, and a model that no reload touches.
The first adds a number to its input, by which an answer tells its version. Reloads change its version, its delay of batches
and its signature, or break: the file is missing or damaged, rows depend on each other, the process dies at its start, or
hangs there.

Rounds alternate: a reload, and a control in which the same processes start beside the server, by `shapestream check`, and
nothing is reloaded. The table has the ratio of the p99 of the two, for each kind of reload. A wrong answer is an error at
once, and so is a failed one. `--slope RELOADS` measures memory instead: the PSS of the server and of its gateway by reload,
less that of the same time without reloads.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import psutil
import typer

from benchmarks.processes import Child, child_process, wait_for_slots
from benchmarks.raw_client import RawClient
from benchmarks.report import Figure, Report, print_reports
from shapestream import DeadlineExceeded, blocking
from shapestream.wire.messages import Failure, ResultEntry
from shapestream_engine.layout import Tensors
from shapestream_workers.reload import AdminAddress, reload_server

PER_S = 33.0
"""Requests per second of each client."""
DEADLINE_S = 1.0
RELOAD_S = 5.0
"""`server.reload_s`, where a process does not come up."""
PATIENT_S = 120.0
"""`server.reload_s`, where it does."""
AIM_P99 = 3.0
"""p99 during a reload / p99 while the same processes start beside the server."""
QUIET_S = 0.5
LOG_S = 30.0
"""Seconds to wait for a line of the log, after the slots are there."""
AIM_SLOPE_KB = 20.0
"""Growth of a process with each reload, above that of the same time without."""
HOST = "127.0.0.1"

CHANGED = """\
import numpy as np

ADDED = {version}


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
    result: str
    function: str = "changed_model:plus"
    more: str = "trust: true"
    bound: int = 64
    path: str = ""
    reload_s: float = PATIENT_S


KINDS = (
    Kind("another version", "ok"),
    Kind("batching alone", "ok", more="trust: true, batching: {max_delay_ms: 1}"),
    Kind("another signature", "ok", bound=96),
    Kind("a missing file", "refused", path="missing.onnx"),
    Kind("a damaged file", "incomplete", path="damaged.onnx"),
    Kind("a refuted proof", "incomplete", function="changed_model:centred", more="batching: {max_batch: 8}"),
    Kind("a process that dies", "incomplete", function="dies_at_start:f", reload_s=RELOAD_S),
    Kind("a process that hangs", "incomplete", function="hangs_at_start:f", reload_s=RELOAD_S),
)
SMOKE = (KINDS[0], KINDS[1], KINDS[2], KINDS[3], KINDS[5])


class Setting:
    """A server's YAML and the functions that it serves, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "server.yaml"
        self.version = 1
        for name, text in FILES.items():
            (folder / f"{name}.py").write_text(text)
        (folder / "damaged.onnx").write_bytes(bytes(100))
        self.write(KINDS[0])

    def write(self, kind: Kind) -> None:
        """Write the YAML as a reload of this kind reads it."""
        (self.folder / "changed_model.py").write_text(CHANGED.format(version=self.version))
        ports = (
            f'inputs: {{x: {{shape: "batch:1..8, n:1..{kind.bound}", element_type: f32}}}}, '
            'outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}'
        )
        source = f"path: {kind.path}" if kind.path else f'function: "{kind.function}", {ports}'
        beside = f'function: "never_changes:same", {ports}'.replace(f"n:1..{kind.bound}", "n:1..64")
        self.path.write_text(
            f"server: {{listen: [ipc://s.sock], admin: {HOST}:0, http: {HOST}:0, reload_s: {kind.reload_s:g}}}\n"
            "models:\n"
            f"  - {{name: changed, {source}, calibration_s: 0, {kind.more}}}\n"
            f"  - {{name: beside, {beside}, calibration_s: 0, trust: true}}\n"
            "workers:\n"
            "  - {models: [changed], count: 2, slots: 1, threads: 1}\n"
            "  - {models: [beside], slots: 1, threads: 1}\n"
        )


@dataclass(slots=True)
class Seen:
    """The answers and failures that the clients have seen so far."""

    waits: list[tuple[float, float]] = field(default_factory=list)
    """Time of sending, and seconds to the answer, of requests for either model."""
    late: list[float] = field(default_factory=list)
    """Times of sending of requests that missed their deadlines."""
    answered: int = 0
    problem: str | None = None
    allowed: frozenset[int] = frozenset({1})
    """The versions that may answer now."""

    def answer(self, sent_at: float, value: float, answer: Sequence[float], *, changed: bool) -> None:
        """Compare an answer, and note its wait."""
        self.waits.append((sent_at, time.monotonic() - sent_at))
        self.answered += 1
        versions = self.allowed if changed else {0}
        if not any(list(answer) == [value + version] for version in versions):
            self.problem = f"{list(answer)} for {value}, where versions {sorted(versions)} may answer"

    def p99(self, begin: float, end: float) -> float:
        """The p99 of what was sent in this time, in seconds."""
        found = sorted(wait for at, wait in self.waits if begin <= at < end)
        return found[math.ceil(0.99 * len(found)) - 1] if found else math.nan

    def missed(self, begin: float, end: float) -> int:
        """Deadlines missed of what was sent in this time."""
        return sum(begin <= at < end for at in self.late)


def requests(over: threading.Event) -> Iterator[tuple[float, bool]]:
    """A value for each request, and whether the model that changes is asked: in turns, until the end."""
    number, due = 0, time.monotonic()
    while not over.is_set():
        yield float(number % 1000), number % 2 == 0
        number += 1
        due = max(due + 1.0 / PER_S, time.monotonic() - 1.0)
        over.wait(max(0.0, due - time.monotonic()))


def ask_by_sdk(address: str, seen: Seen, over: threading.Event) -> None:
    """Requests of the blocking client, one after the other."""
    with blocking.connect(address) as client:
        for value, changed in requests(over):
            sent_at = time.monotonic()
            inputs = {"x": np.array([[value]], np.float32)}
            try:
                result = client.infer("changed" if changed else "beside", inputs, deadline=DEADLINE_S)
            except DeadlineExceeded:
                seen.late.append(sent_at)
                continue
            seen.answer(sent_at, value, result["y"][0].tolist(), changed=changed)


def ask_by_protocol(address: str, seen: Seen, over: threading.Event) -> None:
    """Requests of a client that knows no notices, and opened its models once."""
    with RawClient(address, "changed") as changing, RawClient(address, "beside") as still:
        for value, changed in requests(over):
            client = changing if changed else still
            sent_at, payload = time.monotonic(), np.array([[value]], np.float32).tobytes()
            sequence = client.ask(Tensors(layout=((0, "f32", (1, 1)),), buffers=(payload,)))
            (answer,) = _answers(client, sequence)
            (still if changed else changing).beat()
            if isinstance(answer, Failure):
                raise AssertionError(f"{answer.code}: {answer.message}")
            outputs = np.frombuffer(answer.tensors.buffers[0], np.float32).tolist()
            seen.answer(sent_at, value, outputs, changed=changed)


def _answers(client: RawClient, sequence: int) -> list[ResultEntry | Failure]:
    while True:
        client.socket.poll()
        found = [
            entry
            for entry in client.take()
            if isinstance(entry, ResultEntry | Failure) and entry.sequence == sequence
        ]
        if found:
            return found


def ask_over_http(port: int, seen: Seen, over: threading.Event) -> None:
    """Requests over one connection, which is made anew where a gateway that is replaced has ended it."""
    connection = http.client.HTTPConnection(HOST, port, timeout=60.0)
    for value, changed in requests(over):
        name = "changed" if changed else "beside"
        inputs = [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}]
        sent_at = time.monotonic()
        connection.request("POST", f"/v2/models/{name}/infer", json.dumps({"inputs": inputs}))
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise AssertionError(f"HTTP {response.status}: {body[:300]!r}")
        seen.answer(sent_at, value, json.loads(body)["outputs"][0]["data"], changed=changed)
    connection.close()


@contextmanager
def asking(asks: Sequence[Callable[[Seen, threading.Event], None]]) -> Iterator[Seen]:
    """Clients that ask until the block ends; the first error of one is raised at its end, or by `checked`."""
    seen, over = Seen(), threading.Event()

    def run(ask: Callable[[Seen, threading.Event], None]) -> None:
        try:
            ask(seen, over)
        except Exception as error:  # noqa: BLE001 - told by the main thread
            seen.problem = seen.problem or f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=(ask,)) for ask in asks]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        over.set()
        for thread in threads:
            thread.join()
    checked(seen)


def checked(seen: Seen) -> None:
    """Raise AssertionError for what a client has found wrong."""
    if seen.problem is not None:
        raise AssertionError(seen.problem)


class Running:
    """A server under measurement."""

    def __init__(self, setting: Setting, child: Child, log: Path) -> None:
        self._setting = setting
        self._log = log
        self.child = child
        self.address = f"ipc://{setting.folder}/s.sock"
        wait_for_slots(child, self.address, 3, log)
        self.admin = self._port("admin port ready")
        self.http = self._port("http ready")

    def _port(self, event: str) -> int:
        give_up_at = time.monotonic() + LOG_S
        while time.monotonic() < give_up_at:
            for line in self._log.read_text(errors="replace").splitlines():
                told = json.loads(line) if f'"{event}"' in line and line.startswith("{") else {}
                if told.get("event") == event:
                    return int(told["address"].rpartition(":")[2])
            time.sleep(0.05)
        raise RuntimeError(f"no {event!r}:\n{self._log.read_text(errors='replace')[-4000:]}")

    def reload(self, kind: Kind) -> dict[str, Any]:
        """Reload, and return the result; raises AssertionError for another one than expected."""
        self._setting.write(kind)
        admin = AdminAddress(host=HOST, port=self.admin, token=None)
        found = reload_server(admin, "changes", timeout_s=LOG_S)
        if found["state"] != kind.result:
            raise AssertionError(f"{kind.name}: {found['state']} instead of {kind.result}: {found}")
        return found


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Setting, Running]]:
    """A server that may be reloaded."""
    setting, log = Setting(folder), folder / "server.log"
    arguments = ["-m", "shapestream_workers", "serve", str(setting.path)]
    with child_process(arguments, log=log, environment={"PYTHONPATH": str(folder)}) as child:
        yield setting, Running(setting, child, log)


def started_beside(setting: Setting) -> None:
    """Start a process that loads the same models, twice, as a reload starts two workers."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "shapestream_workers",
        "check",
        str(setting.path),
        "--any-function",
    ]
    for _ in range(2):
        subprocess.run(command, cwd=setting.folder, capture_output=True, check=False)


def measure(folder: Path, *, kinds: Sequence[Kind], rounds: int) -> Iterator[Report]:
    """Reload in each of these ways, so often, with a control before each."""
    report = Report(
        title=f"Reloads, {3 * PER_S:.0f} requests/s by three clients, each answer compared",
        columns=("reload", "result", "s", "p99", "p99 / control", "late / control"),
    )
    with serving(folder) as (setting, running):
        asks: list[Callable[[Seen, threading.Event], None]] = [
            lambda seen, over: ask_by_sdk(running.address, seen, over),
            lambda seen, over: ask_by_protocol(running.address, seen, over),
            lambda seen, over: ask_over_http(running.http, seen, over),
        ]
        with asking(asks) as seen:
            for kind in kinds:
                ratios, p99s, seconds, late = [], [], [], [0, 0]
                for _ in range(rounds):
                    begin = time.monotonic()
                    started_beside(setting)
                    time.sleep(QUIET_S)
                    between = time.monotonic()
                    before = setting.version
                    if kind.result == "ok" and kind is not KINDS[1]:
                        setting.version += 1
                        seen.allowed = frozenset({before, setting.version})
                    running.reload(kind)
                    time.sleep(QUIET_S)
                    checked(seen)
                    end = time.monotonic()
                    seen.allowed = frozenset({setting.version})
                    time.sleep(QUIET_S)
                    checked(seen)
                    seconds.append(end - between - QUIET_S)
                    p99s.append(seen.p99(between, end))
                    ratios.append(p99s[-1] / seen.p99(begin, between))
                    late[0] += seen.missed(between, end)
                    late[1] += seen.missed(begin, between)
                row = (
                    kind.name,
                    kind.result,
                    Figure(statistics.median(seconds), "s"),
                    Figure(1e3 * statistics.median(p99s), "ms"),
                    Figure(statistics.median(ratios), "x", at_most=AIM_P99),
                    f"{late[0]} / {late[1]}",
                )
                report.rows.append(row)
            report.title += f": {seen.answered:,} answers, 0 wrong, 0 failed"
    yield report


def pss_kb(pid: int) -> float:
    """The proportional set size of a process, in KiB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return float(re.search(r"^Pss: +(\d+)", text, re.M)[1])  # type: ignore[index]  # each has it


def slopes(folder: Path, *, reloads: int) -> Iterator[Report]:
    """Growth by reload of the server and its gateway, the first quarter left out, and the same without reloads."""
    report = Report(
        title=f"Memory over {reloads} reloads", columns=("process", "by reload", "without", "growth")
    )
    with serving(folder) as (setting, running):
        server = psutil.Process(running.child.pid)
        gateway = next(one for one in server.children() if "gateway" in one.cmdline())
        found: dict[str, dict[str, list[float]]] = {}
        took_s = 0.0
        for mode in ("by reload", "without"):
            samples = found[mode] = {"server": [], "gateway": []}
            for number in range(reloads):
                began = time.monotonic()
                if mode == "by reload":
                    setting.version += 1
                    running.reload(KINDS[2 * (number % 2)])
                    took_s += (time.monotonic() - began) / reloads
                else:
                    time.sleep(took_s / 4)
                samples["server"].append(pss_kb(server.pid))
                samples["gateway"].append(pss_kb(gateway.pid))
        for process in ("server", "gateway"):
            grown = [_slope(found[mode][process][reloads // 4 :]) for mode in ("by reload", "without")]
            texts = [f"{one:.1f} KiB" for one in grown]
            report.rows.append((process, *texts, Figure(grown[0] - grown[1], "", at_most=AIM_SLOPE_KB)))
    yield report


def _slope(values: Sequence[float]) -> float:
    return float(np.polyfit(np.arange(len(values)), values, 1)[0])


def main(
    smoke: Annotated[
        bool, typer.Option(help="One round of five kinds, in less than a minute: answers are compared.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each kind; medians are printed.")] = 5,
    slope: Annotated[
        int | None,
        typer.Option(min=12, metavar="RELOADS", help="Measure memory over so many reloads instead."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure what clients notice of reloads, or what a reload leaves in memory."""

    def run(folder: Path) -> Iterator[Report]:
        if slope is not None:
            return slopes(folder, reloads=slope)
        return measure(folder, kinds=SMOKE if smoke else KINDS, rounds=1 if smoke else rounds)

    print_reports(run, as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
