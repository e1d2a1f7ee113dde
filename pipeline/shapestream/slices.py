"""Work that would hold the event loop too long, in slices.

Such work is a generator that yields after each slice, of a millisecond or two, and returns its result. What it reads may
change between two slices: it takes a copy of a list before it walks it.

`SlicedWork` does one work at a time, a slice per turn of the loop. `LongSteps` does the work of many callers: a small
request needs a few turns of the loop, and in each of them it could meet another long step. So long steps take turns, in the
order of their asking, and after each the next one waits as long as that one took. All of them together have at most half of
the loop's time, whoever asks, and a small request seldom meets two.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from contextlib import nullcontext
from functools import partial
from typing import TypeAlias, TypeVar

import trio

T = TypeVar("T")
Slices: TypeAlias = Generator[None, None, T]
"""Work in slices, and the type of its result."""


def at_once(work: Slices[T]) -> T:
    """Return the result of the work, done in one turn: for callers that delay no other."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


class SlicedWork:
    """The work of one port, in the order in which it was asked for. Each caller bounds what it adds."""

    def __init__(self) -> None:
        self._waiting: deque[Slices[None]] = deque()
        self._added = trio.Event()

    def add(self, work: Slices[None]) -> None:
        """Do this work in later turns, after the work that was added before."""
        self._waiting.append(work)
        self._added.set()

    async def run(self, end_turn: Callable[[], None]) -> None:
        """Work until cancelled; `end_turn` is called after each work, to send what it made ready."""
        while True:
            await self._added.wait()
            while self._waiting:
                for _ in self._waiting.popleft():
                    await trio.lowlevel.checkpoint()
                end_turn()
                await trio.lowlevel.checkpoint()
            self._added = trio.Event()


LONG_BYTES = 64 * 1024
"""Bytes, of JSON say, from which a step counts as long: 1 to 3 ms. Shorter ones run at once, without a turn of the loop."""
LONGEST_REST_S = 0.1
"""Most seconds between two steps. One that seems longer was interrupted: the machine stood still, not the event loop."""


class LongSteps:
    """The turns of one event loop's long steps."""

    def __init__(self) -> None:
        self._turns = trio.StrictFIFOLock()
        self._whole = trio.StrictFIFOLock()
        """Of works that are done one after the other."""
        self._free_at = -math.inf
        """When the next step may begin."""

    async def run(self, nbytes: int, step: Callable[[], T]) -> T:
        """Do a step that reads or writes so many bytes, and return its result: at once, or in its turn."""
        if nbytes < LONG_BYTES:
            return step()
        async with self._turns:
            began = trio.current_time()
            if began < self._free_at:
                await trio.sleep_until(self._free_at)
                began = trio.current_time()
            try:
                return step()
            finally:
                took_s = trio.current_time() - began
                self._free_at = began + took_s + min(took_s, LONGEST_REST_S)

    async def run_slices(self, nbytes: int, work: Slices[T]) -> T:
        """Do work that reads or writes so many bytes, and return its result: at once, or each slice in a turn."""
        if nbytes < LONG_BYTES:
            return at_once(work)
        while not (ended := await self.run(nbytes, partial(_next_slice, work))):
            pass
        return ended[0]

    async def finish_slices(self, nbytes: int, work: Slices[T], *, goes_on: bool = False) -> T:
        """Do work as `run_slices` does, to its end also where the caller is cancelled meanwhile.

        For work that drops in slices what it has made: left in the middle, it would be dropped in one. One such work is
        begun at a time, but what `goes_on` with what another has made waits for none: the objects of many at once would make
        each garbage collection long (100 ms with 16 JSON texts of 49,000 lists).
        """
        if nbytes < LONG_BYTES:
            return at_once(work)
        async with nullcontext() if goes_on else self._whole:
            with trio.CancelScope(shield=True):
                return await self.run_slices(nbytes, work)
        raise AssertionError("a shield ends nothing")


def _next_slice(work: Slices[T]) -> tuple[()] | tuple[T]:
    """Do the next slice. Return nothing, or the result of the work at its end."""
    try:
        next(work)
    except StopIteration as end:
        return (end.value,)
    return ()
