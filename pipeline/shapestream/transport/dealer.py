"""The ZeroMQ socket of clients and workers under trio: DEALER, which connects (`watched_socket.py` has the hazards)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio
import zmq

from shapestream.addresses import is_ipv6
from shapestream.errors import TransportError
from shapestream.transport.curve import CallerKeys
from shapestream.transport.interface import RECEIVE_BURST, Message, send_when_there_is_room
from shapestream.transport.socket_options import SocketOptions
from shapestream.transport.wake import Wake
from shapestream.transport.watched_socket import (
    CLOSED,
    POLLIN,
    POLLOUT,
    HandshakeFailure,
    HandshakeMonitor,
    WatchedSocket,
    no_more_sockets,
    ready_to_send,
    receive_frames,
    send_frames,
)
from shapestream_engine.layout import Buffer


class DealerSocket(WatchedSocket):
    """A `Connection` over ZeroMQ's DEALER.

    Use it in one trio run, with one task in `run()`. libzmq connects, and connects again, by itself.
    """

    def __init__(
        self,
        *,
        keys: CallerKeys | None = None,
        options: SocketOptions | None = None,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        """Make the socket, which proves `keys`; raises `TransportError` where the system has no more sockets."""
        context = context or zmq.Context.instance()
        self._senders = trio.lowlevel.ParkingLot()
        try:
            super().__init__(zmq.DEALER, options or SocketOptions(), context)
            try:
                self._monitor = HandshakeMonitor(self._socket, context, connects=True)
            except zmq.ZMQError:
                super().close()
                raise
        except zmq.ZMQError as error:
            raise no_more_sockets(error) from error
        self._refusal: str | None = None
        self._has_key = keys is not None
        if keys is not None:
            keys.apply(self._socket)

    def connect(self, address: str) -> None:
        """Start to connect; raises `TransportError` for an impossible address."""
        if self._closed:
            raise trio.ClosedResourceError(CLOSED)
        try:
            self._socket.set(zmq.IPV6, int(is_ipv6(address)))
            self._socket.connect(address)
        except zmq.ZMQError as error:
            raise TransportError(f"{address}: cannot connect: {error.strerror}") from error
        self._look()

    @property
    def refusal(self) -> str | None:
        """Reason of a failed handshake, for the user; None where none has failed."""
        for failure in self._monitor.failures():
            if self._refusal is None or failure is not HandshakeFailure.BROKEN:
                self._refusal = _advice_on(failure, self._has_key)
        return self._refusal

    @property
    def broke(self) -> bool:
        """Whether the connection has ended since it was made; libzmq tries to make it again."""
        _ = self.refusal  # the monitor's events are of both kinds
        return self._monitor.broke

    async def receive(self) -> list[Message]:
        """Return the waiting messages, at least one; one checkpoint."""
        return await self._receive(self.receive_nowait)

    @trio.lowlevel.enable_ki_protection
    def receive_nowait(self) -> list[Message]:
        """Return the waiting messages, perhaps none."""
        if self._closed:
            raise trio.ClosedResourceError(CLOSED)
        receive, events, taken = self._socket.recv, POLLIN, list[Message]()
        try:
            while events & POLLIN and len(taken) < RECEIVE_BURST:
                taken.append(receive_frames(receive))
                # A look costs less than a receive that finds nothing, and is as good: libzmq announces what comes after it.
                events = self._events()
        except zmq.Again:
            events = self._events() if self._senders else 0
        self._drained = not events & POLLIN
        if not self._drained:
            self._receivers.unpark()
        if self._senders and events & POLLOUT:
            self._senders.unpark_all()
        return taken

    @trio.lowlevel.enable_ki_protection
    def send_nowait(self, frames: Sequence[Buffer]) -> None:
        """Send; raises `trio.WouldBlock`, with nothing taken, while the peer's queue is full."""
        if self._closed:
            raise trio.ClosedResourceError(CLOSED)
        ready = ready_to_send(frames)
        self._swallowed = not self._waiting
        while not send_frames(self._socket.send, ready):
            # Room that came since libzmq last looked is announced to nobody else: the caller would wait for it in vain.
            if not self._look() & POLLOUT:
                raise trio.WouldBlock
        if self._waiting:
            self._look()

    def wait(self, wake: Wake, timeout_s: float, *, for_room: bool) -> bool:
        """Block this thread until there may be messages, or room: then return True. False for the wake, or in the end."""
        if self._closed:
            wake.wait(timeout_s)
            return False
        if self._swallowed or not self._drained:
            self._swallowed = False
            if self._events() & (POLLIN | POLLOUT if for_room else POLLIN):
                return True
        return wake.wait(timeout_s, self._fd)

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Send, after waiting for room; when cancelled nothing was sent."""
        await send_when_there_is_room(frames, self.send_nowait, self._senders)

    def close(self) -> None:
        """Close the connection; messages that libzmq has taken linger."""
        _ = self.refusal  # read the monitor's last events
        self._monitor.close()
        super().close()
        self._senders.unpark_all()

    def _look(self) -> int:
        events = super()._look()
        if events & POLLOUT and self._senders:
            self._senders.unpark_all()
        return events


def _advice_on(failure: HandshakeFailure, has_key: bool) -> str:
    match failure, has_key:
        case HandshakeFailure.REFUSED, _:
            return "it refuses this key: list it there, in the right role"
        case _, True:
            return "it does not prove the server key that was given: another server, or one that asks for no keys"
        case HandshakeFailure.MISMATCH, False:
            return "it asks for a key: give key and server_key"
    # MISMATCH or BROKEN depends on which side closes first; a server that ends, or a proxy, gives BROKEN too.
    return "it ended the handshake; perhaps it asks for a key: give key and server_key"
