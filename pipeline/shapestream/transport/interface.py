"""Interfaces of a transport, for the server, the workers and the client; `zeromq.py` and `memory.py` implement them.

Both kinds of socket follow trio's habit of one state object with `x_nowait()` beside `async x()`. A message
is a list of frames. A receive returns all waiting messages, up to a burst, and loses none when it is cancelled. One
task runs `run()` for as long as the socket is in use; any number of tasks may wait in `receive()`.

Small received frames are `bytes`; large ones are uncopied buffers (a ZeroMQ frame, a memoryview), often unaligned.
Sent buffers must not change until the transport releases them.
"""

from __future__ import annotations

import math
import os
import select
from collections.abc import Callable, Sequence
from os import read, write  # not by the module, whose namespace is large: once per request
from typing import Protocol, TypeAlias

import trio

from shapestream_engine.layout import Buffer

Message: TypeAlias = list[Buffer]
Addressed: TypeAlias = tuple[bytes, Message]

# The most messages of one receive, so that a flood cannot hold the event loop.
RECEIVE_BURST = 256
# Frames of at least this size are neither copied in nor out (measured: below it a copy is cheaper).
COPY_BELOW_BYTES = 64 * 1024


class PeerSocket(Protocol):
    """The side that listens: many peers, each with an id that lasts as long as its connection."""

    on_messages: Callable[[], bool | None] | None
    """`run` may call this in place of waking a receiver; it calls `receive_nowait`. True asks for one more call.

    A receiver is needed all the same: not every message comes this way.
    """

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses that it listens at, ports filled in."""

    @property
    def drained(self) -> bool:
        """True where the last receive took all messages that had arrived."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch the socket until it is closed (then it returns) or cancelled."""

    async def receive(self) -> list[Addressed]:
        """Return the waiting messages, at least one, each with its sender; one checkpoint.

        Raises `trio.ClosedResourceError` once the socket is closed.
        """

    def receive_nowait(self) -> list[Addressed]:
        """Return the waiting messages, perhaps none."""

    def send_nowait(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Send, or put into the peer's bounded outbox; never block, and keep the order per peer.

        Raises `PeerGone`, or `OutboxFull`; the caller then calls `forget`.
        """

    def forget(self, peer: bytes) -> None:
        """Drop the messages that wait for this peer. It may be heard again."""

    def cut_off(self, peer: bytes) -> None:
        """Forget the peer, and neither hear it nor send to it for as long as its connection lasts.

        Its connection ends at its next message; sending to it raises `OutboxFull`.
        """

    def failed_handshakes(self) -> int:
        """Return the number of failed handshakes since the last call: garbage, wrong keys, other protocols."""

    def key_of(self, peer: bytes) -> str | None:
        """Return the public key that this peer has proved to own; None where the address asks for no key."""

    def is_admin(self, peer: bytes) -> bool:
        """Tell whether a peer may see the counters, which concern other peers too."""

    def may_name_callers(self, peer: bytes) -> bool:
        """Tell whether a peer is a gateway, which may name the callers of its requests."""

    def close(self) -> None:
        """Stop listening; waiting receivers get `trio.ClosedResourceError`. A second call does nothing."""


class Connection(Protocol):
    """The side that connects: one peer, which may go away and come back without notice."""

    @property
    def refusal(self) -> str | None:
        """The reason why the peer did not let this connection in, for the user; None where it did, or is not there."""

    @property
    def broke(self) -> bool:
        """Whether the connection has ended since it was made; the transport tries to make it again."""

    on_messages: Callable[[], bool | None] | None
    """As that of a `PeerSocket`."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch the socket until it is closed (then it returns) or cancelled."""

    def wait(self, wake: Wake, timeout_s: float, *, for_room: bool) -> bool:
        """Block this thread, which has no event loop, until there may be messages, or room where it is for that: then True.

        It is used in place of `run`. False when the wake is set, and after `timeout_s` seconds.
        """

    async def receive(self) -> list[Message]:
        """Return the waiting messages, at least one; one checkpoint.

        Raises `trio.ClosedResourceError` once the socket is closed.
        """

    def receive_nowait(self) -> list[Message]:
        """Return the waiting messages, perhaps none."""

    def send_nowait(self, frames: Sequence[Buffer]) -> None:
        """Send; raises `trio.WouldBlock`, with nothing taken, while the peer's queue is full."""

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Send, after waiting for room; when cancelled nothing was sent."""

    def close(self) -> None:
        """Close the connection; waiting tasks get `trio.ClosedResourceError`. A second call does nothing."""


class BlockingConnection(Protocol):
    """A connection of one thread, which makes, uses and closes it. A `Wake` ends its waits from other threads."""

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message; None after `timeout_s` seconds without one, and when the thread is woken."""

    def send(self, frames: Sequence[Buffer], timeout_s: float | None = None) -> bool:
        """Send. Return False, with nothing sent, where there was no room for `timeout_s` seconds, or the thread is woken."""

    def close(self) -> None:
        """Close the connection; sent messages are still delivered."""


async def send_when_there_is_room(
    frames: Sequence[Buffer],
    send_nowait: Callable[[Sequence[Buffer]], None],
    senders: trio.lowlevel.ParkingLot,
) -> None:
    """Call `send_nowait` until it does not raise `trio.WouldBlock`; park in `senders` in between.

    One checkpoint; when cancelled nothing was sent. Other errors of `send_nowait` pass through.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    while True:
        try:
            send_nowait(frames)
        except trio.WouldBlock:
            await senders.park()
        else:
            # Shielded: a sent message must not look unsent.
            await trio.lowlevel.cancel_shielded_checkpoint()
            return


# Longest wait in one piece; poll() takes milliseconds in 31 bits.
MAX_WAIT_S = 1e6
_LONGEST_WAIT_MS = MAX_WAIT_S * 1000


class Wake:
    """A signal that ends the wait of one thread: for a message, for room, or for nothing else. Any thread may `set` it."""

    __slots__ = ("_descriptor", "_poll", "_reader", "_writer")

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._poll = select.poll()
        self._poll.register(self._reader, select.POLLIN)
        self._descriptor: int | None = None
        """The descriptor that the last wait was for, besides the signal."""

    def fileno(self) -> int:
        """Return the descriptor that is readable once the signal is set."""
        return self._reader

    def set(self) -> None:
        """End the present wait, or the next one."""
        try:  # noqa: SIM105 - once per request; `suppress` takes longer than the call
            write(self._writer, b"\0")
        except BlockingIOError:
            pass  # it is set more often than the pipe holds

    def clear(self) -> None:
        """Take the signal."""
        try:  # noqa: SIM105 - as above
            read(self._reader, 4096)
        except BlockingIOError:
            pass  # it is not set

    def wait(self, timeout_s: float = math.inf, descriptor: int | None = None) -> bool:
        """Wait for the signal, and take it; for so long; or until `descriptor` is readable, and then return True."""
        if descriptor != self._descriptor:
            if self._descriptor is not None:
                self._poll.unregister(self._descriptor)
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN)
            self._descriptor = descriptor
        # Rounded up: a wait that ends too early would be begun again at once.
        timeout_ms = max(0.0, timeout_s) * 1000 + 1 if timeout_s < MAX_WAIT_S else _LONGEST_WAIT_MS
        readable = False
        for number, _ in self._poll.poll(timeout_ms):
            if number == self._reader:
                self.clear()
            else:
                readable = True
        return readable

    def close(self) -> None:
        """Give the descriptors back. Only the thread that waits calls this, when no other can `set` any more."""
        os.close(self._reader)
        os.close(self._writer)
