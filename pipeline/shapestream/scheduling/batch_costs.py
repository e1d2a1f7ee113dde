"""Predicted seconds of one model's batches on one worker: `BatchCosts` answers all questions about them.

A batch is one call of its own sizes or, where only some numbers of rows are allowed, the calls that cover its rows. What a
call costs is known to the worker's class (worker_class.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from math import exp, inf, log
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shapestream.scheduling.cost_grid import Floats, Integers, Sizes, elements_of
from shapestream.scheduling.events import ModelProfile

if TYPE_CHECKING:
    from shapestream.scheduling.worker_class import WorkerClass

Calls: TypeAlias = Sequence[tuple[int, Sizes]]
"""How many calls of which sizes, (rows, *shape)."""

CLIP = log(1.5)
"""Logarithm by which one observation differs from what was expected, at most: a machine that stalls says nothing about
the model."""
LASTING = 4
"""Batches in a row that are off by more than that, all of them longer or all shorter: then the costs have changed. With
lognormal noise of sigma 0.4, which is much, it happens by chance once in 1,900 batches, with 0.3 once in 6,700.

Calls that had not run lately are few. In a row of short ones their differences count, and must be as much together."""
MOST_KNOWN_SHAPES = 4096
"""Call shapes that a worker's devices are taken to know. Those not met for the longest time go first."""
_MOST_SECONDS = 1 << 20
"""Predictions remembered per surface and version; when so many are known, all are forgotten."""
_MOST_SIZE = 1 << 62
FEW = 4
"""Requests of new shapes up to which a line for each is sooner than one prediction of all. For one request a line takes
33 us and a prediction 88, for 64 requests 1,970 and 770 (2 padded dimensions, 16 rows)."""
CLOSE = 1.05
"""Factor by which a request may cost more than in the best company: where company hardly pays, it need not be large."""


