"""The ZeroMQ sockets of clients, workers and slots (DEALER), and what they share with the server's (`router.py`).

libzmq announces that something happened on one file descriptor, ZMQ_FD, and announces it once. A call that processes
libzmq's internal commands takes the announcement from all tasks. Such calls are a look at ZMQ_EVENTS, a receive that finds
nothing at first, and a send, but a send once a millisecond at most. So:

* Only `run()` waits for the descriptor. Others park, and are woken by it or by a task that finds a message.
* `run()` looks at ZMQ_EVENTS, and goes to wait with no checkpoint in between.
* A send while `run` waits is followed by a look. Other sends set `_swallowed`, and the look comes before the next wait.
* A task that a full queue refuses parks only after a look that found no room.
* A receive goes on until a look finds nothing, after which libzmq is known to announce the next message. Where it stops at
  its burst, it wakes the next receiver.

A look costs two system calls (`getpid`, `poll`). A lone request takes two looks: after it was received, and after its
answer was sent. tests/e2e/test_high_water_mark.py fails without the router's.

Nothing is taken from libzmq after the last point at which the receiver can be cancelled has been passed, so
there is no buffer here in which a message could be left behind, and none that is lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any, Self, TypeVar, cast

import trio
import zmq
from trio.lowlevel import wait_readable
from zmq.backend import zmq_poll

from shapestream.addresses import is_ipv6
from shapestream.errors import TransportError
from shapestream.transport.curve_keys import CallerKeys
from shapestream.transport.interface import (
    COPY_BELOW_BYTES,
    RECEIVE_BURST,
    Message,
    Wake,
    send_when_there_is_room,
)
from shapestream_engine.layout import Buffer

# Plain integers: pyzmq's enumerations cost as much as a small send.
NOBLOCK = int(zmq.NOBLOCK)
MORE_NOBLOCK = int(zmq.SNDMORE | zmq.NOBLOCK)
POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
CLOSED = "this socket is closed"
T = TypeVar("T")
_names = count()


class WatchedSocket:
    """The common part of both kinds of sockets: one watcher on ZMQ_FD, and the tasks that it wakes."""

    def __init__(self, kind: int, options: SocketOptions, context: zmq.Context[Any] | None) -> None:
        self._socket: zmq.Socket[bytes] = (context or zmq.Context.instance()).socket(kind)
        options.apply(self._socket)
        self._fd = cast(int, self._socket.get(zmq.FD))
        self._looked_at = [(self._socket, POLLIN | POLLOUT)]
        # Once: to find them in pyzmq's classes takes a search through five each time.
        self._recv = self._socket.recv
        self._send = self._socket.send
        self._closed = False
        self._drained = True
        self._receivers = trio.lowlevel.ParkingLot()
        self._waiting = False
        """True while `run` waits for the descriptor."""
        self._swallowed = False
        """True where a send may have swallowed an announcement, so that `run` looks before it waits."""
        self.on_messages: Callable[[], bool | None] | None = None
        """Called by `run` in place of `_look`, to call `receive_nowait`: one turn of the event loop less than a receiver.

        True asks for another call in the event loop's next turn. A receiver is still needed, for messages that a send or
        the end of a burst finds.
        """

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch the socket until it is closed or cancelled; `receive` works only while this runs."""
        task_status.started()
        with contextlib.suppress(trio.ClosedResourceError):
            while not self._closed:
                on_messages = self.on_messages
                if on_messages is None:
                    self._look()
                elif on_messages() or (self._swallowed and self._events() & POLLIN):
                    await trio.lowlevel.checkpoint()  # libzmq does not announce these messages again
                    continue
                self._waiting, self._swallowed = True, False
                try:
                    await wait_readable(self._fd)
                finally:
                    self._waiting = False

    def close(self) -> None:
        """Close the socket; unsent messages linger for as long as its options say."""
        if not self._closed:
            self._closed = True
            if trio.lowlevel.in_trio_run():
                trio.lowlevel.notify_closing(self._fd)
            self._socket.close()
            self._receivers.unpark_all()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _events(self) -> int:
        """Return ZMQ_EVENTS, after libzmq has processed its commands.

        By a poll that does not wait: pyzmq's `get` makes a member of an enumeration of each option, which is Python code
        that a lone request finds nowhere in the caches.
        """
        found = zmq_poll(self._looked_at, 0)
        return int(found[0][1]) if found else 0

    def _look(self) -> int:
        """Process libzmq's commands, wake the tasks that can go on, and return ZMQ_EVENTS."""
        events = self._events()
        if events & POLLIN:
            self._receivers.unpark()
        return events

    async def _receive(self, receive_nowait: Callable[[], list[T]]) -> list[T]:
        # No checkpoint after the messages are taken: in it `on_messages` would take later ones, and serve them first.
        if not self._closed and self._events() & POLLIN:
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        while not (messages := receive_nowait()):
            if self._drained:
                await self._receivers.park()
            else:
                await trio.lowlevel.checkpoint()  # all that was there came from peers that are cut off
        return messages


