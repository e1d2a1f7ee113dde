"""Predicted seconds of one model's batches on one worker: `BatchCosts` answers all questions about them.

A batch is one call of its own sizes or, where only some numbers of rows are allowed, the calls that cover its rows. What a
call costs is known to the worker's class (worker_class.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from math import exp, inf, log, prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shapestream.scheduling.cost_grid import Floats, Integers, Sizes, elements_of
from shapestream.scheduling.events import ModelProfile

if TYPE_CHECKING:
    from shapestream.scheduling.worker_class import WorkerClass

Calls: TypeAlias = Sequence[tuple[int, Sizes]]
"""How many calls of which sizes, (rows, *shape)."""

CLIP = log(1.5)
"""Largest logarithm of observed / expected seconds that one batch counts for: a machine that stalls says nothing about the
model."""
LASTING = 4
"""Batches in a row that are off by more than that, all of them longer or all shorter: then the costs have changed. With
lognormal noise of sigma 0.4, which is much, it happens by chance once in 1,900 batches, with 0.3 once in 6,700.

Calls that had not run lately are few. In a row of short ones their differences count, and must be as much together."""
MOST_KNOWN_SHAPES = 4096
"""Call shapes that a worker's devices are assumed to keep prepared. The least recently used one is forgotten first."""
_MOST_SECONDS = 1 << 20
"""Predictions remembered per class and version. When there are more, all are forgotten."""
_MOST_SIZE = 1 << 62
FEW = 4
"""Largest number of new shapes that are priced one by one; more are priced together. One request takes 33 us by itself
and 88 us in an array, 64 requests 1,970 and 770 us (2 padded dimensions, 16 rows)."""
CLOSE = 1.05
"""Factor by which seconds per request may exceed those of the most efficient batch: a smaller batch is then preferred."""


