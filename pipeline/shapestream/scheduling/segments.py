"""The optimal cuts of a sorted window: dynamic programming over contiguous segments (`cut_window`), or the nearest.

Requests are sorted by the size of one row. A batch is a segment of that order. Its call has the elementwise largest
shape and the sum of the rows.

**Why segments are enough.** Assume one padded dimension, requests of equal rows, no limit but the number of requests, and
seconds that never fall when a call grows. Then no other partition into sets of the same sizes is cheaper. Exchange members
between two sets until one holds the smaller ones: the larger shape stays, and the other one can only shrink. In all other
cases segments are a restriction without a proof: with rows of different sizes it is a good one.

**Nearest.** Shapes of several padded dimensions may not be nested (none of two holds the other), and then neighbours by
elements may pad each other to twice as many. So `nearest` sorts the other requests by what a call of the anchor's takes
longer with each of them, less what that one costs in an efficient batch. Of the beginnings of this order it takes the one
whose seconds are least beside what its members cost in efficient batches. It cuts one batch, in two passes of NumPy.
Simulated (docs/decisions.md), it has 17 % more goodput there than segments, and less where shapes are nested.

**The sum that is minimised** is that of all waiting times. Let `W` requests wait, and let batch `i` take `s_i` seconds and
have `k_i` members. These wait for all of it. Of the `W - k_i` others, half come after it if nothing is known about the
order, and wait for it too. So do the `L` that arrive before the queue is empty. The batch adds
`s_i * (k_i + (W - k_i) / 2 + L) = s_i * (k_i / 2 + delayed)` to the sum, with `delayed = W / 2 + L`. If many are delayed,
the work alone counts. If few are, a cut avoids that the first request waits for the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shapestream.scheduling.cost_grid import Floats, Integers, elements_of_many
from shapestream.scheduling.worker_costs import WorkerCosts

_Number = TypeVar("_Number", np.intp, np.float64)

_MARKED = 1 << 17
"""Combinations of sizes up to which those in use are marked in an array; where there are more, they are sorted first."""

NEVER = 1e6
"""Cost of a request that no call can take, in multiples of the dearest finite segment: it must be in some segment, and
it shall spoil no other's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLimits:
    """Upper limits of a segment of more than one request."""

    max_rows: int
    max_bytes: int | None = None
    """Of its call, padding included."""
    max_padding_ratio: float | None = None
    most_s: float | None = None
    """Predicted seconds of its call: those on the slot, divided by the slot's `slowdown`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Waiting requests, smallest rows first."""

    rows: Integers
    shapes: Integers
    """(n, d), without the batch axis."""

    def __len__(self) -> int:
        """Count its requests."""
        return len(self.rows)


def cut_window(
    window: Window,
    costs: WorkerCosts,
    limits: SegmentLimits,
    *,
    delayed: float | None = None,
    batch_s: float = 0.0,
) -> list[int]:
    """Return the ends (exclusive) of the segments of least cost, in order. Of equally cheap cuts larger segments win.

    `delayed` is explained above; None minimises the work alone. `batch_s`: what each batch costs besides its calls.
    """
    seconds = segment_seconds(window, costs, limits)
    seconds += batch_s
    if delayed is not None:
        seconds *= delayed + 0.5 * np.arange(seconds.shape[1], 0, -1)
    return optimal_ends(seconds)


def are_nested(shapes: Integers) -> bool:
    """Tell whether each of these shapes (n, d), smallest first, holds all before it."""
    return bool((shapes[1:] >= shapes[:-1]).all())