class HandshakeFailure(Enum):
    """Reason of a failed handshake, as far as libzmq can tell. The values are its event numbers."""

    REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    """The server's ZAP handler said no."""
    MISMATCH = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    """One side asks for a key and the other has none, the keys do not fit, or it is not ZeroMQ at all."""
    BROKEN = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    """The connection ended in the middle."""


class HandshakeMonitor:
    """A monitor of one socket's failed handshakes, from its construction on. libzmq keeps up to 1000, and drops more.

    Of a socket that connects it may also tell whether a connection `broke`.
    """

    def __init__(self, socket: zmq.Socket[Any], context: zmq.Context[Any], *, connects: bool = False) -> None:
        self._monitored = socket
        self.broke = False
        """Whether a connection that was made has ended; kept by `failures`."""
        address = f"inproc://shapestream-handshakes-{next(_names)}"
        failures = sum(failure.value for failure in HandshakeFailure)
        socket.monitor(address, failures | _DISCONNECTED if connects else failures)
        self._socket = context.socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)

    def failures(self) -> list[HandshakeFailure]:
        """Return the failures since the last call; none once this is closed."""
        taken: list[HandshakeFailure] = []
        with contextlib.suppress(zmq.Again):
            while not self._socket.closed:
                number = int.from_bytes(self._socket.recv_multipart(NOBLOCK)[0][:2], "little")
                taken += [failure for failure in HandshakeFailure if failure.value == number]
                self.broke |= number == _DISCONNECTED
        return taken

    def close(self) -> None:
        """Stop listening, before the observed socket is closed; a second call does nothing."""
        if not self._socket.closed:
            self._monitored.disable_monitor()
            self._socket.close()


def no_more_sockets(error: zmq.ZMQError) -> TransportError:
    """Return the error for a socket that the system does not make."""
    advice = "raise the limit of open files (ulimit -n), or close some clients"
    return TransportError(f"this process cannot make another connection: {error.strerror} ({advice})")


def receive_frames(receive: Callable[..., Any]) -> Message:
    """Return the frames of the next message; raises `zmq.Again` where there is none. libzmq hands over whole messages.

    At most `MAX_FRAMES` of them: no valid message is longer, and the frames taken are enough to refuse it.
    """
    frames, more = frames_from(receive(NOBLOCK, False), receive, MAX_FRAMES)
    while more:
        more = receive(NOBLOCK, False).more
    return frames


def send_frames(send: Callable[..., Any], ready: Sequence[bytes | zmq.Frame]) -> bool:
    """Send a message of a DEALER. Return False, with nothing taken, while its peer's queue is full, or it has no peer.

    Where the connection broke between two frames, libzmq has withdrawn the first ones and swallows the rest up to the
    last: all are offered, or it would swallow the start of the next message instead. Then the answer is False as well.
    """
    last = len(ready) - 1
    taken = True
    for index, frame in enumerate(ready):
        try:
            send(frame, MORE_NOBLOCK if index < last else NOBLOCK)
        except zmq.Again:
            taken = False
            if index == 0:
                break
    return taken


def frames_from(frame: zmq.Frame, receive: Callable[..., Any], most: int) -> tuple[Message, bool]:
    """Return at most `most` frames of a message whose first one has been taken, and whether more of them follow."""
    frames: Message = [frame.bytes if len(frame) < COPY_BELOW_BYTES else frame]
    while frame.more and len(frames) < most:
        frame = receive(NOBLOCK, False)
        frames.append(frame.bytes if len(frame) < COPY_BELOW_BYTES else frame)
    return frames, frame.more


