"""What the server, the workers and the client ask of a transport; `zeromq.py` and `memory.py` give it.

Both kinds of socket follow trio's habit of one state object with `x_nowait()` beside `async x()`. A message
is a list of frames. A receive hands over everything that is there, up to a burst, and never loses a message
that it has taken, whenever it is cancelled. One task runs `run()` for as long as the socket is in use; any
number of tasks may wait in `receive()` at the same time.

Received small frames are `bytes`; large ones are buffers that nobody copied (a ZeroMQ frame,
a memoryview), often unaligned. Sent buffers must not change until the transport has let go of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import trio

from shapestream_engine.layout import Buffer

Message: TypeAlias = list[Buffer]
Addressed: TypeAlias = tuple[bytes, Message]

# Messages that one receive takes at most, so that a flood from outside cannot hold the event loop.
RECEIVE_BURST = 256
# Frames of at least this size are neither copied in nor out (measured: below it a copy is cheaper).
COPY_BELOW_BYTES = 64 * 1024


class PeerSocket(Protocol):
    """The side that listens: many peers, each with an id that lasts as long as its connection."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens, ports filled in."""

    @property
    def drained(self) -> bool:
        """Whether the last receive took everything that had arrived."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watches the socket until it is closed (then it returns) or cancelled."""

    async def receive(self) -> list[Addressed]:
        """The messages that are there, at least one, each with its sender; one checkpoint.

        Raises `trio.ClosedResourceError` once the socket is closed.
        """

    def receive_nowait(self) -> list[Addressed]:
        """The messages that are there, perhaps none."""

    def send_nowait(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Sends, or puts into the peer's bounded outbox; never blocks, and keeps the order per peer.

        Raises `PeerGone`, or `OutboxFull`: the caller then gives the peer up, with `forget`.
        """

    def forget(self, peer: bytes) -> None:
        """Drops what still waits for this peer. It may be heard again."""

    def cut_off(self, peer: bytes) -> None:
        """Forgets the peer, and neither hears it nor sends to it for as long as this connection lasts.

        Its connection ends at its next message; sending to it raises `OutboxFull`.
        """

    def failed_handshakes(self) -> int:
        """How many connections ended before they began, since the last call: garbage, wrong keys, other protocols."""

    def key_of(self, peer: bytes) -> str | None:
        """The public key that this peer has proved to own; None where none is asked for. It says who it is."""

    def is_admin(self, peer: bytes) -> bool:
        """Whether this peer may see what concerns others: the counters."""

    def close(self) -> None:
        """Stops listening; waiting receivers get `trio.ClosedResourceError`. Twice is once."""


class Connection(Protocol):
    """The side that connects: one peer, which may go away and come back without notice."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watches the socket until it is closed (then it returns) or cancelled."""

    async def receive(self) -> list[Message]:
        """The messages that are there, at least one; one checkpoint.

        Raises `trio.ClosedResourceError` once the socket is closed.
        """

    def receive_nowait(self) -> list[Message]:
        """The messages that are there, perhaps none."""

    def send_nowait(self, frames: Sequence[Buffer]) -> None:
        """Sends; raises `trio.WouldBlock` when the peer is behind and nothing was taken."""

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Sends, waiting for room; when cancelled nothing was sent."""

    def close(self) -> None:
        """Closes the connection; waiting tasks get `trio.ClosedResourceError`. Twice is once."""
