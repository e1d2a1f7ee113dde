"""Answers, and how soon requests follow them. company.py says what for."""

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
    """Queued rows with which it is over."""


OVER = Awaited(-inf, 0)


class Returns:
    """How soon a model gets half as many rows as it has just answered."""

    __slots__ = ("_watched", "after_s", "arrived_rows")

    def __init__(self) -> None:
        self.arrived_rows = 0
        """Rows of all requests that arrived."""
        self.after_s = inf
        """Seconds from the answers that were watched last until then; inf where it took longer than they were watched."""
        self._watched: tuple[float, float, float] | None = None
        """When answers left, until when they are watched, and the `arrived_rows` with which half have returned."""

    def answered(self, rows: int, now: float, watched_s: float) -> None:
        """Watch what arrives within so many seconds, unless earlier answers still are watched."""
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
