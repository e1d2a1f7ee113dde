"""Connections between a server and clients in other threads of its process: as those over ZeroMQ, without a socket.

Each client has a thread or an event loop of its own: trio's, or a core's thread (`Core.run_in_thread`). `MemoryEndpoint` is
for one trio run, and a `ThreadServer` has slots as peers, which need no bound. Here both directions have one:

    direction   what waits at most              what happens beyond it
    to server   `most_messages`, `most_bytes`   `send_nowait` raises `trio.WouldBlock`, `send` waits
    to client   `most_answers` messages         `send_nowait` raises `OutboxFull`, and the server ends the link

The first message that waits is taken whatever its size. Answers are not bounded in bytes: what is unread are answers of
requests that were under way when the client stopped reading, which its own program has chosen, and it sends no more until it
reads. To end its link would lose answers that are in its memory already.

A side that sleeps is woken as in memory.py: it says that it is about to sleep, and looks once more. The other side
appends first, and looks whether this one sleeps. Counts that both sides read are written by one of them: what was sent, by
the sender, what was read, by the receiver.

Small frames are copied, large ones are shared, read-only. A client must not change an array before its result is there, as
with ZeroMQ.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import trio

from shapestream.errors import OutboxFull, PeerGone
from shapestream.transport.interface import (
    Addressed,
    Message,
    Wake,
    send_when_there_is_room,
)
from shapestream.transport.memory import CAPACITY_MESSAGES, MemorySocket, ThreadServer, as_received
from shapestream_engine.layout import Buffer

MOST_BYTES = 512 << 20
"""Bytes that the server has not read, at most: a client's credit by default (`window_bytes`)."""
MOST_ANSWERS = 65_536 + 4096
"""Messages that a client has not read, at most: the largest credit, and more than an hour of heartbeats."""


class _Direction:
    """The unread part of one direction. Each method is for one side: `sent` for the sender, `read` for the receiver."""

    __slots__ = (
        "_read_bytes",
        "_read_messages",
        "_sent_bytes",
        "_sent_messages",
        "most_bytes",
        "most_messages",
    )

    def __init__(self, most_messages: int, most_bytes: float) -> None:
        self.most_messages = most_messages
        self.most_bytes = most_bytes
        self._sent_messages = self._sent_bytes = 0
        self._read_messages = self._read_bytes = 0

    def has_room(self, nbytes: int) -> bool:
        """Tell whether a message of so many bytes may be sent."""
        unread = self._sent_messages - self._read_messages
        unread_bytes = self._sent_bytes - self._read_bytes
        return not unread or (unread < self.most_messages and unread_bytes + nbytes <= self.most_bytes)

    def sent(self, nbytes: int) -> None:
        self._sent_messages += 1
        self._sent_bytes += nbytes

    def read(self, message: Message) -> None:
        self._read_messages += 1
        self._read_bytes += sum(map(len, message))


