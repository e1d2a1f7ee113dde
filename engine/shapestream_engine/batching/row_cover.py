"""A number of rows, made up of calls of allowed numbers of rows: dynamic programming, exact, once per number."""

from __future__ import annotations

from math import gcd

__all__ = ["RowCover"]

_EXACT_ROWS = 1 << 14
"""Rows up to which every number is worked out, whatever the sizes; see `RowCover`."""


class RowCover:
    """The best calls for a number of rows, of the sizes given.

    `whole_first`: no row is filled up unless it must be, and of such covers the one with the fewest calls is taken.
    Otherwise the fewest calls come first, and of these the one that fills up the fewest rows.

    Of many rows, as many as possible go into calls of the largest size L, which is what the best cover does too: among
    L/g smaller calls (g divides all sizes) there are always some whose rows add up to a multiple of L, and which fewer
    calls of L replace. So below L * L / g + L everything is searched, above it nothing is lost. Only where that
    is more than 16384 rows may a cover above these be other than the best, by the last of its calls.
    """

    def __init__(self, sizes: tuple[int, ...], *, whole_first: bool) -> None:
        self._sizes = sizes
        self._whole_first = whole_first
        largest = sizes[-1]
        self._searched = min(largest * largest // gcd(*sizes), max(_EXACT_ROWS, largest))
        # Per number of rows: the key that is minimised, and the size of one call of the best cover.
        self._best: list[tuple[tuple[int, int], int]] = [((0, 0), 0)]

    def __call__(self, rows: int) -> tuple[int, ...]:
        """The rows of each call, the largest first. No rows at all take one call of the smallest size."""
        if rows == 0:
            return (self._sizes[0],)
        largest = self._sizes[-1]
        calls = []
        if rows > self._searched:
            many = -(-(rows - self._searched) // largest)
            calls = [largest] * many
            rows -= many * largest
        self._search(rows)
        while rows > 0:
            size = self._best[rows][1]
            calls.append(size)
            rows -= size
        return tuple(sorted(calls, reverse=True))

    def _search(self, rows: int) -> None:
        best = list(self._best)
        for target in range(len(best), rows + 1):
            best.append(
                min((self._key(best[max(0, target - size)][0], target, size), size) for size in self._sizes)
            )
        if len(best) > len(self._best):
            self._best = best  # whole, as other threads read it

    def _key(self, rest: tuple[int, int], rows: int, size: int) -> tuple[int, int]:
        filled = max(0, size - rows)
        return (rest[0] + filled, rest[1] + 1) if self._whole_first else (rest[0] + 1, rest[1] + filled)
