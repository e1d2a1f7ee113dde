"""How a task waits until its connection has room: the same over ZeroMQ and in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from shapestream_engine.layout import Buffer

__all__ = ["send_when_there_is_room"]


async def send_when_there_is_room(
    frames: Sequence[Buffer],
    send_nowait: Callable[[Sequence[Buffer]], None],
    senders: trio.lowlevel.ParkingLot,
) -> None:
    """Calls `send_nowait` until it does not raise `trio.WouldBlock`; in between, parks where room is announced.

    One checkpoint; when cancelled nothing was sent. What else `send_nowait` raises comes out.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    while True:
        try:
            send_nowait(frames)
        except trio.WouldBlock:
            await senders.park()
        else:
            # Shielded: what was sent must not look like it was not.
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