def hang_up(frame: zmq.Frame) -> None:
    """End the connection that this frame came over: libzmq finds it closed. Its stable interface has no call for that.

    The caller made sure that the connection was there a moment ago: later its descriptor may be that of another one. The
    peer's address is compared as well; at worst another connection of the same machine has to be made again.
    """
    try:
        address, descriptor = str(frame.get("Peer-Address")), os.dup(int(frame.get(zmq.SRCFD)))
    except (zmq.ZMQError, OSError):
        return
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:  # no socket by now
        os.close(descriptor)
        return
    with connection, contextlib.suppress(OSError):
        if _address_of(connection) == address:
            connection.shutdown(socket.SHUT_RDWR)


def _address_of(connection: socket.socket) -> str:
    """Return a connection's peer, as libzmq writes it (`get_peer_address`, stream_engine_base.cpp)."""
    peer = connection.getpeername()
    if connection.family == socket.AF_UNIX:
        pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"localhost:{uid}:{gid}:{pid}"
    return str(socket.getnameinfo(peer, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0])


def ready_to_send(frames: Sequence[Buffer]) -> Sequence[bytes | zmq.Frame]:
    """Return the frames in a form that libzmq cannot refuse halfway through a message.

    Small ones as `bytes`; large ones by reference: a received ZeroMQ frame is passed on as it is.
    Raises `ValueError` for a message without frames or a buffer that is not C-contiguous.
    """
    if not frames:
        raise ValueError("a message has at least one frame")
    for frame in frames:
        if type(frame) is not bytes or len(frame) >= COPY_BELOW_BYTES:
            return [_ready(frame) for frame in frames]
    return frames


def _ready(frame: Buffer) -> bytes | zmq.Frame:
    if type(frame) is zmq.Frame:
        return frame
    view = memoryview(frame)
    if not view.c_contiguous:
        raise ValueError(
            f"a frame of shape {view.shape} and strides {view.strides} is not C-contiguous: copy it first"
        )
    if view.nbytes >= COPY_BELOW_BYTES:
        return zmq.Frame(view, copy=False)
    return frame if type(frame) is bytes else view.tobytes()


