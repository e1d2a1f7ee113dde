"""`python -m benchmarks.growth`: what a request costs the server's event loop, by the numbers of clients and of workers.

Each cell of the table has so many sessions and so many workers; the load is the same in all cells. Closed loop: eight
requests are in flight, of one client after another. Open loop: requests come at random times, two hundred per second.
Idle: heartbeats alone. Clients are raw sessions in this process. Workers are the product's own, one slot and one process
each, forked from one process that has imported everything. Their model is an identity without batching, so that a
request costs the same work in each cell. Every answer is compared.

CPU is user + system time of the server, less its idle use. The loop is its main thread; the rest is libzmq's.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import zmq
from rich.console import Console

from benchmarks.models import TINY, TINY_WIDTH
from benchmarks.processes import Child, child_process, wait_for_slots
from benchmarks.raw_client import TIMEOUT_MS, RawClient
from benchmarks.report import Figure, Report
from shapestream.wire.messages import Failure, ResultEntry
from shapestream_engine.layout import Tensors
from shapestream_workers import cli, worker_process
from shapestream_workers.process import end_with_parent

CLIENTS = (1, 10, 100, 1000)
WORKERS = (1, 8, 64)
SMOKE_CLIENTS, SMOKE_WORKERS = (1, 20), (1, 3)
IN_FLIGHT = 8
PER_S = 200.0
"""The rate of the open loop: a fifth of what one client and one worker can do on two shared cores."""
HEARTBEAT_S = 1.0
"""The server's default, which its `Welcome` asks of each client."""
LAYOUT = ((0, "f32", (1, TINY_WIDTH)),)


# ------------------------------------------------------------ the servers


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """A server, and where it listens."""

    workers: int
    address: str
    server: Child

    def loop_s(self) -> float:
        """User + system time of the server's main thread, in seconds, in steps of a clock tick."""
        pid = self.server.pid
        line = Path(f"/proc/{pid}/task/{pid}/stat").read_text(encoding="ascii")
        user, system = line.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _house(folder: Path, workers: int) -> Iterator[House]:
    label = f"growth-{workers}"
    address = f"ipc://{folder}/{label}.sock"
    common = (
        f"server: {{listen: ['{address}'], worker_listen: 'ipc://{folder}/{label}-w.sock', max_clients: 2048}}\n"
        f"models:\n  - {{name: {TINY}, engine: function, function: benchmarks.models:identity, trust: true,\n"
        f"     calibration_s: 0.2, batching: {{max_batch: 1}},\n"
        f"     inputs: {{x: {{shape: 'batch:1..64, {TINY_WIDTH}', element_type: f32}}}},\n"
        f"     outputs: {{y: {{shape: 'batch:1..64, {TINY_WIDTH}', element_type: f32, rule: rows}}}}}}\n"
        "logging: {level: warning}\n"
    )
    path, theirs = folder / f"{label}.yaml", folder / f"{label}-w.yaml"
    path.write_text(f"{common}workers: []\n")
    theirs.write_text(f"{common}workers: [{{models: [{TINY}], slots: 1, threads: 1}}]\n")
    log = folder / f"{label}-w.log"
    command = ["-m", "shapestream_workers", "serve", str(path)]
    with child_process(command, log=folder / f"{label}.log") as server:
        arguments = ["-m", "benchmarks.growth", "workers", str(theirs), str(workers)]
        with child_process(arguments, log=log):
            wait_for_slots(server, address, workers, log)
            yield House(workers=workers, address=address, server=server)


def _run_workers(path: Path, count: int) -> None:
    """Run workers in processes of their own until told to end: a fork costs a hundredth of a start."""
    reader, writer = os.pipe()  # it ends with this process, and the workers with it
    for number in range(count):
        if os.fork() == 0:
            os.close(writer)
            end_with_parent(reader)
            cli.app(["worker", str(path), "--name", f"worker-{number}"])
    signal.pause()


# ------------------------------------------------------------ the clients