def nearest(
    window: Window,
    cost_s: Floats,
    costs: WorkerCosts,
    limits: SegmentLimits,
    *,
    delayed: float,
    batch_s: float,
) -> list[int]:
    """Return the requests that share a call with the first one, as places in a window in any order.

    `cost_s`: what each of them costs in an efficient batch. `delayed`, `batch_s`: as `cut_window`.
    """
    rows, shapes = window.rows, window.shapes
    pair_s = costs.seconds(rows[1:] + rows[0], np.maximum(shapes[1:], shapes[0]))
    order = np.argsort(pair_s - cost_s[1:], kind="stable")[: max(0, limits.max_rows - 1)] + 1
    order = np.concatenate(([0], order))
    largest = np.maximum.accumulate(shapes[order], axis=0)
    sums = np.cumsum(rows[order])
    seconds = costs.seconds(sums, largest)
    legal = sums <= limits.max_rows
    if limits.max_bytes is not None:
        legal &= costs.bytes.of_batches(sums, largest) <= limits.max_bytes
    if limits.max_padding_ratio is not None:
        real = np.cumsum(rows[order] * elements_of_many(costs.padded_columns(shapes[order])))
        legal &= real >= (1.0 - limits.max_padding_ratio) * sums * elements_of_many(
            costs.padded_columns(largest)
        )
    if limits.most_s is not None:
        legal &= seconds <= limits.most_s
    legal[0] = True
    each = (seconds + batch_s) * (delayed + 0.5 * np.arange(1, len(order) + 1)) / np.cumsum(cost_s[order])
    each[~legal] = np.inf
    # Of equally good ones the most; the first one alone, if no call can take it.
    count = len(order) - int(each[::-1].argmin()) if np.isfinite(each).any() else 1
    return [int(place) for place in order[1:count]]


def optimal_ends(costs: Floats) -> list[int]:
    """Cover `n` items at the least cost; return the ends (exclusive) of the segments, in order.

    `costs[j, c]` is the cost of the segment that ends with item `j` and has `K - c` items, with `K` columns. Segments that
    reach before the first item are not looked at. Costs must not be NaN, and each single item's (the last column) must be
    finite. O(n K), one pass of NumPy per item.
    """
    n, reach = costs.shape
    # best[reach - 1 + i]: the least cost of the first i items; infinite before the first.
    best = np.full(n + reach, np.inf)
    best[reach - 1] = 0.0
    lengths = [0] * n
    total = np.empty(reach)
    for j in range(n):
        np.add(best[j : j + reach], costs[j], out=total)
        column = int(total.argmin())
        best[j + reach] = total[column]
        lengths[j] = reach - column
    ends = []
    end = n
    while end > 0:
        ends.append(end)
        end -= lengths[end - 1]
    ends.reverse()
    return ends


