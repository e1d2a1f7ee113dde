"""One connection that speaks ZMTP by hand, over a plain socket: nothing of ZeroMQ or of the product is between."""

from __future__ import annotations

import contextlib
import select
import socket
import struct

from tests.e2e.conftest import PATIENCE_S
from tests.entries import Heartbeat

from shapestream.wire.codec import encode

# Nothing more is taken for so long: libzmq and the kernel are full.
STUCK_S = 0.5
MOST_SENT = 1 << 20
"""Thousands of messages: many times what libzmq held for a peer before it stopped to read."""
HEARTBEAT = encode([Heartbeat()])[0]
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def command(name: bytes, body: bytes = b"") -> bytes:
    """A short command frame."""
    content = bytes([len(name)]) + name + body
    return b"\x04" + bytes([len(content)]) + content


def message(body: bytes) -> bytes:
    """A message of one short frame."""
    return b"\x00" + bytes([len(body)]) + body


PING = command(b"PING", b"\0\0")


class Raw:
    """One connection as a plain socket, with the handshake done; it reads nothing afterwards."""

    def __init__(self, sock: socket.socket, kind: bytes, flood: bytes) -> None:
        self.socket = sock
        self._flood = flood
        sock.settimeout(PATIENCE_S)
        body = b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
        sock.sendall(GREETING)
        self._heard(len(GREETING))
        sock.sendall(command(b"READY", body))
        self._heard(2)

    def _heard(self, nbytes: int) -> None:
        while nbytes > 0:
            data = self.socket.recv(nbytes)
            assert data, "the other side hung up"
            nbytes -= len(data)

    def greet(self) -> None:
        """Sends one message and waits for the answer: the event loop knows this peer."""
        self.socket.sendall(message(HEARTBEAT))
        self._heard(2)

    def fill(self) -> None:
        """Sends until nothing more is taken."""
        self.socket.setblocking(False)
        sent = 0
        while sent < MOST_SENT and select.select([], [self.socket], [], STUCK_S)[1]:
            with contextlib.suppress(BlockingIOError):
                # Whole floods only: a short send goes on where it stopped.
                sent += self.socket.send(self._flood[sent % len(self._flood) :])

    def break_off(self) -> None:
        """Ends the connection by a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def dialled(address: str) -> socket.socket:
    """A connected socket."""
    if address.startswith("ipc://"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.removeprefix("ipc://"))
        return sock
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))
