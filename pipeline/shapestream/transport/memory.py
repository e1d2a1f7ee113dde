"""Sockets within one process: the same interfaces as ZeroMQ's, no file, no port, no thread, all bounded.

For tests under trio's MockClock, which cannot see real sockets, and for a server and its client in one trio
run. They behave like ZeroMQ where it matters: a server that closes is not noticed by its connections, which
keep what they cannot send yet; a new server at the same endpoint knows them under new peer ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count
from types import TracebackType
from typing import Generic, TypeVar

import trio

from shapestream.errors import AddressInUse, OutboxFull, PeerGone
from shapestream.transport.interface import COPY_BELOW_BYTES, RECEIVE_BURST, Addressed, Message
from shapestream_engine.layout import Buffer

__all__ = ["MemoryConnection", "MemoryEndpoint", "MemoryServer", "memory_server"]

# Messages that wait in one direction of one connection; then the sender is told to wait, or to give up.
CAPACITY_MESSAGES = 1024

T = TypeVar("T")


def _as_received(frames: Sequence[Buffer]) -> Message:
    """The frames as the other side gets them from ZeroMQ: small ones copied, large ones shared."""
    received: Message = []
    for frame in frames:
        if type(frame) is bytes:
            received.append(frame)
            continue
        view = memoryview(frame)
        small = view.nbytes < COPY_BELOW_BYTES
        received.append(view.tobytes() if small else view.cast("B").toreadonly())
    return received


class _Inbox(Generic[T]):
    """Messages that have arrived, and the tasks that wait for them. Its bound is kept by those who put."""

    def __init__(self) -> None:
        self.messages: deque[T] = deque()
        self.closed = trio.Event()
        self._receivers = trio.lowlevel.ParkingLot()

    def put(self, message: T) -> None:
        # One wake-up per message: whoever finds none left waits again, and nobody is forgotten.
        self.messages.append(message)
        self._receivers.unpark()

    def take(self) -> list[T]:
        self.check_open()
        burst = min(len(self.messages), RECEIVE_BURST)
        return [self.messages.popleft() for _ in range(burst)]

    async def wait(self) -> None:
        """Returns when there may be something to take; a wake-up that finds nothing is not an error."""
        await self._receivers.park()

    def check_open(self) -> None:
        if self.closed.is_set():
            raise trio.ClosedResourceError

    def close(self) -> None:
        self.closed.set()
        self.messages.clear()
        self._receivers.unpark_all()


class MemoryEndpoint:
    """An address in memory: at most one server at a time, any number of connections, bound in any order."""

    def __init__(self, *, capacity_messages: int = CAPACITY_MESSAGES) -> None:
        self.capacity_messages = capacity_messages
        self.server: MemoryServer | None = None
        self.connections: set[MemoryConnection] = set()
        self._peer_numbers = count(1)

    def bind(self) -> MemoryServer:
        """Starts to listen; connections that are there already are heard under new peer ids."""
        if self.server is not None:
            raise AddressInUse("another server listens at this memory endpoint")
        server = self.server = MemoryServer(self)
        for connection in self.connections:
            connection._attach(server)
        return server

    def connect(self) -> MemoryConnection:
        """A new connection, whether or not somebody listens yet."""
        connection = MemoryConnection(self)
        self.connections.add(connection)
        if self.server is not None:
            connection._attach(self.server)
        return connection

    def _next_peer(self) -> bytes:
        return b"\x00%04d" % next(self._peer_numbers)


class MemoryServer:
    """A `PeerSocket` in memory; `connect()` gives the other ends."""

    def __init__(self, endpoint: MemoryEndpoint) -> None:
        self.endpoint = endpoint
        self._inbox: _Inbox[Addressed] = _Inbox()
        self._peers: dict[bytes, MemoryConnection] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens: nowhere that another process could reach."""
        return (f"memory://{id(self.endpoint):x}",)

    def connect(self) -> MemoryConnection:
        """A new connection to this server's endpoint."""
        return self.endpoint.connect()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Returns when the socket is closed; in memory there is nothing to watch."""
        task_status.started()
        await self._inbox.closed.wait()

    async def receive(self) -> list[Addressed]:
        """The messages that are there, at least one, each with its sender."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if messages := self.receive_nowait():
            await trio.lowlevel.cancel_shielded_checkpoint()
        while not messages:
            await self._inbox.wait()
            messages = self.receive_nowait()
        return messages

    def receive_nowait(self) -> list[Addressed]:
        """The messages that are there, perhaps none."""
        taken = self._inbox.take()
        for peer, _ in taken:
            if (connection := self._peers.get(peer)) is not None:
                connection._was_read()
        return taken

    def send_nowait(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Hands the message over; `PeerGone` for an unknown or closed peer, `OutboxFull` for a slow one."""
        self._inbox.check_open()
        connection = self._peers.get(peer)
        if connection is None:
            raise PeerGone(f"no peer {peer!r} at this memory endpoint")
        if len(connection._inbox.messages) >= self.endpoint.capacity_messages:
            raise OutboxFull(f"peer {peer!r} has {self.endpoint.capacity_messages} messages unread")
        connection._inbox.put(_as_received(frames))

    def forget(self, peer: bytes) -> None:
        """Nothing waits on this side: what was sent has arrived already."""

    def cut_off(self, peer: bytes) -> None:
        """Ignores this peer for good."""
        if (connection := self._peers.pop(peer, None)) is not None:
            connection._ignored = True
            unread = [message for message in self._inbox.messages if message[0] != peer]
            self._inbox.messages = deque(unread)

    def failed_handshakes(self) -> int:
        """None: there is no handshake here."""
        return 0

    def key_of(self, peer: bytes) -> str | None:
        """None: nobody comes in here from outside the process."""
        return None

    def is_admin(self, peer: bytes) -> bool:
        """True, for the same reason."""
        return True

    def close(self) -> None:
        """Stops listening; the connections are not told."""
        if self.endpoint.server is self:
            self.endpoint.server = None
            for connection in self._peers.values():
                connection._detach()
            self._peers.clear()
            self._inbox.close()

    async def __aenter__(self) -> MemoryServer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MemoryConnection:
    """A `Connection` in memory."""

    def __init__(self, endpoint: MemoryEndpoint) -> None:
        self._endpoint = endpoint
        self._inbox: _Inbox[Message] = _Inbox()
        self._server: MemoryServer | None = None
        self._peer = b""
        self._unsent: deque[Message] = deque()
        self._unread = 0
        self._ignored = False
        self._senders = trio.lowlevel.ParkingLot()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Returns when the socket is closed; in memory there is nothing to watch."""
        task_status.started()
        await self._inbox.closed.wait()

    async def receive(self) -> list[Message]:
        """The messages that are there, at least one."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if messages := self._inbox.take():
            await trio.lowlevel.cancel_shielded_checkpoint()
        while not messages:
            await self._inbox.wait()
            messages = self._inbox.take()
        return messages

    def receive_nowait(self) -> list[Message]:
        """The messages that are there, perhaps none."""
        return self._inbox.take()

    def send_nowait(self, frames: Sequence[Buffer]) -> None:
        """Hands the message over, or keeps it until somebody listens; `trio.WouldBlock` when full."""
        self._inbox.check_open()
        if self._ignored:
            return
        if self._unread + len(self._unsent) >= self._endpoint.capacity_messages:
            raise trio.WouldBlock
        self._unsent.append(_as_received(frames))
        self._flush()

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Sends, waiting for room."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            try:
                self.send_nowait(frames)
            except trio.WouldBlock:
                await self._senders.park()
            else:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return

    def close(self) -> None:
        """Leaves the endpoint; what it sent stays with the server."""
        if self in self._endpoint.connections:
            self._endpoint.connections.discard(self)
            if self._server is not None:
                self._server._peers.pop(self._peer, None)
            self._inbox.close()
            self._senders.unpark_all()

    def _attach(self, server: MemoryServer) -> None:
        self._server, self._peer, self._ignored = server, self._endpoint._next_peer(), False
        server._peers[self._peer] = self
        self._flush()

    def _detach(self) -> None:
        """The server is gone, and with it what it had not read."""
        self._server, self._unread = None, 0
        self._senders.unpark_all()

    def _flush(self) -> None:
        while self._server is not None and self._unsent:
            self._unread += 1
            self._server._inbox.put((self._peer, self._unsent.popleft()))

    def _was_read(self) -> None:
        self._unread -= 1
        self._senders.unpark()

    async def __aenter__(self) -> MemoryConnection:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def memory_server(*, capacity_messages: int = CAPACITY_MESSAGES) -> MemoryServer:
    """A server at an endpoint of its own."""
    return MemoryEndpoint(capacity_messages=capacity_messages).bind()
