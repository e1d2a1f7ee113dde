"""Balancers of a few lines: one that follows readiness, request by request; and one of connections, which sees none."""

from __future__ import annotations

import http.client
import itertools
import json
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field

import grpc
from tests.e2e.grpc_calls import TIMEOUT_S, Caller

BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]})
PATH = "/v2/models/gated/infer"
LOOK_S = 0.1
PAUSE_S = 0.005
"""Between two requests of one caller."""


@dataclass(eq=False)
class Backend:
    """One server, as its balancer knows it."""

    http_port: int
    grpc_place: str = ""
    ready: bool = False

    def look(self) -> None:
        """Ask whether it is ready."""
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=TIMEOUT_S)) as asked:
                asked.request("GET", "/v2/health/ready")
                self.ready = asked.getresponse().status == 200
        except OSError:
            self.ready = False


class KeepAlive:
    """Connections that are kept, one for each backend, as a balancer keeps them."""

    def __init__(self) -> None:
        self._kept: dict[Backend, http.client.HTTPConnection] = {}

    def __call__(self, backend: Backend) -> int:
        """The status of one inference."""
        connection = self._kept.get(backend)
        if connection is not None and _is_over(connection):
            connection.close()
            connection = None
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", backend.http_port, timeout=TIMEOUT_S)
            self._kept[backend] = connection
        connection.request("POST", PATH, BODY)
        answer = connection.getresponse()
        answer.read()
        return answer.status

    def close(self) -> None:
        """All of them."""
        for connection in self._kept.values():
            connection.close()


class Fresh(KeepAlive):
    """A connection for each request."""

    def __call__(self, backend: Backend) -> int:
        """The status of one inference."""
        try:
            return super().__call__(backend)
        finally:
            self._kept.pop(backend).close()


class OverGrpc:
    """A channel for each backend."""

    def __init__(self) -> None:
        self._kept: dict[Backend, Caller] = {}

    def __call__(self, backend: Backend) -> int:
        """200, or the number of gRPC's status."""
        caller = self._kept.setdefault(backend, Caller(backend.grpc_place))
        try:
            caller.infer(wait_for_ready=False)
        except grpc.RpcError as error:
            return int(error.code().value[0])
        return 200

    def close(self) -> None:
        """All of them."""
        for caller in self._kept.values():
            caller.channel.close()


KINDS: dict[str, type[KeepAlive | OverGrpc]] = {kind.__name__: kind for kind in (KeepAlive, Fresh, OverGrpc)}


def _is_over(connection: http.client.HTTPConnection) -> bool:
    """Whether the peer has closed a kept connection, or announced it."""
    return connection.sock is None or bool(select.select([connection.sock], [], [], 0)[0])


@dataclass
class Balancer:
    """Callers of several kinds, whose requests go to ready backends in turn. Nothing is tried again."""

    backends: dict[str, Backend] = field(default_factory=dict)
    answered: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def balancing(self) -> Iterator[None]:
        """Callers ask during the block, and the backends' readiness is looked at."""
        over = threading.Event()
        with ThreadPoolExecutor() as pool:
            running = [pool.submit(self._look, over)]
            running += [pool.submit(self._call, kind, over) for kind in KINDS.values()]
            try:
                yield
            finally:
                over.set()
                for each in running:
                    each.result(TIMEOUT_S)

    def _look(self, over: threading.Event) -> None:
        while not over.wait(LOOK_S):
            for backend in list(self.backends.values()):
                backend.look()

    def _call(self, kind: type[KeepAlive | OverGrpc], over: threading.Event) -> None:
        name, turns = kind.__name__, itertools.count()
        with closing(kind()) as ask:
            while not over.wait(PAUSE_S):
                ready = [backend for backend in list(self.backends.values()) if backend.ready]
                if not ready:
                    continue
                try:
                    status = ask(ready[next(turns) % len(ready)])
                except (OSError, http.client.HTTPException) as error:
                    self.failures.append(f"{name}: {error!r}")
                    continue
                if status != 200:
                    self.failures.append(f"{name}: {status}")
                self.answered[name] = self.answered.get(name, 0) + (status == 200)


class ConnectionBalancer:
    """Gives each new connection to the next backend, and copies bytes: it knows neither requests nor readiness."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pool = ThreadPoolExecutor(256)
        self._accepting: Future[None] = self._pool.submit(self._accept)

    def _accept(self) -> None:
        for turn in itertools.count():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.ports[turn % len(self.ports)]), TIMEOUT_S)
            self._pool.submit(_copy, near, far)

    def close(self) -> None:
        """Accept no more; the connections end with their peers."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.result(TIMEOUT_S)
        self._pool.shutdown(wait=False)


def _copy(near: socket.socket, far: socket.socket) -> None:
    """Copy both ways, until both sides have ended or one is gone."""
    targets = {near: far, far: near}
    with near, far, suppress(OSError):
        while targets:
            for source in select.select(list(targets), [], [])[0]:
                if data := source.recv(65536):
                    targets[source].sendall(data)
                else:
                    targets.pop(source).shutdown(socket.SHUT_WR)