def segment_seconds(window: Window, costs: WorkerCosts, limits: SegmentLimits) -> Floats:
    """Return the seconds of every segment, laid out for `optimal_ends`; inf where it is not legal.

    A single request is always legal.
    """
    n = len(window)
    reach = max(1, min(n, limits.max_rows))
    shapes, places = _call_shapes(window.shapes, reach, 2 * n * reach // limits.max_rows)
    rows: Integers = np.broadcast_to(np.arange(reach, 0, -1), (n, reach))
    single = bool((window.rows == 1).all())
    if not single:
        rows = _sums(window.rows, reach)
    legal = None if single else rows <= limits.max_rows
    if limits.max_bytes is not None:
        nbytes = costs.bytes.of_batches(rows.ravel(), shapes[places.ravel()]).reshape(rows.shape)
        legal = _both(legal, nbytes <= limits.max_bytes)
    if limits.max_padding_ratio is not None:
        real = _sums(window.rows * elements_of_many(costs.padded_columns(window.shapes)), reach)
        own = np.broadcast_to(elements_of_many(costs.padded_columns(shapes)), len(shapes))
        computed = rows * own[places]
        legal = _both(legal, real >= (1.0 - limits.max_padding_ratio) * computed)
    if legal is not None:
        legal[:, -1] = True
    seconds = _look_up(rows, shapes, places, legal, costs, limits.max_rows)
    if limits.most_s is not None:
        shared = seconds[:, :-1]
        shared[shared > limits.most_s] = np.inf
    _make_singles_finite(seconds)
    return seconds


def _both(one: NDArray[np.bool_] | None, other: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return other if one is None else one & other


def _sums(values: NDArray[_Number], reach: int) -> NDArray[_Number]:
    """Return the sum of every segment: (n, reach). Before the first item there are zeros."""
    before = np.concatenate((np.zeros(reach, dtype=values.dtype), np.cumsum(values)))
    sums: NDArray[_Number] = before[reach:, None] - np.lib.stride_tricks.sliding_window_view(
        before[:-1], reach
    )
    return sums


def _call_shapes(shapes: Integers, reach: int, most: int) -> tuple[Integers, Integers]:
    """Return the elementwise largest shapes of all segments, and which of them each segment has.

    Equal ones are found only where there may be `most` different ones or fewer.
    """
    n = len(shapes)
    if are_nested(shapes):
        # Every segment has the shape of its last request.
        new = np.concatenate(([True], (shapes[1:] != shapes[:-1]).any(axis=1)))
        return shapes[new], np.broadcast_to((np.cumsum(new) - 1)[:, None], (n, reach))
    if reach > 1 and 2 * n - 1 > most and _pairs_differ(shapes) > most:
        every = np.stack([_largest(column, reach).ravel() for column in shapes.T], axis=1)
        return every, np.arange(n * reach).reshape(n, reach)
    # Sizes are replaced by their ranks per dimension, so that a shape is one small number.
    codes = np.zeros((n, reach), dtype=np.intp)
    largest = []
    different = 1
    for column in shapes.T:
        own = column.tolist()
        sizes = sorted(set(own))
        places_of = {size: rank for rank, size in enumerate(sizes)}
        ranks = _largest(np.array([places_of[size] for size in own], dtype=np.intp), reach)
        largest.append((sizes, ranks))
        codes *= len(sizes)
        codes += ranks
        different *= len(sizes)
        if different > _MARKED:
            # Many dimensions: the combinations of those so far that are in use, numbered, so that no code overflows.
            used, codes = np.unique(codes, return_inverse=True)
            codes = codes.reshape(n, reach)
            different = len(used)
    marks = np.zeros(different, dtype=np.intp)
    marks[codes] = 1
    numbers = np.cumsum(marks)
    places = (numbers - 1)[codes]
    one_of = np.empty(numbers[-1], dtype=np.intp)
    one_of[places.ravel()] = np.arange(places.size)
    columns = [np.array(sizes, dtype=np.intp)[ranks.ravel()[one_of]] for sizes, ranks in largest]
    return np.stack(columns, axis=1), places


def _pairs_differ(shapes: Integers) -> int:
    """Count the different shapes of the segments of one and of two requests."""
    pairs = np.maximum(shapes[1:], shapes[:-1])
    return len({tuple(shape) for shape in shapes.tolist() + pairs.tolist()})


def _largest(ranks: Integers, reach: int) -> Integers:
    """Return the largest value of every segment: (n, reach)."""
    n = len(ranks)
    padded = np.concatenate((np.zeros(reach - 1, dtype=ranks.dtype), ranks))
    # As `sliding_window_view`, without its checks.
    windows: Integers = np.ndarray((n, reach), padded.dtype, padded, strides=padded.strides * 2)
    largest: Integers = np.maximum.accumulate(windows[:, ::-1], axis=1)[:, ::-1]
    return largest


def _look_up(
    rows: Integers,
    shapes: Integers,
    places: Integers,
    legal: NDArray[np.bool_] | None,
    costs: WorkerCosts,
    max_rows: int,
) -> Floats:
    if len(shapes) * max_rows > 2 * rows.size:
        n, reach = rows.shape
        # Those that reach before the first item are not looked at.
        wanted = np.arange(reach, 0, -1) <= np.arange(1, n + 1)[:, None]
        if legal is not None:
            wanted = wanted & legal
        seconds = np.full(rows.shape, np.inf)
        seconds[wanted] = costs.seconds(rows[wanted], shapes[places[wanted]])
        return seconds
    table = costs.table(shapes, max_rows)
    if legal is None:
        # Every request has one row.
        if not places.strides[1]:
            return table[:, rows[0]][places[:, 0]]
        return table[places, rows]
    seconds = table[places, np.minimum(rows, max_rows)]
    large = rows[:, -1] > max_rows  # they run alone
    if large.any():
        seconds[large, -1] = costs.seconds(rows[large, -1], shapes[places[large, -1]])
    seconds[~legal] = np.inf
    return seconds


def _make_singles_finite(seconds: Floats) -> None:
    finite = np.isfinite(seconds[:, -1])
    if not finite.all():
        dearest = float(seconds[np.isfinite(seconds)].max(initial=1.0))
        seconds[~finite, -1] = NEVER * dearest
