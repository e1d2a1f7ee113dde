"""What happened to one request: a bounded memory of the scheduler's decisions, told on demand.

One entry per decision, not per request, and nothing is formatted until somebody asks, so that it costs a
tuple per batch to keep.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

__all__ = ["Behind", "Seconds", "Story"]


class Seconds(NamedTuple):
    """A prediction, put into words when somebody asks."""

    seconds: float | None

    def __format__(self, _: str) -> str:
        return "" if self.seconds is None else f"; predicted {self.seconds:.6f} s"


class Behind(NamedTuple):
    """The batch that another one is sent ahead to wait for."""

    batch: int

    def __format__(self, _: str) -> str:
        return f"; sent ahead, behind batch {self.batch}"


class Story:
    """The last `length` decisions. With length 0 it remembers nothing."""

    __slots__ = ("_entries",)

    def __init__(self, length: int) -> None:
        self._entries: deque[tuple[float, tuple[int, ...], str, tuple[object, ...]]] = deque(maxlen=length)

    def note(self, time: float, ids: tuple[int, ...], what: str, *details: object) -> None:
        """Remembers one decision about these requests; `what` is a format string for the details."""
        self._entries.append((time, ids, what, details))

    def of(self, id: int) -> list[tuple[float, str]]:  # noqa: A002 - the name that events and actions use
        """What is remembered of one request, oldest first; nothing if it was long ago."""
        return [(time, what.format(*details)) for time, ids, what, details in self._entries if id in ids]
