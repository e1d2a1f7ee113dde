"""A client of an HTTP server that costs little: keep-alive connections and one epoll, in the caller's thread.

A connection carries one request at a time, since HTTP/1.1 answers in order. So there are as many as are in flight.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Iterator, Sequence

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
_READ_BYTES = 1 << 16
_OK = b"HTTP/1.1 200 "
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class _Connection:
    """A socket, the number of its request, and the part of the answer that has arrived."""

    __slots__ = ("number", "received", "socket")

    def __init__(self, port: int, source: str) -> None:
        self.socket = socket.create_connection((HOST, port), TIMEOUT_S, (source, 0))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # With a timeout, Python would poll before each call.
        self.socket.setblocking(False)
        self.number = 0
        self.received = b""

    def send(self, request: bytes) -> None:
        """Send the whole request, and wait where the server reads slowly."""
        sent = self.socket.send(request)
        if sent < len(request):
            self.socket.settimeout(TIMEOUT_S)
            self.socket.sendall(memoryview(request)[sent:])
            self.socket.setblocking(False)

    def read(self) -> bytes | None:
        """Read what has arrived; the body of the answer once it is whole."""
        part = self.socket.recv(_READ_BYTES)
        if not part:
            raise AssertionError("the server closed a connection")
        self.received += part
        head, end, body = self.received.partition(b"\r\n\r\n")
        if not end:
            return None
        length = _LENGTH.search(head)
        if length is None or not head.startswith(_OK):
            raise AssertionError(f"the server answered {self.received[:300]!r}")
        if len(body) < int(length[1]):
            return None
        self.received = b""
        return body


class HttpClient:
    """Requests to one path of a server on this machine, numbered from 0."""

    def __init__(self, port: int, path: str, headers: str = "", *, source: str = HOST) -> None:
        """`headers` are more of them, each with its line end; `source` is the client's own address."""
        self._port = port
        self._source = source
        self._head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\n{headers}Content-Length: ".encode()
        self._epoll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._idle: list[_Connection] = []
        self._asked = 0

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._epoll.close()
        for connection in self._connections.values():
            connection.socket.close()

    def fileno(self) -> int:
        """A descriptor that is readable where an answer, or a part of one, has arrived."""
        return self._epoll.fileno()

    def ask(self, body: bytes) -> int:
        """Send one request on a connection that is idle, or a new one; returns its number."""
        connection = self._idle.pop() if self._idle else self._connect()
        connection.number = self._asked
        self._asked += 1
        connection.send(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
        return connection.number

    def _connect(self) -> _Connection:
        connection = _Connection(self._port, self._source)
        self._connections[connection.socket.fileno()] = connection
        self._epoll.register(connection.socket, select.EPOLLIN)
        return connection

    def take(self, timeout_s: float = 0.0) -> list[tuple[int, bytes]]:
        """The numbers and bodies of the answers that are there, perhaps none; waits at most so long for a first part."""
        answers = []
        for descriptor, _ in self._epoll.poll(timeout_s):
            connection = self._connections[descriptor]
            if (body := connection.read()) is not None:
                self._idle.append(connection)
                answers.append((connection.number, body))
        return answers

    def ask_alone(self, body: bytes) -> bytes:
        """Send one request, with none outstanding, and wait for its answer; returns the answer's body."""
        self.ask(body)
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            for _, answer in self.take(TIMEOUT_S):
                return answer
        raise AssertionError(f"no answer within {TIMEOUT_S:g} s")

    def stream(self, bodies: Sequence[bytes], outstanding: int) -> Iterator[tuple[int, bytes]]:
        """Send all of them, so many outstanding; yields the place of each with its answer, as they come."""
        first = self._asked
        sent = received = 0
        while received < len(bodies):
            while sent < len(bodies) and sent - received < outstanding:
                self.ask(bodies[sent])
                sent += 1
            if not select.select([self], [], [], TIMEOUT_S)[0]:
                raise AssertionError(f"no answer within {TIMEOUT_S:g} s")
            for number, body in self.take():
                received += 1
                yield number - first, body
