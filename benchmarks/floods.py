"""`python -m benchmarks.floods`: what does one client notice of another that floods the server?

An honest client sends a tiny request every few milliseconds, whatever is answered. Beside it a child process floods the same
port, over 1 or 32 connections, with messages of one kind at the limits of docs/protocol.md. Floods and quiet rounds
alternate. The table has the honest client's p99 beside the flood, its rate of answers / that of the quiet round before, and
the server's longest turn: CPU time between two waits of its event loop. Every honest answer is compared. Both sides speak
the protocol with pyzmq and msgpack alone, so that nothing of the client library paces the flood.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgpack
import trio
import typer
import zmq
from rich.console import Console

from benchmarks.processes import child_process, wait_for_slots
from benchmarks.report import Figure, Report
from benchmarks.turns import Turns, longest_turn_s

MODEL = "tiny"
ENTRIES = 256
"""Entries of one message, at most; docs/protocol.md, Limits."""
CONNECTIONS = (1, 32)
"""Of the flood. The aims are for one."""
P99_MS, RATE = 50.0, 0.9
"""Aims: the honest client's p99 at most, and its rate at least."""
INTERVAL_S = 0.005
"""Between two honest requests."""
SETTLE_S = 0.3
"""A flood runs for so long before the honest client is measured."""

Entry = list[Any]


def request(sequence: int, model: int = 0) -> Entry:
    """One `Request` of [1, 16] float32 zeros, inline."""
    layout = msgpack.packb([[0, "f32", [1, 16]]])
    return [12, 0, sequence, model, None, 0, layout, [bytes(64)]]


def hello(client: bytes) -> Entry:
    """One `Hello`."""
    return [10, 0, client, "flood"]


def pack(entries: list[Entry]) -> bytes:
    """One message."""
    return bytes(msgpack.packb([1, entries]))


def _messages_of(kind: str) -> Callable[[], bytes]:
    """A function that gives the next message of one connection of this flood."""
    client = os.urandom(16)
    first = pack([hello(client), [11, 0, MODEL]])
    small = msgpack.packb([[0, "f32", [1, 16]]])
    wide = msgpack.packb([[port, "f32", [0, *[1] * 30, 300]] for port in range(64)])
    flags = msgpack.packb([[port, "boolean", [1024]] for port in range(64)])
    fixed = {
        "repeated numbers": pack([request(0)] * ENTRIES),
        "64 tensors of 32 dimensions": pack([[12, 0, 1, 0, None, 0, wide, [b""] * 64]] * ENTRIES),
        "64 tensors of truth values": pack([[12, 0, 1, 0, None, 0, flags, [bytes(1024)] * 64]] * 15),
        "8 tags": pack(
            [[12, 0, 1, 0, None, 0, small, [bytes(64)], dict.fromkeys(TAGS, "x" * 100)]] * ENTRIES
        ),
        "models by name": pack([[11, 0, "x" * 512]] * ENTRIES),
        "questions about an id": pack([[15, 0, 1, "same", 0]] * ENTRIES),
        "questions about the slowest": pack([[15, 0, 1, "", 2**63 - 1]] * ENTRIES),
        "credits": pack([[26, 0, 2**63 - 1, 2**63 - 1]] * ENTRIES),
        "clocks": pack([[2, 0, 2**63 - 1]] * ENTRIES),
        "heartbeats": pack([[0, 0]] * ENTRIES),
        "audits": pack([[17, 0, "x" * 512]] * ENTRIES),
        "long garbage": pack([[99, 0, *[[1] * 1000] * 4]] * ENTRIES),
        "maps": pack([[99, 0, {str(key): 1 for key in range(64)}]] * ENTRIES),
        "hellos": pack([hello(client)] * ENTRIES),
        "cancels": pack([[13, 0, 0]] * ENTRIES),
        "statistics": pack([[14, 0]] * ENTRIES),
        "unknown models": pack([request(1, model=999)] * ENTRIES),
        "garbage": pack([[99, 0]] * ENTRIES),
    }
    sent = 0

    def following() -> bytes:
        nonlocal sent
        sent += 1
        if sent == 1:
            return first
        if kind == "client ids":
            return pack([hello(os.urandom(16)) for _ in range(ENTRIES)])
        if kind == "requests with one id":
            rows = [[*request(sent * ENTRIES + place), {"request_id": "same"}] for place in range(ENTRIES)]
            return pack(rows) if sent % 8 else fixed["questions about an id"]
        if kind == "requests":  # far beyond the credit
            return pack([request(sent * ENTRIES + place) for place in range(ENTRIES)])
        return fixed[kind]

    return following


