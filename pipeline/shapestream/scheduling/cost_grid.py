"""Predicted seconds of calls: a grid of measured sizes (`Grid`), or a fixed part and a part per element (`LinearCost`).

**Prediction.** A node of the grid is a call size, and holds its seconds. Between nodes seconds are interpolated linearly in
each dimension (multilinear interpolation). That is exact if a call does equal work per element. Beyond the grid one slope
per element goes on. No prediction falls where a call grows: noise that says otherwise is averaged out (`_monotone`).

**Correction.** An observation moves the nodes around its call by a part of the logarithm of observed / expected seconds
(`correct`), in proportion to their weights. Corrections collect in `_learned`. Predictions use them only after `publish`, so
that plans stay valid in between.

**Belief.** `tries.py` says which nodes are known. The first call at a node that is not known is believed (`believe`).
Nodes where no call ran are estimated from those where one did, and are bounded by lately visited ones: a larger call takes
no less time.

**Rows first.** Nearly every question is about several numbers of rows at one shape, so `row_seconds` answers for all of
them at once. `seconds` answers for calls of any sizes: a window of shapes that never come again has hundreds, and the rows
of each would be computed for one number of them. One shape is priced with Python numbers, several with arrays: per shape,
numpy costs more than the arithmetic where there is one (17 and 60 us), and less where there are 64 (17 and 3 us).

Not done: no decision which size to try (tries.py), no slowdown of a worker (worker_class.py), no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from math import exp, inf, log, prod
from operator import gt, itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Sizes: TypeAlias = tuple[int, ...]
"""The sizes of one call: (rows, *shape), with rows 1 for a model without a batch axis."""
Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.intp]

LEAST_S = 1e-9
"""Seconds of the shortest call. Corrections are factors, and nothing times a factor stays nothing."""
STEP = 0.1
"""Part of the difference (of logarithms) between observed and expected seconds by which the nodes around a call move."""
LONE_STEP = 0.2
"""The same for a grid of a single node."""
FIXED_PART = 0.5
"""Part of a call's seconds that counts as its fixed part while only one size was measured."""
MOST_NODES = 4096
"""Nodes of a grid. The axes of a table with more different sizes are thinned."""
MOST_AXES = 6
"""Largest number of axes: a prediction looks at 2 corners per axis, so at 64. If calls have more sizes, the product of the
last ones forms one axis. The 64 points of a calibration could not tell more axes apart."""
FIRST_CLIP = log(4.0)
"""Largest logarithm by which the first call at a node may exceed its expectation, since the machine may have stalled. There
is no bound below, since no stall makes a call shorter."""
BEYOND = 1.5
"""Factor by which a call must be larger than the last node along an axis to have a node of its own. A calibration also
leaves out points that are nearer."""
NOTABLE = 0.01
"""Logarithm by which traffic must have moved a node for its correction to be kept."""
_REMEMBERED = 4096
"""Calls whose places are remembered; when so many are known, all are forgotten. A place does not change."""
FEW = 4
"""Largest number of shapes that are priced one by one; more are priced with arrays."""
_MOST_SIZE = 1 << 62
"""Largest size on an axis."""
_MOST_ROW_SECONDS = 1 << 18
"""Seconds that are kept to price every number of rows at once."""
_MOST_EXACT = 1 << 53
"""Products up to this are whole numbers as doubles too, in whatever order they are multiplied."""
_MOST_ELEMENTS = 1 << 400
"""Largest count of elements. Squared, as where a `LinearCost` is fitted, it is still finite."""


def elements_of(sizes: Sequence[int]) -> float:
    """Return the product of the sizes of one call, exact in integers, and `_MOST_ELEMENTS` at most.

    Callers claim sizes: the product of sixty of them overflows a double long before one of them is too large by itself.
    """
    return float(min(prod(sizes), _MOST_ELEMENTS))


def elements_of_many(columns: Iterable[Integers | Floats]) -> Floats:
    """Return `elements_of` of many calls, given one array per dimension; 1.0 without dimensions."""
    elements = np.asarray(1.0)
    for column in columns:
        elements = np.minimum(elements * column, float(_MOST_ELEMENTS))
    return elements


class _Spot(NamedTuple):
    """The place of a call among the nodes of a grid."""

    near: list[tuple[int, float]]
    """The nodes around it, and their weights."""
    nearest: int
    """The node of the largest weight; of two, the smaller call's, so that the larger one is still tried."""
    squares: float
    """The sum of the squares of these weights."""
    beyond: float
    """Elements by which the call exceeds the grid's edge."""


