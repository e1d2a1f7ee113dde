"""Seconds that everything has spent in one place: requests in a queue, slots in work.

Let T be the sum of the times at which things left, less the sum of those at which they entered. If n things are there, all
things together have spent T + n * now seconds. So nothing is looked at one by one, and a thing that is still there counts
from its entry on. The rate of these seconds is the mean number of things in the place (Little's law).

Times are kept in whole nanoseconds: the sums are large, and what is left of them is small.
"""

from __future__ import annotations


class Occupancy:
    """Enters and leaves of one place, by the same clock."""

    __slots__ = ("_ns", "present")

    def __init__(self) -> None:
        self.present = 0
        """Things that are there."""
        self._ns = 0

    def enter(self, count: int, now: float) -> None:
        """Note that `count` things have entered."""
        self.present += count
        self._ns -= count * round(now * 1e9)

    def leave(self, count: int, now: float) -> None:
        """Note that `count` things have left."""
        self.present -= count
        self._ns += count * round(now * 1e9)

    def seconds(self, now: float) -> float:
        """Return the seconds spent there until now, also by things that are still there. They never become less."""
        still_ns = self.present * round(now * 1e9) if self.present else 0
        return (self._ns + still_ns) / 1e9
