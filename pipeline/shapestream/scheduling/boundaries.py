"""Sizes to round up to, so that the sizes seen cost least: exact, by dynamic programming over their histogram.

Given sizes u1 < u2 < … with weights w, and what a request costs at each size, the cost of a set of boundaries is
sum over requests of cost(next boundary). With F(k, j) the least cost of all up to size j, of which j is a boundary
and at most k are new:

    F(k, j) = min over i < j of F(k - [j is new], i) + cost(j) * (w up to j - w up to i)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["BoundaryChoices", "Floats", "SizeHistogram", "cost_of", "next_of"]

Floats: TypeAlias = NDArray[np.float64]
Sizes: TypeAlias = NDArray[np.intp]

_EXACT_BELOW = 256
"""Sizes up to which each is counted by itself; above it they are counted in steps of less than 1 %."""


class SizeHistogram:
    """How often each size of one dimension came, lately: old counts fade. `bound`: the largest size there is."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._weights: dict[int, float] = {}

    def add(self, size: int, weight: int = 1) -> None:
        """One more request of this size."""
        if size > _EXACT_BELOW:
            step = 1 << (size.bit_length() - 8)
            size = min(self._bound, -(-size // step) * step)
        self._weights[size] = self._weights.get(size, 0.0) + weight

    def fade(self, factor: float) -> None:
        """Everything so far counts less; what is as good as forgotten is."""
        self._weights = {
            size: weight * factor for size, weight in self._weights.items() if weight * factor > 1e-3
        }

    def columns(self, most: int, kept: Sequence[int]) -> tuple[Sizes, Floats]:
        """Ascending sizes and the weight of each: at most `most` of what was seen, and all of `kept`.

        Of more, neighbours are taken together, at the larger of them, so that each has about the same weight.
        """
        seen = sorted(self._weights)
        weights = np.array([self._weights[size] for size in seen])
        if len(seen) > most:
            part = (np.cumsum(weights) * (most / weights.sum())).astype(np.intp)
            last = np.append(np.flatnonzero(np.diff(part)), len(seen) - 1)
            seen = [seen[place] for place in last]
            weights = np.diff(np.cumsum(weights)[last], prepend=0.0)
        sizes = np.unique(np.array([*seen, *kept], np.intp))
        spread = np.zeros(len(sizes))
        np.add.at(spread, np.searchsorted(sizes, np.array(seen, np.intp)), weights)
        return sizes, spread


def next_of(boundaries: Sequence[int], sizes: Sizes) -> Sizes:
    """The smallest boundary that is no smaller, of each; the last one is as large as any of them."""
    known = np.asarray(boundaries, np.intp)
    return known[np.searchsorted(known, sizes)]


def cost_of(boundaries: Sequence[int], sizes: Sizes, weights: Floats, costs: Floats) -> float:
    """What these weights cost when each size is rounded up; the boundaries are among `sizes`, and so is the last."""
    return float(weights @ costs[np.searchsorted(sizes, next_of(boundaries, sizes))])


@dataclass(frozen=True, slots=True)
class BoundaryChoices:
    """The best boundaries for every number of new ones from 0, and what each costs."""

    costs: tuple[float, ...]
    boundaries: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, sizes: Sizes, weights: Floats, costs: Floats, kept: Sequence[int], most_new: int
    ) -> BoundaryChoices:
        """`kept`: those that are boundaries anyway, the largest size among them. `costs` must not fall with the size."""
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


def _traced(before: Sizes, is_kept: NDArray[np.bool_], sizes: Sizes, new: int) -> tuple[int, ...]:
    """The boundaries of the best way with at most `new` new ones; kept ones that it passed by cost nothing either."""
    chosen = {int(size) for size in sizes[is_kept]}
    place = len(sizes)
    while place:
        chosen.add(int(sizes[place - 1]))
        previous = int(before[new, place])
        new -= not is_kept[place - 1]
        place = previous
    return tuple(sorted(chosen))
