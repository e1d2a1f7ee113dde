"""Seconds of calls over a grid of measured sizes: what lies between and beyond is interpolated, and corrected by traffic.

Where a call does an equal amount of work per element, a multilinear function is exact: seconds are linear in the rows at
equal sizes, and in each size at equal rows. Between measured points it is followed piecewise; beyond the grid it goes on
in a straight line over elements.

A prediction looks at the corners of a cell, which double with each axis. So a grid has few axes: where a call has more
sizes, the product of the last ones is one axis.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import product
from math import exp, log, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shapestream.scheduling.cost_filling import LEAST_S, filled, grid_axes, monotone
from shapestream.scheduling.elements import elements_of, elements_of_many

__all__ = ["Grid", "Sizes"]

Sizes: TypeAlias = tuple[int, ...]
Seconds: TypeAlias = NDArray[np.float64]
_Corners: TypeAlias = tuple[tuple[int, float], ...]
_Place: TypeAlias = tuple[_Corners, float]

STEP = 0.1
"""Of the difference (of logarithms) between expected and observed, what the nodes around take over."""
NOTABLE = 1.01
"""A node that traffic moved by less than this factor is where it was measured."""
MOVED = 1.05
"""A prediction that changed by this factor is another one."""
MOST_AXES = 6
"""Of a grid: 64 corners. The 64 points of a calibration could tell no more axes apart."""
_MOST_SIZE = 1 << 62
"""Of an axis; what is larger counts as this, so that it stays an integer of 64 bits."""
_MOST_LOOKUP = 1 << 16
"""Sizes up to which the place on an axis is looked up in an array, rather than searched."""
_REMEMBERED = 4096


class Grid:
    """Seconds per call. Sizes are (rows, *shape): rows are 1 for models without a batch axis.

    Two sets of values: `_live`, which every observation corrects, and what is published, which predictions are made of.
    The second follows the first when `publish` is called, so that plans stay valid in between.
    """

    def __init__(self, points: Mapping[Sizes, float]) -> None:
        """At least one point, all of one length."""
        self._dimensions = len(next(iter(points)))
        points = _folded_points(points)
        self.axes = grid_axes(points)
        values = monotone(filled(self.axes, points))
        self._strides = tuple(prod(map(len, self.axes[axis + 1 :])) for axis in range(len(self.axes)))
        self._live: list[float] = values.ravel().tolist()
        self._began = tuple(self._live)
        self._published_live = list(self._live)
        self._published = values.ravel()
        self._listed: list[float] = list(self._live)
        self._lookups = [_Lookup(axis, stride) for axis, stride in zip(self.axes, self._strides, strict=True)]
        self._places: dict[Sizes, _Place] = {}
        # The last node, and the one before it along every axis: beyond the grid their slope goes on.
        self._elements = elements_of([axis[-1] for axis in self.axes])
        self._elements_before = elements_of([axis[max(0, len(axis) - 2)] for axis in self.axes])
        self._before = sum(
            max(0, len(axis) - 2) * stride for axis, stride in zip(self.axes, self._strides, strict=True)
        )

    # ------------------------------------------------------------ predictions

    def seconds(self, sizes: list[NDArray[np.intp]]) -> Seconds:
        """Of many calls; one array per dimension."""
        sizes = _folded_columns(sizes)
        value = self._interpolated(sizes)
        over = np.zeros(len(sizes[0]), bool)
        for column, axis in zip(sizes, self.axes, strict=True):
            over |= column > axis[-1]
        if over.any():
            value[over] = self._beyond([column[over] for column in sizes])
        return value

    def _interpolated(self, sizes: list[NDArray[np.intp]]) -> Seconds:
        base = np.zeros(len(sizes[0]), np.intp)
        shares: list[tuple[int, Seconds]] = []
        for column, lookup in zip(sizes, self._lookups, strict=True):
            places, share = lookup(column)
            if share is not None:
                base += places
                shares.append((lookup.stride, share))
        return self._blend(base, shares)

    def _blend(self, base: NDArray[np.intp], shares: list[tuple[int, Seconds]]) -> Seconds:
        """The value between the corners of a cell, one axis after the other."""
        if not shares:
            return self._published[base]
        (stride, share), rest = shares[0], shares[1:]
        low = self._blend(base, rest)
        high = self._blend(base + stride, rest)
        high -= low
        high *= share
        high += low
        return high

    def _beyond(self, sizes: list[NDArray[np.intp]]) -> Seconds:
        """Where some size is beyond the grid: on from its edge, in a straight line over elements."""
        inside = [np.minimum(column, axis[-1]) for column, axis in zip(sizes, self.axes, strict=True)]
        elements = elements_of_many(sizes) - elements_of_many(inside)
        return np.asarray(self._interpolated(inside) + self._slope(self._listed) * elements)

    def _slope(self, values: list[float]) -> float:
        """Seconds per element of the largest calls. One for everywhere beyond the grid: so nothing falls there."""
        if self._before == len(values) - 1:
            # A single node shows no slope; the line goes through nothing.
            return values[-1] / max(1.0, self._elements)
        return max(0.0, values[-1] - values[self._before]) / max(1.0, self._elements - self._elements_before)

    @property
    def longest_s(self) -> float:
        """Seconds of the largest call within the grid, as published: no other takes longer there."""
        return self._listed[-1]

    def second(self, sizes: Sizes) -> float:
        """Of one call, as published."""
        return self._value(sizes, self._listed)

    def expected(self, sizes: Sizes) -> float:
        """Of one call, by all that was observed so far."""
        return self._value(sizes, self._live)

    def _value(self, sizes: Sizes, values: list[float]) -> float:
        corners, beyond = self._place(sizes)
        value = 0.0
        for node, weight in corners:
            value += weight * values[node]
        return value + beyond * self._slope(values) if beyond else value

    def _place(self, sizes: Sizes) -> _Place:
        """The corners of its cell, each with its weight, and how many elements beyond the grid's edge it is."""
        place = self._places.get(sizes)
        if place is None:
            if len(self._places) >= _REMEMBERED:
                self._places.clear()
            folded = _folded(sizes)
            inside = tuple([min(size, axis[-1]) for size, axis in zip(folded, self.axes, strict=True)])
            beyond = elements_of(folded) - elements_of(inside)
            place = self._places[sizes] = _corners(inside, self.axes, self._strides), beyond
        return place

    # ------------------------------------------------------------ corrections

    def correct(self, sizes: Sizes, difference: float, scale: float) -> bool:
        """Moves the nodes around a call by a part of `difference`, the logarithm of observed / expected.

        Returns whether one of them, times `scale`, is now off what is published by more than 5 %.
        """
        live, published = self._live, self._published_live
        corners, _ = self._place(sizes)
        step = STEP * difference / sum([weight * weight for _, weight in corners])
        moved = False
        for node, weight in corners:
            live[node] *= 1.0 + step * weight if abs(step) < 0.02 else 2.718281828459045 ** (step * weight)
            ratio = live[node] * scale / published[node]
            if not 1.0 / MOVED <= ratio <= MOVED:
                moved = True
        return moved

    def publish(self, scale: float) -> None:
        """Makes what was learned the basis of predictions. `scale` is a factor that is part of the values from now on."""
        self._live = [value * scale for value in self._live]
        self._published_live = list(self._live)
        shape = tuple(map(len, self.axes))
        self._published = monotone(np.array(self._live).reshape(shape)).ravel()
        self._listed = self._published.tolist()

    def corrections(self, scale: float) -> dict[Sizes, float]:
        """Seconds, times `scale`, of the nodes that are off what the grid began with."""
        # A folded axis stands for several sizes: all of it is the first of them, so that it folds to the same again.
        ones = (1,) * (self._dimensions - len(self.axes))
        return {
            (*sizes, *ones): value * scale
            for sizes, value, was in zip(product(*self.axes), self._live, self._began, strict=True)
            if not 1.0 / NOTABLE <= value * scale / was <= NOTABLE
        }

    def recall(self, seconds: Mapping[Sizes, float]) -> None:
        """Begins where another grid of the same points has ended: these are its `corrections`."""
        folded = {_folded(sizes): value for sizes, value in seconds.items()}
        nodes = zip(product(*self.axes), self._live, strict=True)
        self._live = [max(LEAST_S, folded.get(sizes, value)) for sizes, value in nodes]
        self.publish(1.0)


