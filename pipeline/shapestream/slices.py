"""Work that would hold the event loop too long, in slices: one slice per turn of the loop, and one work at a time.

Such work is a generator that yields after each slice, of a millisecond or two, and returns its result. What it reads may
change between two slices: it takes a copy of a list before it walks it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
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
