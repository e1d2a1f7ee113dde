"""ZeroMQ under trio: the sockets between clients, server and workers (watched_socket.py says what bites)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from typing import Any, cast

import trio
import zmq

from shapestream.errors import AddressInUse, OutboxFull, PeerGone, TransportError
from shapestream.transport.dealer import DealerSocket
from shapestream.transport.descriptors import Doorkeeper
from shapestream.transport.handshakes import HandshakeMonitor
from shapestream.transport.interface import RECEIVE_BURST, Addressed
from shapestream.transport.ipc_path import IpcPath
from shapestream.transport.outbox import Outbox, OutboxRoom
from shapestream.transport.socket_options import SocketOptions
from shapestream.transport.watched_socket import (
    MORE_NOBLOCK,
    NOBLOCK,
    WatchedSocket,
    frames_from,
    hang_up,
    ready_to_send,
)
from shapestream_engine.layout import Buffer

__all__ = ["DealerSocket", "RouterSocket"]

# Frames that one receive takes or drops, before the rest of the event loop has a turn: some 10 ms. One message may pass it.
FRAMES_AT_ONCE = 16_384
# So many bytes of a header count as a frame, so that a receive takes about 1 MiB of headers: copied and kept for a turn.
BYTES_PER_FRAME = 64
# A blocked peer is tried again this often, should other traffic have swallowed libzmq's announcement.
RETRY_S = 0.01
# So many peers that are cut off are remembered, the latest; libzmq does not use a peer id twice.
MAX_CUT_OFF = 4096


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
        """`room` is what its outboxes may hold, where other sockets share that."""
        self._options = options or SocketOptions()
        _unpredictable_routing_ids()
        context = context or zmq.Context.instance()
        super().__init__(zmq.ROUTER, self._options, context)
        self._monitor = HandshakeMonitor(self._socket, context)
        self._addresses: list[str] = []
        self._paths: list[IpcPath] = []
        self._outboxes: dict[bytes, Outbox] = {}
        self._room = room or OutboxRoom()
        self._blocked = trio.Event()
        self._cut_off: dict[bytes, bool] = {}
        """Peers that are not heard, and whether their connection was ended."""
        self._skipping = False
        """Whether frames follow of a message that is dropped."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens, wildcard ports filled in."""
        return tuple(self._addresses)

    @property
    def drained(self) -> bool:
        """Whether the last receive took everything that had arrived."""
        return self._drained

    def bind(self, address: str) -> None:
        """Listens at `tcp://…`, `ipc://…` or `inproc://…` too.

        Raises `AddressInUse`, or `TransportError` for an address that cannot be used.
        """
        self._check_open()
        path = IpcPath(address) if address.startswith("ipc://") and address[6:7] != "@" else None
        try:
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
        """Watches the socket until it is closed or cancelled; `receive` works only while this runs."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._retry_blocked)
            if self._paths:
                nursery.start_soon(Doorkeeper(self._hide_paths, self._publish_paths).run)
            await super().run(task_status=task_status)
            nursery.cancel_scope.cancel()

    async def receive(self) -> list[Addressed]:
        """The messages that are there, at least one, each with its sender; one checkpoint."""
        return await self._receive(self.receive_nowait)

    @trio.lowlevel.enable_ki_protection  # an interrupt between two frames would leave half a message behind
    def receive_nowait(self) -> list[Addressed]:
        """The messages that are there, perhaps none."""
        self._check_open()
        taken: list[Addressed] = []
        self._drained = False
        try:
            left = self._skip(FRAMES_AT_ONCE)
            for _ in range(RECEIVE_BURST):
                if left <= 0:
                    break
                left = self._receive_one(taken, left)
        except zmq.Again:
            self._drained = True
        if not self._drained:
            self._receivers.unpark()
        if self._outboxes:
            self._look()
        return taken

    def _receive_one(self, taken: list[Addressed], left: int) -> int:
        """Appends the next message to `taken`, unless its peer is not heard. Raises `zmq.Again` when there is none.

        Returns how many of the `left` frames, or bytes of headers in their place, may still be taken.
        """
        receive = self._socket.recv
        peer = receive(NOBLOCK)
        first = receive(NOBLOCK, False)
        if peer in self._cut_off or not self._may_speak(peer, first):
            if not self._cut_off.get(peer, True):
                self._cut_off[peer] = True
                self._hang_up(peer, first)
            self._skipping = first.more
            return self._skip(left - 1)
        frames, self._skipping = frames_from(first, receive, self._options.max_frames)
        if self._skipping:
            self._hang_up(peer, first)  # the beginning is handed over, and refused
        taken.append((peer, frames))
        return self._skip(left - len(frames) - len(frames[0]) // BYTES_PER_FRAME)

    def _hang_up(self, peer: bytes, frame: zmq.Frame) -> None:
        """Ends the connection that a frame came over, unless it has ended: its descriptor may be another's by then.

        A last message tells, since libzmq takes none for a connection that is gone.
        """
        try:
            self._try_send(peer, [self._options.farewell])
        except PeerGone:
            return
        hang_up(frame)

    def _skip(self, left: int) -> int:
        """Goes on to drop the frames of a message that nobody reads: libzmq gives no other message before its end."""
        receive = self._socket.recv
        while self._skipping and left > 0:
            self._skipping = receive(NOBLOCK, False).more
            left -= 1
        return left

    def _may_speak(self, peer: bytes, first: zmq.Frame) -> bool:
        """Whether this peer is heard (`curve.py` asks for its key)."""
        return True

    @trio.lowlevel.enable_ki_protection
    def send_nowait(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Sends, or puts into the peer's outbox; after `PeerGone` or `OutboxFull` nothing was taken."""
        self._check_open()
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
            # Also a send to a peer that is gone may have swallowed the news of others' messages.
            if self._receivers:
                self._look()

    def forget(self, peer: bytes) -> None:
        """Drops what still waits for this peer here."""
        if (outbox := self._outboxes.pop(peer, None)) is not None:
            outbox.clear()

    def cut_off(self, peer: bytes) -> None:
        """Forgets the peer, neither hears it nor sends to it from now on, and hangs up at its next message."""
        self.forget(peer)
        self._cut_off[peer] = False
        if len(self._cut_off) > MAX_CUT_OFF:
            del self._cut_off[next(iter(self._cut_off))]

    def key_of(self, peer: bytes) -> str | None:
        """None: nobody proves a key here (`curve.py` has the socket that asks for one)."""
        return None

    def is_admin(self, peer: bytes) -> bool:
        """True: whoever gets here is at home, or the operator said that the network is safe."""
        return True

    def failed_handshakes(self) -> int:
        """Connections that ended before they began, since the last call; libzmq tells of 1000, and drops more."""
        failed = 0
        while not self._closed and (failures := self._monitor.receive_nowait()):
            failed += len(failures)
        return failed

    def close(self) -> None:
        """Stops listening; what libzmq has taken still lingers, outboxes are dropped."""
        self._monitor.close()
        super().close()
        for peer in list(self._outboxes):
            self.forget(peer)
        for path in self._paths:
            path.release()
        self._paths.clear()

    def _hide_paths(self) -> None:
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):  # somebody else has removed it
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
        """Whether libzmq took the message. Only the first part can be refused: there the peer is chosen."""
        send = self._socket.send
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

    def _look(self) -> None:
        if self._outboxes:
            self._events()  # libzmq learns only now who has read; the flush may then swallow other news
            self._flush()
        super()._look()

    @trio.lowlevel.enable_ki_protection
    def _flush(self) -> None:
        """Sends what blocked peers take by now. A blocked peer keeps nobody else from being served."""
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
        """With a ROUTER, POLLOUT means "some peer", so blocked peers are tried again by a timer as well."""
        while True:
            await self._blocked.wait()
            while self._outboxes:
                await trio.sleep(RETRY_S)
                if self._outboxes:
                    self._look()
            self._blocked = trio.Event()


_LIBC = ctypes.CDLL(None)


def _unpredictable_routing_ids() -> None:
    """Seeds the random numbers that libzmq starts counting its routing ids from.

    It takes them from C's rand() and seeds that nowhere, so they would be the same in each process. A peer that knows
    the next one could connect under it, since it may choose its own; libzmq 4.3.5 then ends the process at an
    assertion ("ok", socket_base.cpp) with the next ordinary connection.
    """
    _LIBC.srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))
