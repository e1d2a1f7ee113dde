"""How soon new requests follow answers, by which answer_waits.py decides whether a free slot waits."""

from __future__ import annotations

from math import inf
from typing import NamedTuple


class AnsweredBatch(NamedTuple):
    """The batch that a slot has just answered."""

    model: str
    at: float
    ran_s: float
    """Seconds that it held the slot."""
    rows: int
    """Of the requests that were answered."""
    shape: tuple[int, ...]
    """Of its call, without the batch axis."""
    arrived_rows: int
    """`Returns.arrived_rows` at that time."""


class Awaited(NamedTuple):
    """The wait of a model's free slots for requests that follow answers."""

    until: float
    rows: int
    """Queued rows that end the wait."""


OVER = Awaited(-inf, 0)


class Returns:
    """Measures how soon a model receives half as many rows as it has just answered."""

    __slots__ = ("_watched", "after_s", "arrived_rows")

    def __init__(self) -> None:
        self.arrived_rows = 0
        """Rows of all requests that ever arrived."""
        self.after_s = inf
        """Seconds from the answers that were watched last until then; inf if it took longer than they were watched."""
        self._watched: tuple[float, float, float] | None = None
        """Time of the answers, end of the watch, and the `arrived_rows` at which half have returned."""

    def answered(self, rows: int, now: float, watched_s: float) -> None:
        """Watch arrivals for `watched_s` seconds after an answer, unless earlier answers still are watched."""
        if self._watched is not None:
            if now <= self._watched[1]:
                return
            self.after_s = inf
        self._watched = now, now + watched_s, self.arrived_rows + rows / 2

    def arrived(self, rows: int, now: float) -> None:
        """Count rows that arrive."""
        self.arrived_rows += rows
        if self._watched is not None and self.arrived_rows >= self._watched[2]:
            at, until, _ = self._watched
            self.after_s = now - at if now <= until else inf
            self._watched = None
