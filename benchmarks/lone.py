"""`python -m benchmarks.lone`: a small request alone, and in a stream, against the floor of its kind (`floors.py`).

A regime is one way of a request: over ipc or CURVE, in process or through a worker, by a raw client or the SDK. All regimes
take turns, round by round. CPU is user + system time of a process with all its threads, per request. With `--peer` the same
row goes to the peer (`peer.py`): an identity in one worker process, asked over one kept connection of HTTP by a client that
does nothing but the protocol. Its CPU is that of all its processes; ratios to it are of rounds, as those to the floor.
"""

from __future__ import annotations

import asyncio
import socket as sockets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import trio
import typer

import shapestream
from benchmarks import floors, peer
from benchmarks.http_client import HOST, HttpClient
from benchmarks.models import TINY, TINY_WIDTH, write_configuration
from benchmarks.processes import Child, child_process, cpu_s
from benchmarks.raw_client import RawClient, connect_dealer
from benchmarks.report import Figure, Report, median_ratio, median_us, print_reports
from shapestream import aio, blocking
from shapestream.transport.curve_keys import CallerKeys, new_key_pair, write_key_pair
from shapestream.wire.codec import encode
from shapestream.wire.messages import RequestEntry
from shapestream_engine.layout import Tensors

IN_FLIGHT = 64
# Aims of issue 12: items 1 and 7.
AIM_TO_FLOOR = 2.0
AIM_CLIENT_LONE_US = 150.0
AIM_CLIENT_STREAM_US = 25.0
AIM_SERVER_STREAM_US = 30.0
AIM_STREAM_RATE = 0.7
AIM_PEER = 1.0
"""Issue 24: CPU and p50 of a lone request, to the peer's of the same run."""
_WARM_UP = 50
"""Requests of each round before the clocks are read."""
_START_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The processes that answer at one address."""

    address: str
    server: int
    workers: tuple[int, ...] = ()
    keys: CallerKeys | None = None
    peer: peer.Peer | None = None
    """The peer that they are: its server's CPU is that of all its processes."""


@dataclass(slots=True, kw_only=True)
class Regime:
    """One way of a request, and what each round measured of it."""

    name: str
    served: Served
    run: Callable[[Regime, int], None]
    requests: int
    floor: Regime | None = None
    """The floor that its server, its rate and its p50 are compared with."""
    client_floor: Regime | None = None
    """The floor that its client is compared with."""
    peer: Regime | None = None
    """The peer that its server and its p50 are compared with."""
    stream: bool = False
    client_us: list[float] = field(default_factory=list)
    server_us: list[float] = field(default_factory=list)
    workers_us: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    """Empty for a stream, whose requests wait for each other."""
    rate: list[float] = field(default_factory=list)
    together: float = 1.0
    """Requests of one message; in a stream of the SDK those that shared a call."""

    @contextmanager
    def measured(self, count: int, times: list[float]) -> Iterator[None]:
        """Read the clocks before and after the block; it sends `count` requests, and appends to `times` in seconds."""
        before, started = self._clocks(), time.perf_counter()
        yield
        elapsed_s, after = time.perf_counter() - started, self._clocks()
        used_us = [(late - early) / count * 1e6 for early, late in zip(before, after, strict=True)]
        self.client_us.append(used_us[0])
        self.server_us.append(used_us[1])
        self.workers_us.append(used_us[2])
        self.rate.append(count / elapsed_s)
        if times:
            self.p50_ms.append(statistics.median(times) * 1e3)

    def _clocks(self) -> tuple[float, float, float]:
        served = self.served
        workers = sum(cpu_s(pid) for pid in served.workers)
        server = cpu_s(served.server) if served.peer is None else served.peer.cpu_s()
        return time.process_time(), server, workers

    def served_us(self) -> list[float]:
        """CPU of server and workers together, a figure per round."""
        return [server + workers for server, workers in zip(self.server_us, self.workers_us, strict=True)]


