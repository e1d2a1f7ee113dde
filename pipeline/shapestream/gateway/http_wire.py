"""The bytes of a connection, in and out: on a plain TCP socket, or by TLS.

Both forms have the same four methods. A plain socket is used by system calls on its descriptor: an answer of many pieces is
one `writev`, and a body is read into the array that keeps it. trio's streams offer neither, and take a turn of the event
loop for each write.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import trio

from shapestream.gateway.http_messages import Buffer

READ_BYTES = 64 * 1024
"""Most bytes that are read of requests before they are looked at."""
TLS_PIECE_BYTES = 256 * 1024
"""Bytes that are encrypted and written at once. With 64 KiB, 4 MiB each way took 1.15 of the CPU."""
MOST_BUFFERS = os.sysconf("SC_IOV_MAX")
"""Most buffers of one `writev`."""


class PlainWire:
    """A TCP socket."""

    __slots__ = ("_descriptor", "socket")

    def __init__(self, stream: trio.SocketStream) -> None:
        self.socket = stream.socket
        self._descriptor = stream.socket.fileno()
        _let_the_system_buffer(self.socket)

    async def read(self, most: int = READ_BYTES) -> bytes:
        """Wait for bytes, and return at most `most` of them; none after the peer's last."""
        while True:
            # Waiting comes first: mostly there is nothing yet. It is also where other connections have their turn.
            await trio.lowlevel.wait_readable(self._descriptor)
            try:
                return os.read(self._descriptor, most)
            except BlockingIOError:
                continue

    async def read_into(self, room: memoryview) -> int:
        """Wait for bytes, write them into `room`, and return their number; 0 after the peer's last."""
        while True:
            await trio.lowlevel.wait_readable(self._descriptor)
            try:
                return os.readv(self._descriptor, [room])
            except BlockingIOError:
                continue

    def write_now(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Write what the system takes at once. Return the rest."""
        while buffers:
            try:
                written = os.writev(self._descriptor, buffers[:MOST_BUFFERS])
            except BlockingIOError:
                break
            buffers = _after(buffers, written)
        return buffers

    async def write_more(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Wait until the system takes more, and write it. Return the rest."""
        await trio.lowlevel.wait_writable(self._descriptor)
        return self.write_now(buffers)


class TlsWire:
    """TLS over a TCP socket."""

    __slots__ = ("_stream", "socket")

    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream
        self.socket = stream.transport_stream.socket
        _let_the_system_buffer(self.socket)

    async def read(self, most: int = READ_BYTES) -> bytes:
        """Wait for bytes, and return at most `most` of them; none after the peer's last."""
        return bytes(await self._stream.receive_some(most))

    async def read_into(self, room: memoryview) -> int:
        """Wait for bytes, write them into `room`, and return their number; 0 after the peer's last."""
        data = await self._stream.receive_some(min(len(room), READ_BYTES))
        room[: len(data)] = data
        return len(data)

    def write_now(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Write nothing: TLS may have to wait first. Return all."""
        return buffers

    async def write_more(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Write the next piece, as soon as the system takes it. Return the rest."""
        piece = memoryview(buffers[0])[:TLS_PIECE_BYTES]
        await self._stream.send_all(piece)
        return _after(buffers, len(piece))


Wire = PlainWire | TlsWire
HttpStream = trio.SocketStream | trio.SSLStream[trio.SocketStream]


def wire_of(stream: HttpStream) -> Wire:
    """Return the form of a connection's bytes."""
    return PlainWire(stream) if isinstance(stream, trio.SocketStream) else TlsWire(stream)


def _let_the_system_buffer(own: trio.socket.SocketType) -> None:
    """Set the system's own bound on unsent bytes, which is up to the 4 MiB of `tcp_wmem`.

    trio lets the system take more only when less than 16 KiB are unsent: 4 MiB would be written in 13 turns of the event
    loop instead of two.
    """
    own.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NOTSENT_LOWAT, 0)


async def drain(own: trio.socket.SocketType) -> None:
    """Tell the peer that nothing more comes, and drop what it still sends, until it closes too.

    A socket that is closed with unread bytes resets the connection, and the peer may lose the last answer.
    """
    try:
        own.shutdown(socket.SHUT_WR)
        while await own.recv(READ_BYTES):
            pass
    except OSError:
        return  # the peer has reset the connection


def _after(buffers: Sequence[Buffer], written: int) -> Sequence[Buffer]:
    """Return what follows the first `written` bytes."""
    for index, buffer in enumerate(buffers):
        if written < len(buffer):
            return [memoryview(buffer)[written:], *buffers[index + 1 :]]
        written -= len(buffer)
    return ()
