"""Connections between an event loop and threads of its own process: the slots of a server without worker processes.

A message is appended to a deque, which is atomic. The other side is woken only where it sleeps:

    side     sleeps in                       is woken by
    loop     `ThreadServer.run`              its pipe, from the thread that appended a message
    thread   `ThreadConnection.receive`      its `Wake`, from the loop

A side that is about to sleep says so first, and then looks for messages once more. The other side appends first, and then
looks whether this one sleeps. So one of the two sees the other, and no message is left behind.

Neither side keeps a bound: a slot has at most two batches, and a report of each.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import count

import trio

from shapestream.errors import PeerGone
from shapestream.transport.interface import Message
from shapestream.transport.memory import LocalServer
from shapestream.transport.wake import Wake
from shapestream_engine.layout import Buffer


class ThreadServer(LocalServer):
    """A `PeerSocket` whose peers are threads of this process, each with one connection."""

    def __init__(self) -> None:
        super().__init__()
        self._threads: dict[bytes, ThreadConnection] = {}
        self._numbers = count(1)
        self._asleep = False
        self._wake = Wake()
        # Not closed with the socket: a thread may be about to set it, when its number is another file's.
        weakref.finalize(self, self._wake.close).atexit = False

    def dial(self, wake: Wake) -> ThreadConnection:
        """Return a new connection for the calling thread, whose waits `wake` ends."""
        peer = b"thread %d" % next(self._numbers)
        connection = self._threads[peer] = ThreadConnection(self, peer, wake)
        return connection

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Call `on_messages` when messages come, until the socket is closed or cancelled."""
        task_status.started()
        while not self._closed.is_set():
            more = self.on_messages is not None and bool(self.on_messages())
            self._asleep = True
            if more or (self._messages and self.on_messages is not None):
                await trio.lowlevel.checkpoint()
            else:
                if self._messages:
                    self._receivers.unpark()
                await trio.lowlevel.wait_readable(self._wake.fileno())
                self._wake.clear()
            self._asleep = False

    def send_nowait(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Hand the message over; `PeerGone` where the thread has closed its connection."""
        self._check_open()
        connection = self._threads.get(peer)
        if connection is None:
            raise PeerGone(f"{peer.decode()} has closed its connection, or was cut off")
        connection._put(list(frames))

    def cut_off(self, peer: bytes) -> None:
        """Ignore this thread from now on, and what it has sent."""
        self._hang_up(peer)
        # In place, each step atomic: other threads append meanwhile.
        for message in self._messages.copy():
            if message[0] == peer:
                self._messages.remove(message)

    def _hang_up(self, peer: bytes) -> None:
        self._threads.pop(peer, None)

    def close(self) -> None:
        """Stop listening; the threads are not told."""
        self._threads.clear()
        self._end()
        self._wake.set()

    def _arrived(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Take a message, in the sender's thread."""
        if peer in self._threads:
            self._messages.append((peer, list(frames)))
            if self._asleep:
                self._asleep = False
                self._wake.set()


class ThreadConnection:
    """A `BlockingConnection` to a `ThreadServer`. Only its own thread calls its methods."""

    def __init__(self, server: ThreadServer, peer: bytes, wake: Wake) -> None:
        self._server = server
        self._peer = peer
        self._wake = wake
        self._unread: deque[Message] = deque()
        self._asleep = False

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message; None after `timeout_s` seconds without one, and when the thread is woken."""
        if not self._unread:
            self._asleep = True
            if not self._unread:
                self._wake.wait(math.inf if timeout_s is None else timeout_s)
            self._asleep = False
        return self._unread.popleft() if self._unread else None

    def send(self, frames: Sequence[Buffer], timeout_s: float | None = None) -> bool:
        """Send. Returns True: there is always room."""
        self._server._arrived(self._peer, frames)
        return True

    def close(self) -> None:
        """Close the connection; sent messages stay with the server."""
        self._server._hang_up(self._peer)

    def _put(self, message: Message) -> None:
        """Take a message, in the event loop."""
        self._unread.append(message)
        if self._asleep:
            self._asleep = False
            self._wake.set()