class Grid:
    """Seconds per call over measured points, corrected by traffic.

    `_learned` takes up every observation at once. Predictions follow it when `publish` is called, so that plans stay
    valid in between.
    """

    __slots__ = (
        "_by_rows",
        "_corners",
        "_dimensions",
        "_elements",
        "_ends",
        "_last",
        "_learned",
        "_live",
        "_live_flat",
        "_measured",
        "_near_end",
        "_pitch",
        "_slope_from",
        "_spots",
        "_starts",
        "_steps",
        "_strides",
        "_values",
        "_varied",
        "_walks",
        "axes",
        "nodes",
    )

    def __init__(self, points: Mapping[Sizes, float]) -> None:
        """`points`: at least one, all of one length."""
        self._dimensions = len(next(iter(points)))
        points = _folded_points(points)
        self.axes = _axes(points)
        """The sizes of its nodes along each dimension."""
        lengths = np.array([len(axis) for axis in self.axes])
        self._strides = np.array([prod(lengths[number + 1 :].tolist()) for number in range(len(lengths))])
        self._varied = np.flatnonzero(lengths > 1)
        """Axes of several nodes; along the others nothing changes within the grid."""
        self._steps = np.full((len(self._varied), max(lengths.tolist()) + 1), np.inf)
        """The sizes along these axes, then infinity."""
        corners = np.zeros(1, np.intp)
        for row, number in zip(self._steps[::-1], self._varied[::-1], strict=True):
            row[: lengths[number]] = self.axes[number]
            corners = np.concatenate((corners, corners + self._strides[number]))
        self._corners = corners[:, None]
        """Places of the corners of a cell after its first node, the first axis outermost."""
        self._measured = _monotone(_filled(self.axes, points)).ravel()
        self._live = self._measured
        """Seconds of each node by all that was observed before `publish` was called last."""
        self._values = self._measured
        """The same, never falling where a call grows: what predictions are made of."""
        self._live_flat = self._live.tolist()
        self._learned = [0.0] * len(self._live_flat)
        """Logarithm by which each node is off `_live` by what was observed since."""
        self.nodes = list(product(*[[int(size) for size in axis.tolist()] for axis in self.axes]))
        """The sizes of each node."""
        # Beyond the grid the slope between its last node and the one before along every axis goes on.
        before = np.maximum(0, lengths - 2)
        self._slope_from = int(before @ self._strides)
        last = elements_of([int(axis[-1]) for axis in self.axes])
        first = elements_of([int(axis[at]) for axis, at in zip(self.axes, before, strict=True)])
        self._elements = last - first if self._slope_from < len(self._values) - 1 else last
        """Elements between these two; of one node alone, all that it has."""
        self._spots: dict[Sizes, _Spot] = {}
        """`_find` of calls that ran."""
        self._starts, self._ends = [np.array([axis[[end]] for axis in self.axes]) for end in (0, -1)]
        self._walks = [
            (number, self.axes[number].tolist(), int(self._strides[number]))
            for number in self._varied.tolist()
        ]
        """The varied axes: place, sizes, and how many nodes further the next size is."""
        self._last = tuple([int(axis[-1]) for axis in self.axes])
        self._near_end = (inf, *[BEYOND * last for last in self._last[1:]])
        """The largest sizes that need no nodes of their own; rows have those that they have."""
        self._pitch = self._slope(self._values)
        """Published seconds per element beyond the grid."""
        self._by_rows: tuple[int, Floats, float] | None = None
        """Most rows, the seconds (nodes of the other axes, rows) of 0 to as many, and those of the smallest call."""

    @property
    def longest_s(self) -> float:
        """Published seconds of the largest call within the grid: no other takes longer there."""
        return float(self._values[-1])

    def seconds(self, columns: Floats) -> Floats:
        """Return the published seconds of many calls."""
        return self._blended(self._values, columns)

    def _place(self, sizes: Sizes) -> tuple[int, list[float]]:
        """Find the first node of one call's cell, and per varied axis the share of the way through it."""
        place, shares = 0, []
        for number, axis, stride in self._walks:
            size = float(sizes[number])
            above = bisect_right(axis, size)
            share = 0.0  # at a node, or beyond the ends
            if above:
                place += stride * (above - 1)
                if above < len(axis):
                    low = axis[above - 1]
                    share = (size - low) / (axis[above] - low)
            shares.append(share)
        return place, shares

    def row_seconds(self, most: int, shapes: Sequence[Sizes]) -> list[Floats | None]:
        """Return the published seconds of 0 to `most` rows at each shape: the same as `seconds`, from what is prepared.

        None where it is not prepared: too many rows, axes or elements, or no elements.
        """
        if self._dimensions > MOST_AXES or not self._prepare_rows(most):
            return [None] * len(shapes)
        if len(shapes) <= FEW:
            return [self._rows_at(most, shape) for shape in shapes]
        found: list[Floats | None] = [None] * len(shapes)
        places = [place for place, shape in enumerate(shapes) if 0 < prod(shape) * most < _MOST_EXACT]
        if places:
            for place, seconds in zip(
                places, self._rows_of([shapes[place] for place in places]), strict=True
            ):
                found[place] = seconds
        return found

    def _prepare_rows(self, most: int) -> bool:
        """Prepare the seconds of 0 to `most` rows at each node of the other axes; tell whether they are few enough."""
        if self._by_rows is None or self._by_rows[0] != most:
            if (most + 1) * len(self._values) > _MOST_ROW_SECONDS * len(self.axes[0]):
                return False
            if self._starts.min() >= 1.0:
                least_s = float(self._values[0])  # no node is smaller than the smallest call
            else:
                least_s = float(self.seconds(np.ones((len(self.axes), 1)))[0])
            self._by_rows = most, self._rows_of_nodes(most), least_s
        return True

    def _rows_at(self, most: int, shape: Sizes) -> Floats | None:
        """Return `row_seconds` of one shape."""
        elements = prod(shape)
        if not 0 < elements * most < _MOST_EXACT:
            return None
        assert self._by_rows is not None
        _, nodes, least_s = self._by_rows
        place, shares = self._place((0, *shape))
        if self._walks and not self._walks[0][0]:
            shares = shares[1:]  # the first axis is part of them already
        corners = [place]
        for (_, _, stride), share in zip(self._walks[len(self._walks) - len(shares) :], shares, strict=True):
            if share:
                corners = [corner + step for corner in corners for step in (0, stride)]
        halves = [nodes[corner] for corner in corners]
        for share in shares:
            if share:
                half = len(halves) // 2
                halves = [
                    (high - low) * share + low for low, high in zip(halves[:half], halves[half:], strict=True)
                ]
        seconds: Floats = halves[0]
        inside = prod([min(size, last) for size, last in zip(shape, self._last[1:], strict=True)])
        if elements > inside or most > self._last[0]:
            rows = np.arange(most + 1.0)
            seconds = seconds + self._pitch * (rows * elements - np.minimum(rows, self._last[0]) * inside)
        elif len(corners) == 1:
            seconds = seconds.copy()
        seconds[0] = least_s
        return seconds

    def _rows_of(self, shapes: Sequence[Sizes]) -> Floats:
        """Return `row_seconds` of several shapes, which all have some: (shapes, most + 1)."""
        assert self._by_rows is not None
        most, nodes, least_s = self._by_rows
        sizes = np.array(shapes, np.float64).T
        inside = np.minimum(sizes, self._ends[1:])
        corners = [np.zeros(len(shapes), np.intp)]
        shares = []
        for number, _, stride in self._walks:
            if not number:
                continue  # the first axis is part of them already
            axis = self.axes[number]
            own = np.maximum(inside[number - 1], axis[0])
            below = np.searchsorted(axis, own, side="right") - 1
            shares.append(((own - axis[below]) / np.append(np.diff(axis), np.inf)[below])[:, None])
            # Of a size at the end of an axis the share is 0, and the corner beyond it any node.
            corners = [
                np.minimum(corner + step, len(nodes) - 1)
                for corner in corners
                for step in (stride * below, stride * below + stride)
            ]
        halves = [nodes[corner] for corner in corners]
        for share in shares:
            half = len(halves) // 2
            halves = [
                (high - low) * share + low for low, high in zip(halves[:half], halves[half:], strict=True)
            ]
        seconds: Floats = halves[0]
        elements, within = sizes.prod(axis=0)[:, None], inside.prod(axis=0)[:, None]
        if most > self._last[0] or (elements > within).any():
            rows = np.arange(most + 1.0)
            seconds = seconds + self._pitch * (rows * elements - np.minimum(rows, self._last[0]) * within)
        seconds[:, 0] = least_s
        return seconds

    def _rows_of_nodes(self, most: int) -> Floats:
        """Interpolate along the rows at every node of the other axes: (nodes, most + 1)."""
        values = self._values.reshape(len(self.axes[0]), -1).T
        axis = self.axes[0]
        rows = np.minimum(np.maximum(np.arange(most + 1.0), axis[0]), axis[-1])
        below = np.searchsorted(axis, rows, side="right") - 1
        above = np.minimum(below + 1, len(axis) - 1)
        shares = (rows - axis[below]) / np.where(above > below, axis[above] - axis[below], np.inf)
        low = values[:, below]
        return np.ascontiguousarray((values[:, above] - low) * shares + low)

    def _places(self, columns: Floats) -> tuple[Integers, Floats]:
        """Find the corners of each call's cell (corners, n), and per axis the share of the way through it (axes, n)."""
        steps = self._steps
        inside = np.minimum(np.maximum(columns, self._starts), self._ends)[self._varied]
        below = np.empty(inside.shape, np.intp)
        for number, (_, axis, _) in enumerate(self._walks):
            below[number] = np.searchsorted(steps[number, : len(axis)], inside[number], side="right") - 1
        axes = np.arange(len(steps))[:, None]
        low = steps[axes, below]
        shares = (inside - low) / (steps[axes, below + 1] - low)
        # Of a size at the end of an axis the share is 0, and the corner beyond it any node.
        nodes = np.minimum(self._strides[self._varied] @ below + self._corners, len(self._values) - 1)
        return nodes, shares

    def _blended(self, values: Floats, columns: Floats) -> Floats:
        columns = _folded(columns)
        nodes, shares = self._places(columns)
        corners = values[nodes]
        for share in shares:
            # Between the two halves of the corners, along one axis after the other.
            half = len(corners) // 2
            low, corners = corners[:half], corners[half:]
            corners -= low
            corners *= share
            corners += low
        seconds: Floats = corners[0]
        if (columns > self._ends).any():
            inside = np.minimum(columns, self._ends)
            seconds += self._slope(values) * (elements_of_many(columns) - elements_of_many(inside))
        return seconds

    def _slope(self, values: Floats) -> float:
        """Return the seconds per element beyond the grid: one slope for all calls, so that nothing falls."""
        start_s = values[self._slope_from] if self._slope_from < len(values) - 1 else FIXED_PART * values[-1]
        return float(max(0.0, values[-1] - start_s)) / max(1.0, self._elements)

    def _find(self, sizes: Sizes) -> _Spot:
        """Find the place of one call, and remember it."""
        folded = _folded_sizes(sizes)
        place, shares = self._place(folded)
        near = [(place, 1.0)]
        for (_, _, stride), share in zip(self._walks[::-1], shares[::-1], strict=True):
            if share:
                rest = 1.0 - share
                near = [(node, weight * rest) for node, weight in near] + [
                    (node + stride, weight * share) for node, weight in near
                ]
        nearest, _ = max(near, key=itemgetter(1))
        squares = sum([weight * weight for _, weight in near])
        beyond = 0.0
        if True in map(gt, folded, self._last):
            beyond = elements_of(folded) - elements_of([*map(min, folded, self._last)])
        if len(self._spots) >= _REMEMBERED:
            self._spots.clear()
        spot = self._spots[sizes] = _Spot(near, nearest, squares, beyond)
        return spot

    def expected(self, sizes: Sizes) -> float:
        """Return the seconds of one call by all that was observed."""
        near, _, _, beyond = self._spots.get(sizes) or self._find(sizes)
        live, learned = self._live_flat, self._learned
        seconds = 0.0
        for node, weight in near:
            seconds += weight * live[node] * exp(learned[node])
        if beyond:
            last = len(live) - 1
            start = self._slope_from
            start_s = (
                live[start] * exp(learned[start])
                if start < last
                else FIXED_PART * live[last] * exp(learned[last])
            )
            seconds += beyond * max(0.0, live[last] * exp(learned[last]) - start_s) / max(1.0, self._elements)
        return seconds

    def correct(self, sizes: Sizes, difference: float) -> list[float]:
        """Move the nodes around a call by a part of `difference`, the logarithm of observed / expected seconds.

        Returns the logarithms by which these nodes are now off the published ones.
        """
        near, _, squares, _ = self._spots.get(sizes) or self._find(sizes)
        step = (STEP if self._walks else LONE_STEP) * difference / squares
        learned = self._learned
        moved = []
        for node, weight in near:
            off = learned[node] = learned[node] + weight * step
            moved.append(off)
        return moved

    # ------------------------------------------------------------ what is known

    def nearest(self, sizes: Sizes) -> int:
        """Return the node of the largest weight around a call."""
        return (self._spots.get(sizes) or self._find(sizes)).nearest

    def holds(self, sizes: Sizes) -> bool:
        """Tell whether a call needs no nodes of its own: its rows never do, and one without elements does not."""
        return True not in map(gt, sizes, self._near_end) or self._dimensions > MOST_AXES or 0 in sizes

    def extended(self, sizes: Sizes, known: NDArray[np.bool_]) -> Grid:
        """Return a grid with nodes at the sizes of a call that lies far beyond (`holds`), or this one if they were too many.

        `known`: as `publish`, which comes first.
        """
        far = [*map(gt, sizes[1:], self._near_end[1:])]
        axes = [[int(size) for size in axis.tolist()] for axis in self.axes]
        for axis, size, is_far in zip(axes[1:], sizes[1:], far, strict=True):
            if is_far:
                axis.append(size)
        if prod(map(len, axes)) > MOST_NODES:
            return self
        self.publish(0.0, known)
        seconds = dict(zip(self.nodes, self._live.tolist(), strict=True))
        nodes = list(product(*axes))
        priced = Grid(seconds).seconds(np.array(nodes, np.float64).T).tolist()
        larger = Grid({node: seconds.get(node, price) for node, price in zip(nodes, priced, strict=True)})
        measured = dict(zip(self.nodes, self._measured.tolist(), strict=True))
        larger._measured = np.array(
            [measured.get(node, price) for node, price in zip(nodes, priced, strict=True)]
        )
        return larger

    def believe(self, sizes: Sizes, difference: float, is_known: Callable[[int], bool]) -> None:
        """Take the first call at nodes that are not known in full; to be published at once.

        `difference`: the logarithm of observed / expected seconds.
        """
        near = (self._spots.get(sizes) or self._find(sizes)).near
        known_s = sum(
            [
                weight * self._live_flat[node] * exp(self._learned[node])
                for node, weight in near
                if is_known(node)
            ]
        )
        expected_s = self.expected(sizes)
        if expected_s * exp(difference) > known_s:
            unknown_s = max(LEAST_S, expected_s - known_s)  # by rounding, nothing may be left of it
            difference = log((expected_s * exp(difference) - known_s) / unknown_s)
        for node, _ in near:
            if not is_known(node):
                self._learned[node] += min(FIRST_CLIP, difference)

    def _estimate(self, ran: NDArray[np.bool_]) -> None:
        """Estimate the nodes where no call ran from those that were measured, or where one did."""
        if ran.all():
            return
        priced = zip(self.nodes, self._live.tolist(), strict=True)
        points = dict([node for node, has_run in zip(priced, ran.tolist(), strict=True) if has_run])
        estimated = Grid(points).seconds(np.array(self.nodes, np.float64).T)
        self._live = np.where(ran, self._live, estimated)

    def _bounded(self, live: Floats, known: NDArray[np.bool_]) -> Floats:
        """Keep the other nodes between what the known ones say of smaller and larger calls."""
        if known.all():
            return live
        shape = [len(axis) for axis in self.axes]
        least = np.where(known, live, 0.0).reshape(shape)
        most = np.where(known, live, np.inf).reshape(shape)
        for axis in range(len(shape)):
            least = np.maximum.accumulate(least, axis)
            most = np.flip(np.minimum.accumulate(np.flip(most, axis), axis), axis)
        bounded: Floats = np.where(known, live, np.minimum(np.maximum(live, least.ravel()), most.ravel()))
        return bounded

    def publish(
        self, shift: float, known: NDArray[np.bool_] | None = None, ran: NDArray[np.bool_] | None = None
    ) -> None:
        """Let predictions follow all that was observed.

        `shift`: a logarithm that every node moves by besides. `known`: the nodes that bound the others; None: all. `ran`:
        the nodes from which the others are estimated anew; None: none are.
        """
        self._live = np.maximum(LEAST_S, self._live * np.exp(np.array(self._learned) + shift))
        if ran is not None:
            self._estimate(ran)
        bounded = self._live if known is None else self._bounded(self._live, known)
        bounded = bounded.reshape([len(axis) for axis in self.axes])
        # What is learned next is a difference from what is published: with two truths, one of them would stay wrong.
        self._live = self._values = _monotone(bounded).ravel()
        self._live_flat = self._live.tolist()
        self._learned = [0.0] * len(self._live_flat)
        self._pitch = self._slope(self._values)
        self._by_rows = None

    def corrections(self, shift: float, known: NDArray[np.bool_] | None = None) -> dict[Sizes, float]:
        """Return the seconds of the nodes that are off the measured ones by more than 1 %.

        `shift`, `known`: as `publish`.
        """
        live = self._live * np.exp(np.array(self._learned) + shift)
        if known is not None:
            live = self._bounded(live, known)
        off = np.abs(np.log(live / self._measured)) > NOTABLE
        # A folded axis stands for several sizes: all of it is the first of them, so that it folds to the same again.
        ones = (1,) * (self._dimensions - len(self.axes))
        nodes = zip(self.nodes, off, live.tolist(), strict=True)
        return {(*map(int, sizes), *ones): seconds for sizes, is_off, seconds in nodes if is_off}

    def recall(self, corrections: Mapping[Sizes, float]) -> list[int]:
        """Begin with the `corrections` of a grid of the same points; return the nodes that have one. To be published."""
        known = _folded_points(corrections) if corrections else {}
        values = np.array([known.get(sizes, 0.0) for sizes in self.nodes])
        self._live = np.where(values > 0.0, values, self._live)
        return np.flatnonzero(values).tolist()


