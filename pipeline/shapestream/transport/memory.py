"""Sockets within one process: the same interfaces as ZeroMQ's, no file, no port, no thread, all bounded.

For tests under trio's MockClock, which cannot see real sockets, and for a server and its client in one trio
run. They behave like ZeroMQ where it matters: a server that closes is not noticed by its connections, which
keep what they cannot send yet; a new server at the same endpoint knows them under new peer ids.

`ThreadServer` connects an event loop with threads of its own process: the slots of a server without worker processes. A
message is appended to a deque, which is atomic. The other side is woken only where it sleeps:

    side     sleeps in                       is woken by
    loop     `ThreadServer.run`              its pipe, from the thread that appended a message
    thread   `ThreadConnection.receive`      its `Wake`, from the loop

A side that is about to sleep says so first, and then looks for messages once more. The other side appends first, and then
looks whether this one sleeps. So one of the two sees the other, and no message is left behind. Neither side keeps a bound: a
slot has at most two batches, and a report of each. Clients in other threads have bounds (crossing.py).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from typing import Generic, Self, TypeVar

import trio
from trio.lowlevel import wait_readable

from shapestream.errors import AddressInUse, OutboxFull, PeerGone
from shapestream.transport.interface import (
    COPY_BELOW_BYTES,
    RECEIVE_BURST,
    Addressed,
    Message,
    Wake,
    send_when_there_is_room,
)
from shapestream_engine.layout import Buffer

# Messages that wait in one direction of one connection; then the sender is told to wait, or to give up.
CAPACITY_MESSAGES = 1024

T = TypeVar("T")


def as_received(frames: Sequence[Buffer]) -> Message:
    """Return the frames as the other side gets them from ZeroMQ: small ones copied, large ones shared."""
    received: Message = []
    for frame in frames:
        if type(frame) is bytes:
            received.append(frame)
            continue
        view = memoryview(frame)
        small = view.nbytes < COPY_BELOW_BYTES
        received.append(view.tobytes() if small else view.cast("B").toreadonly())
    return received


class MemorySocket(ABC, Generic[T]):
    """The common part of both sides: arrived messages, and tasks that wait for them. The sender keeps the bound."""

    def __init__(self) -> None:
        self._messages: deque[T] = deque()
        self._drained = True
        self._closed = trio.Event()
        self._is_closed = False
        """The same: `Event.is_set` is a call in Python, and each message asks."""
        self._receivers = trio.lowlevel.ParkingLot()
        self.on_messages: Callable[[], bool | None] | None = None
        """Never called: a message is put here by a sender's turn, in which no other may begin."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait until the socket is closed; in memory there is nothing to watch."""
        task_status.started()
        await self._closed.wait()

    async def receive(self) -> list[T]:
        """Receive the waiting messages, at least one; from clients each with its sender."""
        # No checkpoint after the messages are taken: in it `on_messages` would take later ones, and serve them first.
        if self._messages:
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        while not (messages := self.receive_nowait()):
            await self._receivers.park()  # a wake-up that finds nothing is not an error
        return messages

    def receive_nowait(self) -> list[T]:
        """Return the waiting messages, perhaps none."""
        if self._is_closed:
            raise trio.ClosedResourceError
        burst = min(len(self._messages), RECEIVE_BURST)
        self._drained = burst == len(self._messages)
        messages = []
        for _ in range(burst):  # no comprehension, see `Dispatcher._start`
            messages.append(self._messages.popleft())
        return messages

    @abstractmethod
    def close(self) -> None:
        """Close the socket; a second call does nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _put(self, message: T) -> None:
        # One wake-up per message: a task that finds none left waits again, and no task is forgotten.
        self._messages.append(message)
        self._receivers.unpark()

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError

    def _end(self) -> None:
        self._is_closed = True
        self._closed.set()
        self._messages.clear()
        self._receivers.unpark_all()


class MemoryEndpoint:
    """An address in memory: at most one server at a time, any number of connections, bound in any order."""

    def __init__(self, *, capacity_messages: int = CAPACITY_MESSAGES) -> None:
        self.capacity_messages = capacity_messages
        self.server: MemoryServer | None = None
        self.connections: set[MemoryConnection] = set()
        self._peer_numbers = count(1)

    def bind(self) -> MemoryServer:
        """Start to listen; existing connections are heard under new peer ids."""
        if self.server is not None:
            raise AddressInUse("another server listens at this memory endpoint")
        server = self.server = MemoryServer(self)
        for connection in self.connections:
            connection._attach(server)
        return server

    def connect(self) -> MemoryConnection:
        """Make a connection, whether or not a server listens."""
        connection = MemoryConnection(self)
        self.connections.add(connection)
        if self.server is not None:
            connection._attach(self.server)
        return connection

    def _next_peer(self) -> bytes:
        return b"\x00%04d" % next(self._peer_numbers)


class LocalServer(MemorySocket[Addressed]):
    """What is the same in all servers whose peers are in this process: nothing is refused, queued or proved."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of this server, which no other process can reach."""
        return (f"memory://{id(self):x}",)

    @property
    def drained(self) -> bool:
        """True where the last receive took all messages that had arrived."""
        return self._drained

    def forget(self, peer: bytes) -> None:
        """Do nothing: no message waits on this side."""

    def failed_handshakes(self) -> int:
        """Return 0: there is no handshake here."""
        return 0

    def key_of(self, peer: bytes) -> str | None:
        """Return None: a peer of this process has no key."""
        return None

    def is_admin(self, peer: bytes) -> bool:
        """Return True: a peer of this process may do everything."""
        return True

    def may_name_callers(self, peer: bytes) -> bool:
        """Return True: a peer of this process may do everything."""
        return True


