"""The server's ZeroMQ socket under trio: ROUTER, with an outbox per peer (`zeromq.py` has the hazards)."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import trio
import zmq
from zmq import Again

from shapestream.addresses import is_ipv6
from shapestream.errors import AddressInUse, OutboxFull, PeerGone, TransportError
from shapestream.transport.guards import Doorkeeper, backlog, seed_routing_ids
from shapestream.transport.interface import RECEIVE_BURST, Addressed
from shapestream.transport.ipc_path import IpcPath
from shapestream.transport.zeromq import (
    CLOSED,
    MORE_NOBLOCK,
    NOBLOCK,
    POLLIN,
    HandshakeMonitor,
    SocketOptions,
    WatchedSocket,
    frames_from,
    hang_up,
    ready_to_send,
)
from shapestream_engine.layout import Buffer

# Frames that one receive takes or drops before the event loop's next turn: some 10 ms. One message may pass it.
FRAMES_AT_ONCE = 16_384
# Bytes of a header that count as a frame, so that a receive copies about 1 MiB of headers.
BYTES_PER_FRAME = 64
# Interval between attempts to send to a blocked peer: other traffic may swallow libzmq's announcement.
RETRY_S = 0.01
# Remembered peers that are cut off, the latest; libzmq does not use a peer id twice.
MAX_CUT_OFF = 4096


class Outbox:
    """Messages behind a peer's high-water mark; false when empty. The socket keeps its bound."""

    def __init__(self, room: OutboxRoom) -> None:
        self.nbytes = 0
        """Bytes of all waiting frames, which stay allocated."""
        self.given_up = False
        """True after its messages were dropped to make room. The peer gets no more: messages would be missing."""
        self._messages: deque[Sequence[bytes | zmq.Frame]] = deque()
        self._room = room

    @property
    def first(self) -> Sequence[bytes | zmq.Frame]:
        """The next message to send."""
        return self._messages[0]

    def put(self, frames: Sequence[bytes | zmq.Frame]) -> None:
        """Append a message. When all outboxes together pass their bound, the largest is given up, perhaps this one."""
        self._messages.append(frames)
        nbytes = sum(map(len, frames))
        self.nbytes += nbytes
        self._room.take(self, nbytes)

    def remove_first(self) -> None:
        """Remove the oldest message, which has been sent."""
        nbytes = sum(map(len, self._messages.popleft()))
        self.nbytes -= nbytes
        self._room.give_back(self, nbytes)

    def clear(self) -> None:
        """Drop all messages: the peer is gone."""
        self._messages.clear()
        nbytes, self.nbytes = self.nbytes, 0
        self._room.give_back(self, nbytes)

    def give_up(self) -> None:
        """Drop all messages, and take no more."""
        self.given_up = True
        self.clear()

    def __len__(self) -> int:
        return len(self._messages)

    def __repr__(self) -> str:
        if self.given_up:
            return "<Outbox: given up, since all outboxes held too much>"
        return f"<Outbox: {len(self)} messages, {self.nbytes} bytes>"


class OutboxRoom:
    """Bound on the bytes that all outboxes of one server hold together, at both of its ports."""

    def __init__(self, max_bytes: int = sys.maxsize) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._waiting: dict[Outbox, None] = {}
        """Outboxes with messages, the longest waiting first."""

    def take(self, outbox: Outbox, nbytes: int) -> None:
        """Count bytes into an outbox; give up the largest, of equal ones the oldest, until the bound is kept."""
        self._waiting[outbox] = None
        self._nbytes += nbytes
        while self._nbytes > self._max_bytes and self._waiting:
            max(self._waiting, key=lambda waiting: waiting.nbytes).give_up()

    def give_back(self, outbox: Outbox, nbytes: int) -> None:
        """Count bytes out of an outbox."""
        self._nbytes -= nbytes
        if not outbox:
            self._waiting.pop(outbox, None)


