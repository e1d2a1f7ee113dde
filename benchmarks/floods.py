"""`python -m benchmarks.floods`: what does one client notice of another that floods the server?

An honest client has one tiny request in flight. Beside it a child process floods the same port, over 1 or 32 connections,
with messages of as many entries as a message may have. Floods and quiet rounds alternate; the table has the honest
client's p50 and p99 as multiples of those of the quiet rounds. Every honest answer is compared. Both sides speak the
protocol with pyzmq and msgpack alone (docs/protocol.md), so that nothing of the client library paces the flood.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgpack
import typer
import zmq
from rich.console import Console

from benchmarks.processes import child_process, wait_for_slots
from benchmarks.report import Figure, Report

MODEL = "tiny"
ENTRIES = 256
"""Entries of one message, at most; docs/protocol.md, Limits."""
AIMS = {1: 5.0, 32: 20.0}
"""Times the quiet round's latency, by connections of the flood."""
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
    fixed = {
        "repeated numbers": pack([request(0)] * ENTRIES),
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
        if kind == "requests":  # far beyond the credit
            return pack([request(sent * ENTRIES + place) for place in range(ENTRIES)])
        return fixed[kind]

    return following


FLOODS = (
    "repeated numbers",
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


def honest(address: str, requests: int) -> list[float]:
    """Seconds of each of so many requests, one after the other; every answer is compared."""
    context: zmq.Context[Any] = zmq.Context.instance()
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(address)
        socket.send(pack([hello(os.urandom(16)), [11, 0, MODEL]]))
        model = next(entry[3] for entry in _entries(socket) if entry[0] == 22)
        taken = []
        for sequence in range(requests):
            began = time.perf_counter()
            socket.send(pack([request(sequence, model)]))
            answer = next(entry for entry in _entries(socket) if entry[0] in (24, 25))
            taken.append(time.perf_counter() - began)
            if answer[0] != 24 or answer[2] != sequence or bytes(answer[5][0]) != bytes(64):
                raise AssertionError(f"request {sequence} was answered {answer}")
        return taken


def _entries(socket: zmq.Socket[bytes]) -> Iterator[Entry]:
    while True:
        yield from msgpack.unpackb(socket.recv_multipart()[0])[1]


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


def measure(folder: Path, *, requests: int, rounds: int, kinds: tuple[str, ...] = FLOODS) -> Report:
    """The table: medians over rounds, each divided by that of the quiet round before it."""
    address = f"ipc://{folder}/floods.sock"
    config, log = folder / "floods.yaml", folder / "floods.log"
    port = "{shape: 'batch:1..64, 16', element_type: f32}"
    config.write_text(
        f"server: {{listen: ['{address}']}}\n"
        f"models:\n  - {{name: {MODEL}, function: 'benchmarks.models:identity', trust: true,\n"
        f"     inputs: {{x: {port}}}, outputs: {{y: {port[:-1]}, rule: rows}}}}}}\n"
        "in_process: true\nlogging: {level: error}\n"
    )
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    quiet: list[tuple[float, float]] = []
    with child_process(["-m", "shapestream_workers", "serve", str(config)], log=log) as server:
        wait_for_slots(server, address, 1, log)
        for _ in range(rounds):
            for kind in kinds:
                for connections in AIMS:
                    honest(address, 20)  # what the last flood left is served before
                    time.sleep(SETTLE_S)
                    alone = _p50_p99(honest(address, requests))
                    quiet.append(alone)
                    with _flooded(address, kind, connections):
                        beside = _p50_p99(honest(address, requests))
                    ratio = (beside[0] / alone[0], beside[1] / alone[1])
                    found.setdefault((kind, connections), []).append(ratio)
        if server.ended:
            raise AssertionError(f"the server ended:\n{log.read_text(errors='replace')[-4000:]}")
    report = Report(
        title=f"one honest client beside a flood (alone: p50 {statistics.median(p50 for p50, _ in quiet) * 1e3:.2f} ms)",
        columns=("flood", *(f"{p}, {n} conn." for n in AIMS for p in ("p50", "p99"))),
    )
    for kind in kinds:
        cells = []
        for connections, aim in AIMS.items():
            of_kind = found[kind, connections]
            cells += [
                Figure(statistics.median(ratios[place] for ratios in of_kind), "x", at_most=aim)
                for place in (0, 1)
            ]
        report.rows.append((kind, *cells))
    return report


def _p50_p99(seconds: list[float]) -> tuple[float, float]:
    ordered = sorted(seconds)
    return statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 3,
    only: Annotated[list[str] | None, typer.Option("--only", help="These floods.")] = None,
    flood_kind: Annotated[str | None, typer.Option("--flood", hidden=True)] = None,
    address: Annotated[str, typer.Argument(hidden=True)] = "",
    connections: Annotated[int, typer.Argument(hidden=True)] = 1,
) -> None:
    """Measures an honest client's latency beside floods; checks every answer."""
    if flood_kind is not None:
        flood(address, flood_kind, connections, seconds=120.0)
        return
    console = Console(stderr=as_json)
    with tempfile.TemporaryDirectory(prefix="ss-bench-") as name:
        report = measure(
            Path(name),
            requests=20 if smoke else 300,
            rounds=1 if smoke else rounds,
            kinds=tuple(only or (FLOODS[:3] if smoke else FLOODS)),
        )
    console.print(report.table())
    if as_json:
        print(json.dumps(report.plain(), indent=2))


if __name__ == "__main__":
    typer.run(main)