TAGS = [f"tag-{number}" for number in range(8)]
FLOODS = (
    "repeated numbers",
    "64 tensors of 32 dimensions",
    "64 tensors of truth values",
    "8 tags",
    "models by name",
    "questions about an id",
    "questions about the slowest",
    "requests with one id",
    "credits",
    "clocks",
    "heartbeats",
    "audits",
    "long garbage",
    "maps",
    "hellos",
    "client ids",
    "requests",
    "cancels",
    "statistics",
    "unknown models",
    "garbage",
)


def flood(address: str, kind: str, connections: int, seconds: float) -> None:
    """Sends as fast as the server takes it, reads what it answers, and comes back when it is cut off."""
    context: zmq.Context[Any] = zmq.Context.instance()
    peers: list[tuple[zmq.Socket[bytes], Callable[[], bytes]]] = []

    def join() -> tuple[zmq.Socket[bytes], Callable[[], bytes]]:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 64)
        socket.connect(address)
        return socket, _messages_of(kind)

    give_up_at = time.monotonic() + seconds
    peers = [join() for _ in range(connections)]
    while time.monotonic() < give_up_at:
        for place, (socket, following) in enumerate(peers):
            for _ in range(4):
                try:
                    socket.send(following(), zmq.NOBLOCK)
                except zmq.Again:
                    break
            cut = False
            try:
                while True:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                    # A `Goodbye` alone in its message: the server ended this connection.
                    # So does an empty message, which comes where the goodbye may have been missed.
                    header = frames[0]
                    cut = cut or not header or (len(header) < 8 and msgpack.unpackb(header)[1] == [[1, 0]])
            except zmq.Again:
                pass
            if cut:
                socket.close(0)
                peers[place] = join()
        time.sleep(0.0005)


def honest(address: str, requests: int) -> tuple[list[float], float]:
    """Seconds of each of so many requests, one per interval, and answers per second; every answer is compared."""
    context: zmq.Context[Any] = zmq.Context.instance()
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(address)
        socket.send(pack([hello(os.urandom(16)), [11, 0, MODEL]]))
        model = next(entry[3] for entry in _entries(socket) if entry[0] == 22)
        taken: list[float] = []
        began = time.perf_counter()
        sent = 0
        while len(taken) < requests:
            due = began + sent * INTERVAL_S
            left = due - time.perf_counter() if sent < requests else 60.0
            if left <= 0.0:
                socket.send(pack([request(sent, model)]))
                sent += 1
            elif socket.poll(max(1, round(left * 1000))):
                for answer in msgpack.unpackb(socket.recv_multipart()[0])[1]:
                    if answer[0] not in (24, 25):
                        continue
                    taken.append(time.perf_counter() - began - answer[2] * INTERVAL_S)
                    if answer[0] != 24 or bytes(answer[5][0]) != bytes(64):
                        raise AssertionError(f"request {answer[2]} was answered {answer}")
        return taken, requests / (time.perf_counter() - began)


def _entries(socket: zmq.Socket[bytes]) -> Iterator[Entry]:
    while True:
        yield from msgpack.unpackb(socket.recv_multipart()[0])[1]


def serve_watched(config: str) -> None:
    """`shapestream serve`, with each turn measured."""
    from shapestream_workers.__main__ import main as any_command

    watched = partial(trio.run, instruments=[Turns(Path(config).parent, "server")])
    trio.run = watched  # type: ignore[assignment]  # what the command calls
    sys.argv = ["shapestream", "serve", config]
    any_command()


@contextmanager
def _flooded(address: str, kind: str, connections: int) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.floods", "--flood", kind, address, str(connections)]
    with subprocess.Popen(command) as process:
        try:
            time.sleep(1.0 + SETTLE_S)
            yield
            if process.poll() is not None:
                raise AssertionError(f"the flood of {kind} ended early, with status {process.poll()}")
        finally:
            process.kill()


