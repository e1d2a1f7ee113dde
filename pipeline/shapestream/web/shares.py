"""The shares of callers in what a port holds for all of them: calls, requests in flight, bytes of bodies and answers.

The whole is limited, and a caller may hold at most as much as it leaves free: alone a half, each of two a third, each of
three a quarter. So there is always room for one caller more, however much the others ask for, and no part has to be set
aside or configured. This is the dynamic threshold of switches that share a buffer (Choudhury and Hahne, 1998).

A caller that holds nothing gets its first piece wherever that is free. The first piece of all is taken at any size: a
single answer may be larger than the whole.

What is beyond a share is refused at once. To let it wait would let slow callers, which end late or never, hold up others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shapestream.errors import Overloaded


class BeyondShare(Overloaded):
    """A caller would hold more than it leaves to other callers."""


class Shares:
    """What callers hold of one whole, in any number of threads."""

    __slots__ = ("_by_caller", "_changed", "_most", "_what", "held")

    def __init__(self, most: Callable[[], int], what: str) -> None:
        """`most` returns the whole; `what` names it in errors, such as "bytes"."""
        self._most = most
        self._what = what
        self._by_caller: dict[str, int] = {}
        """Only callers that hold some."""
        self._changed = threading.Condition()
        self.held = 0

    def take(self, caller: str, amount: int = 1) -> None:
        """Count more for a caller. Raises `BeyondShare`, and counts nothing, where that would pass its share."""
        with self._changed:
            self._take(caller, amount)

    def take_in_turn(self, caller: str, gives_up: Callable[[], bool], look_s: float = 0.1) -> bool:
        """Block this thread until the caller's share has room for one more, and count it.

        Return False, and count nothing, where it `gives_up`, which is asked each `look_s` seconds.
        """
        with self._changed:
            while not gives_up():
                try:
                    self._take(caller, 1)
                except BeyondShare:
                    self._changed.wait(look_s)
                else:
                    return True
        return False

    def give_back(self, caller: str, amount: int = 1) -> None:
        """Count so much of a caller no more."""
        with self._changed:
            self.held -= amount
            left = self._by_caller[caller] - amount
            if left:
                self._by_caller[caller] = left
            else:
                del self._by_caller[caller]
            self._changed.notify_all()

    @contextmanager
    def one(self, caller: str) -> Iterator[None]:
        """Hold one for a caller during the block. Raises `BeyondShare`."""
        self.take(caller)
        try:
            yield
        finally:
            self.give_back(caller)

    def _take(self, caller: str, amount: int) -> None:
        most = self._most()
        own = self._by_caller.get(caller, 0) + amount
        free = most - self.held - amount
        is_first = own == amount and (free >= 0 or not self.held)
        if own > free and not is_first:
            raise BeyondShare(
                f"you would hold {own} {self._what}, more than the rest of the {most} of all callers"
            )
        self._by_caller[caller] = own
        self.held += amount
