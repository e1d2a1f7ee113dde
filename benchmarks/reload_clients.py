"""Four clients for `reloads.py`, which ask all the while, and the judge of their answers.

One does nothing but the protocol, and does not know the notice of a changed signature; the others are the SDK, tritonclient
over HTTP and over gRPC. Each has one request at a time, in turns for the model that reloads change and for one that no
reload touches. No two requests have equal values, so the answer to another request is a wrong one.
"""

from __future__ import annotations

import http.client
import json
import math
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.raw_client import RawClient
from shapestream import DeadlineExceeded, blocking
from shapestream.wire.messages import Failure, ResultEntry
from shapestream_engine.layout import Tensors

PER_S = 25.0
"""Requests per second of each client."""
DEADLINE_S = 1.0
LOST_S = 10.0
"""Seconds after which a request without an answer is lost."""
ROOT = Path(__file__).parents[1]
TRITON = ROOT / ".venv-client-triton" / "bin" / "python"
HOST = "127.0.0.1"
CHANGED, BESIDE = "changed", "beside"


class Answer(NamedTuple):
    """A row of an answer, and the version that it names."""

    values: list[float]
    version: str | None


class Late(Exception):
    """The server says that the deadline has passed."""


class Lost(Exception):
    """No answer came."""


Ask = Callable[[str, list[float]], Answer]
"""Ask a model with a row and the deadline. Raises Late, Lost, and whatever else a client raises for a failed request."""


class Addresses(NamedTuple):
    """Where a server listens."""

    listen: str
    http: int
    grpc: int


@contextmanager
def sdk(server: Addresses) -> Iterator[Ask]:
    """The blocking client."""
    with blocking.connect(server.listen) as client:

        def ask(model: str, row: list[float]) -> Answer:
            try:
                found = client.infer(model, {"x": np.array([row], np.float32)}, deadline=DEADLINE_S)
            except DeadlineExceeded as error:
                raise Late from error
            return Answer(found["y"][0].tolist(), found.version)

        yield ask


@contextmanager
def protocol(server: Addresses) -> Iterator[Ask]:
    """A client that opens its models once."""
    with RawClient(server.listen, CHANGED) as changed, RawClient(server.listen, BESIDE) as beside:
        clients = {CHANGED: changed, BESIDE: beside}

        def ask(model: str, row: list[float]) -> Answer:
            payload = np.array(row, np.float32).tobytes()
            tensors = Tensors(layout=((0, "f32", (1, len(row))),), buffers=(payload,))
            sequence = clients[model].ask(tensors, remaining_ms=int(1e3 * DEADLINE_S))
            for client in clients.values():
                client.beat()
            answer = _answer(clients[model], sequence)
            if isinstance(answer, Failure):
                raise Late if answer.code == DeadlineExceeded.code else RuntimeError(answer.message)
            values: list[float] = np.frombuffer(answer.tensors.buffers[0], np.float32).tolist()
            return Answer(values, answer.timings.version)

        yield ask


def _answer(client: RawClient, sequence: int) -> ResultEntry | Failure:
    while client.socket.poll(int(1e3 * LOST_S)):
        for entry in client.take():
            if isinstance(entry, ResultEntry | Failure):
                if entry.sequence != sequence:
                    raise RuntimeError(f"an answer to request {entry.sequence}, after {sequence}")
                return entry
    raise Lost