def measure(
    folder: Path,
    *,
    requests: int,
    rounds: int,
    kinds: tuple[str, ...] = FLOODS,
    connections: tuple[int, ...] = CONNECTIONS,
) -> Report:
    """The table: medians over rounds."""
    address = f"ipc://{folder}/floods.sock"
    config, log = folder / "floods.yaml", folder / "floods.log"
    port = "{shape: 'batch:1..64, 16', element_type: f32}"
    config.write_text(
        f"server: {{listen: ['{address}']}}\n"
        f"models:\n  - {{name: {MODEL}, function: 'benchmarks.models:identity', trust: true,\n"
        f"     inputs: {{x: {port}}}, outputs: {{y: {port[:-1]}, rule: rows}}}}}}\n"
        "in_process: true\nlogging: {level: error}\n"
    )
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    quiet: list[float] = []
    with child_process(["-m", "benchmarks.floods", "--serve", str(config)], log=log) as server:
        wait_for_slots(server, address, 1, log)
        for _ in range(rounds):
            for kind in kinds:
                for count in connections:
                    honest(address, 20)  # what the last flood left is served before
                    time.sleep(SETTLE_S)
                    p99_s, alone = _measured(address, requests)
                    quiet.append(p99_s)
                    longest_turn_s(folder, reset=True)
                    with _flooded(address, kind, count):
                        p99_s, beside = _measured(address, requests)
                    longest_s, _ = longest_turn_s(folder)
                    found.setdefault((kind, count), []).append((p99_s * 1e3, beside / alone, longest_s * 1e3))
        if server.ended:
            raise AssertionError(f"the server ended:\n{log.read_text(errors='replace')[-4000:]}")
    title = f"an honest client beside a flood (alone: p99 {statistics.median(quiet) * 1e3:.1f} ms)"
    return table_of(title, "flood", found, connections)


def table_of(
    title: str,
    what: str,
    found: Mapping[tuple[str, int], Sequence[tuple[float, float, float]]],
    connections: tuple[int, ...],
    *,
    turn_ms: float | None = None,
    has_aims: bool = True,
) -> Report:
    """Return the medians of each kind: p99 in ms, rate / alone, and the longest turn in ms, whose aim is `turn_ms`.

    The aims are for one connection.
    """
    columns = [f"{figure}, {n} conn." for n in connections for figure in ("p99", "rate", "longest turn")]
    report = Report(title=title, columns=(what, *columns))
    for kind in dict.fromkeys(kind for kind, _ in found):
        cells: list[Figure] = []
        for count in connections:
            p99_ms, rate, longest_ms = map(statistics.median, zip(*found[kind, count], strict=True))
            is_one = has_aims and count == 1
            cells += [
                Figure(p99_ms, "ms", at_most=P99_MS if is_one else None),
                Figure(rate, "x", at_least=RATE if is_one else None),
                Figure(longest_ms, "ms", at_most=turn_ms if is_one else None),
            ]
        report.rows.append((kind, *cells))
    return report


def _measured(address: str, requests: int) -> tuple[float, float]:
    """The p99 in seconds, and answers per second."""
    taken, rate = honest(address, requests)
    return sorted(taken)[int(0.99 * (len(taken) - 1))], rate


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 3,
    only: Annotated[list[str] | None, typer.Option("--only", help="These floods.")] = None,
    flood_kind: Annotated[str | None, typer.Option("--flood", hidden=True)] = None,
    serve: Annotated[str | None, typer.Option("--serve", hidden=True)] = None,
    address: Annotated[str, typer.Argument(hidden=True)] = "",
    connections: Annotated[int, typer.Argument(hidden=True)] = 0,
    one: Annotated[bool, typer.Option("--one", help="Floods over one connection only.")] = False,
) -> None:
    """Measures an honest client's latency and rate beside floods, and the server's turns; checks every answer."""
    if serve is not None:
        serve_watched(serve)
        return
    if flood_kind is not None:
        flood(address, flood_kind, connections, seconds=120.0)
        return
    console = Console(stderr=as_json)
    with tempfile.TemporaryDirectory(prefix="ss-bench-") as name:
        report = measure(
            Path(name),
            requests=20 if smoke else 400,
            rounds=1 if smoke else rounds,
            kinds=tuple(only or (FLOODS[:3] if smoke else FLOODS)),
            connections=(1,) if one else CONNECTIONS,
        )
    console.print(report.table())
    if as_json:
        print(json.dumps(report.plain(), indent=2))


if __name__ == "__main__":
    typer.run(main)