class _Lookup:
    """Where sizes lie on one axis: the node below, times the stride, and the share of the way to the node above."""

    def __init__(self, axis: Sizes, stride: int) -> None:
        self.stride = stride
        self._axis = np.asarray(axis, np.float64)
        self._most = axis[-1]
        self._table: tuple[NDArray[np.intp], Seconds] | None = None
        if len(axis) > 1 and self._most <= _MOST_LOOKUP:
            self._table = self._search(np.arange(self._most + 1))

    def __call__(self, column: NDArray[np.intp]) -> tuple[NDArray[np.intp], Seconds | None]:
        if len(self._axis) == 1:
            return column, None
        if self._table is None:
            return self._search(column)
        places, shares = self._table
        if len(column) and (column.max() > self._most or column.min() < 0):
            column = column.clip(0, self._most)
        return places[column], shares[column]

    def _search(self, column: NDArray[np.intp]) -> tuple[NDArray[np.intp], Seconds]:
        axis = self._axis
        below = np.searchsorted(axis, column, "right").clip(1, len(axis) - 1) - 1
        share = (column - axis[below]) / (axis[below + 1] - axis[below])
        return below * self.stride, share.clip(0.0, 1.0)


def _folded(sizes: Sizes) -> Sizes:
    """One size per axis."""
    if len(sizes) <= MOST_AXES:
        return sizes
    kept = MOST_AXES - 1
    return (*sizes[:kept], min(prod(sizes[kept:]), _MOST_SIZE))