class RouterSocket(WatchedSocket):
    """A `PeerSocket` over ZeroMQ's ROUTER.

    Use it in one trio run, with one task in `run()`. It can be bound to several addresses.
    """

    def __init__(
        self,
        *,
        options: SocketOptions | None = None,
        context: zmq.Context[Any] | None = None,
        room: OutboxRoom | None = None,
    ) -> None:
        """Make the socket. `room` bounds the outboxes of several sockets together."""
        self._options = options or SocketOptions()
        seed_routing_ids()
        context = context or zmq.Context.instance()
        super().__init__(zmq.ROUTER, self._options, context)
        # Past pyzmq's `send` in Python, which adds nothing for plain frames.
        self._send = super(zmq.Socket, self._socket).send
        self._socket.set(zmq.BACKLOG, backlog())
        self._monitor = HandshakeMonitor(self._socket, context)
        self._addresses: list[str] = []
        self._paths: list[IpcPath] = []
        self._outboxes: dict[bytes, Outbox] = {}
        self._room = room or OutboxRoom()
        self._blocked = trio.Event()
        self._cut_off: dict[bytes, bool] = {}
        """Peers that are cut off, and whether their connection was ended."""
        self._skipping = False
        """True while frames of a dropped message follow."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses that it listens at, wildcard ports filled in."""
        return tuple(self._addresses)

    @property
    def drained(self) -> bool:
        """True where the last receive took all messages that had arrived."""
        return self._drained

    def bind(self, address: str) -> None:
        """Listen at `tcp://…`, `ipc://…` or `inproc://…` too.

        Raises `AddressInUse`, or `TransportError` for an address that cannot be used.
        """
        if self._closed:
            raise trio.ClosedResourceError(CLOSED)
        path = IpcPath(address) if address.startswith("ipc://") and address[6:7] != "@" else None
        try:
            self._socket.set(zmq.IPV6, int(is_ipv6(address)))
            self._socket.bind(address if path is None else path.bind_address)
        except zmq.ZMQError as error:
            if path is not None:
                path.release()
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUse(f"{address}: another process listens there") from error
            raise TransportError(f"{address}: cannot listen there: {error.strerror}") from error
        if path is None:
            address = cast(bytes, self._socket.get(zmq.LAST_ENDPOINT)).decode()
        else:
            path.publish()
            self._paths.append(path)
        self._addresses.append(address)
        self._look()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch the socket until it is closed or cancelled; `receive` works only while this runs."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._retry_blocked)
            if self._paths:
                nursery.start_soon(Doorkeeper(self._hide_paths, self._publish_paths).run)
            await super().run(task_status=task_status)
            nursery.cancel_scope.cancel()

    async def receive(self) -> list[Addressed]:
        """Return the waiting messages, at least one, each with its sender; one checkpoint."""
        return await self._receive(self.receive_nowait)

    @trio.lowlevel.enable_ki_protection  # an interrupt between two frames would leave half a message behind
    def receive_nowait(self) -> list[Addressed]:
        """Return the waiting messages, perhaps none."""
        if self._closed:
            raise trio.ClosedResourceError(CLOSED)
        taken: list[Addressed] = []
        self._drained = False
        left = FRAMES_AT_ONCE
        try:
            for number in range(RECEIVE_BURST):
                if self._skipping:
                    left = self._skip(left)
                if left <= 0:
                    break
                if number == 1 and not self._events() & POLLIN:
                    # A look costs half of a receive that finds nothing, but more than one that finds a message.
                    self._drained = True
                    break
                left -= self._receive_one(taken)
        except Again:
            self._drained = True
        if self._outboxes and self._look() & POLLIN:
            self._drained = False  # a message came since, and the look has taken its announcement
        if not self._drained:
            self._receivers.unpark()
        return taken

    def _receive_one(self, taken: list[Addressed]) -> int:
        """Append the next message to `taken`, unless its peer is cut off. Raises `zmq.Again` when there is none.

        Returns the number of frames that it counts for, long headers included.
        """
        receive = self._recv
        peer = receive(NOBLOCK)
        first = receive(NOBLOCK, False)
        if peer in self._cut_off or not self._may_speak(peer, first):
            if not self._cut_off.get(peer, True):
                self._cut_off[peer] = True
                self._hang_up(peer, first)
            self._skipping = first.more
            return 1
        frames, self._skipping = frames_from(first, receive, self._options.max_frames)
        if self._skipping:
            self._hang_up(peer, first)  # the beginning is handed over, and the decoder refuses it
        taken.append((peer, frames))
        return len(frames) + len(frames[0]) // BYTES_PER_FRAME

    def _hang_up(self, peer: bytes, frame: zmq.Frame) -> None:
        """End the connection that a frame came over, unless it has ended: its descriptor may be reused by then.

        A last message shows this, since libzmq takes none for a connection that is gone.
        """
        try:
            self._try_send(peer, [self._options.farewell])
        except PeerGone:
            return
        hang_up(frame)

    def _skip(self, left: int) -> int:
        """Go on dropping the frames of an unwanted message: libzmq gives no other message before its end."""
        receive = self._recv
        while self._skipping and left > 0:
            self._skipping = receive(NOBLOCK, False).more
            left -= 1
        return left

    def _may_speak(self, peer: bytes, first: zmq.Frame) -> bool:
        """Tell whether this peer's message may be taken (`curve.py` checks its key)."""
        return True

    @trio.lowlevel.enable_ki_protection
    def send_nowait(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Send, or put into the peer's outbox; after `PeerGone` or `OutboxFull` nothing was taken."""
        if self._closed:
            raise trio.ClosedResourceError(CLOSED)
        ready = ready_to_send(frames)
        if self._cut_off and peer in self._cut_off:
            raise OutboxFull(f"peer {peer.hex()} is cut off")
        outbox = self._outboxes.get(peer)
        if outbox is not None and self._is_full(outbox):
            self._look()  # the peer may have read since this loop last had the time to look
            if self._is_full(outbox):
                raise OutboxFull(f"peer {peer.hex()} does not read: {outbox!r}")
            outbox = self._outboxes.get(peer)
        try:
            if outbox is not None:
                outbox.put(ready)
            elif not self._try_send(peer, ready):
                outbox = self._outboxes[peer] = Outbox(self._room)
                outbox.put(ready)
                self._blocked.set()
        finally:
            # Even a send to a peer that is gone may swallow the announcement of others' messages.
            if not self._waiting:
                self._swallowed = True
            elif self._events() & POLLIN or self._outboxes:
                self._look()

    def forget(self, peer: bytes) -> None:
        """Drop the messages that wait for this peer."""
        if (outbox := self._outboxes.pop(peer, None)) is not None:
            outbox.clear()

    def cut_off(self, peer: bytes) -> None:
        """Forget the peer, neither hear it nor send to it from now on, and hang up at its next message."""
        self.forget(peer)
        self._cut_off[peer] = False
        if len(self._cut_off) > MAX_CUT_OFF:
            del self._cut_off[next(iter(self._cut_off))]

    def key_of(self, peer: bytes) -> str | None:
        """Return None: this socket asks for no key (`ProtectedRouter` does)."""
        return None

    def is_admin(self, peer: bytes) -> bool:
        """Return True: peers are local, or the operator said that the network is safe."""
        return True

    def may_name_callers(self, peer: bytes) -> bool:
        """Return True: where no keys are asked for, a peer may take as many names as it makes connections."""
        return True

    def failed_handshakes(self) -> int:
        """Return the number of failed handshakes since the last call; libzmq reports 1000, and drops more."""
        return len(self._monitor.failures())

    def close(self) -> None:
        """Stop listening; messages that libzmq has taken linger, outboxes are dropped."""
        self._monitor.close()
        super().close()
        for peer in list(self._outboxes):
            self.forget(peer)
        for path in self._paths:
            path.release()
        self._paths.clear()

    def _hide_paths(self) -> None:
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                path.hide()

    def _publish_paths(self) -> None:
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                path.publish()

    def _is_full(self, outbox: Outbox) -> bool:
        # A message may pass the limit of bytes, or one larger than that could never wait at all.
        return (
            outbox.given_up
            or len(outbox) >= self._options.outbox_messages
            or outbox.nbytes >= self._options.outbox_bytes
        )

    def _try_send(self, peer: bytes, frames: Sequence[bytes | zmq.Frame]) -> bool:
        """Send, and tell whether libzmq took the message. Only the first part, which chooses the peer, can be refused."""
        send = self._send
        try:
            send(peer, MORE_NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGone(f"peer {peer.hex()} is not connected") from None
            raise
        for frame in frames[:-1]:
            send(frame, MORE_NOBLOCK)
        send(frames[-1], NOBLOCK)
        return True

    def _look(self) -> int:
        if self._outboxes:
            self._events()  # libzmq now processes who has read; the flush may swallow other announcements
            self._flush()
        return super()._look()

    @trio.lowlevel.enable_ki_protection
    def _flush(self) -> None:
        """Send what blocked peers accept by now. A blocked peer does not delay the others."""
        for peer, outbox in list(self._outboxes.items()):
            try:
                while outbox and self._try_send(peer, outbox.first):
                    outbox.remove_first()
            except PeerGone:
                outbox.clear()
            if outbox.given_up:
                self.cut_off(peer)
            elif not outbox:
                del self._outboxes[peer]

    async def _retry_blocked(self) -> None:
        """Send to blocked peers by a timer as well: with a ROUTER, POLLOUT means "some peer"."""
        while True:
            await self._blocked.wait()
            while self._outboxes:
                await trio.sleep(RETRY_S)
                if self._outboxes:
                    self._look()
            self._blocked = trio.Event()
