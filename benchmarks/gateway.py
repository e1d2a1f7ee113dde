"""`python -m benchmarks.gateway`: the gateway against bare echoes and the SDK.

All contenders take turns, round by round, and each answer is compared. Requests are binary infers of one row of float32
through an identity in the server's process. CPU is user + system time of a process with all its threads, per request. The
client (`http_client.py`) is one process with one epoll, the same for all; its CPU is not counted, but it shares the cores,
so rates are of the whole machine. With `--peer` mosec answers tiny rows too, as raw bytes (`peer.py`).
"""

from __future__ import annotations

import json
import socket as sockets
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import trio
import typer

import shapestream
import shapestream.blocking
from benchmarks import peer
from benchmarks.binary_infer import PATH, head_of, headers_of
from benchmarks.http_client import HOST, TIMEOUT_S, HttpClient
from benchmarks.processes import Child, child_process, cpu_s, spin
from benchmarks.report import Figure, Report, median_ratio, median_us, print_reports
from shapestream.transport.guards import raise_descriptor_limit

TINY, SMALL, LARGE = 16, 256, 1024 * 1024
"""Elements of a row: 64 bytes, 1 KiB, 4 MiB."""
MODELS = {"tiny": TINY, "small": SMALL, "large": LARGE}
CONNECTIONS = (1, 16)
MANY_CONNECTIONS = 64
IDLE_CONNECTIONS = 1000
# Aims of issue 25.
AIM_GATEWAY = 3.0
AIM_SERVER = 1.15
AIM_PEER = 1.0
AIM_LARGE = 0.6
AIM_IDLE_MB = 50.0
_WARM_UP = 64
_START_S = 120.0
_PROBE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Something that answers at one port."""

    port: int
    path: str
    front: tuple[int, ...]
    """The processes that speak HTTP."""
    server: int | None = None
    """The process of the server behind them."""
    headers: str = ""
    head: bytes = b""
    """Head of each body, before the row."""

    def client(self) -> HttpClient:
        """A client without connections yet."""
        return HttpClient(self.port, self.path, self.headers)


@dataclass(slots=True, kw_only=True)
class Regime:
    """One contender at one number of connections, and what each round measured of it."""

    name: str
    run: Callable[[int], None]
    requests: int
    front: tuple[int, ...] = ()
    server: int | None = None
    messages: Callable[[], int] | None = None
    """Messages that the server has read so far, with the one that asks."""
    front_us: list[float] = field(default_factory=list)
    server_us: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    in_message: list[float] = field(default_factory=list)
    """Requests in a message to the server."""

    def measure(self) -> None:
        """One round."""
        messages_before = 0 if self.messages is None else self.messages()
        before, server_before, started = self._clocks()
        self.run(self.requests)
        after, server_after, ended = self._clocks()
        self.front_us.append((after - before) / self.requests * 1e6)
        self.server_us.append((server_after - server_before) / self.requests * 1e6)
        self.rate.append(self.requests / (ended - started))
        if self.messages is not None:
            self.in_message.append(self.requests / (self.messages() - 1 - messages_before))

    def _clocks(self) -> tuple[float, float, float]:
        front = sum(map(cpu_s, self.front))
        return front, 0.0 if self.server is None else cpu_s(self.server), time.perf_counter()


# ------------------------------------------------------------ the processes


class _House:
    """The processes under measurement, each started once."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder / "gateway"
        self._folder.mkdir()

    def echo(self, loop: str) -> Target:
        """A bare echo of `http_echoes.py`."""
        child, port = self._started(f"echo-{loop}", "benchmarks.http_echoes", loop)
        return Target(port=port, path="/", front=(child.pid,))

    def sdk_by_sockets(self, served: Served) -> Target:
        """The SDK behind the bare HTTP of `http_echoes.py`."""
        child, port = self._started("sdk-by-sockets", "benchmarks.http_echoes", "sdk", behind=served.address)
        return Target(port=port, path="/", front=(child.pid,), server=served.server)

    def served(self, gateways: int) -> Served:
        """A server of the product with so many gateways."""
        label = f"gateways-{gateways}"
        address = f"ipc://{self._folder}/{label}.sock"
        path, log = self._folder / f"{label}.yaml", self._folder / f"{label}.log"
        path.write_text(
            f"server: {{listen: ['{address}'], http: {{address: '{HOST}:0', count: {gateways}}}}}\n"
            f"models:\n{''.join(map(_model, MODELS))}in_process: true\n"
        )
        child = self._stack.enter_context(
            child_process(["-m", "shapestream_workers", "serve", str(path)], log=log)
        )
        _until(lambda: _said(log, "gateways ready") is not None, child, log)
        said = _said(log, "http ready")
        assert said is not None
        pids = tuple(process.pid for process in psutil.Process(child.pid).children(recursive=True))
        port = int(said["address"].rpartition(":")[2])
        return Served(address=address, port=port, server=child.pid, gateways=pids)

    def _started(self, label: str, module: str, *arguments: str, behind: str = "") -> tuple[Child, int]:
        ready, log = self._folder / f"{label}.port", self._folder / f"{label}.log"
        command = ["-m", module, *arguments, str(ready), *([behind] if behind else [])]
        child = self._stack.enter_context(child_process(command, log=log))
        _until(ready.exists, child, log)
        return child, int(ready.read_text())


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running server with gateways."""

    address: str
    port: int
    server: int
    gateways: tuple[int, ...]

    def target(self, model: str) -> Target:
        """One of its models over HTTP."""
        return _infer_target(self.port, self.gateways, self.server, model)


def _model(name: str) -> str:
    port = f"shape: 'batch:1..64, {MODELS[name]}', element_type: f32"
    alone = ", batching: {max_batch: 1}" if MODELS[name] == LARGE else ""
    return (
        f"  - {{name: {name}, function: 'benchmarks.models:identity', trust: true{alone},\n"
        f"     inputs: {{x: {{{port}}}}}, outputs: {{y: {{{port}, rule: rows}}}}}}\n"
    )


def _infer_target(port: int, front: tuple[int, ...], server: int, model: str) -> Target:
    head = head_of(MODELS[model])
    return Target(
        port=port,
        path=PATH.format(model),
        front=front,
        server=server,
        headers=headers_of(head),
        head=head,
    )


def _said(log: Path, event: str) -> dict[str, Any] | None:
    """The first line of a log with this event."""
    for line in log.read_text(errors="replace").splitlines():
        if f'"{event}"' in line:
            told: dict[str, Any] = json.loads(line)
            return told
    return None


def _until(done: Callable[[], bool], child: Child, log: Path) -> None:
    give_up_at = time.monotonic() + _START_S
    while not done():
        if child.ended or time.monotonic() > give_up_at:
            raise RuntimeError(f"a process did not start:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.05)


# ------------------------------------------------------------ the clients


def _rows(count: int, width: int) -> list[bytes]:
    return [np.full(width, number, np.float32).tobytes() for number in range(count)]


def _http(target: Target, width: int, connections: int) -> Callable[[int], None]:
    """Ask over so many connections; each answer ends in the bytes of its row."""

    def run(count: int) -> None:
        rows = _rows(min(count, 1000), width)
        bodies = [target.head + rows[number % len(rows)] for number in range(count)]
        with target.client() as client:
            for number, answer in client.stream(bodies, connections):
                if not answer.endswith(rows[number % len(rows)]):
                    raise AssertionError("an answer differs")

    return run


def _sdk(address: str, model: str, concurrency: int) -> Callable[[int], None]:
    """Ask by the SDK without its stream: so many tasks, one request after another in each."""
    rows = [np.full((1, MODELS[model]), number, np.float32) for number in range(1000)]

    def run(count: int) -> None:
        async def ask(client: shapestream.Client, first: int) -> None:
            for number in range(first, count, concurrency):
                row = rows[number % len(rows)]
                result = await client.infer(model, {"x": row})
                if result["y"].tobytes() != row.tobytes():
                    raise AssertionError("an answer differs")

        async def main() -> None:
            async with shapestream.connect(address) as client, trio.open_nursery() as nursery:
                for first in range(concurrency):
                    nursery.start_soon(ask, client, first)

        trio.run(main)

    return run


def _large(target: Target) -> Callable[[int], None]:
    """Ask with 4 MiB over one connection, by blocking calls that read into one array."""

    def run(count: int) -> None:
        rows = _rows(2, LARGE)
        head = f"POST {target.path} HTTP/1.1\r\nHost: {HOST}\r\n{target.headers}Content-Length: "
        length = len(target.head) + 4 * LARGE
        start = f"{head}{length}\r\n\r\n".encode() + target.head
        room = bytearray(length + 4096)
        with sockets.create_connection((HOST, target.port), TIMEOUT_S) as connection:
            for number in range(count):
                connection.sendall(start)
                connection.sendall(rows[number % 2])
                whole, received = 0, 0
                while not whole or received < whole:
                    received += connection.recv_into(memoryview(room)[received:])
                    whole = whole or _whole_length(room, received)
                if room[whole - 4 * LARGE : whole] != rows[number % 2]:
                    raise AssertionError("an answer differs")

    return run


def _whole_length(room: bytearray, received: int) -> int:
    """The bytes of an answer with its head, 0 while the head is not there."""
    end = room.find(b"\r\n\r\n", 0, received)
    if end < 0:
        return 0
    lines = bytes(room[:end]).lower().split(b"\r\n")
    if not lines[0].startswith(b"http/1.1 200"):
        raise AssertionError(f"the server answered {bytes(room[:received])!r}")
    (length,) = (int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length"))
    return end + 4 + length


# ------------------------------------------------------------ the tables


def _probe_ms() -> float:
    """Milliseconds that 10 ms of CPU take: more, where the host steals or others work."""
    began = time.perf_counter()
    spin(_PROBE_S)
    return (time.perf_counter() - began) * 1e3


def _play(regimes: Sequence[Regime], rounds: int) -> Report:
    """All regimes in turns; a table of how quiet the cores were."""
    for regime in regimes:
        regime.run(max(2, min(_WARM_UP, regime.requests)))
    probes, before = [], psutil.cpu_times()
    for _ in range(rounds):
        probes.append(_probe_ms())
        for regime in regimes:
            regime.measure()
    report = Report(title="How quiet the cores were", columns=("what", "median", "most"))
    report.rows.append(
        ("10 ms of CPU took", Figure(statistics.median(probes), "ms"), Figure(max(probes), "ms"))
    )
    after = psutil.cpu_times()
    report.rows.append(("stolen by the host, % of all time", f"{_stolen(before, after):.1f}", ""))
    return report


def _stolen(before: Any, after: Any) -> float:
    """Percent of all cores' time between two readings."""
    return float(100 * (after.steal - before.steal) / (sum(after) - sum(before)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much is asked."""

    requests: int
    large: int
    rounds: int
    idle: int


FULL = Amount(requests=2000, large=40, rounds=5, idle=IDLE_CONNECTIONS)
SMOKE = Amount(requests=100, large=3, rounds=1, idle=50)


def measure(folder: Path, *, amount: Amount, with_peer: bool = False) -> list[Report]:
    """Run everything, and report."""
    raise_descriptor_limit()
    with ExitStack() as stack:
        house = _House(stack, folder)
        echoes = {loop: house.echo(loop) for loop in ("trio", "asyncio")}
        one, two = house.served(1), house.served(2)
        asker = stack.enter_context(shapestream.blocking.connect(one.address))
        cpu = _cpu_regimes(echoes, one, house.sdk_by_sockets(one), amount, lambda: _messages(asker))
        rates = _rate_regimes(stack, folder, two, amount, with_peer=with_peer)
        large = [
            Regime(name=name, run=_large(target), requests=amount.large)
            for name, target in (
                ("echo, trio", echoes["trio"]),
                ("echo, asyncio", echoes["asyncio"]),
                ("gateway", one.target("large")),
            )
        ]
        quiet = _play([*(regime for row in cpu for regime in row), *rates, *large], amount.rounds)
        return [
            *(_of_front(row, count) for row, count in zip(cpu, CONNECTIONS, strict=True)),
            *(_of_server(row, count) for row, count in zip(cpu, CONNECTIONS, strict=True)),
            _of_rates(rates),
            _of_large(large),
            _of_idle(one, amount.idle),
            quiet,
        ]


def _messages(client: shapestream.blocking.Client) -> int:
    return int(client.statistics()["messages"])


def _cpu_regimes(
    echoes: dict[str, Target], one: Served, sdk: Target, amount: Amount, messages: Callable[[], int]
) -> list[list[Regime]]:
    target, rows = one.target("small"), []
    for count in CONNECTIONS:
        row = [
            Regime(
                name=f"echo, {loop}",
                run=_http(echo, SMALL, count),
                requests=amount.requests,
                front=echo.front,
            )
            for loop, echo in echoes.items()
        ]
        row.append(
            Regime(
                name="SDK, callers in step",
                run=_sdk(one.address, "small", count),
                requests=amount.requests,
                server=one.server,
                messages=messages,
            )
        )
        row.append(
            Regime(
                name="SDK, by sockets",
                run=_http(sdk, SMALL, count),
                requests=amount.requests,
                front=sdk.front,
                server=one.server,
                messages=messages,
            )
        )
        row.append(
            Regime(
                name="gateway",
                run=_http(target, SMALL, count),
                requests=amount.requests,
                front=target.front,
                server=one.server,
                messages=messages,
            )
        )
        rows.append(row)
    return rows


def _rate_regimes(
    stack: ExitStack, folder: Path, two: Served, amount: Amount, *, with_peer: bool
) -> list[Regime]:
    contenders = {"two gateways": two.target("tiny")}
    if with_peer:
        example = _rows(1, TINY)[0]
        running = stack.enter_context(
            peer.serving(folder / "gateway", None, "rows", workers=1, rows=1, example=example)
        )
        contenders[peer.NAME] = Target(port=running.port, path=peer.PATH, front=running.processes)
    return [
        Regime(
            name=name,
            run=_http(target, TINY, MANY_CONNECTIONS),
            requests=amount.requests,
            front=target.front,
            server=target.server,
        )
        for name, target in contenders.items()
    ]


def _of_front(row: Sequence[Regime], connections: int) -> Report:
    on_trio, on_asyncio, *others = row
    report = Report(title=f"1 KiB, {connections} at a time; us of CPU per request for HTTP")
    report.columns = ("way", "HTTP", "/ echo, trio", "/ echo, asyncio", "per s")
    for regime in row:
        cells: list[str | Figure] = [median_us(regime.front_us) if regime.front else "", "", ""]
        if regime is others[-1]:
            aim = AIM_GATEWAY if connections > 1 else None
            cells[1] = Figure(median_ratio(regime.front_us, on_trio.front_us), "x", at_most=aim)
            cells[2] = Figure(median_ratio(regime.front_us, on_asyncio.front_us), "x")
        report.rows.append((regime.name, *cells, Figure(statistics.median(regime.rate), "/s")))
    return report


def _of_server(row: Sequence[Regime], connections: int) -> Report:
    *_, in_step, by_sockets, gateway = row
    report = Report(title=f"1 KiB, {connections} at a time; us of CPU per request at the server")
    report.columns = ("way", "requests in a message", "server", "gateway / it")
    for regime in (in_step, by_sockets, gateway):
        ratio: str | Figure = ""
        if regime is not gateway:
            aim = AIM_SERVER if regime is by_sockets else None
            ratio = Figure(median_ratio(gateway.server_us, regime.server_us), "x", at_most=aim)
        in_message = Figure(statistics.median(regime.in_message), "x")
        report.rows.append((regime.name, in_message, median_us(regime.server_us), ratio))
    return report


def _of_rates(regimes: Sequence[Regime]) -> Report:
    ours, *others = regimes
    report = Report(title=f"64 bytes over {MANY_CONNECTIONS} connections")
    report.columns = ("way", "per s", "HTTP, us", "server, us", "two gateways / it")
    for regime in regimes:
        ratio: str | Figure = ""
        if regime in others:
            ratio = Figure(median_ratio(ours.rate, regime.rate), "x", at_least=AIM_PEER)
        server = "" if regime.server is None else median_us(regime.server_us)
        rate = Figure(statistics.median(regime.rate), "/s")
        report.rows.append((regime.name, rate, median_us(regime.front_us), server, ratio))
    return report


def _of_large(regimes: Sequence[Regime]) -> Report:
    on_trio, on_asyncio, ours = regimes
    report = Report(title="4 MiB each way, one connection")
    report.columns = ("way", "per s", "rate / it")
    for regime in (on_trio, on_asyncio):
        ratio = Figure(median_ratio(ours.rate, regime.rate), "x", at_least=AIM_LARGE)
        report.rows.append((regime.name, Figure(statistics.median(regime.rate), "/s"), ratio))
    report.rows.append((ours.name, Figure(statistics.median(ours.rate), "/s"), ""))
    return report


def _of_idle(one: Served, count: int) -> Report:
    """Memory of a gateway with connections that have asked once and now do nothing."""
    (gateway,) = one.gateways
    process = psutil.Process(gateway)
    target, row = one.target("small"), _rows(1, SMALL)[0]
    before = process.memory_info().rss
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(target.client())
            if not client.ask_alone(target.head + row).endswith(row):
                raise AssertionError("an answer differs")
        after = process.memory_info().rss
    report = Report(title="Memory of idle connections", columns=("connections", "more resident memory"))
    report.rows.append((f"{count:,}", Figure((after - before) / 1e6, "MB", at_most=AIM_IDLE_MB)))
    return report


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 5,
    with_peer: Annotated[bool, typer.Option("--peer", help=peer.OPTION_HELP)] = False,
) -> None:
    """Measure the gateway against bare echoes and the SDK."""
    if with_peer:
        peer.demand_environment()
    amount = SMOKE if smoke else replace(FULL, rounds=rounds)
    print_reports(lambda folder: measure(folder, amount=amount, with_peer=with_peer), as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