# ------------------------------------------------------------ the clients


def _table(count: int) -> np.ndarray[Any, Any]:
    return np.arange(count * TINY_WIDTH, dtype=np.float32).reshape(count, TINY_WIDTH)


def _messages(count: int) -> list[bytes]:
    """Requests as the SDK encodes them, one in each message."""
    layout = ((0, "f32", (1, TINY_WIDTH)),)
    return [
        bytes(
            encode(
                [
                    RequestEntry(
                        sequence=number,
                        model=0,
                        remaining_ms=None,
                        priority=0,
                        tensors=Tensors(layout=layout, buffers=(row.tobytes(),)),
                    )
                ]
            )[0]
        )
        for number, row in enumerate(_table(count))
    ]


def _bare(regime: Regime, count: int) -> None:
    with connect_dealer(regime.served.address, regime.served.keys) as socket:
        floors.ask_alone(socket, _messages(_WARM_UP))
        messages, times = _messages(count), list[float]()
        with regime.measured(count, times):
            times += floors.ask_alone(socket, messages)


def _in_loop(regime: Regime, count: int) -> None:
    async def main() -> None:
        with connect_dealer(regime.served.address) as socket:
            await floors.ask_in_loop(socket, _messages(_WARM_UP))
            messages, times = _messages(count), list[float]()
            with regime.measured(count, times):
                times += await floors.ask_in_loop(socket, messages)

    trio.run(main)


def _echo_stream(regime: Regime, count: int) -> None:
    with connect_dealer(regime.served.address) as socket:
        floors.ask_alone(socket, _messages(_WARM_UP))
        messages, per_message = _messages(count), round(regime.together)
        with regime.measured(count, []):
            floors.ask_in_stream(socket, messages, per_message=per_message, outstanding=IN_FLIGHT)


def _raw(regime: Regime, count: int) -> None:
    with RawClient(regime.served.address, TINY, regime.served.keys) as client:
        payloads, times = [row.tobytes() for row in _table(_WARM_UP + count)], list[float]()
        client.round(payloads[:_WARM_UP], (1, TINY_WIDTH), 1)
        with regime.measured(count, times):
            for payload in payloads[_WARM_UP:]:
                sent_at = time.perf_counter()
                client.round([payload], (1, TINY_WIDTH), 1)
                times.append(time.perf_counter() - sent_at)


def _http(regime: Regime, count: int) -> None:
    server = regime.served.peer
    assert server is not None
    with server.connect() as client:
        payloads, times = [row.tobytes() for row in _table(_WARM_UP + count)], list[float]()
        _ask_peer(client, payloads[:_WARM_UP])
        with regime.measured(count, times):
            times += _ask_peer(client, payloads[_WARM_UP:])


def _ask_peer(client: HttpClient, payloads: Sequence[bytes]) -> list[float]:
    """The seconds of each."""
    times = []
    for payload in payloads:
        sent_at = time.perf_counter()
        answer = client.ask_alone(payload)
        times.append(time.perf_counter() - sent_at)
        if answer != payload:
            raise AssertionError("an answer differs")
    return times


def _check(result: shapestream.Result, expected: bytes) -> None:
    if result["y"].tobytes() != expected:
        raise AssertionError("an answer differs")


async def _ask_async(client: Any, regime: Regime, count: int) -> None:
    """Requests one after another, through a face for an event loop."""
    rows = [row[None] for row in _table(_WARM_UP + count)]
    for row in rows[:_WARM_UP]:
        _check(await client.infer(TINY, {"x": row}), row.tobytes())
    times: list[float] = []
    with regime.measured(count, times):
        for row in rows[_WARM_UP:]:
            sent_at = time.perf_counter()
            _check(await client.infer(TINY, {"x": row}), row.tobytes())
            times.append(time.perf_counter() - sent_at)


