"""A connection to a gateway for gRPC whose frames of HTTP/2 the test writes itself: what no client's library would send."""

from __future__ import annotations

import socket
import struct
from types import TracebackType
from typing import Any, Self

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
TIMEOUT_S = 120.0


class Frames:
    """One connection. It reads no frame unless it is told to, and opens no window beyond HTTP/2's first 64 KiB."""

    def __init__(self, place: str) -> None:
        host, _, port = place.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send(SETTINGS, 0, 0)
        self._streams = 0
        self._received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def begin(self, path: str, message: Any = None, *, token: str = "") -> int:
        """Begins a call, and ends it where it has a message; returns the number of its stream."""
        number = 2 * self._streams + 1
        self._streams += 1
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "here",
            "te": "trailers",
            "content-type": "application/grpc",
            **({"authorization": f"Bearer {token}"} if token else {}),
        }
        self._send(HEADERS, END_HEADERS, number, b"".join(map(_literal, headers, headers.values())))
        if message is not None:
            data = message if isinstance(message, bytes) else message.SerializeToString()
            self._send(DATA, END_STREAM, number, b"\0" + struct.pack(">I", len(data)) + data)
        return number

    def ping(self) -> None:
        """Pings, and returns when the gateway has answered."""
        self._send(PING, 0, 0, bytes(8))
        while self._next()[:2] != (PING, ACK):
            pass

    def ends(self, number: int) -> set[int]:
        """The streams that the gateway has ended, once there are so many."""
        ended: set[int] = set()
        while len(ended) < number:
            kind, flags, stream = self._next()
            if kind == RESET or (kind in (DATA, HEADERS) and flags & END_STREAM):
                ended.add(stream)
        return ended

    def _next(self) -> tuple[int, int, int]:
        """Kind, flags and stream of the next frame. Settings and pings are acknowledged."""
        size, kind, flags, stream = struct.unpack(">IBBI", b"\0" + self._read(9))
        payload = self._read(size)
        if kind in (SETTINGS, PING) and not flags & ACK:
            self._send(kind, ACK, 0, payload if kind == PING else b"")
        assert kind != GOAWAY, payload
        return kind, flags, stream

    def _read(self, size: int) -> bytes:
        while len(self._received) < size:
            chunk = self._socket.recv(65536)
            assert chunk, "the gateway has closed the connection"
            self._received += chunk
        found, self._received = self._received[:size], self._received[size:]
        return found

    def _send(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        self._socket.sendall(struct.pack(">IBBI", len(payload), kind, flags, stream)[1:] + payload)


def _literal(name: str, value: str) -> bytes:
    """A header that is not indexed (HPACK). Both lengths are below 127."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
