"""From measured points to a whole grid: its axes, the nodes that nobody measured, and noise that cannot be.

A calibration measures from small calls to large ones until its time is used up, so what is missing are mostly the
largest; a table from elsewhere may have any holes.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["filled", "grid_axes", "monotone"]

Sizes: TypeAlias = tuple[int, ...]
Values: TypeAlias = NDArray[np.float64]

MOST_NODES = 4096
"""Of a grid. A table with more different sizes than that has its axes thinned."""
LEAST_S = 1e-9
"""No call costs nothing: corrections are factors, and nothing times a factor stays nothing."""


def grid_axes(points: Mapping[Sizes, float]) -> tuple[Sizes, ...]:
    """The sizes that occur along each dimension, ascending; thinned evenly where they make too many nodes."""
    axes = [sorted(set(column)) for column in zip(*points, strict=True)]
    while prod(map(len, axes)) > MOST_NODES:
        longest = max(range(len(axes)), key=lambda number: len(axes[number]))
        kept = axes[longest][::2]
        # Both ends stay: beyond them nothing is interpolated.
        axes[longest] = kept if kept[-1] == axes[longest][-1] else [*kept, axes[longest][-1]]
    return tuple(map(tuple, axes))


def filled(axes: tuple[Sizes, ...], points: Mapping[Sizes, float]) -> Values:
    """Seconds of every node: as measured, else in a straight line along an axis, small calls first."""
    values = np.full(tuple(map(len, axes)), np.nan)
    missing: list[tuple[int, ...]] = []
    for node in product(*[range(len(axis)) for axis in axes]):
        measured = points.get(tuple(axis[place] for axis, place in zip(axes, node, strict=True)))
        if measured is None:
            missing.append(node)
        else:
            values[node] = max(LEAST_S, measured)
    if np.isnan(values).all():  # thinning left none of the points
        values[...] = max(LEAST_S, float(np.median(list(points.values()))))
        return values
    missing.sort(key=lambda node: prod(max(1, axis[place]) for axis, place in zip(axes, node, strict=True)))
    while missing:
        left = [node for node in missing if not _fill(values, axes, node)]
        missing = left  # each round fills the neighbours, along an axis, of what is known
    return values


def _fill(values: Values, axes: tuple[Sizes, ...], node: tuple[int, ...]) -> bool:
    """Fills a node from those on a line with it; whether there was one.

    Along the first axis with two known nodes, rows before sizes: in the rows seconds are most nearly linear.
    """
    single: float | None = None
    for number, axis in enumerate(axes):
        where: tuple[int | slice, ...] = (*node[:number], slice(None), *node[number + 1 :])
        line = values[where]
        known = np.flatnonzero(~np.isnan(line))
        if len(known) >= 2:
            values[node] = _along([axis[place] for place in known], line[known].tolist(), axis[node[number]])
            return True
        if len(known) == 1 and single is None:
            # From below in proportion to the elements, which errs upwards; from above, no more than that.
            place = int(known[0])
            single = float(line[place]) * max(1.0, axis[node[number]] / max(1, axis[place]))
    if single is None:
        return False
    values[node] = single
    return True


def _along(sizes: list[int], seconds: list[float], size: int) -> float:
    """On the line through the two neighbours of `size`, never falling beyond the ends."""
    place = min(max(1, int(np.searchsorted(sizes, size))), len(sizes) - 1)
    low, high = place - 1, place
    slope = (seconds[high] - seconds[low]) / (sizes[high] - sizes[low])
    if size > sizes[-1]:
        return seconds[high] + max(0.0, slope) * (size - sizes[high])
    if size < sizes[0]:
        # At least in proportion: a line that falls steeply would make small calls free.
        return max(seconds[0] - max(0.0, slope) * (sizes[0] - size), seconds[0] * size / sizes[0], LEAST_S)
    return seconds[low] + slope * (size - sizes[low])


def monotone(values: Values) -> Values:
    """The same, never falling along any axis: halfway between what lies before and what lies after.

    Larger calls do not take less time, so where it looks so, it is noise. Values that rise are not touched.
    """
    highest_before, lowest_after = values, values
    for axis in range(values.ndim):
        highest_before = np.maximum.accumulate(highest_before, axis)
        lowest_after = np.flip(np.minimum.accumulate(np.flip(lowest_after, axis), axis), axis)
    return np.asarray(np.sqrt(highest_before * lowest_after))