class BatchCosts:
    """Predicted seconds of one model's batches on one worker. `shape` has no batch axis; `rows` is 1 without a batch axis.

    The seconds of single calls come from the `WorkerClass`. Added here are the calls that a batch becomes, the bounds
    that no call may pass, the worker's slowdown, and the shapes that its devices have prepared.
    """

    def __init__(self, profile: ModelProfile, worker_class: WorkerClass, worker: str) -> None:
        self.profile = profile
        self.worker_class = worker_class
        """The workers with an equal cost table."""
        self.worker = worker
        self.slots = 0
        self.slowdown_log = 0.0
        """Logarithm of the worker's seconds / what `worker_class` expects by all that was observed."""
        self._off: list[float] = []
        """Differences (logarithms) of the last batches in a row that were off by more than `CLIP` in one direction."""
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
        self._rows = worker_class.row_prices
        self._priced = worker_class.prices  # alike on all workers of the class

    @property
    def slowdown(self) -> float:
        """Seconds on this worker / mean seconds on all workers of its class; 1.0 of a worker that left."""
        return exp(self.slowdown_log - self.worker_class.mean_slowdown_log) if self.slots else 1.0

    def lasting_change(self, off: float) -> float:
        """Return the smallest difference of the last `LASTING` batches if all were off in one direction, else 0.0.

        `off`: the newest difference. Differences are logarithms of observed / expected seconds.
        """
        row = self._off
        if row and (-CLIP <= off <= CLIP or off * row[0] < 0.0):
            row.clear()
        if -CLIP <= off <= CLIP:
            return 0.0
        row.append(off)
        if len(row) < LASTING:
            return 0.0
        change = min(row, key=abs)
        row.clear()
        return change

    # ------------------------------------------------------------ predictions

    def seconds(self, rows: Integers, shapes: Integers) -> Floats:
        """Return the seconds of many batches: rows (n,), shapes (n, d); inf for what cannot be run."""
        columns = np.empty((1 + shapes.shape[1], len(rows)))
        columns[0], columns[1:] = rows, shapes.T
        if self._row_calls is None:
            seconds = self.worker_class.seconds(columns)
        else:
            counts = self._row_calls.counts(rows)
            batches, places = np.nonzero(counts)
            calls = columns[:, batches]
            calls[0] = np.array(self._row_calls.sizes)[places]
            each = self.worker_class.seconds(calls) * counts[batches, places]
            seconds = np.asarray(np.bincount(batches, each, len(rows)), np.float64)
        if self._is_bounded:
            seconds[(columns > self._bounds).any(axis=0)] = inf
        return seconds

    def row_seconds(self, shapes: Sequence[Sizes]) -> list[Floats]:
        """Return the seconds of batches of 0 to `max_batch` rows at each shape; not to be written to."""
        self._make_room()
        known = self._rows
        missing = [shape for shape in dict.fromkeys(shapes) if shape not in known]
        number = self.profile.max_batch + 1
        if self._row_calls is None and missing:
            found = {shape: self._seconds_by_rows(shape) for shape in missing}
            self._rows.update({shape: seconds for shape, seconds in found.items() if seconds is not None})
            missing = [shape for shape, seconds in found.items() if seconds is None]
        if missing:
            _, wide = _parted([(0, *shape) for shape in missing])
            many = self.seconds(np.tile(np.arange(number), len(missing)), np.repeat(wide, number, axis=0))
            self._rows.update(zip(missing, many.reshape(len(missing), number), strict=True))
        return [known[shape] for shape in shapes]

    def _seconds_by_rows(self, shape: Sizes) -> Floats | None:
        """Return the seconds of all numbers of rows at one shape; None where `seconds` must be asked."""
        seconds = self.worker_class.row_seconds(self.profile.max_batch, shape)
        if seconds is not None and self._is_bounded:
            if any(size > most for size, most in zip(shape, self._most[1:], strict=True)):
                seconds[:] = inf
            elif self._most[0] < len(seconds):
                seconds[int(self._most[0]) + 1 :] = inf
        return seconds

    def second(self, rows: int, shape: Sizes) -> float:
        """Return the seconds of one batch."""
        seconds = self._rows.get(shape)
        if seconds is None:
            priced = self._priced.get((rows, shape))
            if priced is not None:
                return priced[2]
            if rows <= self.profile.max_batch:
                seconds = self.row_seconds([shape])[0]
        if seconds is not None and rows < len(seconds):
            return float(seconds[rows])
        return float(self.seconds(*_parted([(rows, *shape)]))[0])

    def expect(self, requests: Iterable[tuple[int, Sizes]]) -> None:
        """Price requests (rows, shape) in one prediction, for `batched_share_s` and `second` to look up."""
        self._make_room()
        missing = [request for request in dict.fromkeys(requests) if request not in self._priced]
        if not missing:
            return
        if len(missing) <= FEW:
            found = [self._doubled(rows, shape) for rows, shape in missing]
        else:
            counts = [self._doublings(rows, shape) for rows, shape in missing]
            powers = [power for count in counts for power in range(count)]
            places = np.repeat(np.arange(len(missing)), counts)
            own_rows, shapes = _parted([(rows, *shape) for rows, shape in missing])
            seconds = iter(self.seconds(own_rows[places] << np.array(powers), shapes[places]).tolist())
            found = [list(islice(seconds, count)) for count in counts]
        for (rows, shape), doubled in zip(missing, found, strict=True):
            each_s = [each / (1 << power) for power, each in enumerate(doubled)]
            least_s = min(each_s)
            call_s = next(
                each for each, own_s in zip(doubled, each_s, strict=True) if own_s <= CLOSE * least_s
            )
            self._priced[rows, shape] = least_s, call_s, doubled[0]

    def _doubled(self, rows: int, shape: Sizes) -> list[float]:
        """Return the seconds of batches of 1, 2, 4, ... equal requests, as many as are possible."""
        one_s = self.second(rows, shape)
        count = self._doublings(rows, shape)
        if count == 1:
            return [one_s]
        seconds = self._rows[shape]  # `second` has looked there
        return [one_s, *[float(seconds[rows << power]) for power in range(1, count)]]

    def _doublings(self, rows: int, shape: Sizes) -> int:
        """Count the batches of 1, 2, 4, ... equal requests that are possible. A request without elements stays alone."""
        if not self.profile.has_batch or not rows or 0 in shape:
            return 1
        return max(1, (self.profile.max_batch // rows).bit_length())

    def batched_share_s(self, rows: int, shape: Sizes) -> tuple[float, float]:
        """Return the seconds per request in an efficient batch of requests of these sizes, and the seconds of such a batch.

        Batches of 1, 2, 4, ... equal requests are compared by seconds per request. The first figure is the least of them.
        The second is of the smallest batch within `CLOSE` of it.
        """
        if (rows, shape) not in self._priced:
            self.expect([(rows, shape)])
        own_s, call_s, _ = self._priced[rows, shape]
        longest_s = self.longest_s(rows, shape)
        return min(own_s, longest_s), min(call_s, longest_s)

    def _make_room(self) -> None:
        """Forget all predictions where they are too many."""
        if len(self._rows) * self.profile.max_batch + len(self._priced) > _MOST_SECONDS:
            self._rows.clear()
            self._priced.clear()

    def longest_s(self, rows: int, shape: Sizes) -> float:
        """Return the seconds of such a batch if each of its calls were the longest that was measured, or ran.

        No request is charged more. Clients choose their sizes, and far beyond all measured sizes a prediction means nothing.
        """
        if self._row_calls is None:
            return self.worker_class.longest_s
        return sum([times for times, _ in self.calls(rows, shape)]) * self.worker_class.longest_s

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

    def first_call_s(self, elements: float) -> float:
        """Return the extra seconds of a call of so many elements whose shape is new to the device; 0.0 while unknown."""
        new = self.worker_class.new
        return min(new.second(elements), new.longest_s) if new.measured else 0.0

    def preparation_s(self, rows: int, shape: Sizes) -> float:
        """Return the extra seconds of a batch for calls whose shapes are new to the device.

        0.0 if all are prepared, if no preparation was measured, or if the batch has no elements.
        """
        new = self.worker_class.new
        if not new.measured or (not rows and self._row_calls is None) or 0 in shape:
            return 0.0
        if self._row_calls is None and self._of_tensors((rows, *shape)) in self._known:
            return 0.0
        unknown = [
            sizes for _, sizes in self.calls(rows, shape) if self._of_tensors(sizes) not in self._known
        ]
        return sum([self.first_call_s(elements_of(sizes)) for sizes in unknown])

    def preparations_s(self, shape: Sizes) -> list[float]:
        """Return `preparation_s` of batches of 1 to `max_batch` rows at one shape, each one call of its own sizes."""
        count = self.profile.max_batch
        if not self.worker_class.new.measured or 0 in shape:
            return [0.0] * count
        known, elements, (_, *own) = self._known, prod(shape), self._of_tensors((1, *shape))
        return [
            0.0 if (rows, *own) in known else self.first_call_s(elements_of((rows, elements)))
            for rows in range(1, count + 1)
        ]

    def met(self, calls: Calls) -> None:
        """Note that the device has prepared these call shapes."""
        known = self._known
        for _, call_sizes in calls:
            sizes = self._of_tensors(call_sizes)
            known.pop(sizes, None)
            if len(known) >= MOST_KNOWN_SHAPES:
                del known[next(iter(known))]
            known[sizes] = None

    def _of_tensors(self, sizes: Sizes) -> Sizes:
        """Return `ModelProfile.shape_of_tensors` of the sizes of a call with rows first, which not all models have."""
        profile = self.profile
        if not profile.strings or profile.has_batch:
            return profile.shape_of_tensors(sizes)
        return (sizes[0], *profile.shape_of_tensors(sizes[1:]))

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
