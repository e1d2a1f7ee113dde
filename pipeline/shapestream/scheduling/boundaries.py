"""Sizes that other sizes are rounded up to: a geometric grid first, then those that cost least over the traffic.

Learned boundaries are worth 1.9 to 3.5 % of goodput with 32 shapes of one size, and 2.5 % with 64 shapes of two
(docs/decisions.md). They are the best ones, found by dynamic programming over a histogram of the sizes seen. Its sizes are
u1 < u2 < … with weights w, and a request has a cost at each size. A set of boundaries costs the sum, over requests, of
cost(next boundary). Let F(k, j) be the least cost of all up to size j, where j is a boundary and at most k are new:

    F(k, j) = min over i < j of F(k - [j is new], i) + cost(j) * (w up to j - w up to i)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import ceil, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shapestream.scheduling.cost_grid import Floats, Integers

Prices: TypeAlias = Callable[[int, Integers, Mapping[int, int]], Floats]
"""What a request costs at each of these sizes along an axis, given usual sizes along the others."""

FIRST_LOOK = 256
"""Requests after which boundaries are learned for the first time."""
LOOK_EVERY = 1024
"""Requests between looks at whether others would be better. A look takes about a millisecond."""
WORTH = 0.03
"""Share of the cost that other boundaries must save to be taken: each new shape has to be prepared for."""
FIRST_PART, LATER_PART = 0.75, 0.5
"""Share of the combinations left under the cap that the first learning spends, and each later one."""
_WORTH_ONE = 0.005
"""Share of the cost that a single boundary must save: what is not spent is there when the traffic changes."""
_CANDIDATES = 64
"""Sizes that boundaries are chosen among."""
_EXACT_BELOW = 256
"""Sizes up to which each is counted by itself; above it they are counted in steps of less than 1 %."""


def geometric_sizes(low: int, high: int, count: int) -> tuple[int, ...]:
    """Return at most `count` sizes up to `high`, each the same factor larger than the one before."""
    if high < 1:
        return (high,)
    low = max(1, low)
    factor = (high / low) ** (1 / count)
    steps = {min(high, ceil(low * factor**step - 1e-9)) for step in range(1, count)}
    return tuple(sorted(steps | {high}))


def grid_sizes(ends: Sequence[tuple[int, int]], budget: int) -> tuple[tuple[int, ...], ...]:
    """Return geometric sizes between each pair of ends, no more than `budget` combinations: the widest steps first."""
    counts = [1] * len(ends)
    open_ones = set(range(len(ends)))
    while open_ones:
        widest = max(
            open_ones,
            key=lambda number: ((ends[number][1] / max(1, ends[number][0])) ** (1 / counts[number]), -number),
        )
        low, high = ends[widest]
        more = [*counts]
        more[widest] += 1
        if more[widest] > high - max(1, low) + 1 or prod(more) > budget:
            open_ones.discard(widest)
        else:
            counts = more
    return tuple(geometric_sizes(low, high, count) for (low, high), count in zip(ends, counts, strict=True))


def next_of(boundaries: Sequence[int], sizes: Integers) -> Integers:
    """Return the smallest boundary that is no smaller than each size; the last one is as large as any of them."""
    known = np.asarray(boundaries, np.intp)
    return known[np.searchsorted(known, sizes)]


class SizeHistogram:
    """Counts how often each size of one dimension came lately: old counts fade. `bound`: the largest size there is."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._weights: dict[int, float] = {}

    def add(self, size: int, weight: int = 1) -> None:
        """Count one more request of this size."""
        if size > _EXACT_BELOW:
            step = 1 << (size.bit_length() - 8)
            size = min(self._bound, -(-size // step) * step)
        self._weights[size] = self._weights.get(size, 0.0) + weight

    def fade(self, factor: float) -> None:
        """Let everything so far count less, and forget what hardly counts."""
        faded = {size: weight * factor for size, weight in self._weights.items()}
        self._weights = {size: weight for size, weight in faded.items() if weight > 1e-3}

    def columns(self, most: int, kept: Sequence[int]) -> tuple[Integers, Floats]:
        """Return ascending sizes and the weight of each, as `columns_of` does."""
        return columns_of(self._weights, most, kept)


def columns_of(counted: Mapping[int, float], most: int, kept: Sequence[int]) -> tuple[Integers, Floats]:
    """Return ascending sizes and the weight of each: at most `most` of those that were counted, and all of `kept`.

    Of more, neighbours are taken together, at the larger of them, so that each has about the same weight.
    """
    seen = sorted(counted)
    weights = np.array([counted[size] for size in seen])
    if len(seen) > most:
        part = np.ceil(np.cumsum(weights) * most / weights.sum())
        last = np.append(np.flatnonzero(np.diff(part)), len(seen) - 1)
        seen = [seen[place] for place in last]
        weights = np.diff(np.cumsum(weights)[last], prepend=0.0)
    sizes = np.unique(np.array([*seen, *kept], np.intp))
    spread = np.zeros(len(sizes))
    np.add.at(spread, np.searchsorted(sizes, np.array(seen, np.intp)), weights)
    return sizes, spread


def cost_of(boundaries: Sequence[int], sizes: Integers, weights: Floats, costs: Floats) -> float:
    """Return what these weights cost when each size is rounded up; the boundaries, and so the last, are among `sizes`."""
    return float(weights @ costs[np.searchsorted(sizes, next_of(boundaries, sizes))])


@dataclass(frozen=True, slots=True)
class BoundaryChoices:
    """The best boundaries for every number of new ones from 0, and what each costs."""

    costs: tuple[float, ...]
    boundaries: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, sizes: Integers, weights: Floats, costs: Floats, kept: Sequence[int], most_new: int
    ) -> BoundaryChoices:
        """Find them. `kept`: boundaries that stay, the largest size among them. `costs` must not fall with the size."""
        count = len(sizes)
        is_kept = np.isin(sizes, np.asarray(kept, np.intp))
        if not is_kept[-1]:
            raise ValueError("the largest size must be kept, or some would not fit")
        # Column 0 stands before the first size: nothing is covered, at no cost.
        upto = np.concatenate([[0.0], np.cumsum(weights)])
        least = np.full((most_new + 1, count + 1), np.inf)
        least[:, 0] = 0.0
        before = np.zeros((most_new + 1, count + 1), np.intp)
        for place in range(1, count + 1):
            cost = costs[place - 1]
            ways = least[:, :place] - cost * upto[:place]
            best = ways.argmin(axis=1)
            total = np.take_along_axis(ways, best[:, None], axis=1)[:, 0] + cost * upto[place]
            if is_kept[place - 1]:
                least[:, place], before[:, place] = total, best
            else:
                least[1:, place], before[1:, place] = total[:-1], best[:-1]
        chosen = [_traced(before, is_kept, sizes, new) for new in range(most_new + 1)]
        return cls(tuple(least[:, -1].tolist()), tuple(chosen))


def _traced(before: Integers, is_kept: NDArray[np.bool_], sizes: Integers, new: int) -> tuple[int, ...]:
    """Trace the best way with at most `new` new boundaries; kept ones that it passed by cost nothing either."""
    chosen = {int(size) for size in sizes[is_kept]}
    place = len(sizes)
    while place:
        chosen.add(int(sizes[place - 1]))
        previous = int(before[new, place])
        new -= not is_kept[place - 1]
        place = previous
    return tuple(sorted(chosen))


class LearnedBoundaries:
    """Ascending boundaries per axis, the last of them its bound, that follow the traffic while shapes are left."""

    def __init__(self, bounds: Mapping[int, int], combinations: int, prices: Prices) -> None:
        """Begin with a geometric grid of `combinations` at most."""
        self._bounds = dict(bounds)
        self._prices = prices
        grid = grid_sizes([(1, bound) for bound in self._bounds.values()], max(1, combinations))
        self.per_axis: dict[int, tuple[int, ...]] = dict(zip(self._bounds, grid, strict=True))
        self._seen = {axis: SizeHistogram(bound) for axis, bound in self._bounds.items()}
        self._observed = 0
        self._look_at = FIRST_LOOK
        self.learned = 0
        """How often they were learned."""

    def observe(self, sizes: tuple[int, ...], weight: int) -> bool:
        """Count a request of these sizes and so many rows. True: it is time for `look`."""
        for axis, seen in self._seen.items():
            seen.add(sizes[axis], weight)
        self._observed += 1
        return self._observed >= self._look_at

    def look(self, used: Mapping[int, Set[int]], spare: float) -> bool:
        """Take other boundaries if they save enough, and say whether; what was seen counts half from now on.

        `used`: per axis the boundaries that some call was given, which stay; `spare`: combinations that may be added.
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
        part = FIRST_PART if self.learned == 0 else LATER_PART
        budget = taken + max(int(spare * part), min(int(spare), 1))
        usual = {axis: self._usual(axis) for axis in self._bounds}
        choices, current = {}, 1.0
        for axis, own in kept.items():
            sizes, weights = self._seen[axis].columns(_CANDIDATES, (*own, *self.per_axis[axis]))
            costs = self._prices(axis, sizes, usual)
            # As many as there could be if nothing were added along the others.
            room = budget // (taken // len(own)) - len(own)
            most_new = max(0, min(room, len(sizes) - len(own)))
            choices[axis] = BoundaryChoices.of(sizes, weights, costs, own, most_new)
            current *= cost_of(self.per_axis[axis], sizes, weights, costs)
        counts = _shared_out(choices, {axis: len(own) for axis, own in kept.items()}, budget)
        best = prod([choices[axis].costs[count] for axis, count in counts.items()])
        if best > current * (1 - WORTH):
            return None
        return {axis: choices[axis].boundaries[count] for axis, count in counts.items()}

    def _usual(self, axis: int) -> int:
        """Return the median size along an axis; 1 where none was seen."""
        sizes, weights = self._seen[axis].columns(_CANDIDATES, ())
        return int(sizes[np.searchsorted(np.cumsum(weights), weights.sum() / 2)]) if len(sizes) else 1


def _shared_out(
    choices: Mapping[int, BoundaryChoices], kept: Mapping[int, int], budget: int
) -> dict[int, int]:
    """Choose new boundaries per axis: one after the other where it saves most, while combinations are left."""
    counts = dict.fromkeys(choices, 0)
    while True:
        gains = {}
        for axis, count in counts.items():
            costs = choices[axis].costs
            combinations = prod([kept[other] + new + (other == axis) for other, new in counts.items()])
            if count + 1 < len(costs) and combinations <= budget:
                gains[axis] = 1 - costs[count + 1] / costs[count] if costs[count] else 0.0
        if not gains or max(gains.values()) <= _WORTH_ONE:
            return counts
        counts[max(gains, key=lambda axis: (gains[axis], -axis))] += 1