class Sessions:
    """So many sessions of one server, each heard once per heartbeat interval."""

    def __init__(self, stack: ExitStack, address: str, count: int) -> None:
        self._clients = [stack.enter_context(RawClient(address, TINY)) for _ in range(count)]
        self._beats = 0
        self._began = time.perf_counter()
        self._waiting: dict[RawClient, dict[int, bytes]] = {}
        """The clients that are owed answers, with these by sequence number."""
        self._sent = 0

    def idle(self, seconds: float) -> None:
        """Beat, and nothing else."""
        until = time.perf_counter() + seconds
        while (left := until - time.perf_counter()) > 0.0:
            self._beat()
            time.sleep(min(left, self._until_beat()))

    def closed(self, payloads: Sequence[bytes]) -> None:
        """Send all of them, with `IN_FLIGHT` unanswered, each by the next client."""
        received = sent = 0
        while received < len(payloads):
            while sent < len(payloads) and sent - received < IN_FLIGHT:
                self._ask(payloads[sent])
                sent += 1
            received += self._take(TIMEOUT_MS)

    def open(self, payloads: Sequence[bytes], times: Sequence[float]) -> None:
        """Send each of them at its time in seconds from now, by the next client, and wait for the answers."""
        received = sent = 0
        began = time.perf_counter()
        while received < len(payloads):
            ahead_s = 1.0 if sent == len(payloads) else began + times[sent] - time.perf_counter()
            if ahead_s <= 0.0:
                self._ask(payloads[sent])
                sent += 1
            elif self._waiting:
                received += self._take(ahead_s * 1e3)
            else:
                self._beat()
                time.sleep(min(ahead_s, self._until_beat()))

    def _ask(self, payload: bytes) -> None:
        client = self._clients[self._sent % len(self._clients)]
        self._sent += 1
        self._waiting.setdefault(client, {})[client.ask(_tensors(payload))] = payload

    def _take(self, timeout_ms: float) -> int:
        """Answers that came; waits for some."""
        self._beat()
        zmq.zmq_poll([(client.socket, zmq.POLLIN) for client in self._waiting], int(timeout_ms))
        received = 0
        for client, owed in list(self._waiting.items()):
            for entry in client.take():
                if type(entry) is ResultEntry:
                    if entry.tensors.buffers[0] != owed.pop(entry.sequence):
                        raise AssertionError("an answer differs")
                    received += 1
                elif type(entry) is Failure:
                    raise AssertionError(f"the server refused: {entry}")
            if not owed:
                del self._waiting[client]
        return received

    def _until_beat(self) -> float:
        """Seconds until the next is due: clients do not beat in step, and each heartbeat may wake the server."""
        due = self._began + self._beats * HEARTBEAT_S / len(self._clients)
        return max(0.0, due - time.perf_counter())

    def _beat(self) -> None:
        """Beat for those whose turn has come, and read what the server told them."""
        due = (time.perf_counter() - self._began) / HEARTBEAT_S * len(self._clients)
        while self._beats < due:
            client = self._clients[self._beats % len(self._clients)]
            self._beats += 1
            client.beat()
            if client not in self._waiting and any(type(entry) is ResultEntry for entry in client.take()):
                raise AssertionError("an answer that nobody waits for")


# ------------------------------------------------------------ the cells


