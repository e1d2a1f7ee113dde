"""Seconds as a straight line over elements, learned from what ran: where nothing was measured beforehand.

A call costs a fixed part and something per element: `fixed_s + element_s * elements`, least squares with forgetting,
neither part negative. Errors count in proportion (each observation weighs 1 / seconds²), so that long calls do not
drown short ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["Line"]

FORGETTING = 0.97
"""What an observation weighs one observation later: about thirty count for the division between the two parts."""
LEVEL_STEP = 0.1
"""Of the difference (of logarithms) between expected and observed, what both parts together take over at once: a machine
that becomes slower is followed within twenty observations, without unlearning how the two parts compare."""
CLIP = 1.5
"""How far an observation may lie from what was expected, as a factor, and still count in full; beyond, it counts as this."""
PART_CLIP = 1.2
"""The same for the division between the two parts, where one long call would have much weight."""
FIRST_CLIP = 8.0
"""The same for the first few, when little is expected."""
FEW = 3
KEEP = 0.05
"""Weight, in observations, of the division between the two parts that was known before: it decides as long as all calls
are alike, which say nothing about it, and hardly counts as soon as they differ."""
LEAST_S = 1e-7
"""Nothing takes less; errors in proportion to nothing would have no end."""
RECALLED = 15
"""How many observations each end of a recalled line stands for: together as many as count anyway."""
MOVED = 1.05
"""A prediction that changed by this factor is another one."""


class Line:
    """One line. Before the first observation it says nothing: see `measured`."""

    __slots__ = (
        "_clip",
        "_ee",
        "_es",
        "_last",
        "_n",
        "_ns",
        "_reach",
        "_s",
        "_unit",
        "count",
        "element_s",
        "fixed_s",
        "longest_s",
    )

    def __init__(self, clip: float = CLIP) -> None:
        self._clip = clip
        self.count = 0
        self.fixed_s = 0.0
        self.element_s = 0.0
        self._unit = 1.0
        """Elements of an average request, when the first call ran: only to bring both parts to one scale."""
        self._n = self._s = self._ee = self._es = self._ns = 0.0
        self._last = (0.0, 0.0)
        """The two parts when `moved` last said so."""
        self._reach = (0.0, 0.0)
        """The fewest and the most elements met."""
        self.longest_s = 0.0
        """Of one call, the longest that was observed."""

    @property
    def measured(self) -> bool:
        """Whether anything was observed."""
        return self.count > 0

    def seconds(self, elements: NDArray[np.float64]) -> NDArray[np.float64]:
        """Expected of calls of so many elements."""
        return np.asarray(self.fixed_s + self.element_s * elements)

    def second(self, elements: float) -> float:
        """Expected of one call."""
        return self.fixed_s + self.element_s * elements

    def observe(self, calls: float, elements: float, seconds: float, *, request_elements: float) -> None:
        """Learns from `calls` calls that had `elements` in all and took `seconds`.

        `request_elements`: of one request in them. Before there is more to go by, the fixed part of a call is taken to
        weigh as much as one request.
        """
        seconds = max(LEAST_S, seconds)
        self.longest_s = max(self.longest_s, seconds / calls)
        if not self.count:
            self._unit = max(1.0, request_elements)
            each = seconds / (calls * self._unit + elements)
            self.fixed_s, self.element_s = each * self._unit, each
            self._reach = (elements, elements)
        expected = max(LEAST_S, calls * self.fixed_s + elements * self.element_s)
        clip = FIRST_CLIP if self.count < FEW else self._clip
        taken = max(expected / clip, min(expected * clip, seconds))
        if self.count >= FEW:
            level = (taken / expected) ** LEVEL_STEP
            self._rescale(level)
            expected *= level
            taken = max(expected / PART_CLIP, min(expected * PART_CLIP, taken))
        self.count += 1
        self._reach = (min(self._reach[0], elements), max(self._reach[1], elements))
        weight = 1.0 / max(expected, taken, 1e-12) ** 2
        self._add(calls, elements / self._unit, taken, weight)
        self._solve(KEEP * weight)

    def _add(self, calls: float, units: float, taken: float, weight: float) -> None:
        """One more term of the sums; the older ones count less."""
        self._n = FORGETTING * self._n + weight * calls * calls
        self._s = FORGETTING * self._s + weight * calls * units
        self._ee = FORGETTING * self._ee + weight * units * units
        self._ns = FORGETTING * self._ns + weight * calls * taken
        self._es = FORGETTING * self._es + weight * units * taken

    def _rescale(self, level: float) -> None:
        """As if everything had taken `level` times as long."""
        self.fixed_s *= level
        self.element_s *= level
        self._ns, self._es = self._ns / level, self._es / level
        squared = level * level
        self._n, self._s, self._ee = self._n / squared, self._s / squared, self._ee / squared

    def _solve(self, keep: float) -> None:
        """The normal equations of two unknowns, with a weak pull towards the division between them so far."""
        fixed, sloped = self.fixed_s, self.element_s * self._unit
        norm = fixed * fixed + sloped * sloped
        pull = keep / norm if norm > 0.0 else 0.0
        n, s, ee = (
            self._n + pull * sloped * sloped,
            self._s - pull * fixed * sloped,
            self._ee + pull * fixed**2,
        )
        determinant = n * ee - s * s
        if determinant > 1e-12 * n * ee:
            fixed = (self._ns * ee - self._es * s) / determinant
            sloped = (self._es * n - self._ns * s) / determinant
        if fixed < 0.0 or (sloped >= 0.0 and ee <= 0.0):
            fixed, sloped = 0.0, self._es / self._ee if self._ee > 0.0 else 0.0
        elif sloped < 0.0:
            fixed, sloped = self._ns / self._n, 0.0
        self.fixed_s, self.element_s = fixed, sloped / self._unit

    def ends(self) -> dict[float, float]:
        """Seconds at the fewest and the most elements that were met; nothing where nothing was."""
        return {elements: self.second(elements) for elements in self._reach} if self.measured else {}

    def recall(self, ends: Mapping[float, float]) -> None:
        """Begins where another line has ended: these are its `ends`. It goes on as that one would."""
        if not ends:
            return
        self.count = FEW
        self._reach = (min(ends), max(ends))
        self.longest_s = max(LEAST_S, *ends.values())
        self._unit = max(1.0, *ends)
        self.fixed_s = ends[max(ends)] / 2  # where all calls were alike; else the two ends say it
        self.element_s = self.fixed_s / self._unit
        for _ in range(RECALLED):
            for elements, seconds in ends.items():
                taken = max(LEAST_S, seconds)
                self._add(1.0, elements / self._unit, taken, 1.0 / taken**2)
        self._solve(0.0)

    def moved(self) -> bool:
        """Whether predictions, at the ends of what was met, changed by more than 5 % since this last was true."""
        fixed, element = self._last
        for elements in self._reach:
            was, now = fixed + element * elements, self.second(elements)
            if not was / MOVED <= now <= was * MOVED:
                self._last = (self.fixed_s, self.element_s)
                return True
        return False
