"""What batches cost: the scheduler's view of one model on one worker, or on all that are alike.

A batch is one call of its own sizes, or, where only some numbers of rows are allowed, the calls that cover its rows.
What calls cost is `CostBase`'s to know; this adds what batches become, what cannot be run, and what is new to the device.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shapestream.scheduling.cost_base import Calls, CostBase
from shapestream.scheduling.cost_line import Line
from shapestream.scheduling.elements import elements_of
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.row_calls import RowCalls

__all__ = ["Surface"]

Sizes: TypeAlias = tuple[int, ...]

_REMEMBERED = 1 << 14
"""Predictions remembered between two versions; when so many are known, all are forgotten."""
_KNOWN_SHAPES = 4096
"""Call shapes per worker that are taken to be known to its devices. Those not met for the longest time go first."""


class Surface:
    """Predicted seconds of batches. `shape` is without the batch axis; `rows` are 1 for models without one."""

    __slots__ = (
        "_base",
        "_bounds",
        "_calls",
        "_has_batch",
        "_known",
        "_new",
        "_seconds",
        "_version",
        "profile",
    )

    def __init__(self, profile: ModelProfile, base: CostBase, new: Line) -> None:
        """`new`: what it costs extra when a shape is new, by elements."""
        self.profile = profile
        self._base = base
        self._new = new
        self._has_batch = profile.has_batch
        self._calls = None if profile.row_calls is None else RowCalls(profile.row_calls)
        bounds = tuple(inf if most is None else most for most in profile.bounds) or (inf,) * len(
            profile.dimensions
        )
        most_rows = bounds[0] if profile.has_batch else 1
        # Allowed numbers of rows cover any number.
        self._bounds = (
            inf if self._calls is not None else most_rows,
            *bounds[1 if profile.has_batch else 0 :],
        )
        self._known: dict[Sizes, None] = {}
        self._seconds: dict[tuple[int, Sizes], float] = {}
        self._version = 0

    @property
    def version(self) -> int:
        """Changes when a prediction changed by more than 5 %: what was planned with it is out of date."""
        return self._base.version

    @property
    def measured(self) -> bool:
        """False: a prior in arbitrary units, good for comparing, not for deadlines."""
        return self._base.measured

    def seconds(self, rows: NDArray[np.intp], shapes: NDArray[np.intp]) -> NDArray[np.float64]:
        """Predicted seconds of batches: rows (n,), shapes (n, d); inf for what cannot be run."""
        columns = [np.asarray(shapes[:, axis]) for axis in range(shapes.shape[1])]
        if self._calls is None:
            seconds = self._base.seconds([rows, *columns])
        else:
            seconds = self._calls.summed(rows, columns, self._base.seconds)
        for column, most in zip((rows, *columns), self._bounds, strict=True):
            if most != inf:
                over = column > most
                if over.any():
                    seconds[over] = inf
        return seconds

    def second(self, rows: int, shape: Sizes) -> float:
        """The same of one batch; remembered until the version changes."""
        if self._version == self._base.version:
            known = self._seconds.get((rows, shape))
            if known is not None:
                return known
        else:
            self._seconds.clear()
            self._version = self._base.version
        if len(self._seconds) >= _REMEMBERED:
            self._seconds.clear()
        if any(size > most for size, most in zip((rows, *shape), self._bounds, strict=True)):
            value = inf
        else:
            value = sum([count * self._base.second(sizes) for count, sizes in self.calls(rows, shape)])
        self._seconds[rows, shape] = value
        return value

    def most_s(self, rows: int, shape: Sizes) -> float:
        """Seconds of such a batch if each of its calls were the longest that was measured, or ran.

        No price is higher: sizes are claimed by callers, and what lies beyond all that was measured is a guess without end.
        """
        return sum([count for count, _ in self.calls(rows, shape)]) * self._base.longest_s

    def calls(self, rows: int, shape: Sizes) -> Calls:
        """How many calls of which sizes, (rows, *shape), such a batch takes."""
        if self._calls is None:
            return ((1, (rows, *shape)),)
        return [(count, (each, *shape)) for each, count in self._calls.of(rows).items()]

    @property
    def kind(self) -> object:
        """The same for surfaces that predict the same, but for what is new to their devices."""
        return self._base

    @property
    def prepares(self) -> bool:
        """Whether anything is known to cost extra because a shape is new."""
        return self._new.measured

    def preparation_s(self, rows: int, shape: Sizes) -> float:
        """What it costs extra that a call of such a batch is new to the device; 0 where it is known, free, or empty."""
        if not self._new.measured or (not rows and self._calls is None) or 0 in shape:
            return 0.0
        if self._calls is None:
            one = (rows, *shape)
            return 0.0 if one in self._known else self._preparing_s(one)
        new = [sizes for _, sizes in self.calls(rows, shape) if sizes not in self._known]
        return sum([self._preparing_s(sizes) for sizes in new])

    def _preparing_s(self, sizes: Sizes) -> float:
        return min(self._new.second(elements_of(sizes)), self._new.longest_s)

    def met(self, calls: Calls) -> None:
        """The device knows these shapes from now on."""
        known = self._known
        for _, sizes in calls:
            if sizes in known:
                del known[sizes]
            elif len(known) >= _KNOWN_SHAPES:
                del known[next(iter(known))]
            known[sizes] = None

    @property
    def known(self) -> Collection[Sizes]:
        """The shapes, (rows, *shape), that the device has met, the longest ago first."""
        return self._known.keys()
