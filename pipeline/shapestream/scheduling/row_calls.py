"""The calls that rows are covered by, where only some numbers of rows are allowed, for many batches at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowCalls"]

_Columns: TypeAlias = list[NDArray[np.intp]]


class RowCalls:
    """`row_calls` of a profile: the rows of each call, per number of rows. More take as many of the largest as needed."""

    def __init__(self, row_calls: Sequence[tuple[int, ...]]) -> None:
        self._most = len(row_calls) - 1
        self._per_rows: list[Counter[int]] = [Counter(calls) for calls in row_calls]
        self._rows = np.array([rows for calls in self._per_rows for rows in calls], np.intp)
        self._counts = np.array([count for calls in self._per_rows for count in calls.values()], np.float64)
        self._numbers = np.array([len(calls) for calls in self._per_rows], np.intp)
        self._starts = np.concatenate([[0], np.cumsum(self._numbers)[:-1]]).astype(np.intp)

    def of(self, rows: int) -> Mapping[int, int]:
        """How many calls of how many rows."""
        if rows <= self._most:
            return self._per_rows[rows]
        many = -(-(rows - self._most) // self._most)
        calls = Counter({each: many * count for each, count in self._per_rows[self._most].items()})
        calls.update(self._per_rows[rows - many * self._most])
        return calls

    def summed(
        self,
        rows: NDArray[np.intp],
        columns: _Columns,
        seconds: Callable[[_Columns], NDArray[np.float64]],
    ) -> NDArray[np.float64]:
        """Per batch, the sum of its calls' `seconds`; `columns` are the other sizes."""
        most = self._most
        many = np.maximum(0, -(-(rows - most) // most))
        total = self._covered(rows - many * most, columns, seconds)
        if many.any():
            total += many * self._covered(np.full_like(rows, most), columns, seconds)
        return total

    def _covered(
        self,
        rows: NDArray[np.intp],
        columns: _Columns,
        seconds: Callable[[_Columns], NDArray[np.float64]],
    ) -> NDArray[np.float64]:
        if not len(rows):
            return np.zeros(0)
        numbers = self._numbers[rows]
        if numbers.max() == 1:
            places = self._starts[rows]
            return np.asarray(seconds([self._rows[places], *columns]) * self._counts[places])
        firsts = np.cumsum(numbers) - numbers
        batches = np.repeat(np.arange(len(rows)), numbers)
        places = self._starts[rows][batches] + np.arange(len(batches)) - firsts[batches]
        each = seconds([self._rows[places], *[column[batches] for column in columns]]) * self._counts[places]
        return np.asarray(np.add.reduceat(each, firsts))
