"""From measured points to a whole grid: its axes, the nodes that nobody measured, and noise that cannot be.

A calibration measures from small calls to large ones until its time is used up, so what is missing are mostly the
largest; a table from elsewhere may have any holes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import exp, log, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shapestream.scheduling.elements import elements_of

__all__ = ["LEAST_S", "filled", "grid_axes", "monotone"]

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
    """Seconds of every node: as measured; between measured ones on a line; beyond them as the trend of all goes on.

    Beyond, no line through two neighbours is followed: where one of them is off by what machines are off, it would make
    calls thirty times as large cost the same.
    """
    measured = {sizes: max(LEAST_S, seconds) for sizes, seconds in points.items()}
    trend = _trend(measured)
    values = np.full(tuple(map(len, axes)), np.nan)
    missing: list[tuple[int, ...]] = []
    sizes_of = {node: _sizes(axes, node) for node in product(*[range(len(axis)) for axis in axes])}
    for node, sizes in sizes_of.items():
        if sizes in measured:
            values[node] = measured[sizes]
        else:
            missing.append(node)
    if len(missing) == len(sizes_of):  # thinning left none of the points
        values[...] = [trend(elements_of(sizes_of[node])) for node in sizes_of]
        return values
    missing.sort(key=lambda node: prod(max(1, size) for size in sizes_of[node]))
    while missing:
        # Each round fills the neighbours, along an axis, of what is known: between two known ones first.
        left = [node for node in missing if not _between(values, axes, node)]
        if len(left) == len(missing):
            left = [node for node in missing if not _onward(values, axes, node, trend)]
        missing = left
    return values


def _sizes(axes: tuple[Sizes, ...], node: tuple[int, ...]) -> Sizes:
    return tuple(axis[place] for axis, place in zip(axes, node, strict=True))


def _trend(points: Mapping[Sizes, float]) -> Callable[[float], float]:
    """Seconds over elements, for all points together: a fixed part and one per element, neither of them negative.

    Least squares of errors in proportion. It carries over what a call of another size costs, no more: each node is
    a factor off it.
    """
    seconds = np.array(list(points.values()))
    fixed, element = 1.0 / seconds, np.array([elements_of(sizes) for sizes in points]) / seconds
    parts, *_ = np.linalg.lstsq(np.stack([fixed, element], axis=1), np.ones(len(seconds)), rcond=None)
    a, b = float(parts[0]), float(parts[1])
    if a < 0.0 or b < 0.0:
        one, other = fixed.sum() / (fixed @ fixed), element.sum() / max(element @ element, 1e-300)
        a, b = (0.0, float(other)) if a < 0.0 else (float(one), 0.0)
    return lambda elements: max(LEAST_S, a + b * elements)


def _lines(
    values: Values, axes: tuple[Sizes, ...], node: tuple[int, ...]
) -> Iterator[tuple[int, list[int], list[float]]]:
    """Per axis: its number, the places along it that are known on a line with the node, and their seconds."""
    for number in range(len(axes)):
        where: tuple[int | slice, ...] = (*node[:number], slice(None), *node[number + 1 :])
        line = values[where]
        known = np.flatnonzero(~np.isnan(line)).tolist()
        if known:
            yield number, known, line[known].tolist()


def _between(values: Values, axes: tuple[Sizes, ...], node: tuple[int, ...]) -> bool:
    """Fills a node that lies between two known ones; whether it does.

    Along the first such axis, rows before sizes: in the rows seconds are most nearly linear.
    """
    for number, known, seconds in _lines(values, axes, node):
        if known[0] < node[number] < known[-1]:
            axis = axes[number]
            values[node] = np.interp(axis[node[number]], [axis[place] for place in known], seconds)
            return True
    return False


def _onward(
    values: Values, axes: tuple[Sizes, ...], node: tuple[int, ...], trend: Callable[[float], float]
) -> bool:
    """Fills a node from the nearest known one along each axis; whether there was one.

    It is off the trend by the factor that they are off, in the (geometric) mean.
    """
    factors: list[float] = []
    for number, known, seconds in _lines(values, axes, node):
        at = 0 if node[number] < known[0] else -1
        near = (*node[:number], known[at], *node[number + 1 :])
        factors.append(log(seconds[at] / trend(elements_of(_sizes(axes, near)))))
    if not factors:
        return False
    values[node] = trend(elements_of(_sizes(axes, node))) * exp(sum(factors) / len(factors))
    return True


def monotone(values: Values) -> Values:
    """The same, never falling along any axis: halfway between what lies before and what lies after.

    Larger calls do not take less time, so where it looks so, it is noise. Values that rise are not touched.
    """
    highest_before, lowest_after = values, values
    for axis in range(values.ndim):
        highest_before = np.maximum.accumulate(highest_before, axis)
        lowest_after = np.flip(np.minimum.accumulate(np.flip(lowest_after, axis), axis), axis)
    return np.asarray(np.sqrt(highest_before * lowest_after))