def _with_trio(regime: Regime, count: int) -> None:
    async def main() -> None:
        async with shapestream.connect(regime.served.address) as client:
            await _ask_async(client, regime, count)

    trio.run(main)


def _with_asyncio(regime: Regime, count: int) -> None:
    async def main() -> None:
        async with aio.connect(regime.served.address) as client:
            await _ask_async(client, regime, count)

    asyncio.run(main())


def _with_threads(regime: Regime, count: int) -> None:
    rows = [row[None] for row in _table(_WARM_UP + count)]
    with blocking.connect(regime.served.address) as client:
        for row in rows[:_WARM_UP]:
            _check(client.infer(TINY, {"x": row}), row.tobytes())
        times: list[float] = []
        with regime.measured(count, times):
            for row in rows[_WARM_UP:]:
                sent_at = time.perf_counter()
                _check(client.infer(TINY, {"x": row}), row.tobytes())
                times.append(time.perf_counter() - sent_at)


def _stream(regime: Regime, count: int) -> None:
    expected = [row.tobytes() for row in _table(count)]
    batch_requests: list[int] = []

    async def through(client: Any, number: int) -> None:
        table, received = _table(number), 0
        rows = ({"x": table[at : at + 1]} for at in range(number))
        async with client.stream(TINY, rows, max_in_flight=IN_FLIGHT) as results:
            async for result in results:
                _check(result, expected[received])
                received += 1
                if number < count:
                    batch_requests.append(result.timings.batch_requests)

    async def main() -> None:
        async with shapestream.connect(regime.served.address) as client:
            await through(client, max(1, min(count - 1, 4 * _WARM_UP)))
            with regime.measured(count, []):
                await through(client, count)

    trio.run(main)
    regime.together = statistics.fmean(batch_requests)


# ------------------------------------------------------------ the regimes