def grid_over(points: Mapping[Sizes, float], most_rows: int) -> tuple[Grid, list[bool]]:
    """Return the grid of these points with nodes at every power of two of the rows, and at `most_rows`; and which are known.

    So a batch twice as large as what is known has a price of its own, which the first such call corrects. Nodes of more rows
    than any point has are not known.
    """
    measured = Grid(points)
    axes = [[int(size) for size in axis.tolist()] for axis in measured.axes]
    powers = [1 << power for power in range(most_rows.bit_length())]
    axes[0] = sorted({*axes[0], *[rows for rows in (*powers, most_rows) if rows > axes[0][0]]})
    if len(next(iter(points))) > MOST_AXES or prod(map(len, axes)) > MOST_NODES:
        folded = _folded_points(points)
        return measured, [node in folded for node in measured.nodes]
    nodes = list(product(*axes))
    seconds = measured.seconds(np.array(nodes, np.float64).T).tolist()
    most_known = int(measured.axes[0][-1])
    grid = Grid(dict(zip(nodes, seconds, strict=True)))
    return grid, [node[0] <= most_known for node in grid.nodes]


def _folded(columns: Floats) -> Floats:
    """Bring calls of many sizes to `MOST_AXES`."""
    if len(columns) <= MOST_AXES:
        return columns
    kept = MOST_AXES - 1
    return np.concatenate(
        (columns[:kept], np.minimum(elements_of_many(columns[kept:]), float(_MOST_SIZE))[None])
    )


