"""Timers of an event loop: an alarm for the earliest time that the scheduler waits for, and the heartbeat's pause.

Server and workers beat alike: a process that stood still reads its unread messages before it calls a peer silent.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

__all__ = ["Alarm", "next_beat"]

# A beat that comes later than this after its time says that this process itself stood still: it was stopped, or busy.
STALL_S = 0.5


class Alarm:
    """Wakes when `next_wakeup` says; `check` must be called whenever that may have become earlier."""

    def __init__(self, next_wakeup: Callable[[], float | None], ring: Callable[[], None]) -> None:
        """`next_wakeup` gives a time of trio's clock, or None; `ring` is called when it has come."""
        self._next_wakeup = next_wakeup
        self._ring = ring
        self._set_for = math.inf
        self._earlier = trio.Event()

    def check(self) -> None:
        """Costs next to nothing while what the alarm is set for is early enough."""
        wakeup = self._next_wakeup()
        if wakeup is not None and wakeup < self._set_for:
            self._set_for = wakeup
            self._earlier.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._earlier = trio.Event()
            wakeup = self._next_wakeup()
            self._set_for = math.inf if wakeup is None else wakeup
            with trio.CancelScope(deadline=self._set_for):
                await self._earlier.wait()
            due = self._next_wakeup()
            if due is not None and due <= trio.current_time():
                self._ring()


async def next_beat(interval_s: float) -> tuple[float, float]:
    """Sleep for an interval. Returns the time, and the seconds for which this process stood still beyond it.

    After a standstill it sleeps for `STALL_S` more, in which the unread messages are read.
    """
    due = trio.current_time() + interval_s
    await trio.sleep_until(due)
    now = trio.current_time()  # once: the process may stand still between two looks, too
    if now <= due + STALL_S:
        return now, 0.0
    await trio.sleep(STALL_S)
    return now + STALL_S, now - due
