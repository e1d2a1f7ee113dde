"""Endless shapes, kept to a few: a shape that comes late is rounded up to one that is known, or will be.

Every shape that an engine meets leaves something behind, and what leads memory to grow is their number. The first
shapes are run exactly as they come, since most models see few; once most of those that may be prepared are, new
ones are rounded up.

A server's scheduler rounds better, as it sees the traffic (`shapestream.scheduling.rounding`); this is for whoever has
none, and keeps the cap whatever anybody asks for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import ceil, prod
from typing import TypeAlias

from shapestream_engine.shapes import Dimension

__all__ = ["RoundingTable", "calibration_shapes", "escape_shapes", "geometric_sizes", "grid_sizes"]

_Sizes: TypeAlias = tuple[int, ...]

_REMEMBERED = 4096
"""Roundings remembered; when so many are known, all are forgotten."""
_MOST_GROUPS = 1024
"""Groups whose shapes are remembered, as in a scheduler; of more, those longest unused start anew."""


def escape_shapes(cap: int) -> int:
    """How many of the shapes under a cap a process keeps for itself where a scheduler chooses the others.

    A scheduler that starts anew knows nothing of what its workers have met; these take up what is too much then.
    """
    return max(1, cap // 8)


def calibration_shapes(cap: int) -> int:
    """How many of the shapes under a cap a process may spend on measuring what calls cost."""
    return cap // 8


class RoundingTable:
    """Gives each shape the one that it is to be run at, and never more than `cap` different ones.

    `bounds` are those of the dimensions that may be rounded, which must have an upper one, and None for the others.
    Shapes that differ in one of these are different for good: of them the cap counts each group by itself.
    """

    def __init__(self, cap: int, bounds: Sequence[Dimension | None], *, on_grid: int | None = None) -> None:
        """`on_grid`: so many of the cap are kept for late shapes; None: half of it, rounded up."""
        if cap < 2:
            raise ValueError(f"a cap below 2 leaves no room for exact shapes: {cap}")
        self._exact = cap // 2 if on_grid is None else cap - on_grid
        self._bounds = tuple(bounds)
        self._grid = grid_sizes([bound for bound in bounds if bound is not None], cap - self._exact)
        self._known: OrderedDict[_Sizes, set[_Sizes]] = OrderedDict()
        """Per group (the sizes that may not be rounded), the shapes that were given out."""
        self._given: dict[_Sizes, _Sizes] = {}

    @property
    def grid(self) -> tuple[_Sizes, ...]:
        """Per dimension that may be rounded, the sizes that late shapes are rounded up to."""
        return self._grid

    @property
    def shapes(self) -> int:
        """How many different shapes were given out so far, of the groups that are remembered."""
        return sum(map(len, self._known.values()))

    def round_up(self, sizes: _Sizes) -> _Sizes:
        """The shape to run these sizes at: no smaller in any dimension, and the same wherever it may not be rounded."""
        given = self._given.get(sizes)
        if given is None:
            given = self._choose(sizes)
            if len(self._given) >= _REMEMBERED:
                self._given.clear()
            self._given[sizes] = given
        return given

    def _choose(self, sizes: _Sizes) -> _Sizes:
        group = tuple(size for size, bound in zip(sizes, self._bounds, strict=True) if bound is None)
        known = self._known.setdefault(group, set())
        self._known.move_to_end(group)
        if len(self._known) > _MOST_GROUPS:
            self._known.popitem(last=False)
            self._given.clear()
        if sizes in known:
            return sizes
        if len(known) < self._exact:
            known.add(sizes)
            return sizes
        choice = self._on_grid(sizes)
        # A shape that is known already costs nothing to prepare; it wins unless it has more to compute.
        fitting = [
            shape for shape in known if all(map(int.__ge__, shape, sizes)) and prod(shape) <= prod(choice)
        ]
        if fitting:
            choice = min(fitting, key=lambda shape: (prod(shape), shape))
        known.add(choice)
        return choice

    def _on_grid(self, sizes: _Sizes) -> _Sizes:
        columns = iter(self._grid)
        return tuple(
            size if bound is None else next(step for step in next(columns) if step >= size)
            for size, bound in zip(sizes, self._bounds, strict=True)
        )


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