class _House:
    """The processes under measurement, each started once."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder = folder / "lone"
        folder.mkdir()
        server, client = new_key_pair(), new_key_pair()
        self._server_secret, _ = write_key_pair(folder / "keys", "server", server)
        write_key_pair(folder / "keys", "client", client)
        self._keys = CallerKeys(key=client, server_key=server.public)

    def floor(self, kind: str, *, curve: bool = False) -> Served:
        """A floor of `floors.py`."""
        name = f"{kind}-curve" if curve else kind
        address = _free_port() if curve else f"ipc://{self._folder}/{name}.sock"
        key = [str(self._server_secret)] if curve else []
        keys = self._keys if curve else None
        if kind != "relay":
            return Served(address=address, server=self._start(name, kind, address, *key).pid, keys=keys)
        back = f"ipc://{self._folder}/{name}-back.sock"
        relay = self._start(name, kind, address, back, *key)
        slot = self._start(f"{name}-slot", "slot", back)
        return Served(address=address, server=relay.pid, workers=(slot.pid,), keys=keys)

    def product(self, label: str, *, workers: int | None, curve: bool = False) -> Served:
        """A server of the product, with the identity for a model."""
        protected = _free_port() if curve else None
        path, address = write_configuration(self._folder, label=label, workers=workers, protected=protected)
        log = self._folder / f"{label}.log"
        child = self._stack.enter_context(
            child_process(["-m", "shapestream_workers", "serve", str(path)], log=log)
        )
        with blocking.connect(address, connect_timeout=_START_S) as client:
            client.infer(TINY, {"x": np.zeros((1, TINY_WIDTH), np.float32)}, deadline=_START_S)
        pids = tuple(process.pid for process in psutil.Process(child.pid).children(recursive=True))
        return Served(
            address=protected or address, server=child.pid, workers=pids, keys=self._keys if curve else None
        )

    def peer(self) -> Served:
        """The peer, with an identity in one process."""
        example = _table(1)[0].tobytes()
        running = self._stack.enter_context(
            peer.serving(self._folder, None, "rows", workers=1, rows=1, example=example)
        )
        return Served(address=f"http://{HOST}:{running.port}", server=running.processes[0], peer=running)

    def _start(self, name: str, *arguments: str) -> Child:
        return self._stack.enter_context(
            child_process(["-m", "benchmarks.floors", *arguments], log=self._folder / f"{name}.log")
        )


def _free_port() -> str:
    with sockets.socket() as socket:
        socket.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{socket.getsockname()[1]}"


def _regimes(house: _House, requests: int, *, with_peer: bool) -> list[Regime]:
    """All regimes; a floor stands before those that are compared with it, and so does the peer."""
    regimes: list[Regime] = []

    def add(name: str, served: Served, run: Callable[[Regime, int], None], **others: Any) -> Regime:
        regime = Regime(name=name, served=served, run=run, **{"requests": requests, **others})
        regimes.append(regime)
        return regime

    echo = house.floor("echo")
    in_process = house.product("in-process", workers=None)
    worker = house.product("one-worker", workers=1)
    add("bare echo", echo, _bare)
    inproc_floor = add("floor: inproc slot", house.floor("inproc"), _bare)
    relay_floor = add("floor: relay, slot in a worker", house.floor("relay"), _bare)
    theirs = add(f"{peer.NAME}, raw client", house.peer(), _http) if with_peer else None
    add("in process, raw client", in_process, _raw, floor=inproc_floor, peer=theirs)
    add("one worker, raw client", worker, _raw, floor=relay_floor, peer=theirs)
    add("CURVE, bare echo", house.floor("echo", curve=True), _bare)
    curve_inproc = add("CURVE, floor: inproc slot", house.floor("inproc", curve=True), _bare)
    curve_relay = add("CURVE, floor: relay, slot in a worker", house.floor("relay", curve=True), _bare)
    protected = house.product("protected", workers=None, curve=True)
    add("CURVE, in process, raw client", protected, _raw, floor=curve_inproc)
    protected_worker = house.product("protected-worker", workers=1, curve=True)
    add("CURVE, one worker, raw client", protected_worker, _raw, floor=curve_relay)
    client = add("floor: client in an event loop, echo", echo, _in_loop)
    for face, ask in (("trio", _with_trio), ("asyncio", _with_asyncio), ("blocking", _with_threads)):
        add(f"in process, SDK: {face}", in_process, ask, floor=inproc_floor, client_floor=client)
    many = 10 * requests
    add("echo, one entry per message", echo, _echo_stream, requests=many, stream=True)
    for label, served in (("in process", in_process), ("one worker", worker)):
        stream = Regime(name=f"{label}, SDK: stream", served=served, run=_stream, requests=many, stream=True)
        stream.floor = add(f"echo as {stream.name}", echo, _echo_stream, requests=many, stream=True)
        regimes.append(stream)
    return regimes


def measure(folder: Path, *, requests: int, rounds: int, with_peer: bool = False) -> list[Report]:
    """Run everything, and report on servers, clients and streams.

    `requests` per lone regime and round; a stream has ten times as many.
    """
    with ExitStack() as stack:
        regimes = _regimes(_House(stack, folder), requests, with_peer=with_peer)
        for number in range(rounds + 1):
            for regime in regimes:
                # The first round warms up; it tells how many requests of a stream travel together.
                regime.run(regime, regime.requests if number else max(_WARM_UP, regime.requests // 10))
                if regime.stream and regime.floor is not None:
                    regime.floor.together = regime.together
            if not number:
                for regime in regimes:
                    for figures in (regime.client_us, regime.server_us, regime.workers_us, regime.rate):
                        figures.clear()
                    regime.p50_ms.clear()
    return [_of_servers(regimes), _of_clients(regimes), _of_streams(regimes)]


def _of_servers(regimes: Sequence[Regime]) -> Report:
    report = Report(title=f"A lone request, [1, {TINY_WIDTH}] float32, by its server; us of CPU per request")
    report.columns = ("way", "server", "workers", "CPU / floor", "p50", "p50 / floor")
    with_peer = any(regime.peer for regime in regimes)
    if with_peer:
        report.columns += (f"CPU / {peer.NAME}", f"p50 / {peer.NAME}")
    for regime in regimes:
        if regime.stream or regime.client_floor is not None:
            continue
        cpu, p50 = _to(regime, regime.floor, AIM_TO_FLOOR)
        report.rows.append(
            (
                regime.name,
                median_us(regime.server_us),
                _workers(regime),
                cpu,
                _ms(regime.p50_ms),
                p50,
                *(_to(regime, regime.peer, AIM_PEER) if with_peer else ()),
            )
        )
    return report


def _of_clients(regimes: Sequence[Regime]) -> Report:
    report = Report(title="A lone request by its client; us of CPU per request")
    report.columns = ("way", "client", "CPU / floor", "server", "p50")
    for regime in regimes:
        if regime.stream:
            continue
        floor = regime.client_floor
        aim = None if floor is None else AIM_CLIENT_LONE_US
        ratio = "" if floor is None else Figure(median_ratio(regime.client_us, floor.client_us), "x")
        client = median_us(regime.client_us, aim)
        report.rows.append((regime.name, client, ratio, median_us(regime.server_us), _ms(regime.p50_ms)))
    return report


def _of_streams(regimes: Sequence[Regime]) -> Report:
    report = Report(title=f"A stream, {IN_FLIGHT} in flight; us of CPU per request")
    report.columns = ("way", "client", "server", "workers", "together", "per s", "/ echo", "/ echo of one")
    (one,) = (regime for regime in regimes if regime.stream and regime.name.startswith("echo, one"))
    for regime in regimes:
        if not regime.stream:
            continue
        echo = regime.floor
        client_aim, server_aim = (AIM_CLIENT_STREAM_US, AIM_SERVER_STREAM_US) if echo else (None, None)
        ratio = (
            ""
            if echo is None
            else Figure(median_ratio(regime.rate, echo.rate), "x", at_least=AIM_STREAM_RATE)
        )
        to_one = "" if regime is one else Figure(median_ratio(regime.rate, one.rate), "x")
        client, server = median_us(regime.client_us, client_aim), median_us(regime.server_us, server_aim)
        rate = Figure(statistics.median(regime.rate), "/s")
        together = f"{regime.together:.0f}"
        report.rows.append((regime.name, client, server, _workers(regime), together, rate, ratio, to_one))
    return report


def _to(regime: Regime, other: Regime | None, aim: float) -> tuple[Figure | str, Figure | str]:
    """CPU of server and workers, and p50, as ratios to another regime's, at most `aim`."""
    if other is None:
        return "", ""
    cpu = median_ratio(regime.served_us(), other.served_us())
    p50 = median_ratio(regime.p50_ms, other.p50_ms)
    return Figure(cpu, "x", at_most=aim), Figure(p50, "x", at_most=aim)


def _ms(figures: Sequence[float]) -> Figure:
    return Figure(statistics.median(figures), "ms")


def _workers(regime: Regime) -> Figure | str:
    return median_us(regime.workers_us) if regime.served.workers else ""


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 5,
    requests: Annotated[int, typer.Option(min=50, help="Per lone regime and round.")] = 1000,
    with_peer: Annotated[bool, typer.Option("--peer", help=peer.OPTION_HELP)] = False,
) -> None:
    """Measure a lone request and a stream against the floors of their kind."""
    if with_peer:
        peer.demand_environment()
    requests, rounds = (50, 1) if smoke else (requests, rounds)
    print_reports(
        lambda folder: measure(folder, requests=requests, rounds=rounds, with_peer=with_peer),
        as_json=as_json,
    )


if __name__ == "__main__":
    typer.run(main)
