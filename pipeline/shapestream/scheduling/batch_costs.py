"""Predicted seconds of one model's batches on one worker, and what finished batches teach.

Workers whose cost tables have equal keys are of one `WorkerClass`: what one of them shows is known of all. Each worker has
`BatchCosts` of its own, with its slowdown and the shapes that its devices know. A batch is one call of its own sizes or,
where only some numbers of rows are allowed, the calls that cover its rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from math import exp, inf, log
from typing import TypeAlias

import numpy as np

from shapestream.scheduling.cost_grid import (
    LATELY,
    STEP,
    Floats,
    Grid,
    Integers,
    LinearCost,
    Sizes,
    elements_of,
    elements_of_many,
    grid_over,
)
from shapestream.scheduling.events import ModelProfile
from shapestream_engine.cost_table import MAX_ELEMENTS, MAX_POINTS, CostTable, LearnedCosts

Calls: TypeAlias = Sequence[tuple[int, Sizes]]
"""How many calls of which sizes, (rows, *shape)."""

CLIP = log(1.5)
"""Logarithm by which one observation differs from what was expected, at most: a machine that stalls says nothing about
the model."""
LASTING = 4
"""Batches in a row that are off by more than that, all of them longer or all shorter: then the costs have changed. With
lognormal noise of sigma 0.4, which is much, it happens by chance once in 1,900 batches, with 0.3 once in 6,700.

Calls that had not run lately are few. In a row of short ones their differences count, and must be as much together."""
SLOWDOWN_STEP = 0.06
"""Part of that difference that a worker's slowdown takes over; the grid takes over `cost_grid.STEP`."""
BATCH_S = 1e-3
"""Seconds that a batch takes besides its call. They decide between cuts that are otherwise equal."""
MOVED = log(1.05)
"""Logarithm by which a prediction, `BATCH_S` included, must change to be published: plans made with the old one are then
out of date."""
NOISE = 1.1
"""Factor by which a batch may take longer than expected before the rest counts as preparation."""
PREPARATION_CLIP = 8.0
"""Factor by which one preparation differs from the one expected, at most."""
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


