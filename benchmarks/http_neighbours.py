"""An honest caller of a gateway beside one connection that asks for as much work as is legal, or breaks off late.

The honest one sends 1 KiB in binary every few milliseconds, whatever is answered; its times count from when a request was
due. Its neighbour is a process: `python -m benchmarks.http_neighbours KIND PORT`.
"""

from __future__ import annotations

import gzip
import http.client
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.binary_infer import PATH, head_of, headers_of
from benchmarks.http_client import HOST, HttpClient
from benchmarks.report import Figure, Report

AIM_P99_MS = 50.0
INTERVAL_S = 0.005
_SETTLE_S = 0.5
_JSON_BYTES = 2 * 1024 * 1024 - 256
"""Just below what a gateway takes of JSON."""
_MOST_CONTAINERS = 49_000
_PORT = "shape: 'batch:1..50000, width:0..1000000', element_type: f32"
MODEL = (
    "  - {name: wide, function: 'benchmarks.models:identity', trust: true, batching: {max_batch: 50000},\n"
    f"     inputs: {{x: {{{_PORT}}}}}, outputs: {{y: {{{_PORT}, rule: rows}}}}}}\n"
)
"""The YAML of the model that takes the neighbours' JSON."""


def _body(data: str, shape: str) -> bytes:
    return f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":{shape},"data":{data}}}]}}'.encode()


def _numbers() -> bytes:
    """Body with the most numbers that fit; its answer is JSON as well."""
    return _body("[" + ",".join("1" * 1_000_000) + "]", "[1,1000000]")


def _lists() -> bytes:
    return _body("[" + ",".join(["[1]"] * _MOST_CONTAINERS) + "]", f"[{_MOST_CONTAINERS},1]")


def _members() -> bytes:
    return (
        b'{"inputs":[],' + ",".join(f'"k{number}":{{}}' for number in range(_MOST_CONTAINERS)).encode() + b"}"
    )


def _bomb() -> bytes:
    """64 MiB of zeros, the most that a body may have."""
    return gzip.compress(bytes(64 * 1024 * 1024))


def _asks(port: int, body: bytes, model: str, headers: dict[str, str]) -> None:
    """Ask again and again, whatever is answered."""
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    while True:
        connection.request("POST", PATH.format(model), body, headers)
        answer = connection.getresponse()
        answer.read()
        if answer.status >= 500:
            raise AssertionError(f"the gateway answered {answer.status}")


def _slow(port: int) -> None:
    """Send bodies byte by byte."""
    while True:
        with socket.create_connection((HOST, port)) as own:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            own.sendall(
                f"POST {PATH.format('small')} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 65536\r\n\r\n".encode()
            )
            for _ in range(65535):
                own.sendall(b" ")
                time.sleep(0.0002)


NEIGHBOURS: dict[str, Callable[[int], None]] = {
    "two MB of numbers": lambda port: _asks(port, _numbers(), "wide", {}),
    "49,000 lists": lambda port: _asks(port, _lists(), "wide", {}),
    "49,000 members": lambda port: _asks(port, _members(), "wide", {}),
    "gzip bombs": lambda port: _asks(port, _bomb(), "small", {"Content-Encoding": "gzip"}),
    "slow bodies": _slow,
}


def _honest(port: int, requests: int) -> float:
    """The p99 in milliseconds; every answer is compared."""
    head = head_of(256)
    rows = [np.full(256, number, np.float32).tobytes() for number in range(requests)]
    taken: list[float] = []
    with HttpClient(port, PATH.format("small"), headers_of(head)) as client:
        began, sent = time.perf_counter(), 0
        while len(taken) < requests:
            left = began + sent * INTERVAL_S - time.perf_counter() if sent < requests else 60.0
            if left <= 0:
                client.ask(head + rows[sent])
                sent += 1
                continue
            for number, answer in client.take(left):
                taken.append(time.perf_counter() - began - number * INTERVAL_S)
                if not answer.endswith(rows[number]):
                    raise AssertionError("an answer differs")
    return sorted(taken)[int(0.99 * (len(taken) - 1))] * 1e3


@contextmanager
def _beside(kind: str, port: int) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-m", "benchmarks.http_neighbours", kind, str(port)]) as process:
        try:
            time.sleep(1.0 + _SETTLE_S)
            yield
            if process.poll() is not None:
                raise AssertionError(f"the neighbour with {kind} ended early")
        finally:
            process.kill()


def measure(port: int, *, requests: int, rounds: int) -> Report:
    """The table: medians over rounds, each kind after a quiet stretch."""
    quiet: list[float] = []
    beside: dict[str, list[float]] = {kind: [] for kind in NEIGHBOURS}
    for _ in range(rounds):
        for kind, found in beside.items():
            time.sleep(_SETTLE_S)  # what the last one left is answered before
            quiet.append(_honest(port, requests))
            with _beside(kind, port):
                found.append(_honest(port, requests))
    report = Report(
        title=f"An honest caller beside one connection (alone: p99 {statistics.median(quiet):.1f} ms)"
    )
    report.columns = ("beside", "p99")
    for kind, found in beside.items():
        report.rows.append((kind, Figure(statistics.median(found), "ms", at_most=AIM_P99_MS)))
    return report


if __name__ == "__main__":
    NEIGHBOURS[sys.argv[1]](int(sys.argv[2]))
