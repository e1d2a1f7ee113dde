"""Grids of sizes: few sizes per dimension, in equal factors, to which others are rounded up."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import TypeAlias

from shapestream_engine.shapes import Dimension

__all__ = ["geometric_sizes", "grid_sizes"]

_Sizes: TypeAlias = tuple[int, ...]


def geometric_sizes(low: int, high: int, count: int) -> _Sizes:
    """At most `count` sizes up to `high`, each the same factor larger than the one before, as whole numbers go."""
    if high < 1:
        return (high,)
    low = max(1, low)
    factor = (high / low) ** (1 / count)
    steps = {min(high, ceil(low * factor**step - 1e-9)) for step in range(1, count)}
    return tuple(sorted(steps | {high}))


def grid_sizes(bounds: Sequence[Dimension], budget: int) -> tuple[_Sizes, ...]:
    """Sizes per dimension, no more than `budget` combinations: the dimension of the widest steps is refined first."""
    ends = []
    for bound in bounds:
        assert bound.maximum is not None  # the strategy has asked for it
        ends.append((max(1, bound.minimum), bound.maximum))
    counts = [1] * len(ends)
    open_ones = set(range(len(ends)))
    while open_ones:
        widest = max(
            open_ones,
            key=lambda number: ((ends[number][1] / ends[number][0]) ** (1 / counts[number]), -number),
        )
        low, high = ends[widest]
        more = [*counts]
        more[widest] += 1
        if more[widest] > high - low + 1 or prod(more) > budget:
            open_ones.discard(widest)
        else:
            counts = more
    return tuple(geometric_sizes(low, high, count) for (low, high), count in zip(ends, counts, strict=True))
