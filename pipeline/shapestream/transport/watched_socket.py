"""What the ZeroMQ sockets share: one watcher on ZMQ_FD, and whole messages in and out.

libzmq announces that something happened on one file descriptor, ZMQ_FD, and announces it once. Whatever
processes its internal commands - a send, a receive, a look at ZMQ_EVENTS - swallows the announcement for
everybody. So:

* Only `run()` waits for the descriptor. Others park, and are woken by it or by whoever finds a message.
* `run()` looks at ZMQ_EVENTS, and goes to wait with no checkpoint in between.
* After each send, if somebody is parked, ZMQ_EVENTS is looked at again: the send may have swallowed the news.
* A receive goes on until EAGAIN, after which libzmq is known to announce the next message, or wakes the next
  receiver if it stops at its burst.

Nothing is taken from libzmq after the last point at which the receiver can be cancelled has been passed, so
there is no buffer here in which a message could be left behind, and none that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import trio
import zmq

from shapestream.transport.interface import COPY_BELOW_BYTES, Message
from shapestream.transport.socket_options import SocketOptions
from shapestream_engine.layout import Buffer

__all__ = ["MORE_NOBLOCK", "NOBLOCK", "POLLIN", "POLLOUT", "WatchedSocket", "frames_after", "ready_to_send",
           "receive_frames"]  # fmt: skip

# Plain integers: pyzmq's enumerations cost as much as a small send.
NOBLOCK = int(zmq.NOBLOCK)
MORE_NOBLOCK = int(zmq.SNDMORE | zmq.NOBLOCK)
POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
# More than a message may have on any port (wire/limits.py, which this layer does not know): an object per frame costs
# more memory than the frame.
MOST_FRAMES = 65_536 + 2

T = TypeVar("T")


class WatchedSocket:
    """What both kinds share: one watcher on ZMQ_FD, and the tasks that it wakes."""

    def __init__(self, kind: int, options: SocketOptions, context: zmq.Context[Any] | None) -> None:
        self._socket: zmq.Socket[bytes] = (context or zmq.Context.instance()).socket(kind)
        options.apply(self._socket)
        self._fd = cast(int, self._socket.get(zmq.FD))
        self._closed = False
        self._drained = True
        self._receivers = trio.lowlevel.ParkingLot()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watches the socket until it is closed or cancelled; `receive` works only while this runs."""
        task_status.started()
        try:
            while True:
                self._check_open()
                self._look()
                await trio.lowlevel.wait_readable(self._fd)
        except trio.ClosedResourceError:
            return

    def close(self) -> None:
        """Closes the socket; what it still has to send lingers for as long as its options say."""
        if not self._closed:
            self._closed = True
            if trio.lowlevel.in_trio_run():
                trio.lowlevel.notify_closing(self._fd)
            self._socket.close()
            self._receivers.unpark_all()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this socket is closed")

    def _look(self) -> None:
        """Processes libzmq's commands and wakes whoever can go on."""
        if self._events() & POLLIN:
            self._receivers.unpark()

    def _events(self) -> int:
        return cast(int, self._socket.get(zmq.EVENTS))

    async def _receive(self, receive_nowait: Callable[[], list[T]]) -> list[T]:
        await trio.lowlevel.checkpoint_if_cancelled()
        messages = receive_nowait()
        if messages:
            # Shielded: from here on the messages are ours, and must reach the caller.
            await trio.lowlevel.cancel_shielded_checkpoint()
            return messages
        while not messages:
            if self._drained:
                await self._receivers.park()
            else:
                await trio.lowlevel.checkpoint()  # all that was there came from peers that are cut off
            messages = receive_nowait()
        return messages


def receive_frames(receive: Callable[..., Any]) -> Message:
    """The frames of a message of which at least one is there (libzmq hands over whole messages only).

    No more than `MOST_FRAMES` of them: a longer message is nobody's, and is refused for those that it has.
    """
    frame = receive(NOBLOCK, False)
    frames = [frame.bytes if len(frame) < COPY_BELOW_BYTES else frame]
    while frame.more:
        frame = receive(NOBLOCK, False)
        frames.append(frame.bytes if len(frame) < COPY_BELOW_BYTES else frame)
        if len(frames) == MOST_FRAMES:
            while frame.more:
                frame = receive(NOBLOCK, False)
    return frames


def frames_after(first: zmq.Frame, receive: Callable[..., Any]) -> Message:
    """The frames of a message whose first one has been taken already, as it came."""
    frames: Message = [first.bytes if len(first) < COPY_BELOW_BYTES else first]
    return frames + receive_frames(receive) if first.more else frames


def ready_to_send(frames: Sequence[Buffer]) -> Sequence[bytes | zmq.Frame]:
    """The frames in a form that libzmq cannot refuse halfway through a message.

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
        raise ValueError("a frame must be C-contiguous")
    if view.nbytes >= COPY_BELOW_BYTES:
        return zmq.Frame(view, copy=False)
    return frame if type(frame) is bytes else view.tobytes()