MAX_FRAMES = 65_536 + 2
"""Above the frames of a valid message on any port (`wire/limits.py`, which this layer does not import): a frame's object
costs more memory than a small frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketOptions:
    """Options of one socket. Flow control is the protocol's credit; the high-water mark is the last fence."""

    high_water_mark: int = 256
    """Messages that libzmq queues for a peer that does not read; low, since libzmq does not count their bytes."""
    receive_high_water_mark: int = 0
    """Unread messages on this side. 0: no limit. Other values are for `inproc://` only; `apply` has the reason."""
    max_frame_bytes: int = 1024 * 1024 * 1024
    """Largest frame; a peer that announces a larger one is disconnected."""
    max_frames: int = MAX_FRAMES
    """Frames of a longer message that a ROUTER hands over; it drops the rest, and ends the connection."""
    linger_ms: int = 1000
    """Time that a closed socket goes on sending its queue."""
    handshake_ms: int = 5000
    """Time for a handshake, which takes three messages; then the connection is closed."""
    dead_after_ms: int = 15000
    """Time without acknowledgement after which the kernel closes a tcp connection. It only clears dead
    connections away: heartbeats of the event loops decide which peer is alive, and sooner."""
    reconnect_interval_ms: int = 50
    max_reconnect_interval_ms: int = 2000
    immediate: bool = False
    """A DEALER takes messages only for a connection that exists. Otherwise one that is closed and replaced while its
    server is away may reach that server later, behind its replacement, with an old greeting."""
    outbox_messages: int = 1024
    """Messages that wait for one peer behind the high-water mark; then the peer must be given up."""
    outbox_bytes: int = 256 * 1024 * 1024
    """Bytes that wait for one peer behind the high-water mark; then the peer must be given up."""
    farewell: bytes = b""
    """A message of one frame that a ROUTER sends before it hangs up: it says, again, that the connection is over."""

    def apply(self, socket: zmq.Socket[Any]) -> None:
        """Set the options of a socket, before bind or connect."""
        # libzmq 4.3.5 must never stop to read a connection, and has no timer that writes. Where a pipe is full
        # (ZMQ_RCVHWM) and the connection breaks, `stream_engine_base_t::in_event_internal` sets `_io_error`, and each
        # later `out_event` ends the process (`!_io_error`, stream_engine_base.cpp:310; issue 4841). `timer_event`
        # calls it for ZMQ_HEARTBEAT_IVL, `zmtp_engine_t::process_heartbeat_message` for a PING that was not decoded
        # before, whatever this side has set. So there is no ZMQ_RCVHWM: the server cuts off
        # a peer that sends beyond its credit (serving/port_traffic.py).
        # A timeout of a heartbeat at a full pipe ends a connecting process later, too (`_input_stopped` in
        # `restart_input`; issue 3937). The other timers only call `error` (handshake, time to live) or connect again
        # (`stream_connecter_base_t::timer_event`); neither asserts anything of the connection.
        socket.set(zmq.RCVHWM, self.receive_high_water_mark)
        socket.set(zmq.HEARTBEAT_IVL, 0)
        socket.set(zmq.SNDHWM, self.high_water_mark)
        socket.set(zmq.MAXMSGSIZE, self.max_frame_bytes)
        socket.set(zmq.LINGER, self.linger_ms)
        socket.set(zmq.HANDSHAKE_IVL, self.handshake_ms)
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.set(zmq.TCP_KEEPALIVE_IDLE, self.dead_after_ms // 3000)
        socket.set(zmq.TCP_KEEPALIVE_INTVL, self.dead_after_ms // 3000)
        socket.set(zmq.TCP_KEEPALIVE_CNT, 2)
        socket.set(zmq.TCP_MAXRT, self.dead_after_ms)
        socket.set(zmq.RECONNECT_IVL, self.reconnect_interval_ms)
        socket.set(zmq.RECONNECT_IVL_MAX, self.max_reconnect_interval_ms)
        socket.set(zmq.IMMEDIATE, int(self.immediate))
        if socket.type == zmq.ROUTER:
            socket.set(zmq.ROUTER_MANDATORY, 1)


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
        receive, events, taken = self._recv, POLLIN, list[Message]()
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
        while not send_frames(self._send, ready):
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


class BlockingDealer:
    """One connection of one thread. libzmq connects, and connects again, by itself."""

    def __init__(
        self,
        address: str,
        wake: Wake,
        *,
        keys: CallerKeys | None = None,
        options: SocketOptions | None = None,
    ) -> None:
        """Start to connect. Raises `TransportError` for an impossible address, and where there are no more sockets."""
        self._wake = wake
        try:
            self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise no_more_sockets(error) from error
        (options or SocketOptions()).apply(self._socket)
        if keys is not None:
            keys.apply(self._socket)
        try:
            self._socket.set(zmq.IPV6, int(is_ipv6(address)))
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise TransportError(f"{address}: cannot connect: {error.strerror}") from error
        self._readable = [(self._socket, POLLIN), (wake.fileno(), POLLIN)]
        self._writable = [(self._socket, POLLOUT), (wake.fileno(), POLLIN)]

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message; None after `timeout_s` seconds without one, and when the thread is woken."""
        if not self._ready(self._readable, timeout_s):
            return None
        try:
            return receive_frames(self._socket.recv)
        except zmq.Again:  # what was there came over a connection that is gone
            return None

    def send(self, frames: Sequence[Buffer], timeout_s: float | None = None) -> bool:
        """Send. Return False, with nothing sent, where there was no room for `timeout_s` seconds, or the thread is woken."""
        ready = ready_to_send(frames)
        while not send_frames(self._socket.send, ready):
            if not self._ready(self._writable, timeout_s):
                return False
        return True

    def close(self) -> None:
        """Close the connection; messages that libzmq has taken linger."""
        self._socket.close()

    def _ready(self, wanted: list[Any], timeout_s: float | None) -> bool:
        ready = zmq.zmq_poll(wanted, -1 if timeout_s is None else max(0, round(timeout_s * 1000)))
        if len(ready) == 1 and ready[0][0] is self._socket:
            return True
        if ready:
            self._wake.clear()
        return False