@dataclass(slots=True, kw_only=True)
class Cell:
    """One number of clients at one server; a figure per round."""

    house: House
    clients: int
    closed_us: list[float] = field(default_factory=list)
    """CPU of the server per request in the closed loop."""
    loop_us: list[float] = field(default_factory=list)
    """CPU of its main thread per request in the closed loop."""
    open_us: list[float] = field(default_factory=list)
    idle_ms: list[float] = field(default_factory=list)
    """CPU of the server per second without requests, in milliseconds."""

    def measure(self, *, requests: int, seconds: float, seed: int) -> None:
        """One round."""
        draw = random.Random(seed)
        times = list(accumulate(draw.expovariate(PER_S) for _ in range(round(seconds * PER_S))))
        with ExitStack() as stack:
            sessions = Sessions(stack, self.house.address, self.clients)
            sessions.closed(_payloads(max(64, requests // 8)))
            idle = self._used(lambda: sessions.idle(seconds))
            closed = self._used(lambda: sessions.closed(_payloads(requests)))
            opened = self._used(lambda: sessions.open(_payloads(len(times)), times))
        self.idle_ms.append(1e3 * idle.cpu_s / idle.wall_s)
        self.closed_us.append(1e6 * (closed.cpu_s - idle.cpu_s / idle.wall_s * closed.wall_s) / requests)
        self.loop_us.append(1e6 * (closed.loop_s - idle.loop_s / idle.wall_s * closed.wall_s) / requests)
        self.open_us.append(1e6 * (opened.cpu_s - idle.cpu_s / idle.wall_s * opened.wall_s) / len(times))

    def _used(self, work: Callable[[], None]) -> _Used:
        before, loop_before, began = self.house.server.cpu_s(), self.house.loop_s(), time.perf_counter()
        work()
        return _Used(
            cpu_s=self.house.server.cpu_s() - before,
            loop_s=self.house.loop_s() - loop_before,
            wall_s=time.perf_counter() - began,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Used:
    """The server's use of CPU in some time."""

    cpu_s: float
    loop_s: float
    wall_s: float


def _tensors(payload: bytes) -> Tensors:
    return Tensors(layout=LAYOUT, buffers=(payload,))


def _payloads(count: int) -> list[bytes]:
    table = np.arange(count * TINY_WIDTH, dtype=np.float32).reshape(count, TINY_WIDTH)
    return [row.tobytes() for row in table]


def measure(
    folder: Path,
    *,
    clients: Sequence[int],
    workers: Sequence[int],
    requests: int,
    seconds: float,
    rounds: int,
) -> Report:
    """Measure all cells in turns; `requests` per closed loop, `seconds` per open loop and idle stretch."""
    with ExitStack() as stack:
        houses = [stack.enter_context(_house(folder, count)) for count in workers]
        cells = [Cell(house=house, clients=count) for house in houses for count in clients]
        for number in range(rounds):
            for cell in cells:
                cell.measure(requests=requests, seconds=seconds, seed=number)
    return _report(cells)


def _report(cells: Sequence[Cell]) -> Report:
    report = Report(
        title=f"The server's CPU by clients and workers; {IN_FLIGHT} in flight, or {PER_S:g} per second"
    )
    report.columns = (
        "workers, clients",
        "loop us",
        "server us",
        "server / 1 client",
        "open us",
        "open / 1 client",
        "idle ms/s",
    )
    for cell in cells:
        first = next(other for other in cells if other.house is cell.house)
        report.rows.append(
            (
                f"{cell.house.workers}, {cell.clients}",
                Figure(statistics.median(cell.loop_us), "us"),
                Figure(statistics.median(cell.closed_us), "us"),
                Figure(_ratio(cell.closed_us, first.closed_us), "x"),
                Figure(statistics.median(cell.open_us), "us"),
                Figure(_ratio(cell.open_us, first.open_us), "x"),
                Figure(statistics.median(cell.idle_ms), "ms"),
            )
        )
    return report


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(mine, theirs, strict=True))


assert worker_process  # imported before the forks
app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all cells; medians are printed.")] = 3,
) -> None:
    """Measure how the server's CPU per request grows with clients and workers."""
    if context.invoked_subcommand is not None:
        return
    # A session takes three descriptors here and one in the server.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    zmq.Context.instance().set(zmq.MAX_SOCKETS, 2 * max(CLIENTS))
    console = Console(stderr=as_json)
    with tempfile.TemporaryDirectory(prefix="ss-growth-") as name:
        report = measure(
            Path(name),
            clients=SMOKE_CLIENTS if smoke else CLIENTS,
            workers=SMOKE_WORKERS if smoke else WORKERS,
            requests=100 if smoke else 1000,
            seconds=0.5 if smoke else 2.0,
            rounds=1 if smoke else rounds,
        )
    console.print(report.table())
    if as_json:
        print(json.dumps(report.plain(), indent=2))


@app.command(hidden=True)
def workers(path: Path, count: int) -> None:
    """Run the workers of a configuration."""
    _run_workers(path, count)


if __name__ == "__main__":
    app()
