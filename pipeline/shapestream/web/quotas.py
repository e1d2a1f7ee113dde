"""Callers' quotas of what a port holds for all of them: calls, requests in flight, bytes of bodies and answers.

The whole is limited, and a caller may hold at most as much as it leaves free: alone a half, each of two a third, each of
three a quarter. So there is always room for one caller more, however much the others ask for, and no part has to be set
aside or configured. This is the dynamic threshold of switches that share a buffer (Choudhury and Hahne, 1998).

A caller that holds nothing gets its first piece wherever that is free. The first piece of all is taken at any size: a
single answer may be larger than the whole.

What is beyond a quota is refused at once. To let it wait would let slow callers, which end late or never, hold up others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

from shapestream.errors import Overloaded
from shapestream_engine.machine import memory_bytes

HELD_PARTS = 8
"""A port's bodies and answers hold one of so many parts of the memory at most. The server and each gateway count by
themselves: a server with two gateways, whose bodies it gets, lets in three eighths."""


def held_at_most(most: int, largest: int, memory: int | None = None) -> int:
    """Return the bytes that a port may hold: those of `most` of the `largest` pieces, if the memory has room for them.

    One piece is always held. `memory`: bytes; None for those that this process may use.
    """
    return max(largest, min(most * largest, (_memory() if memory is None else memory) // HELD_PARTS))


@cache
def _memory() -> int:
    """Return the bytes of memory that this process may use, read once: the bound is asked for at each body."""
    return memory_bytes()


class BeyondQuota(Overloaded):
    """A caller would hold more than it leaves to other callers."""


class Quotas:
    """What callers hold of one whole, in any number of threads."""

    __slots__ = ("_by_caller", "_changing", "_given_back", "_most", "_waiting", "_what", "held")

    def __init__(self, most: Callable[[], int], what: str) -> None:
        """`most` returns the whole; `what` names it in errors, such as "bytes"."""
        self._most = most
        self._what = what
        self._by_caller: dict[str, int] = {}
        """Only callers that hold some."""
        self._changing = threading.Lock()
        self._given_back = threading.Condition(self._changing)
        self._waiting = 0
        """Threads that wait for their turn."""
        self.held = 0

    def take(self, caller: str, amount: int = 1) -> None:
        """Count more for a caller. Raises `BeyondQuota`, and counts nothing, where that would pass its quota."""
        with self._changing:
            self._take(caller, amount)

    def take_in_turn(
        self, caller: str, amount: int, gives_up: Callable[[], bool], look_s: float = 0.1
    ) -> bool:
        """Block this thread until the caller's quota has room for more, and count it.

        Return False, and count nothing, where it `gives_up`, which is asked each `look_s` seconds.
        """
        with self._changing:
            self._waiting += 1
            try:
                while not gives_up():
                    try:
                        self._take(caller, amount)
                    except BeyondQuota:
                        self._given_back.wait(look_s)
                    else:
                        return True
            finally:
                self._waiting -= 1
        return False

    def give_back(self, caller: str, amount: int = 1) -> None:
        """Count so much of a caller no more."""
        with self._changing:
            self.held -= amount
            left = self._by_caller[caller] - amount
            if left:
                self._by_caller[caller] = left
            else:
                del self._by_caller[caller]
            if self._waiting:
                self._given_back.notify_all()

    def change(self, caller: str, before: int, after: int) -> None:
        """Count `after` instead of `before` for a caller. Raises `BeyondQuota`, and changes nothing."""
        if after > before:
            self.take(caller, after - before)
        elif after < before:
            self.give_back(caller, before - after)

    def one(self, caller: str) -> One:
        """Hold one for a caller during a block. Raises `BeyondQuota` at its beginning."""
        return One(self, caller)

    def _take(self, caller: str, amount: int) -> None:
        most = self._most()
        own = self._by_caller.get(caller, 0) + amount
        free = most - self.held - amount
        is_first = own == amount and (free >= 0 or not self.held)
        if own > free and not is_first:
            raise BeyondQuota(
                f"you would hold {own} {self._what}, more than the rest of the {most} of all callers"
            )
        self._by_caller[caller] = own
        self.held += amount


class One:
    """One that a caller holds during a block. A generator would take twice the time of the rest."""

    __slots__ = ("_caller", "_quotas")

    def __init__(self, quotas: Quotas, caller: str) -> None:
        self._quotas = quotas
        self._caller = caller

    def __enter__(self) -> None:
        self._quotas.take(self._caller)

    def __exit__(self, *_: object) -> None:
        self._quotas.give_back(self._caller)


class Holding:
    """What one piece of work holds in its caller's quota, from any thread, until it is closed."""

    __slots__ = ("_caller", "_changing", "_held", "_is_closed", "_quotas")

    def __init__(self, quotas: Quotas, caller: str) -> None:
        self._quotas = quotas
        self._caller = caller
        self._changing = threading.Lock()
        self._held = 0
        self._is_closed = False

    def take_in_turn(self, amount: int, gives_up: Callable[[], bool]) -> bool:
        """Wait for room as `Quotas.take_in_turn` does. Return False, too, where it was closed meanwhile."""
        if not self._quotas.take_in_turn(self._caller, amount, gives_up):
            return False
        with self._changing:
            if not self._is_closed:
                self._held += amount
                return True
        self._quotas.give_back(self._caller, amount)
        return False

    def change(self, before: int, after: int) -> None:
        """Hold `after` instead of `before`. Raises `BeyondQuota`, and changes nothing. After `close` it does nothing."""
        with self._changing:
            if not self._is_closed:
                self._quotas.change(self._caller, before, after)
                self._held += after - before

    def close(self) -> None:
        """Give back all that is held."""
        with self._changing:
            self._is_closed = True
            self._quotas.change(self._caller, self._held, 0)
            self._held = 0
