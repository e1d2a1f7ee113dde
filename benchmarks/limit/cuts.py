"""Ways to cut a trace into batches, when all of it is known."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.limit.engine import Batch, InProcess

Lengths = npt.NDArray[np.intp]

GRID_ROWS = (1, 2, 4, 8, 16, 32)
GRID_LENGTHS = (4, 8, 16, 32, 64, 128, 256)
GRID_TOKENS = 2048
"""Larger calls gain nothing on a CPU, and are not measured."""


def alone(lengths: Lengths) -> list[Batch]:
    """One at a time, in order of arrival."""
    return [Batch(places=np.array([place]), length=int(length)) for place, length in enumerate(lengths)]


def in_order(lengths: Lengths, rows: int) -> list[Batch]:
    """So many at a time in order of arrival, padded to the longest: what servers commonly do."""
    places = np.arange(len(lengths))
    return [
        Batch(places=part, length=int(lengths[part].max()))
        for part in (places[start : start + rows] for start in range(0, len(lengths), rows))
    ]


def by_rows(lengths: Lengths, rows: int) -> list[Batch]:
    """Sorted, the longest first, and cut after so many rows."""
    order = np.argsort(-lengths, kind="stable")
    return [
        Batch(places=part, length=int(lengths[part[0]]))
        for part in (order[start : start + rows] for start in range(0, len(lengths), rows))
    ]


def by_budget(lengths: Lengths, tokens: int, most_rows: int) -> list[Batch]:
    """Sorted, the longest first, and cut where a batch would pass so many tokens, padding counted."""
    batches: list[Batch] = []
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        length = int(lengths[order[start]])
        stop = start + max(1, min(most_rows, tokens // length))
        batches.append(Batch(places=order[start:stop], length=length))
        start = stop
    return batches


class CallCosts:
    """Seconds of calls on a small grid of rows and lengths, interpolated in logarithms, all streams busy."""

    def __init__(self, measured: dict[tuple[int, int], float]) -> None:
        table = np.full((len(GRID_ROWS), len(GRID_LENGTHS)), np.nan)
        for i, rows in enumerate(GRID_ROWS):
            for j, length in enumerate(GRID_LENGTHS):
                table[i, j] = measured.get((rows, length), np.nan)
        self._log_s = np.log(table)

    def seconds(self, rows: int, lengths: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Of calls with so many rows, at each length; inf beyond what was measured."""
        at = np.interp(np.log2(rows), np.log2(GRID_ROWS), np.arange(len(GRID_ROWS)))
        low = min(int(at), len(GRID_ROWS) - 2)
        share = at - low
        upper = self._log_s[low + 1] if share else self._log_s[low]
        row = (1 - share) * self._log_s[low] + share * upper
        known = ~np.isnan(row)
        found = np.exp(np.interp(np.log(lengths), np.log(np.array(GRID_LENGTHS)[known]), row[known]))
        return np.where(rows * lengths > GRID_TOKENS, np.inf, found)


def measure_costs(engine: InProcess, repeats: int) -> CallCosts:
    """Runs the grid with all requests busy; each cost is the time between two ends."""
    ids = [np.full(GRID_LENGTHS[-1], 1000, np.int64)]
    measured: dict[tuple[int, int], float] = {}
    for rows in GRID_ROWS:
        for length in GRID_LENGTHS:
            if rows * length <= GRID_TOKENS:
                batch = Batch(places=np.zeros(rows, np.intp), length=length)
                measured[rows, length] = _time(engine, batch, [ids[0][:length]], repeats)
    return CallCosts(measured)


def _time(engine: InProcess, batch: Batch, ids: Sequence[npt.NDArray[np.int64]], repeats: int) -> float:
    answers = np.empty((1, 384), np.float32)
    count = 2 * engine.setting.requests
    runs = [engine.run([batch] * count, ids, answers) / count for _ in range(1 + repeats)]
    return statistics.median(runs[1:])


def optimal(lengths: Lengths, costs: CallCosts) -> list[Batch]:
    """Sorted and cut so that the sum of predicted seconds is least; the costliest batches first.

    The cuts of a sorted list are found by dynamic programming: best[j] = min over rows of best[j - rows] + the cost
    of a call with so many rows, padded to the j-th length.
    """
    order = np.argsort(lengths, kind="stable")
    ordered = lengths[order].astype(np.float64)
    table = np.stack([costs.seconds(rows, ordered) for rows in range(1, GRID_ROWS[-1] + 1)])
    best = np.zeros(len(order) + 1)
    taken = np.zeros(len(order) + 1, np.intp)
    for end in range(1, len(order) + 1):
        most = min(end, GRID_ROWS[-1])
        totals = best[end - np.arange(1, most + 1)] + table[:most, end - 1]
        taken[end] = 1 + int(np.argmin(totals))
        best[end] = totals[taken[end] - 1]
    batches: list[Batch] = []
    end = len(order)
    while end:
        start = end - int(taken[end])
        batches.append(Batch(places=order[start:end], length=int(ordered[end - 1])))
        end = start
    return sorted(batches, key=lambda batch: -batch.length * len(batch.places))


def padding_ratio(batches: Iterable[Batch], lengths: Lengths) -> float:
    """Tokens computed only as padding / tokens computed."""
    computed = sum(len(batch.places) * batch.length for batch in batches)
    return 1.0 - int(lengths.sum()) / computed