@contextmanager
def triton(kind: str, port: int) -> Iterator[Ask]:
    """Tritonclient, in a process and an environment of its own."""
    program = ROOT / "benchmarks" / "triton_client.py"
    command = [str(TRITON), "-P", str(program), kind, f"{HOST}:{port}", str(DEADLINE_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        sink, source = child.stdin, child.stdout

        def ask(model: str, row: list[float]) -> Answer:
            print(json.dumps([model, row]), file=sink, flush=True)
            told = json.loads(source.readline() or '{"late": false, "error": "tritonclient ended"}')
            if "error" in told:
                raise Late if told["late"] else RuntimeError(told["error"])
            return Answer(**told)

        yield ask
        sink.close()


@contextmanager
def plain_http(server: Addresses) -> Iterator[Ask]:
    """One connection of `http.client`, where tritonclient is not installed."""
    connection = http.client.HTTPConnection(HOST, server.http, timeout=LOST_S)

    def ask(model: str, row: list[float]) -> Answer:
        inputs = [{"name": "x", "datatype": "FP32", "shape": [1, len(row)], "data": row}]
        body = {"inputs": inputs, "parameters": {"timeout": int(1e6 * DEADLINE_S)}}
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps(body))
        response = connection.getresponse()
        told = response.read()
        if response.status != 200:
            raise Late if response.status == 504 else RuntimeError(f"{response.status}: {told[:300]!r}")
        answer = json.loads(told)
        return Answer(answer["outputs"][0]["data"], answer.get("model_version"))

    yield ask
    connection.close()


def clients_of(server: Addresses) -> dict[str, AbstractContextManager[Ask] | None]:
    """The clients by name; None for those that need what is not installed."""
    here = TRITON.exists()
    return {
        "protocol alone": protocol(server),
        "SDK": sdk(server),
        "tritonclient, HTTP": triton("http", server.http) if here else None,
        "tritonclient, gRPC": triton("grpc", server.grpc) if here else None,
        **({} if here else {"http.client": plain_http(server)}),
    }


@dataclass(slots=True)
class Seen:
    """The answers that one client has seen. A request belongs to the time at which it was due."""

    asked: int = 0
    waits: list[tuple[float, float]] = field(default_factory=list)
    """The time at which the request of each answer was due, and seconds from then."""
    late: list[float] = field(default_factory=list)
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Clients:
    """The clients at work. `allowed`: what the changed model may add now, and the version that answers must name then."""

    def __init__(self, allowed: Mapping[int, str]) -> None:
        self.allowed = dict(allowed)
        self.seen: dict[str, Seen] = {}
        self._over = threading.Event()

    @contextmanager
    def asking(self, asks: Mapping[str, AbstractContextManager[Ask]]) -> Iterator[None]:
        """Let them ask until the block ends."""
        with ExitStack() as stack:
            threads = []
            for number, (name, client) in enumerate(asks.items()):
                seen = self.seen[name] = Seen()
                arguments = (stack.enter_context(client), seen, number)
                threads.append(threading.Thread(target=self._ask, args=arguments))
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                self._over.set()
                for thread in threads:
                    thread.join()

    def _ask(self, ask: Ask, seen: Seen, client: int) -> None:
        due = time.monotonic()
        while not self._over.is_set():
            model, allowed = (CHANGED, BESIDE)[seen.asked % 2], self.allowed
            row = [1e6 * client + seen.asked % 1_000_000, *[0.0] * (1 + seen.asked % 7)]
            seen.asked += 1
            try:
                answer = ask(model, row)
            except Late:
                seen.late.append(due)
            except Lost:
                seen.lost += 1
            except Exception as error:  # noqa: BLE001 - told by the verdicts
                seen.failed.append(f"{model}: {type(error).__name__}: {error}")
            else:
                seen.waits.append((due, time.monotonic() - due))
                if not right(row, answer, {**allowed, **self.allowed} if model == CHANGED else {0: None}):
                    seen.wrong.append(f"{model}: {answer} for {row}, where {allowed} may answer")
            due = max(due + 1.0 / PER_S, time.monotonic() - DEADLINE_S)
            self._over.wait(max(0.0, due - time.monotonic()))

    def p99(self, begin: float, end: float) -> float:
        """The p99 of what was due in this time, in seconds."""
        found = sorted(wait for seen in self.seen.values() for at, wait in seen.waits if begin <= at < end)
        return found[math.ceil(0.99 * len(found)) - 1] if found else math.nan

    def missed(self, begin: float, end: float) -> tuple[int, int]:
        """Deadlines missed, and answers, of what was due in this time."""
        late = sum(begin <= at < end for seen in self.seen.values() for at in seen.late)
        return late, sum(begin <= at < end for seen in self.seen.values() for at, _ in seen.waits)


def right(row: Sequence[float], answer: Answer, allowed: Mapping[int, str | None]) -> bool:
    """Tell whether a version that may answer gave this answer, by NumPy, and is the one that the answer names."""
    added = int(answer.values[-1]) if answer.values else -1
    expected = np.array(row, np.float32) + np.float32(added)
    named = allowed.get(added)
    return added in allowed and answer.values == expected.tolist() and named in (None, answer.version)
