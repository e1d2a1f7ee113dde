"""What is to happen in the simulated world, and when: callbacks on trio's clock, in order of time, then of asking."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count

import trio

# A clock that jumps adds up floats: what is due so soon is due now.
_NOW_S = 1e-9


class Agenda:
    """One task that calls. What a callback asks for at once is called within the same turn, after what was due before."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._set_for = math.inf
        self._earlier = trio.Event()

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Calls `act` at this time of trio's clock; one that has passed means now."""
        heapq.heappush(self._heap, (time_s, next(self._numbers), act))
        if time_s < self._set_for:
            self._set_for = time_s
            self._earlier.set()

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """The same, so many seconds from now."""
        self.at(trio.current_time() + delay_s, act)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._earlier = trio.Event()
            self._set_for = self._heap[0][0] if self._heap else math.inf
            with trio.CancelScope(deadline=self._set_for):
                await self._earlier.wait()
            while self._heap and self._heap[0][0] <= trio.current_time() + _NOW_S:
                heapq.heappop(self._heap)[2]()