class CrossingServer(ThreadServer):
    """A `PeerSocket` for clients of this process, each in a thread or an event loop of its own."""

    def __init__(
        self,
        *,
        most_messages: int = CAPACITY_MESSAGES,
        most_bytes: int = MOST_BYTES,
        most_answers: int = MOST_ANSWERS,
    ) -> None:
        super().__init__()
        self._bounds = most_messages, most_bytes, most_answers
        self._clients: dict[bytes, CrossingConnection] = {}
        self._over = False

    def connect(self) -> CrossingConnection:
        """Return a new connection, from any thread. That of a closed server says so by its `refusal`."""
        peer = b"client %d" % next(self._numbers)
        connection = self._clients[peer] = CrossingConnection(self, peer, *self._bounds)
        if self._over:  # looked at after the connection can be found: `close` finds it, or this does
            self._clients.pop(peer, None)
            connection._server_closed()
        return connection

    def receive_nowait(self) -> list[Addressed]:
        """Return the waiting messages, perhaps none; their senders may send more."""
        taken = super().receive_nowait()
        for peer, message in taken:
            if (connection := self._clients.get(peer)) is not None:
                connection._was_read(message)
        return taken

    def send_nowait(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Hand the message over; `PeerGone` for an unknown or closed peer, `OutboxFull` for one that does not read."""
        self._check_open()
        connection = self._clients.get(peer)
        if connection is None:
            raise PeerGone(f"{peer.decode()} has closed its connection, or was cut off")
        connection._deliver(as_received(frames))

    def close(self) -> None:
        """Stop listening, in the server's event loop. Connections are told, and keep what they have received."""
        self._over = True
        while self._clients:
            _, connection = self._clients.popitem()
            connection._server_closed()
        super().close()

    def _hang_up(self, peer: bytes) -> None:
        self._clients.pop(peer, None)

    def _take(self, peer: bytes, message: Message) -> bool:
        """Take a message, in the sender's thread; False where the peer is cut off, or the server closed."""
        if peer not in self._clients:
            return False
        self._messages.append((peer, message))
        self._wake_up()
        return True


class CrossingConnection(MemorySocket[Message]):
    """A `Connection` to a `CrossingServer`. One thread uses it, by `run` in trio, or by `wait`."""

    def __init__(
        self, server: CrossingServer, peer: bytes, most_messages: int, most_bytes: int, most_answers: int
    ) -> None:
        super().__init__()
        self._server = server
        self._peer = peer
        self._to_server = _Direction(most_messages, most_bytes)
        self._to_client = _Direction(most_answers, math.inf)
        self._refused = 0
        """Bytes of the message for which there was no room; 0: there was."""
        self._senders = trio.lowlevel.ParkingLot()
        self._asleep = False
        self._wake: Wake | None = None
        self.refusal: str | None = None
        self.broke = False

    # ------------------------------------------------------------ its own thread

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Call `on_messages` when messages come, and wake senders when there is room, until closed or cancelled."""
        wake = self._wake = Wake()
        # Not closed here: the server may be about to set it, when its number is another file's.
        weakref.finalize(self, wake.close).atexit = False
        task_status.started()
        while not self._closed.is_set():
            if self._messages and self.on_messages is not None:
                self.on_messages()
            if not self._refused:
                self._senders.unpark_all()
            self._asleep = True
            if (self._messages and self.on_messages is not None) or (self._senders and not self._refused):
                await trio.lowlevel.checkpoint()
            else:
                if self._messages:
                    self._receivers.unpark()
                await trio.lowlevel.wait_readable(wake.fileno())
                wake.clear()
            self._asleep = False

    def wait(self, wake: Wake, timeout_s: float, *, for_room: bool) -> bool:
        """Block this thread until there may be messages, or room where it is for that: then True.

        False when the wake is set, and after `timeout_s` seconds.
        """
        self._wake = wake
        if not self._is_ready(for_room):
            self._asleep = True
            if not self._is_ready(for_room):
                wake.wait(timeout_s)
            self._asleep = False
        return self._is_ready(for_room)

    def _is_ready(self, for_room: bool) -> bool:
        return bool(self._messages) or (for_room and not self._refused)

    def receive_nowait(self) -> list[Message]:
        """Return the waiting messages, perhaps none."""
        taken = super().receive_nowait()
        for message in taken:
            self._to_client.read(message)
        return taken

    def send_nowait(self, frames: Sequence[Buffer]) -> None:
        """Hand the message over; `trio.WouldBlock` when too much is unread. A closed server gets nothing."""
        self._check_open()
        message = as_received(frames)
        nbytes = sum(map(len, message))
        if not self._to_server.has_room(nbytes):
            self._refused = nbytes or 1
            if not self._to_server.has_room(nbytes):  # again: the server may have read just before
                raise trio.WouldBlock
            self._refused = 0
        if self._server._take(self._peer, message):
            self._to_server.sent(nbytes)

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Send, after waiting for room."""
        await send_when_there_is_room(frames, self.send_nowait, self._senders)

    def close(self) -> None:
        """Leave the server, which keeps the sent messages."""
        self._server._hang_up(self._peer)
        self._end()
        self._senders.unpark_all()
        if self._wake is not None:
            self._wake.set()

    # ------------------------------------------------------------ the server's thread

    def _deliver(self, message: Message) -> None:
        nbytes = sum(map(len, message))
        if not self._to_client.has_room(nbytes):
            raise OutboxFull(f"{self._peer.decode()} does not read")
        self._to_client.sent(nbytes)
        self._messages.append(message)
        self._wake_up()

    def _was_read(self, message: Message) -> None:
        self._to_server.read(message)
        if self._refused and self._to_server.has_room(self._refused):
            self._refused = 0
            self._wake_up()

    def _server_closed(self) -> None:
        self.refusal = "the server of this process has ended"
        self.broke = True
        self._wake_up()

    def _wake_up(self) -> None:
        wake = self._wake
        if self._asleep and wake is not None:
            self._asleep = False
            wake.set()
