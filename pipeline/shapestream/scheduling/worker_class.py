"""What single calls cost on workers of one class, and what finished batches teach.

Workers are of one class if their cost tables of a model have equal keys: then they run equal devices with equal settings.
What a batch on one of them shows is taken to hold for all, except its slowdown and the shapes that its devices know. These
two belong to the worker, in its `BatchCosts` (batch_costs.py).

A finished batch is compared with what was expected (`WorkerClass.observe`):

- A batch that prepared new shapes only corrects what a preparation costs (`new`), unless it took less than `CLIP` of what
  was expected without.
- The first call at a node of the grid that is not known is believed.
- Any other batch moves the nodes around its calls, and the slowdown of its worker, by a part of the difference.
- `LASTING` batches in a row that are off by more than `CLIP` in one direction mean that costs have changed.

Predictions follow only when one has moved by more than `MOVED`, so that plans made with them stay valid in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import copysign, exp, log

import numpy as np

from shapestream.scheduling.batch_costs import CLIP, LASTING, BatchCosts, Calls
from shapestream.scheduling.cost_grid import (
    LATELY,
    STEP,
    Floats,
    Grid,
    LinearCost,
    Sizes,
    elements_of,
    elements_of_many,
    grid_over,
)
from shapestream.scheduling.events import ModelProfile
from shapestream_engine.cost_table import MAX_ELEMENTS, MAX_POINTS, CostTable, LearnedCosts

SLOWDOWN_STEP = 0.06
"""Part of a batch's difference (of logarithms) that moves its worker's slowdown; `cost_grid.STEP` of it moves the grid."""
BATCH_S = 1e-3
"""Seconds of handing over a batch, besides its call. They decide between cuts that cost the same otherwise."""
MOVED = log(1.05)
"""Logarithm by which a prediction, `BATCH_S` included, must change to be published: plans made with the old one are then
out of date."""
NOISE = 1.1
"""Factor by which a batch may take longer than expected before the rest counts as preparation."""
PREPARATION_CLIP = 8.0
"""Factor by which one preparation differs from the one expected, at most."""


class WorkerClass:
    """Workers with equal cost tables of one model, and the seconds of single calls on them.

    `version` changes when a prediction has changed by more than 5 %.
    """

    def __init__(
        self,
        profile: ModelProfile,
        table: CostTable | None,
        versions: Iterator[int],
        learned: LearnedCosts | None = None,
    ) -> None:
        """`versions`: numbers never used before, so that no two classes have a version in common.

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
        """By shape of a static model; None until it was measured or ran. Until then it costs as much as dynamic calls."""
        dynamic = {sizes: point.seconds for sizes, point in points.items() if sizes not in self._static}
        self._grid = grid_over(dynamic, profile.max_batch if profile.has_batch else 1) if dynamic else None
        self._linear = LinearCost()
        """The costs while there is no grid."""
        self.measured = self._grid is not None
        """Whether predictions are seconds. If not, they only compare calls."""
        self.new = LinearCost(clip=PREPARATION_CLIP)
        """Extra seconds of a call whose shape is new to the device."""
        self.paid = LinearCost()
        """Seconds of batches while nothing was measured, preparation included: see `ModelCosts.rough_s`."""
        self.batch_costs: dict[str, BatchCosts] = {}
        """By worker. The last one stays when its worker leaves, until another worker joins."""
        self._workers = 0
        """Workers present."""
        self._slowdowns_sum = 0.0
        """Sum of `BatchCosts.slowdown_log` over the workers present."""
        self.mean_slowdown_log = 0.0
        """Their mean, which is what the grid itself is off."""
        self._ran_s = 0.0
        """Seconds of the longest call that ran."""
        self.longest_s = 0.0
        """Seconds of the longest call that was measured, or ran: see `BatchCosts.longest_s`."""
        self.version = next(versions)
        self.row_prices: dict[Sizes, Floats] = {}
        """`BatchCosts.row_seconds` of this version, by shape."""
        self.prices: dict[tuple[int, Sizes], tuple[float, float, float]] = {}
        """`BatchCosts.batched_share_s` of this version without its bound, and `second`, by rows and shape."""
        self.has_points = bool(points)
        self._table = "" if table is None or not points else table.digest
        self.batches = 0
        """Batches that it learned from, those of earlier servers included."""
        self.batches_since_try = 0
        """Batches that ended since the last try began, see tries.py."""
        self.busy_s_since_try = 0.0
        """Seconds that these took."""
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
                for sizes in sorted(corrections.keys() - self._static.keys(), key=elements_of):
                    self._grid = self._grid.extended(sizes)
                self._grid.recall(corrections)
            self.new.recall(learned.preparation)
        self._find_longest()

    # ------------------------------------------------------------ workers

    @property
    def slots(self) -> int:
        """Slots of all its workers."""
        return sum([batch_costs.slots for batch_costs in self.batch_costs.values()])

    def join(self, worker: str) -> BatchCosts:
        """Add a slot of a worker. A new worker is assumed to be as fast as the present ones in the mean."""
        batch_costs = self.batch_costs.get(worker)
        if batch_costs is None or not batch_costs.slots:
            here = [other for other in self.batch_costs.values() if other.slots]
            if batch_costs is None:
                # A worker that left had other prepared shapes.
                self.batch_costs = {other.worker: other for other in here}
                batch_costs = self.batch_costs[worker] = BatchCosts(self._profile, self, worker)
            batch_costs.slowdown_log = 0.0
            self._workers += 1
            self._slow_down(batch_costs, self._slowdowns_sum / len(here) if here else 0.0)
        batch_costs.slots += 1
        return batch_costs

    def leave(self, batch_costs: BatchCosts) -> None:
        """Remove a slot of a worker. When the last worker leaves, the grid keeps what it learned of its slowdown."""
        batch_costs.slots -= 1
        if batch_costs.slots:
            return
        if self._workers == 1:
            self._publish()
        self._workers -= 1
        self._slow_down(batch_costs, -batch_costs.slowdown_log)
        if len(self.batch_costs) > 1:
            del self.batch_costs[batch_costs.worker]

    def _slow_down(self, batch_costs: BatchCosts, difference: float) -> None:
        """Move the slowdown of a worker by a logarithm."""
        batch_costs.slowdown_log += difference
        self._slowdowns_sum += difference
        self.mean_slowdown_log = self._slowdowns_sum / (self._workers or 1)

    # ------------------------------------------------------------ predictions

    @property
    def has_grid(self) -> bool:
        """Whether predictions change with the version alone; linear costs follow each batch a little."""
        return self._grid is not None

    def seconds(self, columns: Floats) -> Floats:
        """Return the seconds of many calls: (dimensions, n), rows first.

        A call without elements costs what the smallest call does, however large it claims to be.
        """
        empty = (columns == 0.0).any(axis=0)
        if empty.any():
            columns = np.where(empty, 1.0, columns)
        if self._grid is not None:
            seconds = self._grid.seconds(columns)
        elif self._linear.measured:
            seconds = self._linear.fixed_s + self._linear.element_s * elements_of_many(columns)
        else:
            # Before anything is known a call's fixed part is taken to weigh as much as one row of it.
            seconds = (columns[0] + 1.0) * np.maximum(1.0, elements_of_many(columns[1:]))
        for sizes, static in self._static.items():
            if static is not None:
                seconds[(columns == np.array([sizes], np.float64).T).all(axis=0)] = static.longest_s
        return seconds

    def row_seconds(self, most: int, shape: Sizes) -> Floats | None:
        """Return the seconds of calls of 0 to `most` rows at one shape; None where `seconds` must be asked."""
        return None if self._grid is None or self._static else self._grid.row_seconds(most, shape)

    # ------------------------------------------------------------ what is known

    def knows(self, calls: Calls) -> bool:
        """Tell whether these calls were measured, or ran since costs changed, and were not short the last time.

        Calls of several sizes count as known: one batch cannot tell their seconds apart.
        """
        ((_, sizes), *others) = calls
        if others or sizes in self._static:
            return True
        if self._grid is None:
            return elements_of(sizes) <= self._linear.reach[1]
        return self._grid.knows(sizes) and not self._grid.was_short(sizes)

    def met_lately(self, calls: Calls) -> bool:
        """Tell whether calls of about these sizes ran lately; False without a grid."""
        return self._grid is not None and all(self._grid.met_lately(sizes) for _, sizes in calls)

    def try_began(self) -> None:
        """Note that a batch is a try."""
        self.batches_since_try, self.busy_s_since_try, self.awaits_try = 0, 0.0, True

    # ------------------------------------------------------------ learning

    def observe(
        self,
        batch_costs: BatchCosts,
        calls: Calls,
        busy_s: float,
        preparations: int,
        requests: int,
        steady_s: float,
    ) -> None:
        """Learn from a finished batch; `steady_s`: its expected seconds without any preparation."""
        self.batches += 1
        self.batches_since_try += 1
        self.busy_s_since_try += busy_s
        number = 0
        for count, _ in calls:
            number += count
        ran_s = busy_s / number
        if ran_s > self._ran_s:
            self._ran_s = ran_s
            self.longest_s = max(self.longest_s, ran_s)
        # With its preparation a batch takes at least what it takes without. Where sizes hardly ever come again, no other
        # batch shows that a price is too high. A report of no seconds shows nothing.
        is_too_dear = self.measured and 0.0 < busy_s * exp(CLIP) < steady_s
        if not preparations or is_too_dear:
            self._learn(batch_costs, calls, busy_s, number, requests)
        elif self.measured:
            self.prepared(elements_of(calls[0][1]), steady_s, busy_s, preparations)
        else:
            self._fit(self.paid, calls, busy_s, number, requests)

    @staticmethod
    def _fit(linear: LinearCost, calls: Calls, seconds: float, number: int, requests: int) -> None:
        """Fit a linear cost to the seconds of so many requests in these calls, of which there are `number`."""
        elements = sum([count * elements_of(sizes) for count, sizes in calls])
        linear.observe(number, elements, seconds, request_elements=elements / max(1, requests))

    def prepared(self, elements: float, steady_s: float, busy_s: float, calls: int = 1) -> None:
        """Learn the preparation of new shapes from a batch that would have taken `steady_s` without it."""
        extra_s = max(0.0, busy_s - NOISE * steady_s) / calls
        self.new.observe(1.0, elements, extra_s, request_elements=elements)

    def _learn(
        self,
        batch_costs: BatchCosts,
        calls: Calls,
        busy_s: float,
        number: int,
        requests: int,
    ) -> None:
        own = batch_costs.slowdown_log if batch_costs.slots else 0.0
        if self._grid is None and batch_costs.slots:
            # A linear cost has learned what all workers are off; a grid takes it over later.
            own -= self.mean_slowdown_log
        any_static = False
        for _, sizes in calls:
            if sizes in self._static:
                any_static = True
            elif self._grid is not None:
                self._grid = self._grid.extended(sizes)
        each_s = []
        expected_s = 0.0
        for count, sizes in calls:
            call_s = self._expected_s(sizes)
            each_s.append(call_s)
            expected_s += count * call_s
        off = log(max(busy_s, 1e-9) / max(expected_s, 1e-12)) - own
        grid = self._grid
        if grid is not None and not any_static and len(calls) == 1:
            known = grid.knows(sizes)
            if known and (change := batch_costs.lasting_change(off)):
                off = change - self._change(batch_costs, change)
                if self._workers == 1:
                    grid.doubt(0)
                    known = grid.knows(sizes)
            elif not grid.met_lately(sizes):
                short = off if off < -CLIP else 0.0
                if grid.short_by(sizes, short) <= -LASTING * CLIP:
                    grid.doubt(LATELY)  # what else has not run lately may be out of date as well
                    known = grid.knows(sizes)
                elif short:
                    self.awaits_try = False
            if not known:
                grid.believe(sizes, off)
                self.awaits_try = False
                self._publish()
                return
        elif grid is None and not any_static and (change := batch_costs.lasting_change(off)):
            if self._workers == 1:
                self._linear = LinearCost()  # how its two parts compare is out of date as well
            else:
                self._linear.rescale(exp(change))
        difference = off if -CLIP <= off <= CLIP else copysign(CLIP, off)
        moved = False
        if self.measured:
            if batch_costs.slots and (grid is not None or self._workers > 1):
                self._slow_down(batch_costs, SLOWDOWN_STEP * difference)
            moved = self._correct(calls, each_s, difference)
        if grid is None and not any_static:  # else the two parts cannot be told apart
            steady_s = busy_s / exp(own) if self._linear.measured else busy_s
            self._fit(self._linear, calls, steady_s, number, requests)
            self.measured = True
            if self._linear.moved():
                self._renew()
        if moved:
            self._publish()

    def _change(self, batch_costs: BatchCosts, change: float) -> float:
        """Move a worker's slowdown by what all calls share of a lasting change; return by how much.

        Sizes that did not run are assumed at their best. If calls became shorter, all did. If they became longer, their
        size may be the cause, and other sizes shall be tried: the change is divided between slowdown and grid like that of
        one batch. If there are several workers, which share one grid, the worker has changed.
        """
        if not batch_costs.slots:
            return 0.0
        is_all = change < 0.0 or self._workers > 1
        moved = change if is_all else SLOWDOWN_STEP / (SLOWDOWN_STEP + STEP) * change
        self._slow_down(batch_costs, moved)
        return moved

    def _expected_s(self, sizes: Sizes) -> float:
        """Return the expected seconds of one call by all observations, published or not."""
        if 0 in sizes:
            sizes = (1,) * len(sizes)
        grid = self._static.get(sizes) or self._grid
        return (
            float(self.seconds(np.array([sizes], np.float64).T)[0]) if grid is None else grid.expected(sizes)
        )

    def _correct(self, calls: Calls, each_s: Sequence[float], difference: float) -> bool:
        """Correct these calls, expected to take `each_s`. Return whether one moved enough (`MOVED`) to publish."""
        shift = self.mean_slowdown_log
        moved = False
        for (_, sizes), call_s in zip(calls, each_s, strict=True):
            grid, own = self._grid, shift
            if sizes in self._static:
                grid, own = self._static[sizes], 0.0
                if grid is None:
                    grid = self._static[sizes] = Grid({sizes: call_s})
                    moved = True
            if grid is not None:
                nodes = grid.correct(sizes, difference)
                off = max(shift, -shift, max(nodes) + own, -min(nodes) - own)
                moved = moved or off * call_s > MOVED * (call_s + BATCH_S)
        return moved

    def _publish(self) -> None:
        """Let predictions follow all that was learned. The mean slowdown of all workers becomes part of the grid."""
        shift = self.mean_slowdown_log if self._grid is not None else 0.0
        for batch_costs in self.batch_costs.values():
            batch_costs.slowdown_log -= shift
        self._slowdowns_sum -= shift * self._workers
        self.mean_slowdown_log = self._slowdowns_sum / max(1, self._workers)
        for grid in (self._grid, *self._static.values()):
            if grid is not None:
                # The only node of a static shape has followed what its calls took, on whichever worker.
                grid.publish(shift if grid is self._grid else 0.0)
        self._find_longest()
        self._renew()

    def _renew(self) -> None:
        """Begin a new version: the prices of the last one are out of date."""
        self.version = next(self._versions)
        self.row_prices.clear()
        self.prices.clear()

    def _find_longest(self) -> None:
        grids = [grid for grid in (self._grid, *self._static.values()) if grid is not None]
        self.longest_s = max([self._ran_s, *[grid.longest_s for grid in grids]])

    def learned(self, saved_at: float) -> LearnedCosts | None:
        """Return the corrections of the table by traffic; None without a table, or before any batch ran."""
        if not self._table or not self.batches:
            return None
        shift = self.mean_slowdown_log if self._grid is not None else 0.0
        corrections: dict[Sizes, float] = {}
        for grid in (*self._static.values(), self._grid):
            if grid is not None:
                corrections |= grid.corrections(shift)
        # Nodes that were not measured, and linear costs, may reach further than anything that may be kept.
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
