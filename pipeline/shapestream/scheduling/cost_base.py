"""What single calls of one model cost on one kind of slot: measured, or learned from traffic, and always corrected.

Below the surfaces, which know how batches become calls. Sizes are (rows, *shape) throughout, with rows 1 for models
without a batch axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, isfinite, log
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shapestream.scheduling.cost_grid import Grid
from shapestream.scheduling.cost_line import Line
from shapestream.scheduling.elements import elements_of, elements_of_many

__all__ = ["Calls", "CostBase", "Seconds"]

Sizes: TypeAlias = tuple[int, ...]
Seconds: TypeAlias = NDArray[np.float64]
Calls: TypeAlias = Sequence[tuple[int, Sizes]]
"""How many calls of which sizes."""

CLIP = log(1.5)
"""What one observation may differ from what was expected, at most: a machine that stalls says nothing about the model."""
SPEED_STEP = 0.06
"""Of that difference, what a worker's speed takes over; the surface takes over `cost_grid.STEP`."""
STATIC_STEP = 0.2
MOVED = log(1.05)


class CostBase:
    """Seconds of calls, shared by all workers that are alike; `workers` tells how far each is off.

    `version` changes when a prediction has changed by more than 5 %.
    """

    def __init__(
        self, points: Mapping[Sizes, float], static: Sequence[Sizes], versions: Iterator[int]
    ) -> None:
        """`versions` are numbers that nobody has used: a version is that of one kind of slots, and of no other."""
        self._versions = versions
        self._static: dict[Sizes, float | None] = {sizes: points.get(sizes) for sizes in static}
        """Seconds of the shapes with a model of their own; None: not known, then they cost what others like them do."""
        self._static_published = dict(self._static)
        dynamic = {sizes: seconds for sizes, seconds in points.items() if sizes not in self._static}
        self._grid = Grid(dynamic) if dynamic else None
        self.line = Line()
        self.version = next(versions)
        self._ran_s = 0.0
        """Of the longest call that ran."""
        self._speeds: dict[str, float] = {}
        """Per worker, the logarithm of its seconds / what the grid says; their mean is what the grid itself is off."""
        self._drift = 0.0
        """The sum of them."""
        self._table = _StaticTable(self._static_published)

    @property
    def measured(self) -> bool:
        """Whether predictions are seconds; else they are good for comparing calls, and nothing else."""
        return self._grid is not None or self.line.measured

    @property
    def longest_s(self) -> float:
        """Seconds of the longest call that was measured, or ran: see `Surface.most_s`."""
        measured = [seconds for seconds in self._static_published.values() if seconds is not None]
        if self._grid is not None:
            measured.append(self._grid.longest_s)
        return max(self._ran_s, *measured) if measured else self._ran_s

    # ------------------------------------------------------------ workers

    def join(self, worker: str) -> None:
        """From now on a worker is one of this kind; at first it is as fast as they are in the mean."""
        if worker not in self._speeds:
            mean = self._drift / len(self._speeds) if self._speeds else 0.0
            self._speeds[worker] = mean
            self._drift += mean

    def leave(self, worker: str) -> None:
        """It is gone; of the last one, what it was off stays part of what is expected."""
        if len(self._speeds) == 1 and worker in self._speeds:
            self._publish()
        self._drift -= self._speeds.pop(worker, 0.0)

    def speed(self, worker: str) -> float:
        """Its seconds / those of the workers of this kind in the mean."""
        own = self._speeds.get(worker)
        return 1.0 if own is None else exp(own - self._drift / len(self._speeds))

    @property
    def workers(self) -> list[str]:
        """Those that are here."""
        return list(self._speeds)

    # ------------------------------------------------------------ predictions

    def seconds(self, sizes: list[NDArray[np.intp]]) -> Seconds:
        """Of many calls, one array per dimension."""
        empty = np.logical_or.reduce([column == 0 for column in sizes])
        if np.any(empty):
            sizes = [np.where(empty, 1, column) for column in sizes]
        if self._grid is not None:
            seconds = self._grid.seconds(sizes)
        else:
            shapes = elements_of_many(sizes[1:])
            rows = np.asarray(sizes[0], np.float64)
            prior = (rows + 1.0) * np.maximum(shapes, 1.0)  # as in `_prior_or_line`
            seconds = self.line.seconds(rows * shapes) if self.line.measured else prior
        return self._table.applied(sizes, np.asarray(seconds)) if self._static else np.asarray(seconds)

    def second(self, sizes: Sizes) -> float:
        """Of one call. One without elements costs what the smallest call does, however large it claims to be."""
        if 0 in sizes:
            sizes = (1,) * len(sizes)
        known = self._static_published.get(sizes)
        if known is not None:
            return known
        if self._grid is not None:
            return self._grid.second(sizes)
        return self._prior_or_line(sizes)

    def _prior_or_line(self, sizes: Sizes) -> float:
        if self.line.measured:
            return self.line.second(elements_of(sizes))
        # Before anything is known a call's fixed part is taken to weigh as much as one row of it.
        return (sizes[0] + 1.0) * max(1.0, elements_of(sizes[1:]))

    def _expected(self, sizes: Sizes) -> float:
        known = self._static.get(sizes)
        if known is not None:
            return known
        return self._prior_or_line(sizes) if self._grid is None else self._grid.expected(sizes)

    # ------------------------------------------------------------ learning

    def ran(self, calls: Calls, busy_s: float) -> None:
        """Notes that a batch took so long, whether or not it prepared anything."""
        self._ran_s = max(self._ran_s, busy_s / sum([count for count, _ in calls]))

    def learn(self, calls: Calls, busy_s: float, worker: str | None, *, requests: int) -> None:
        """Corrects by a batch that took `busy_s` on a worker and prepared nothing."""
        own = self._speeds.get(worker, 0.0) if worker is not None else 0.0
        if not self.measured:
            self._learn_line(calls, busy_s, requests)
            return
        expected = sum([count * self._expected(sizes) for count, sizes in calls])
        difference = log(max(busy_s, 1e-9) / max(expected, 1e-12)) - own
        if not isfinite(difference):
            return
        clipped = max(-CLIP, min(CLIP, difference))
        alone = self._grid is None and len(self._speeds) < 2
        if worker in self._speeds and not alone:
            self._speeds[worker] = own + SPEED_STEP * clipped
            self._drift += SPEED_STEP * clipped
        moved = self._correct_static(calls, clipped)
        if self._grid is None:
            self._learn_line(calls, busy_s / exp(own), requests)
            return
        scale = exp(self._drift / len(self._speeds)) if self._speeds else 1.0
        for _, sizes in calls:
            if sizes not in self._static and self._grid.correct(sizes, clipped, scale):
                moved = True
        if moved or abs(log(scale)) > MOVED:
            self._publish()

    def corrections(self) -> dict[Sizes, float]:
        """Seconds, by all that was observed, of the calls that are off what the points said."""
        scale = exp(self._drift / len(self._speeds)) if self._speeds else 1.0
        static = {sizes: seconds * scale for sizes, seconds in self._static.items() if seconds is not None}
        return static if self._grid is None else {**static, **self._grid.corrections(scale)}

    def recall(self, seconds: Mapping[Sizes, float]) -> None:
        """Begins where another of the same points has ended: these are its `corrections`. It learns as that one would."""
        self._static = {sizes: seconds.get(sizes, value) for sizes, value in self._static.items()}
        if self._grid is not None:
            self._grid.recall(seconds)
        self._publish()

    def _learn_line(self, calls: Calls, seconds: float, requests: int) -> None:
        dynamic = [(count, sizes) for count, sizes in calls if sizes not in self._static]
        if len(dynamic) < len(calls) or not dynamic:
            return  # nobody knows which part of it was which
        number = sum([count for count, _ in dynamic])
        elements = sum([count * elements_of(sizes) for count, sizes in dynamic])
        self.line.observe(number, elements, seconds, request_elements=elements / max(1, requests))
        if self.line.moved():
            self.version = next(self._versions)

    def _correct_static(self, calls: Calls, difference: float) -> bool:
        """Moves what static shapes cost; whether one is now off what is published by more than 5 %."""
        moved = False
        for _, sizes in calls:
            if sizes not in self._static:
                continue
            value = self._expected(sizes) * exp(STATIC_STEP * difference)
            self._static[sizes] = value
            published = self._static_published[sizes]
            if published is None or abs(log(value / published)) > MOVED:
                moved = True
        return moved

    def _publish(self) -> None:
        """Makes what was learned the basis of predictions; what all workers are off becomes part of the grid."""
        if self._speeds and self._grid is not None:
            mean = self._drift / len(self._speeds)
            self._speeds = {worker: own - mean for worker, own in self._speeds.items()}
            self._drift = 0.0
            self._grid.publish(exp(mean))
        elif self._grid is not None:
            self._grid.publish(1.0)
        self._static_published = dict(self._static)
        self._table = _StaticTable(self._static_published)
        self.version = next(self._versions)