def _folded_sizes(sizes: Sizes) -> Sizes:
    """Bring one call of many sizes to `MOST_AXES`."""
    kept = MOST_AXES - 1
    return sizes if len(sizes) <= MOST_AXES else (*sizes[:kept], min(prod(sizes[kept:]), _MOST_SIZE))


def _folded_points(points: Mapping[Sizes, float]) -> dict[Sizes, float]:
    """Bring points of many sizes to `MOST_AXES`; several that fall on one have their geometric mean."""
    if len(next(iter(points))) <= MOST_AXES:
        return {sizes: max(LEAST_S, seconds) for sizes, seconds in points.items()}
    alike: dict[Sizes, list[float]] = {}
    for sizes, seconds in points.items():
        alike.setdefault(_folded_sizes(sizes), []).append(log(max(LEAST_S, seconds)))
    return {sizes: exp(sum(logs) / len(logs)) for sizes, logs in alike.items()}


def _axes(points: Mapping[Sizes, float]) -> list[Floats]:
    """List the sizes that occur along each dimension, ascending; thinned evenly where they make too many nodes."""
    axes = [sorted(set(column)) for column in zip(*points, strict=True)]
    while prod(map(len, axes)) > MOST_NODES:
        longest = max(range(len(axes)), key=lambda number: len(axes[number]))
        kept = axes[longest][::2]
        # Both ends stay: beyond them nothing is interpolated.
        axes[longest] = kept if kept[-1] == axes[longest][-1] else [*kept, axes[longest][-1]]
    return [np.array(axis, np.float64) for axis in axes]