class MemoryServer(LocalServer):
    """A `PeerSocket` in memory; `connect()` gives the other ends."""

    def __init__(self, endpoint: MemoryEndpoint) -> None:
        super().__init__()
        self.endpoint = endpoint
        self._peers: dict[bytes, MemoryConnection] = {}

    def connect(self) -> MemoryConnection:
        """Make a connection to this server's endpoint."""
        return self.endpoint.connect()

    def receive_nowait(self) -> list[Addressed]:
        """Return the waiting messages, perhaps none; their senders may send more."""
        taken = super().receive_nowait()
        for peer, _ in taken:
            if (connection := self._peers.get(peer)) is not None:
                connection._was_read()
        return taken

    def send_nowait(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Hand the message over; `PeerGone` for an unknown or closed peer, `OutboxFull` for a slow one."""
        self._check_open()
        connection = self._peers.get(peer)
        if connection is None:
            raise PeerGone(f"no peer {peer!r} at this memory endpoint")
        if len(connection._messages) >= self.endpoint.capacity_messages:
            raise OutboxFull(f"peer {peer!r} has {self.endpoint.capacity_messages} messages unread")
        connection._put(as_received(frames))

    def cut_off(self, peer: bytes) -> None:
        """Ignore this peer from now on."""
        if (connection := self._peers.pop(peer, None)) is not None:
            connection._ignored = True
            unread = [message for message in self._messages if message[0] != peer]
            self._messages = deque(unread)

    def close(self) -> None:
        """Stop listening; the connections are not told."""
        if self.endpoint.server is self:
            self.endpoint.server = None
            for connection in self._peers.values():
                connection._detach()
            self._peers.clear()
            self._end()


class MemoryConnection(MemorySocket[Message]):
    """A `Connection` in memory."""

    refusal = None
    broke = False

    def __init__(self, endpoint: MemoryEndpoint) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._server: MemoryServer | None = None
        self._peer = b""
        self._unsent: deque[Message] = deque()
        self._unread = 0
        self._ignored = False
        self._senders = trio.lowlevel.ParkingLot()

    def send_nowait(self, frames: Sequence[Buffer]) -> None:
        """Hand the message over, or keep it until a server listens; `trio.WouldBlock` when full."""
        self._check_open()
        if self._ignored:
            return
        if self._unread + len(self._unsent) >= self._endpoint.capacity_messages:
            raise trio.WouldBlock
        self._unsent.append(as_received(frames))
        self._flush()

    def wait(self, wake: Wake, timeout_s: float, *, for_room: bool) -> bool:
        """Raise RuntimeError: both ends live in one trio run."""
        raise RuntimeError("a memory endpoint is for trio: use shapestream.connect")

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Send, after waiting for room."""
        await send_when_there_is_room(frames, self.send_nowait, self._senders)

    def close(self) -> None:
        """Leave the endpoint; sent messages stay with the server."""
        if self in self._endpoint.connections:
            self._endpoint.connections.discard(self)
            if self._server is not None:
                self._server._peers.pop(self._peer, None)
            self._end()
            self._senders.unpark_all()

    def _attach(self, server: MemoryServer) -> None:
        self._server, self._peer, self._ignored = server, self._endpoint._next_peer(), False
        server._peers[self._peer] = self
        self._flush()

    def _detach(self) -> None:
        """Forget the server, which is gone with its unread messages."""
        self._server, self._unread = None, 0
        self._senders.unpark_all()

    def _flush(self) -> None:
        while self._server is not None and self._unsent:
            self._unread += 1
            self._server._put((self._peer, self._unsent.popleft()))

    def _was_read(self) -> None:
        self._unread -= 1
        self._senders.unpark()


def memory_server(*, capacity_messages: int = CAPACITY_MESSAGES) -> MemoryServer:
    """Return a server at an endpoint of its own."""
    return MemoryEndpoint(capacity_messages=capacity_messages).bind()


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
        descriptor = self._wake.fileno()
        task_status.started()
        while not self._is_closed:
            on_messages = self.on_messages
            more = on_messages is not None and bool(on_messages())
            self._asleep = True
            if more or (self._messages and on_messages is not None):
                await trio.lowlevel.checkpoint()
            else:
                if self._messages:
                    self._receivers.unpark()
                await wait_readable(descriptor)
                self._wake.clear()
            self._asleep = False

    def send_nowait(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Hand the message over; `PeerGone` where the thread has closed its connection."""
        if self._is_closed:
            raise trio.ClosedResourceError
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
            self._wake_up()

    def _wake_up(self) -> None:
        """Wake the loop if it sleeps, in any thread."""
        if self._asleep:
            self._asleep = False
            self._wake.set()


class ThreadConnection:
    """A `BlockingConnection` to a `ThreadServer`. Only its own thread calls its methods."""

    __slots__ = ("_asleep", "_peer", "_server", "_unread", "_wake")

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
                self._wake.wait(inf if timeout_s is None else timeout_s)
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
