"""The common part of the ZeroMQ sockets: one watcher on ZMQ_FD, and whole messages in and out.

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
from enum import Enum
from functools import partial
from itertools import count
from typing import Any, Self, TypeVar, cast

import trio
import zmq

from shapestream.errors import TransportError
from shapestream.transport.interface import COPY_BELOW_BYTES, Message
from shapestream.transport.socket_options import MAX_FRAMES, SocketOptions
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
        self._events = cast("Callable[[], int]", partial(self._socket.get, int(zmq.EVENTS)))
        """Returns ZMQ_EVENTS, after libzmq has processed its commands."""
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
                if self.on_messages is None:
                    self._look()
                elif self.on_messages() or (self._swallowed and self._events() & POLLIN):
                    await trio.lowlevel.checkpoint()  # libzmq does not announce these messages again
                    continue
                self._waiting, self._swallowed = True, False
                try:
                    await trio.lowlevel.wait_readable(self._fd)
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
