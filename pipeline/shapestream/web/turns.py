"""The turns of the event loop in which requests are handled, shared by their callers.

A turn of the loop runs every task that is ready. One caller with hundreds of connections may have hundreds of requests
ready, refused ones among them, and everybody else's next request waits for all of these. So a turn begins requests
for `TURN_S` seconds only. The rest wait, and each later turn begins `MOST` of them: one of each caller, a second of each,
and so on. Who has few requests waits for a turn or two, however many the others have.

Where a turn takes less, which is the rule, nobody waits, and a request costs one look at the clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import trio

TURN_S = 0.004
"""Seconds of a turn after which no more requests are begun in it. A request of 1 KiB takes 0.2 ms."""
MOST = 16
"""Waiting requests that a turn begins: of 1 KiB they take 3 ms."""


class LoopTurns(trio.abc.Instrument):
    """The turns of one event loop, which calls it as an instrument between two of them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = clock()
        """When the present turn began."""
        self._waiting: dict[str, deque[trio.Event]] = {}
        """Requests by caller, each in the order of their coming. The caller whose turn it is comes first."""
        self._some_wait = trio.Event()

    def after_io_wait(self, timeout: float) -> None:
        """Note that a turn begins."""
        self._began = self._clock()

    def is_full(self) -> bool:
        """Tell whether a request has to `wait`: the turn is long already, or others wait."""
        return bool(self._waiting) or self._clock() - self._began >= TURN_S

    async def wait(self, caller: str) -> None:
        """Wait for the turn of a caller's request."""
        turn = trio.Event()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._some_wait.set()
        try:
            await turn.wait()
        finally:
            if not turn.is_set():  # cancelled
                own = self._waiting[caller]
                own.remove(turn)
                if not own:
                    del self._waiting[caller]

    async def run(self) -> None:
        """Let requests that wait have their turns, until cancelled."""
        trio.lowlevel.add_instrument(self)
        try:
            while True:
                await self._some_wait.wait()
                while self._waiting:
                    await trio.lowlevel.checkpoint()
                    self._begin_some()
                self._some_wait = trio.Event()
        finally:
            trio.lowlevel.remove_instrument(self)

    def _begin_some(self) -> None:
        for _ in range(MOST):
            if not self._waiting:
                return
            caller = next(iter(self._waiting))
            own = self._waiting.pop(caller)
            own.popleft().set()
            if own:
                self._waiting[caller] = own