def _filled(axes: list[Floats], points: Mapping[Sizes, float]) -> Floats:
    """Return the seconds of every node of a grid: as measured, or a linear fit through all points times a factor.

    A calibration measures from small calls to large ones until its time is used up; a table from elsewhere may have any
    holes. Factors are interpolated between measured nodes along each axis, held constant beyond the ends, and averaged
    geometrically over axes. Seconds are not extrapolated through two neighbours: where noise moved one of them, calls
    thirty times as large could cost the same.
    """
    elements = elements_of_many(np.meshgrid(*axes, indexing="ij"))
    measured = np.array(list(points.values()))
    weights, computed = measured**-2.0, np.array([elements_of(sizes) for sizes in points])
    if len(set(computed.tolist())) == 1:
        usual_s = float(np.exp(np.log(measured).mean()))
        fixed_s, element_s = (
            FIXED_PART * usual_s,
            (1.0 - FIXED_PART) * usual_s / max(1.0, float(computed[0])),
        )
    else:
        fixed_s, element_s = _fitted(
            weights.sum(),
            weights @ computed,
            weights @ (computed * computed),
            weights @ measured,
            weights @ (computed * measured),
        )
    trend = np.maximum(LEAST_S, fixed_s + element_s * elements)
    factors = np.full(trend.shape, np.nan)
    values = np.full(trend.shape, np.nan)
    for sizes, seconds in points.items():
        node = tuple([int(np.searchsorted(axis, size)) for axis, size in zip(axes, sizes, strict=True)])
        if all(axis[at] == size for axis, at, size in zip(axes, node, sizes, strict=True)):
            factors[node] = log(seconds / trend[node])
            values[node] = seconds
    if np.isnan(factors).all():  # thinning left none of the points
        return trend
    while (missing := np.isnan(factors)).any():
        # Each round fills nodes between two known ones along some axis.
        found = np.stack([_along(factors, number, axis, np.nan) for number, axis in enumerate(axes)])
        filling = missing & ~np.isnan(found).all(axis=0)
        if not filling.any():
            # Where there are none, the smallest ones beyond known ones, which the next ones then follow.
            found = np.stack([_along(factors, number, axis, None) for number, axis in enumerate(axes)])
            filling = missing & ~np.isnan(found).all(axis=0)
            filling &= elements <= 2.0 * elements[filling].min()
        ways = np.maximum(1, (~np.isnan(found)).sum(axis=0))
        factors = np.where(filling, np.nansum(found, axis=0) / ways, factors)
    return np.where(np.isnan(values), trend * np.exp(factors), values)