class WorkerClass:
    """The workers whose cost tables of one model have the same key, and what single calls cost on them.

    `version` changes when a prediction has changed by more than 5 %.
    """

    def __init__(
        self,
        profile: ModelProfile,
        table: CostTable | None,
        versions: Iterator[int],
        learned: LearnedCosts | None = None,
    ) -> None:
        """`versions`: numbers never used before, so that no two kinds have a version in common.

        `learned`: what an earlier server learned of the same table.
        """
        self._profile = profile
        self._versions = versions
        alone = () if profile.has_batch else (1,)
        points = {(*alone, *point.sizes): point for point in (() if table is None else table.points)}
        static = [(*alone, *sizes) for sizes in profile.static_shapes]
        self._static: dict[Sizes, Grid | None] = {
            sizes: Grid({sizes: points[sizes].seconds}) if sizes in points else None for sizes in static
        }
        """The shapes with a model of their own. One that was not measured costs what others like it do, until it ran."""
        dynamic = {sizes: point.seconds for sizes, point in points.items() if sizes not in self._static}
        self._grid = grid_over(dynamic, profile.max_batch if profile.has_batch else 1) if dynamic else None
        self._line = LinearCost()
        """Where there is no grid."""
        self.measured = self._grid is not None
        """Whether predictions are seconds; otherwise they are good for comparing calls, and nothing else."""
        self.new = LinearCost(clip=PREPARATION_CLIP)
        """Extra seconds of a call whose shape is new to the device."""
        self.paid = LinearCost()
        """Seconds of requests while nothing was measured, preparation included: see `ModelCosts.rough_s`."""
        self.surfaces: dict[str, BatchCosts] = {}
        """By worker. That of the last worker stays when it leaves, until another one joins."""
        self._workers = 0
        """Workers present."""
        self._slowdowns_sum = 0.0
        """Sum of `BatchCosts.slowdown_log` over the workers present; their mean is what the grid itself is off."""
        self._ran_s = 0.0
        """Seconds of the longest call that ran."""
        self.longest_s = 0.0
        """Seconds of the longest call that was measured, or ran: see `BatchCosts.longest_s`."""
        self.version = next(versions)
        self.has_points = bool(points)
        self._table = "" if table is None or not points else table.digest
        self.batches = 0
        """Batches that it learned from, those of earlier servers included."""
        self.batches_since_try = 0
        """Batches that ended since the last try began, see tries.py."""
        self.busy_s_since_try = 0.0
        """Seconds that they took."""
        self.awaits_try = False
        """Whether nothing was learned from the last try yet."""
        if learned is None or not self._table:
            for sizes in sorted(points, key=elements_of):
                if (first_s := points[sizes].first_seconds) is not None:
                    self.prepared(elements_of(sizes), points[sizes].seconds, first_s)
        else:
            self.batches = learned.batches
            corrections = {(*alone, *sizes): seconds for sizes, seconds in learned.seconds.items()}
            for sizes in self._static.keys() & corrections.keys():
                self._static[sizes] = Grid({sizes: corrections[sizes]})
            if self._grid is not None:
                self._extend(sorted(corrections.keys() - self._static.keys(), key=elements_of))
                self._grid.recall(corrections)
            self.new.recall(learned.preparation)
        self._find_longest()

    # ------------------------------------------------------------ workers

    @property
    def slots(self) -> int:
        """Slots of all its workers."""
        return sum([surface.slots for surface in self.surfaces.values()])

    def join(self, worker: str) -> BatchCosts:
        """Take in a slot of a worker; a new worker is as fast as those present in the mean."""
        surface = self.surfaces.get(worker)
        if surface is None or not surface.slots:
            here = [other for other in self.surfaces.values() if other.slots]
            if surface is None:
                # A worker that left had other prepared shapes.
                self.surfaces = {other.worker: other for other in here}
                surface = self.surfaces[worker] = BatchCosts(self._profile, self, worker)
            surface.slowdown_log = self._slowdowns_sum / len(here) if here else 0.0
            self._slowdowns_sum += surface.slowdown_log
            self._workers += 1
        surface.slots += 1
        return surface

    def leave(self, surface: BatchCosts) -> None:
        """Forget a slot of a worker. What the last worker was off stays part of what is expected."""
        surface.slots -= 1
        if surface.slots:
            return
        if self._workers == 1:
            self._publish()
        self._workers -= 1
        self._slowdowns_sum -= surface.slowdown_log
        if len(self.surfaces) > 1:
            del self.surfaces[surface.worker]

    @property
    def mean_slowdown_log(self) -> float:
        """Mean of the present workers' `slowdown_log`."""
        return self._slowdowns_sum / max(1, self._workers)

    # ------------------------------------------------------------ predictions

    def seconds(self, columns: Floats) -> Floats:
        """Return the seconds of many calls: (dimensions, n), rows first.

        A call without elements costs what the smallest call does, however large it claims to be.
        """
        empty = (columns == 0.0).any(axis=0)
        if empty.any():
            columns = np.where(empty, 1.0, columns)
        if self._grid is not None:
            seconds = self._grid.seconds(columns)
        elif self._line.measured:
            seconds = self._line.fixed_s + self._line.element_s * elements_of_many(columns)
        else:
            # Before anything is known a call's fixed part is taken to weigh as much as one row of it.
            seconds = (columns[0] + 1.0) * np.maximum(1.0, elements_of_many(columns[1:]))
        for sizes, static in self._static.items():
            if static is not None:
                seconds[(columns == np.array([sizes], np.float64).T).all(axis=0)] = static.longest_s
        return seconds

    def line(self, most: int, shape: Sizes) -> Floats | None:
        """Return the seconds of calls of 0 to `most` rows at one shape; None where `seconds` must be asked."""
        return None if self._grid is None or self._static else self._grid.line(most, shape)

    # ------------------------------------------------------------ what is known

    def knows(self, calls: Calls) -> bool:
        """Tell whether these calls were measured, or ran since costs have changed, and do not seem to change now.

        Of several sizes none is told apart.
        """
        ((_, sizes), *others) = calls
        if others or sizes in self._static:
            return True
        if self._grid is None:
            return elements_of(sizes) <= self._line.reach[1]
        return self._grid.knows(sizes) and not self._grid.was_short(sizes)

    def met_lately(self, calls: Calls) -> bool:
        """Tell whether calls of about these sizes ran lately. A line does not remember that."""
        return self._grid is not None and all(self._grid.met_lately(sizes) for _, sizes in calls)

    def try_began(self) -> None:
        """Note that a batch is a try."""
        self.batches_since_try, self.busy_s_since_try, self.awaits_try = 0, 0.0, True

    # ------------------------------------------------------------ learning

    def observe(
        self,
        surface: BatchCosts,
        calls: Calls,
        busy_s: float,
        preparations: int,
        requests: int,
        steady_s: float,
    ) -> None:
        """Learn from a finished batch; `steady_s` is what it should have taken without preparing anything."""
        self.batches += 1
        self.batches_since_try += 1
        self.busy_s_since_try += busy_s
        number = sum([count for count, _ in calls])
        elements = sum([count * elements_of(sizes) for count, sizes in calls])
        self._ran_s = max(self._ran_s, busy_s / number)
        self.longest_s = max(self.longest_s, self._ran_s)
        if not preparations:
            self._learn(surface, calls, busy_s, number, elements, requests)
        elif self.measured:
            self.prepared(elements_of(calls[0][1]), steady_s, busy_s, preparations)
        else:
            self.paid.observe(number, elements, busy_s, request_elements=elements / max(1, requests))

    def prepared(self, elements: float, steady_s: float, busy_s: float, calls: int = 1) -> None:
        """Learn what new shapes cost extra, from a batch that would have taken `steady_s` without preparing them."""
        extra_s = max(0.0, busy_s - NOISE * steady_s) / calls
        self.new.observe(1.0, elements, extra_s, request_elements=elements)

    def _learn(
        self, surface: BatchCosts, calls: Calls, busy_s: float, number: int, elements: float, requests: int
    ) -> None:
        own = surface.slowdown_log if surface.slots else 0.0
        if self._grid is None and surface.slots:
            own -= (
                self.mean_slowdown_log
            )  # a line has learned what all workers are off; a grid takes it over later
        any_static = any(sizes in self._static for _, sizes in calls)
        self._extend([sizes for _, sizes in calls if sizes not in self._static])
        each_s = [self._expected_s(sizes) for _, sizes in calls]
        expected_s = sum([count * call_s for (count, _), call_s in zip(calls, each_s, strict=True)])
        off = log(max(busy_s, 1e-9) / max(expected_s, 1e-12)) - own
        grid = self._grid
        if grid is not None and len(calls) == 1 and not any_static:
            ((_, sizes),) = calls
            if grid.knows(sizes) and (change := surface.lasting_change(off)):
                off = change - self._change(surface, change)
                if self._workers == 1:
                    grid.doubt(0)
            elif not grid.met_lately(sizes):
                short = off if off < -CLIP else 0.0
                if grid.short_by(sizes, short) <= -LASTING * CLIP:
                    grid.doubt(LATELY)  # what else has not run lately may be out of date as well
                elif short:
                    self.awaits_try = False
            if not grid.knows(sizes):
                grid.believe(sizes, off)
                self.awaits_try = False
                self._publish()
                return
        elif grid is None and not any_static and (change := surface.lasting_change(off)):
            if self._workers == 1:
                self._line = LinearCost()  # how its two parts compare is out of date as well
            else:
                self._line.rescale(exp(change))
        difference = max(-CLIP, min(CLIP, off))
        moved = False
        if self.measured:
            if surface.slots and (self._grid is not None or self._workers > 1):
                surface.slowdown_log += SLOWDOWN_STEP * difference
                self._slowdowns_sum += SLOWDOWN_STEP * difference
            moved = self._correct(calls, each_s, difference)
        if self._grid is None and not any_static:  # else the two parts cannot be told apart
            steady_s = busy_s / exp(own) if self._line.measured else busy_s
            self._line.observe(number, elements, steady_s, request_elements=elements / max(1, requests))
            self.measured = True
            if self._line.moved():
                self.version = next(self._versions)
        if moved:
            self._publish()

    def _change(self, surface: BatchCosts, change: float) -> float:
        """Move a worker's slowdown by what all calls share of a lasting change; return by how much.

        What did not run is taken at its best. If calls became shorter, all did. If they became longer, the size may be the
        cause, and other sizes are to be tried: it is divided as that of one batch is. Of several workers, which share what
        is known of sizes, it is the one that changed.
        """
        if not surface.slots:
            return 0.0
        is_all = change < 0.0 or self._workers > 1
        moved = change if is_all else SLOWDOWN_STEP / (SLOWDOWN_STEP + STEP) * change
        surface.slowdown_log += moved
        self._slowdowns_sum += moved
        return moved

    def _extend(self, calls: Iterable[Sizes]) -> None:
        """Give calls far beyond the grid nodes of their own."""
        for sizes in calls:
            if self._grid is not None and 0 not in sizes and not self._grid.reaches(sizes):
                self._grid = self._grid.extended(sizes)

    def _expected_s(self, sizes: Sizes) -> float:
        """Seconds of one call by all that was observed."""
        if 0 in sizes:
            sizes = (1,) * len(sizes)
        grid = self._static.get(sizes) or self._grid
        return (
            float(self.seconds(np.array([sizes], np.float64).T)[0]) if grid is None else grid.expected(sizes)
        )

    def _correct(self, calls: Calls, each_s: Sequence[float], difference: float) -> bool:
        """Move what these calls are expected to take, `each_s` until now; whether one is to be published, see `MOVED`."""
        shift = self.mean_slowdown_log
        moved = False
        for (_, sizes), call_s in zip(calls, each_s, strict=True):
            if sizes in self._static and self._static[sizes] is None:
                self._static[sizes] = Grid({sizes: call_s})
                moved = True
            grid = self._static.get(sizes) or self._grid
            if grid is not None:
                own = shift if grid is self._grid else 0.0
                off = max(abs(shift), *[abs(each + own) for each in grid.correct(sizes, difference)])
                moved = moved or off * call_s > MOVED * (call_s + BATCH_S)
        return moved

    def _publish(self) -> None:
        """Base predictions on all that was learned; what all workers are off becomes part of the grid."""
        shift = self.mean_slowdown_log if self._grid is not None else 0.0
        for surface in self.surfaces.values():
            surface.slowdown_log -= shift
        self._slowdowns_sum -= shift * self._workers
        for grid in (self._grid, *self._static.values()):
            if grid is not None:
                # The only node of a static shape has followed what its calls took, on whichever worker.
                grid.publish(shift if grid is self._grid else 0.0)
        self._find_longest()
        self.version = next(self._versions)

    def _find_longest(self) -> None:
        grids = [grid for grid in (self._grid, *self._static.values()) if grid is not None]
        self.longest_s = max([self._ran_s, *[grid.longest_s for grid in grids]])

    def learned(self, saved_at: float) -> LearnedCosts | None:
        """Return what traffic made of the table; None where there is none, or nothing ran yet."""
        if not self._table or not self.batches:
            return None
        shift = self.mean_slowdown_log if self._grid is not None else 0.0
        corrections: dict[Sizes, float] = {}
        for grid in (*self._static.values(), self._grid):
            if grid is not None:
                corrections |= grid.corrections(shift)
        # Nodes that were not measured, and lines, may reach further than anything that may be kept.
        kept = (item for item in corrections.items() if elements_of(item[0]) <= MAX_ELEMENTS)
        ends = self.new.ends()
        return LearnedCosts(
            table=self._table,
            batches=self.batches,
            saved_at=saved_at,
            seconds={
                sizes[0 if self._profile.has_batch else 1 :]: seconds
                for sizes, seconds in islice(kept, MAX_POINTS)
            },
            preparation=ends if max(ends, default=0.0) <= MAX_ELEMENTS else {},
        )


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


def _parted(calls: Sequence[Sizes]) -> tuple[Integers, Integers]:
    """Return the rows (n,) and shapes (n, d) of calls (rows, *shape), whose sizes may be claimed beyond 64 bits."""
    bounded = np.array([[min(size, _MOST_SIZE) for size in own] for own in calls], np.intp)
    return bounded[:, 0], bounded[:, 1:]