def _folded_columns(columns: list[NDArray[np.intp]]) -> list[NDArray[np.intp]]:
    """The same of many calls."""
    if len(columns) <= MOST_AXES:
        return columns
    kept = MOST_AXES - 1
    folded = np.minimum(elements_of_many(columns[kept:]), float(_MOST_SIZE))
    return [*columns[:kept], folded.astype(np.intp)]


def _folded_points(points: Mapping[Sizes, float]) -> Mapping[Sizes, float]:
    """Where several fall on one, their geometric mean."""
    if len(next(iter(points))) <= MOST_AXES:
        return points
    alike: dict[Sizes, list[float]] = {}
    for sizes, seconds in points.items():
        alike.setdefault(_folded(sizes), []).append(log(max(LEAST_S, seconds)))
    return {sizes: exp(sum(logs) / len(logs)) for sizes, logs in alike.items()}


def _corners(sizes: Sizes, axes: tuple[Sizes, ...], strides: tuple[int, ...]) -> _Corners:
    corners = [(0, 1.0)]
    for size, axis, stride in zip(sizes, axes, strides, strict=True):
        sides = _sides(size, axis, stride)
        corners = [(node + at, weight * share) for node, weight in corners for at, share in sides]
    return tuple(corners)


def _sides(size: int, axis: Sizes, stride: int) -> Iterable[tuple[int, float]]:
    below = max(0, bisect_right(axis, size) - 1)
    if below == len(axis) - 1 or size <= axis[below]:
        return [(below * stride, 1.0)]
    share = (size - axis[below]) / (axis[below + 1] - axis[below])
    return [(below * stride, 1.0 - share), ((below + 1) * stride, share)]
