"""The long steps of a gateway: reading JSON, making arrays of its numbers, writing numbers as JSON.

While one runs, the event loop stands still, and a thread would not help: orjson and `array` keep the interpreter. A small
request needs a few turns of the event loop, and in each of them it could meet another long step. So long steps take turns,
in the order of their asking, and after each the next one waits as long as that one took. All of them together have at most
half of the event loop's time, whether they come over one connection or over many, and a small request seldom meets two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import trio

from shapestream.slices import Slices, at_once

LONG_BYTES = 64 * 1024
"""Bytes of JSON from which a step counts as long: 1 to 3 ms. Shorter ones run at once, without a turn of the event loop."""
LONGEST_REST_S = 0.1
"""Most seconds between two steps. One that seems longer was interrupted: the machine stood still, not the event loop."""

Done = TypeVar("Done")


class LongSteps:
    """The turns of one event loop's long steps."""

    def __init__(self) -> None:
        self._turns = trio.StrictFIFOLock()
        self._free_at = -math.inf
        """When the next step may begin."""

    async def run(self, nbytes: int, step: Callable[[], Done]) -> Done:
        """Do a step that reads or writes so many bytes of JSON, and return its result: at once, or in its turn."""
        if nbytes < LONG_BYTES:
            return step()
        async with self._turns:
            await trio.sleep_until(self._free_at)
            began = trio.current_time()
            try:
                return step()
            finally:
                took_s = trio.current_time() - began
                self._free_at = began + took_s + min(took_s, LONGEST_REST_S)

    async def run_slices(self, nbytes: int, work: Slices[Done]) -> Done:
        """Do work that reads or writes so many bytes of JSON, and return its result: at once, or each slice in a turn."""
        if nbytes < LONG_BYTES:
            return at_once(work)
        while not (ended := await self.run(nbytes, partial(_next_slice, work))):
            pass
        return ended[0]


def _next_slice(work: Slices[Done]) -> tuple[()] | tuple[Done]:
    """Do the next slice. Return nothing, or the result of the work at its end."""
    try:
        next(work)
    except StopIteration as end:
        return (end.value,)
    return ()
