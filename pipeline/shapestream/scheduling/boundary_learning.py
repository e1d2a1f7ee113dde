"""Boundaries that follow the traffic: what each size that may be rounded is rounded up to, while shapes are left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from math import prod
from typing import TypeAlias

import numpy as np

from shapestream.scheduling.boundaries import BoundaryChoices, Floats, SizeHistogram, Sizes, cost_of
from shapestream.scheduling.size_grid import grid_sizes
from shapestream_engine.shapes import Dimension

__all__ = ["FIRST_LOOK", "LOOK_EVERY", "LearnedBoundaries", "Prices"]

Prices: TypeAlias = Callable[[int, Sizes, Mapping[int, int]], Floats]
"""What a request costs at each of these sizes along an axis, given usual sizes along the others."""

FIRST_LOOK = 256
"""Requests after which boundaries are learned for the first time."""
LOOK_EVERY = 1024
"""Requests between looks at whether others would be better. A look takes about a millisecond."""
WORTH = 0.03
"""Share of the cost that other boundaries must save to be taken: each new shape has to be prepared for."""
FIRST_SHARE, LATER_SHARE = 0.75, 0.5
"""Of what is left under the cap, what one learning spends."""
_WORTH_ONE = 0.005
"""The same of a single boundary: what is not spent is there when the traffic changes."""
_CANDIDATES = 64
"""Sizes that boundaries are chosen among."""


class LearnedBoundaries:
    """Per axis (of a shape) ascending boundaries, the last of them its bound."""

    def __init__(self, bounds: Mapping[int, int], combinations: int, prices: Prices) -> None:
        """Begins with a geometric grid of `combinations` at most."""
        self._bounds = dict(bounds)
        self._prices = prices
        grid = grid_sizes([Dimension(1, bound) for bound in self._bounds.values()], max(1, combinations))
        self.per_axis: dict[int, tuple[int, ...]] = dict(zip(self._bounds, grid, strict=True))
        self._seen = {axis: SizeHistogram(bound) for axis, bound in self._bounds.items()}
        self._observed = 0
        self._look_at = FIRST_LOOK
        self.learned = 0
        """How often they were learned."""

    def observe(self, shape: tuple[int, ...], weight: int) -> bool:
        """A request of this shape and so many rows. True: it is time for `look`."""
        for axis, seen in self._seen.items():
            seen.add(shape[axis], weight)
        self._observed += 1
        return self._observed >= self._look_at

    def look(self, used: Mapping[int, Set[int]], spare: float) -> bool:
        """Takes other boundaries if they save enough, and says whether; what was seen counts half from now on.

        `used`: per axis the boundaries that some call was given, which stay; `spare`: combinations that may be added.
        See `rounding.py`.
        """
        self._look_at = self._observed + (LOOK_EVERY if self._observed >= LOOK_EVERY else 3 * self._observed)
        found = self._better(used, spare) if self._bounds else None
        for seen in self._seen.values():
            seen.fade(0.5)
        if found is None:
            return False
        self.per_axis = found
        self.learned += 1
        return True

    def _better(self, used: Mapping[int, Set[int]], spare: float) -> dict[int, tuple[int, ...]] | None:
        kept = {
            axis: tuple([size for size in own if size in used[axis] or size == self._bounds[axis]])
            for axis, own in self.per_axis.items()
        }
        taken = prod(map(len, kept.values()))
        share = FIRST_SHARE if self.learned == 0 else LATER_SHARE
        budget = taken + max(int(spare * share), min(int(spare), 1))
        usual = {axis: self._usual(axis) for axis in self._bounds}
        choices, current = {}, 1.0
        for axis, own in kept.items():
            sizes, weights = self._seen[axis].columns(_CANDIDATES, (*own, *self.per_axis[axis]))
            costs = self._prices(axis, sizes, usual)
            # As many as there could be if nothing were added along the others.
            room = budget // (taken // len(own)) - len(own)
            choices[axis] = BoundaryChoices.of(
                sizes, weights, costs, own, max(0, min(room, len(sizes) - len(own)))
            )
            current *= cost_of(self.per_axis[axis], sizes, weights, costs)
        counts = _shared_out(choices, {axis: len(own) for axis, own in kept.items()}, budget)
        best = prod([choices[axis].costs[count] for axis, count in counts.items()])
        if best > current * (1 - WORTH):
            return None
        return {axis: choices[axis].boundaries[count] for axis, count in counts.items()}

    def _usual(self, axis: int) -> int:
        """A size that is neither rare nor extreme."""
        sizes, weights = self._seen[axis].columns(_CANDIDATES, ())
        return int(sizes[np.searchsorted(np.cumsum(weights), weights.sum() / 2)]) if len(sizes) else 1


def _shared_out(
    choices: Mapping[int, BoundaryChoices], kept: Mapping[int, int], budget: int
) -> dict[int, int]:
    """New boundaries per axis: one after the other to where it saves most, while combinations are left."""
    counts = dict.fromkeys(choices, 0)
    while True:
        gains = {}
        for axis, count in counts.items():
            costs = choices[axis].costs
            more = {**counts, axis: count + 1}
            combinations = prod([kept[other] + new for other, new in more.items()])
            if count + 1 < len(costs) and combinations <= budget:
                gains[axis] = 1 - costs[count + 1] / costs[count] if costs[count] else 0.0
        if not gains or max(gains.values()) <= _WORTH_ONE:
            return counts
        counts[max(gains, key=lambda axis: (gains[axis], -axis))] += 1