def _along(factors: Floats, number: int, axis: Floats, beyond: float | None) -> Floats:
    """Interpolate along one axis; nodes beyond the known ones are `beyond`, or as the nearest one."""

    def filled(values: Floats) -> Floats:
        known = ~np.isnan(values)
        return np.interp(axis, axis[known], values[known], beyond, beyond) if known.any() else values

    return np.asarray(np.apply_along_axis(filled, number, factors))


def _monotone(values: Floats) -> Floats:
    """Return values that never fall along any axis: halfway between what lies before and what lies after.

    Larger calls do not take less time, so where it looks so, it is noise. Values that rise are not touched.
    """
    highest_before, lowest_after = values, values
    for axis in range(values.ndim):
        highest_before = np.maximum.accumulate(highest_before, axis)
        lowest_after = np.flip(np.minimum.accumulate(np.flip(lowest_after, axis), axis), axis)
    return np.asarray(np.sqrt(highest_before * lowest_after))


def _fitted(n: float, s: float, ee: float, ns: float, es: float) -> tuple[float, float]:
    """Solve the normal equations of `fixed * calls + slope * elements = seconds`; neither part is negative.

    The sums, weighted: of calls², calls * elements, elements², calls * seconds and elements * seconds.
    """
    determinant = n * ee - s * s
    if determinant > 1e-12 * n * ee:
        fixed, slope = (ns * ee - es * s) / determinant, (es * n - ns * s) / determinant
        if fixed >= 0.0 and slope >= 0.0:
            return fixed, slope
        if slope < 0.0:
            return ns / n, 0.0
    elif ee <= 0.0 or (n > 0.0 and s <= 0.0):
        return ns / n, 0.0
    return 0.0, es / ee