class _StaticTable:
    """The static shapes in sorted arrays: finding them among thousands of calls takes one search per axis."""

    def __init__(self, static: Mapping[Sizes, float | None]) -> None:
        known = {sizes: seconds for sizes, seconds in static.items() if seconds is not None}
        self._axes = [np.array(sorted(set(column)), np.intp) for column in zip(*known, strict=True)]
        # A shape's code is its place in the grid of all sizes that occur; 256 shapes of 7 dimensions still fit.
        codes = {self._code(sizes): seconds for sizes, seconds in known.items()}
        self._codes = np.array(sorted(codes), np.intp)
        self._values = np.array([codes[int(code)] for code in self._codes], np.float64)

    def _code(self, sizes: Sizes) -> int:
        code = 0
        for axis, size in zip(self._axes, sizes, strict=True):
            code = code * len(axis) + int(np.searchsorted(axis, size))
        return code

    def applied(self, sizes: list[NDArray[np.intp]], seconds: Seconds) -> Seconds:
        """`seconds`, with those of static shapes in their places."""
        if not self._axes:
            return seconds
        static = np.ones(len(seconds), bool)
        code = np.zeros(len(seconds), np.intp)
        for axis, column in zip(self._axes, sizes, strict=True):
            place = np.minimum(np.searchsorted(axis, column), len(axis) - 1)
            static &= axis[place] == column
            code = code * len(axis) + place
        place = np.minimum(np.searchsorted(self._codes, code), len(self._codes) - 1)
        static &= self._codes[place] == code
        seconds[static] = self._values[place[static]]
        return seconds
