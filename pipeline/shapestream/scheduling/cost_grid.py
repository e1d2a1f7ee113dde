"""Seconds of calls over a grid of measured sizes: what lies between and beyond is interpolated, and corrected by traffic.

Where a call does an equal amount of work per element, a multilinear function is exact: seconds are linear in the rows at
equal sizes, and in each size at equal rows. Between measured points it is followed piecewise; beyond the grid it goes on
in a straight line over elements.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import product
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shapestream.scheduling.cost_filling import filled, grid_axes, monotone

__all__ = ["Grid", "Sizes"]

Sizes: TypeAlias = tuple[int, ...]
Seconds: TypeAlias = NDArray[np.float64]

STEP = 0.12
"""Of the difference (of logarithms) between expected and observed, what the nodes around take over."""
MOVED = 1.05
"""A prediction that changed by this factor is another one."""
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
        self.axes = grid_axes(points)
        values = monotone(filled(self.axes, points))
        self._strides = tuple(prod(map(len, self.axes[axis + 1 :])) for axis in range(len(self.axes)))
        self._live: list[float] = values.ravel().tolist()
        self._published_live = list(self._live)
        self._published = values.ravel()
        self._listed: list[float] = list(self._live)
        self._lookups = [_Lookup(axis, stride) for axis, stride in zip(self.axes, self._strides, strict=True)]
        self._corners: dict[Sizes, _Place] = {}

    # ------------------------------------------------------------ predictions

    def seconds(self, sizes: list[NDArray[np.intp]]) -> Seconds:
        """Of many calls; one array per axis."""
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
        before = [
            np.where(column > axis[-1], axis[max(0, len(axis) - 2)], column)
            for column, axis in zip(sizes, self.axes, strict=True)
        ]
        at, ahead = self._interpolated(inside), self._interpolated(before)
        elements, reached, fewer = (np.prod([np.asarray(column, np.float64) for column in where], axis=0)
                                    for where in (sizes, inside, before))  # fmt: skip
        # An edge of one node shows no slope: there the line goes through nothing.
        one_node = reached <= fewer
        slope = np.where(one_node, at, at - ahead) / np.maximum(
            np.where(one_node, reached, reached - fewer), 1.0
        )
        return np.asarray(at + np.maximum(slope, 0.0) * (elements - reached))

    def second(self, sizes: Sizes) -> float:
        """Of one call, as published."""
        return self._place(sizes).of(self._listed)

    def expected(self, sizes: Sizes) -> float:
        """Of one call, by all that was observed so far."""
        return self._place(sizes).of(self._live)

    def _place(self, sizes: Sizes) -> _Place:
        place = self._corners.get(sizes)
        if place is None:
            if len(self._corners) >= _REMEMBERED:
                self._corners.clear()
            place = self._corners[sizes] = _Place.find(sizes, self.axes, self._strides)
        return place

    # ------------------------------------------------------------ corrections

    def correct(self, sizes: Sizes, difference: float, scale: float) -> bool:
        """Moves the nodes around a call by a part of `difference`, the logarithm of observed / expected.

        Returns whether one of them, times `scale`, is now off what is published by more than 5 %.
        """
        live, published = self._live, self._published_live
        corners = self._place(sizes).corners
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


class _Place:
    """One call's place on the grid: the corners of its cell, each with its weight; and how to go on beyond the edge."""

    __slots__ = ("before", "beyond", "corners")

    def __init__(self, corners: tuple[tuple[int, float], ...]) -> None:
        self.corners = corners
        self.before: _Place | None = None
        self.beyond = 0.0
        """How far beyond the edge, in steps from `before` to the edge (elements); or, without `before`, in edges."""

    @classmethod
    def find(cls, sizes: Sizes, axes: tuple[Sizes, ...], strides: tuple[int, ...]) -> _Place:
        inside = tuple(min(size, axis[-1]) for size, axis in zip(sizes, axes, strict=True))
        place = cls(_corners(inside, axes, strides))
        if inside != sizes:
            fewer = tuple(
                axis[max(0, len(axis) - 2)] if size > axis[-1] else size
                for size, axis in zip(sizes, axes, strict=True)
            )
            reached, before = prod(inside), prod(fewer)
            if before < reached:
                place.before = cls(_corners(fewer, axes, strides))
                place.beyond = (prod(sizes) - reached) / (reached - before)
            else:
                place.beyond = (prod(sizes) - reached) / max(1, reached)
        return place

    def of(self, values: list[float]) -> float:
        """The value here."""
        value = 0.0
        for node, weight in self.corners:
            value += weight * values[node]
        if self.beyond:
            step = value if self.before is None else max(0.0, value - self.before.of(values))
            value += self.beyond * step
        return value


def _corners(
    sizes: Sizes, axes: tuple[Sizes, ...], strides: tuple[int, ...]
) -> tuple[tuple[int, float], ...]:
    per_axis = [_sides(size, axis, stride) for size, axis, stride in zip(sizes, axes, strides, strict=True)]
    return tuple(
        (sum(node for node, _ in corner), prod(weight for _, weight in corner))
        for corner in product(*per_axis)
    )


def _sides(size: int, axis: Sizes, stride: int) -> Iterable[tuple[int, float]]:
    below = max(0, bisect_right(axis, size) - 1)
    if below == len(axis) - 1 or size <= axis[below]:
        return [(below * stride, 1.0)]
    share = (size - axis[below]) / (axis[below + 1] - axis[below])
    return [(below * stride, 1.0 - share), ((below + 1) * stride, share)]
