"""The one timer of the server: it rings at the earliest time that the scheduler waits for."""

from __future__ import annotations

import math
from collections.abc import Callable

import trio


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