class LinearCost:
    """Seconds as `fixed_s + element_s * elements`, learned from what ran: least squares with forgetting.

    Errors count in proportion (an observation weighs 1 / seconds²), so that long calls do not drown short ones.
    """

    __slots__ = (
        "_clip",
        "_count",
        "_last",
        "_sums",
        "element_s",
        "fixed_s",
        "longest_s",
        "measured",
        "reach",
    )

    LEVEL_STEP = 0.1
    """Part of the difference (of logarithms) that both parts take over at once: a machine that becomes slower is followed
    within twenty observations, without unlearning how the two parts compare."""
    FORGETTING = 0.97
    """What an observation weighs one observation later: about thirty count for the division between the two parts."""
    FEW = 3
    """Observations that count as they are, since little is expected yet; later ones are clipped, and less of a weight."""
    KEEP = 0.05
    """Weight, in observations, of each part as it was known before: while all calls are alike it keeps the two apart."""
    LEAST_S = 1e-7
    """Seconds of the shortest observation; errors in proportion to nothing would have no end."""
    MOVED = 1.05
    """Factor by which a prediction must change to count as another one."""

    def __init__(self, clip: float = 1.5) -> None:
        """`clip`: the factor by which an observation may be off what was expected.

        Beyond, it counts as this, and weighs as much less as it is further off (Huber's weights).
        """
        self._clip = clip
        self._count = 0
        self.measured = False
        """Whether anything was observed."""
        self.fixed_s = 0.0
        self.element_s = 0.0
        self.longest_s = 0.0
        """Seconds of the longest call that was observed."""
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        """See `_fitted`."""
        self._last = (0.0, 0.0)
        """The two parts when `moved` was last true."""
        self.reach = (0.0, 0.0)
        """The fewest and the most elements of an observation."""

    def second(self, elements: float) -> float:
        """Return the expected seconds of one call."""
        return self.fixed_s + self.element_s * elements

    def observe(self, calls: float, elements: float, seconds: float, *, request_elements: float) -> None:
        """Learn from `calls` calls that had `elements` in all and took `seconds`.

        `request_elements`: of one request in them. At first, the fixed part of a call is taken to weigh as much as it.
        """
        seconds = max(self.LEAST_S, seconds)
        self.longest_s = max(self.longest_s, seconds / calls)
        if not self._count:
            unit = max(1.0, request_elements)
            self.element_s = seconds / (calls * unit + elements)
            self.fixed_s = self.element_s * unit
            self.reach = (elements, elements)
        self._count += 1
        self.measured = True
        self.reach = (min(self.reach[0], elements), max(self.reach[1], elements))
        expected = max(self.LEAST_S, calls * self.fixed_s + elements * self.element_s)
        taken, share = seconds, 1.0
        if self._count > self.FEW:
            taken = max(expected / self._clip, min(expected * self._clip, seconds))
            level = (taken / expected) ** self.LEVEL_STEP
            self.rescale(level)
            expected *= level
            share = min(1.0, self._clip / max(seconds / expected, expected / seconds))
        weight = share / max(expected, taken) ** 2
        self._add(calls, elements, taken, weight)
        n, s, ee, ns, es = self._sums
        # As if a little of each part had been observed to be as it was: see KEEP.
        kept = self.KEEP * weight
        units = kept * max(1.0, elements) ** 2
        self.fixed_s, self.element_s = _fitted(
            n + kept, s, ee + units, ns + kept * self.fixed_s, es + units * self.element_s
        )

    def rescale(self, level: float) -> None:
        """Change both parts as if everything so far had taken `level` times as long."""
        self.fixed_s *= level
        self.element_s *= level
        n, s, ee, ns, es = self._sums
        self._sums = (n / level**2, s / level**2, ee / level**2, ns / level, es / level)

    def _add(self, calls: float, elements: float, taken: float, weight: float) -> None:
        """Add one term to the sums; the older ones count less."""
        n, s, ee, ns, es = [self.FORGETTING * each for each in self._sums]
        self._sums = (
            n + weight * calls * calls,
            s + weight * calls * elements,
            ee + weight * elements * elements,
            ns + weight * calls * taken,
            es + weight * elements * taken,
        )

    def ends(self) -> dict[float, float]:
        """Return the seconds at the fewest and the most elements observed; nothing before the first observation."""
        return {elements: self.second(elements) for elements in self.reach} if self.measured else {}

    def recall(self, ends: Mapping[float, float]) -> None:
        """Begin with the `ends` of another one."""
        if not ends:
            return
        few, most = min(ends), max(ends)
        # Of two that differ by rounding alone, as of one, nothing is known between the fixed part and the rest.
        apart = most - few > 1e-6 * most
        slope = (ends[most] - ends[few]) / (most - few) if apart else ends[few] / 2 / max(1.0, few)
        self.element_s = max(0.0, slope)
        self.fixed_s = max(0.0, ends[few] - self.element_s * few)
        self.longest_s = max(self.LEAST_S, ends[few], ends[most])
        self.reach = (few, most)
        self._count = self.FEW
        self.measured = True
        for elements, seconds in ends.items():
            # Together they weigh as much as all observations that still count.
            taken = max(self.LEAST_S, seconds)
            self._add(1.0, elements, taken, 0.5 / (1.0 - self.FORGETTING) / taken**2)

    def moved(self) -> bool:
        """Tell whether predictions at the ends of what was observed changed by more than 5 % since this was last true."""
        fixed, element = self._last
        for elements in self.reach:
            was, now = fixed + element * elements, self.second(elements)
            if not was / self.MOVED <= now <= was * self.MOVED:
                self._last = (self.fixed_s, self.element_s)
                return True
        return False