class BatchCosts:
    """Predicted seconds of one model's batches on one worker. `shape` has no batch axis; without one `rows` are 1.

    It belongs to a `WorkerClass` and adds what batches become, what cannot be run, and what is new to the devices.
    """

    def __init__(self, profile: ModelProfile, kind: WorkerClass, worker: str) -> None:
        self.profile = profile
        self.kind = kind
        """The same for surfaces that predict the same, but for what is new to their devices."""
        self.worker = worker
        self.slots = 0
        self.slowdown_log = 0.0
        """Logarithm of the worker's seconds / what `kind` expects by all that was observed."""
        self._off: list[float] = []
        """Of the last batches, as far as they are all off by more than `CLIP` in one direction, by how much."""
        self._row_calls = None if profile.row_calls is None else _RowCalls(profile.row_calls)
        bounds = [inf if most is None else most for most in profile.bounds] or [inf] * len(profile.dimensions)
        if not profile.has_batch:
            bounds = [1, *bounds]
        elif self._row_calls is not None:
            bounds[0] = inf  # allowed numbers of rows cover any number
        self._bounds = np.array([bounds], np.float64).T
        self._is_bounded = bool((self._bounds < inf).any())
        self._most = tuple(bounds)
        self._known: dict[Sizes, None] = {}
        self._rows: dict[Sizes, Floats] = {}
        """`row_seconds` until the version changes."""
        self._company: dict[tuple[int, Sizes], tuple[float, float, float]] = {}
        """`company_s` without its bound, and `second`, of requests by rows and shape, likewise."""
        self._version = 0

    @property
    def version(self) -> int:
        """Changes when a prediction changed by more than 5 %: what was planned with it is out of date."""
        return self.kind.version

    @property
    def measured(self) -> bool:
        """False: a prior in arbitrary units, good for comparing, not for deadlines."""
        return self.kind.measured

    @property
    def slowdown(self) -> float:
        """Seconds on this worker / those of the workers of its kind in the mean; 1.0 of a worker that left."""
        return exp(self.slowdown_log - self.kind.mean_slowdown_log) if self.slots else 1.0

    def lasting_change(self, off: float) -> float:
        """Return by how much `LASTING` batches in a row are off, `off` the last of them; 0.0 where one was not.

        All are logarithms of observed / expected seconds; the least of them counts.
        """
        if abs(off) <= CLIP or (self._off and off * self._off[0] < 0.0):
            self._off.clear()
        if abs(off) > CLIP:
            self._off.append(off)
        if len(self._off) < LASTING:
            return 0.0
        change = min(self._off, key=abs)
        self._off.clear()
        return change

    # ------------------------------------------------------------ predictions

    def seconds(self, rows: Integers, shapes: Integers) -> Floats:
        """Return the seconds of many batches: rows (n,), shapes (n, d); inf for what cannot be run."""
        columns = np.empty((1 + shapes.shape[1], len(rows)))
        columns[0], columns[1:] = rows, shapes.T
        if self._row_calls is None:
            seconds = self.kind.seconds(columns)
        else:
            counts = self._row_calls.counts(rows)
            batches, places = np.nonzero(counts)
            calls = columns[:, batches]
            calls[0] = np.array(self._row_calls.sizes)[places]
            each = self.kind.seconds(calls) * counts[batches, places]
            seconds = np.asarray(np.bincount(batches, each, len(rows)), np.float64)
        if self._is_bounded:
            seconds[(columns > self._bounds).any(axis=0)] = inf
        return seconds

    def row_seconds(self, shapes: Sequence[Sizes]) -> list[Floats]:
        """Return the seconds of batches of 0 to `max_batch` rows at each shape; not to be written to."""
        known = self._remembered()
        missing = [shape for shape in dict.fromkeys(shapes) if shape not in known]
        number = self.profile.max_batch + 1
        if self._row_calls is None and missing:
            lines = [(shape, self._line(shape)) for shape in missing]
            self._rows.update([(shape, line) for shape, line in lines if line is not None])
            missing = [shape for shape, line in lines if line is None]
        if missing:
            _, wide = _parted([(0, *shape) for shape in missing])
            found = self.seconds(np.tile(np.arange(number), len(missing)), np.repeat(wide, number, axis=0))
            self._rows.update(zip(missing, found.reshape(len(missing), number), strict=True))
        return [known[shape] for shape in shapes]

    def _line(self, shape: Sizes) -> Floats | None:
        """Return the seconds of all numbers of rows at one shape; None where `seconds` must be asked."""
        line = self.kind.line(self.profile.max_batch, shape)
        if line is not None and self._is_bounded:
            if any(size > most for size, most in zip(shape, self._most[1:], strict=True)):
                line[:] = inf
            elif self._most[0] < len(line):
                line[int(self._most[0]) + 1 :] = inf
        return line

    def second(self, rows: int, shape: Sizes) -> float:
        """Return the seconds of one batch."""
        lines = self._remembered()
        line = lines.get(shape)
        if line is None:
            priced = self._company.get((rows, shape))
            if priced is not None:
                return priced[2]
            if rows <= self.profile.max_batch:
                line = self.row_seconds([shape])[0]
        if line is not None and rows < len(line):
            return float(line[rows])
        return float(self.seconds(*_parted([(rows, *shape)]))[0])

    def expect(self, requests: Iterable[tuple[int, Sizes]]) -> None:
        """Price requests of rows and shapes in one prediction, alone and in company; `company_s` and `second` remember."""
        self._remembered()
        missing = [request for request in dict.fromkeys(requests) if request not in self._company]
        if not missing:
            return
        if len(missing) <= FEW:
            found = [
                [self.second(rows << power, shape) for power in range(self._doublings(rows, shape))]
                for rows, shape in missing
            ]
        else:
            calls = [
                (rows << power, *shape)
                for rows, shape in missing
                for power in range(self._doublings(rows, shape))
            ]
            seconds = iter(self.seconds(*_parted(calls)).tolist())
            found = [list(islice(seconds, self._doublings(rows, shape))) for rows, shape in missing]
        for (rows, shape), doubled in zip(missing, found, strict=True):
            each_s = [each / (1 << power) for power, each in enumerate(doubled)]
            least_s = min(each_s)
            call_s = next(
                each for each, own_s in zip(doubled, each_s, strict=True) if own_s <= CLOSE * least_s
            )
            self._company[rows, shape] = least_s, call_s, doubled[0]

    def _doublings(self, rows: int, shape: Sizes) -> int:
        """Count the batches of 1, 2, 4, ... equal requests that are possible. A request without elements stays alone."""
        if not self.profile.has_batch or not rows or 0 in shape:
            return 1
        return max(1, (self.profile.max_batch // rows).bit_length())

    def company_s(self, rows: int, shape: Sizes) -> tuple[float, float]:
        """Return the seconds that a request costs in good company, and those of the smallest call that is nearly as good.

        Good company is the batch of 1, 2, 4, ... requests like it in which its part of the seconds is the smallest.
        """
        self.expect([(rows, shape)])
        own_s, call_s, _ = self._company[rows, shape]
        longest_s = self.longest_s(rows, shape)
        return min(own_s, longest_s), min(call_s, longest_s)

    def _remembered(self) -> dict[Sizes, Floats]:
        """Forget predictions of another version, or all where they are too many; return those by shape and rows."""
        too_many = len(self._rows) * self.profile.max_batch + len(self._company) > _MOST_SECONDS
        if self._version != self.kind.version or too_many:
            self._rows.clear()
            self._company.clear()
            self._version = self.kind.version
        return self._rows

    def longest_s(self, rows: int, shape: Sizes) -> float:
        """Return the seconds of such a batch if each of its calls were the longest that was measured, or ran.

        No price is higher: callers claim sizes, and what lies beyond all that was measured is a guess without end.
        """
        if self._row_calls is None:
            return self.kind.longest_s
        return sum([times for times, _ in self.calls(rows, shape)]) * self.kind.longest_s

    def calls(self, rows: int, shape: Sizes) -> Calls:
        """Return how many calls of which sizes such a batch takes."""
        if self._row_calls is None:
            return ((1, (rows, *shape)),)
        counts = self._row_calls.counts(_parted([(rows,)])[0])[0].tolist()
        return [
            (int(times), (own, *shape))
            for own, times in zip(self._row_calls.sizes, counts, strict=True)
            if times
        ]

    # ------------------------------------------------------------ preparation

    @property
    def prepares(self) -> bool:
        """Whether anything is known to cost extra because a shape is new."""
        return self.kind.new.measured

    def first_call_s(self, elements: float) -> float:
        """Return what a call of so many elements costs extra where its shape is new to the device; 0.0 while unknown."""
        new = self.kind.new
        return min(new.second(elements), new.longest_s) if new.measured else 0.0

    def preparation_s(self, rows: int, shape: Sizes) -> float:
        """Return what it costs extra that calls of such a batch are new to the device; 0 where known, free, or empty."""
        new = self.kind.new
        if not new.measured or (not rows and self._row_calls is None) or 0 in shape:
            return 0.0
        unknown = [sizes for _, sizes in self.calls(rows, shape) if sizes not in self._known]
        return sum([self.first_call_s(elements_of(sizes)) for sizes in unknown])

    def met(self, calls: Calls) -> None:
        """Note that the device knows these shapes from now on."""
        known = self._known
        for _, sizes in calls:
            known.pop(sizes, None)
            if len(known) >= MOST_KNOWN_SHAPES:
                del known[next(iter(known))]
            known[sizes] = None

    @property
    def known(self) -> Collection[Sizes]:
        """The call shapes, (rows, *shape), that the device has met, the longest ago first."""
        return self._known.keys()


class _RowCalls:
    """The calls that cover a number of rows, where only some numbers are allowed."""

    def __init__(self, row_calls: Sequence[tuple[int, ...]]) -> None:
        """`row_calls`: of a profile; more rows than it has take as many of its last entry as needed."""
        self.sizes = sorted({rows for calls in row_calls for rows in calls})
        """The allowed numbers of rows."""
        places = {rows: place for place, rows in enumerate(self.sizes)}
        self._counts = np.zeros((len(row_calls), len(self.sizes)))
        for number, calls in enumerate(row_calls):
            for rows, times in Counter(calls).items():
                self._counts[number, places[rows]] = times

    def counts(self, rows: Integers) -> Floats:
        """Return how many calls of each of `sizes` cover these rows: (n, sizes)."""
        most = len(self._counts) - 1
        many = np.maximum(0, -(-(rows - most) // most))
        return np.asarray(self._counts[rows - many * most] + many[:, None] * self._counts[most])


def _parted(calls: Sequence[Sizes]) -> tuple[Integers, Integers]:
    """Return the rows (n,) and shapes (n, d) of calls (rows, *shape), whose sizes may be claimed beyond 64 bits."""
    bounded = np.array([[min(size, _MOST_SIZE) for size in own] for own in calls], np.intp)
    return bounded[:, 0], bounded[:, 1:]
