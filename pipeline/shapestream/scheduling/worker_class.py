"""Prices: the seconds of one model's batches on workers of one class (`WorkerClass`).

Workers are of one class if their cost tables of a model have equal keys: then they run equal devices with equal settings.
What a batch on one of them shows is taken to hold for all, except its slowdown and the shapes that its devices know. The
shapes are kept by worker_costs.py, which adds to a row what it takes to prepare them.

**One table.** `WorkerClass.prices` has a row for each shape: the seconds of batches of all numbers of rows (`ShapePrices`).
One batch, the share of a request, the useful numbers of rows and the window of the planner look up this row. A batch is one
call of its own sizes or, where only some numbers of rows are allowed, the calls that cover its rows. It may be run at other
sizes: rounded ones (rounding.py), or those of a static model that is faster than the dynamic one.

**One rule of validity.** Rows hold for one `version`. Predictions follow what is observed only when one has moved by more
than `MOVED`, so that plans made with them stay valid in between. Then a new version begins, and all rows are forgotten.

A finished batch is compared with what was expected (`WorkerClass.observe`):

- A batch that prepared new shapes only corrects what a preparation costs (`new`), unless it took less than `CLIP` of what
  was expected without.
- The first call at a node of the grid that is not known is believed (tries.py).
- Any other batch moves the nodes around its calls, and the slowdown of its worker, by a part of the difference.
- A lasting change makes the nodes unknown again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from math import copysign, exp, inf, log
from typing import TypeAlias

import numpy as np

from shapestream.scheduling.call_bytes import CallBytes
from shapestream.scheduling.cost_grid import (
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
from shapestream.scheduling.tries import CLIP, EVERY, MOST_PADDED, TRIES_PART, Tries
from shapestream_engine.cost_table import MAX_ELEMENTS, MAX_POINTS, MAX_SECONDS, CostTable, LearnedCosts

Calls: TypeAlias = Sequence[tuple[int, Sizes]]
"""How many calls of which sizes, (rows, *shape)."""

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
NEAR_BEST = 1.01
"""Factor of the least seconds per row up to which a number of rows counts as the best."""
CLOSE = 1.05
"""Factor by which seconds per request may exceed those of the most efficient batch: a smaller batch is then preferred."""
_MOST_SECONDS = 1 << 20
"""Seconds in the table of one class. When there are more, all are forgotten."""
_MOST_SIZE = 1 << 62


class ShapePrices:
    """The prices of one shape in one version."""

    __slots__ = ("run", "seconds", "shares", "useful")

    def __init__(self, seconds: Floats) -> None:
        self.seconds = seconds
        """Of batches of 0 to `max_batch` rows at exactly this shape; not to be written to."""
        self.run: Floats | None = None
        """The same at the sizes that they are run at; None: not asked for yet."""
        self.useful: tuple[int, int] | None = None
        """See `WorkerClass.useful_rows`."""
        self.shares: dict[int, tuple[float, float]] = {}
        """By the rows of a request: `WorkerClass.batched_share_s`."""


class WorkerClass:
    """Workers with equal cost tables of one model, and the seconds of batches on them.

    `shape` has no batch axis; `rows` is 1 without a batch axis. `version` changes when a prediction has changed by more than
    5 %, or the sizes that calls are rounded up to.
    """

    __slots__ = (
        "_bounds",
        "_digest",
        "_grid",
        "_is_bounded",
        "_linear",
        "_most",
        "_paddable",
        "_ran_s",
        "_row_calls",
        "_slots",
        "_slowdowns",
        "_slowdowns_sum",
        "_static",
        "_table",
        "_versions",
        "batches",
        "bytes",
        "grows",
        "has_points",
        "is_plain",
        "longest_call_s",
        "mean_slowdown_log",
        "measured",
        "new",
        "paid",
        "profile",
        "rounding",
        "statics",
        "tries",
        "version",
    )

    def __init__(
        self,
        profile: ModelProfile,
        table: CostTable | None,
        versions: Iterator[int],
        call_bytes: CallBytes,
        learned: LearnedCosts | None = None,
    ) -> None:
        """`versions`: numbers never used before, so that no two classes have a version in common.

        `learned`: what an earlier server learned of the same table.
        """
        self.profile = profile
        self.bytes = call_bytes
        """Bytes of the inputs of its calls, and their bound."""
        self.rounding = call_bytes.rounding
        self._versions = versions
        self.version = next(versions)
        self._table: dict[Sizes, ShapePrices] = {}
        """The prices of this version, by shape."""
        self._read_profile()
        self._linear = LinearCost()
        """The costs while there is no grid."""
        self.new = LinearCost(clip=PREPARATION_CLIP)
        """Extra seconds of a call whose shape is new to the device."""
        self.paid = LinearCost()
        """Seconds of batches while nothing was measured, preparation included: see `ModelCosts.rough_s`."""
        self._slots: dict[str, int] = {}
        """Slots of each worker that is present."""
        self._slowdowns: dict[str, float] = {}
        """Logarithms of each worker's seconds / what the prices say by all that was observed."""
        self._slowdowns_sum = 0.0
        """Sum of these."""
        self.mean_slowdown_log = 0.0
        """Their mean, which is what the grid itself is off."""
        self._ran_s = 0.0
        """Seconds of the longest call that ran."""
        self.longest_call_s = 0.0
        """Seconds of the longest call that was measured, or ran: see `longest_s`."""
        self.batches = 0
        """Batches that it learned from, those of earlier servers included."""
        self._static: dict[Sizes, Grid | None] = {}
        """By shape of a static model; None until it was measured or ran. Until then it costs as much as dynamic calls."""
        self._grid: Grid | None = None
        self.tries = Tries()
        """Which of its prices are tested."""
        self._digest = ""
        """Of its table; empty where there is none."""
        self.measured = False
        """Whether predictions are seconds. If not, they only compare calls, and no deadline is judged by them."""
        self._read_table(table, learned)  # (mypyc takes `_grid` for None until this function ends.)
        self.has_points = bool(self._digest)
        self._find_longest()

    def _read_table(self, table: CostTable | None, learned: LearnedCosts | None) -> None:
        """Begin with what a worker measured, and with what an earlier server made of it."""
        profile = self.profile
        alone = () if profile.has_batch else (1,)
        points = {(*alone, *point.sizes): point for point in (() if table is None else table.points)}
        for sizes in [(*alone, *sizes) for sizes in profile.static_shapes]:
            self._static[sizes] = Grid({sizes: points[sizes].seconds}) if sizes in points else None
        dynamic = {sizes: point.seconds for sizes, point in points.items() if sizes not in self._static}
        if dynamic:
            self._grid, known = grid_over(dynamic, profile.max_batch if profile.has_batch else 1)
            self.measured = True
            self.tries = Tries(known)
        if table is not None and points:
            self._digest = table.digest
        if learned is not None and self._digest:
            self._recall(learned, alone)
            return
        for sizes in sorted(points, key=elements_of):
            if (first_s := points[sizes].first_seconds) is not None:
                self.prepared(elements_of(sizes), points[sizes].seconds, first_s)

    def _read_profile(self) -> None:
        profile = self.profile
        self._row_calls = None if profile.row_calls is None else _RowCalls(profile.row_calls)
        bounds = [inf if most is None else most for most in profile.bounds] or [inf] * len(profile.dimensions)
        if not profile.has_batch:
            bounds = [1, *bounds]
        elif self._row_calls is not None:
            bounds[0] = inf  # allowed numbers of rows cover any number
        self._bounds = np.array([bounds], np.float64).T
        self._is_bounded = bool((self._bounds < inf).any())
        self._most = tuple(bounds)
        self._paddable = profile.paddable[1:] if profile.has_batch else profile.paddable
        self.statics = [(shape[0], shape[1:]) for shape in profile.static_shapes] if profile.has_batch else []
        """Rows and shapes of static models that run batches."""
        self.is_plain = self.rounding is None and not self.statics
        """Whether a batch is run at its own sizes."""
        self.grows = self.is_plain and self._row_calls is None
        """Whether each batch is one call of its own sizes, so that a larger batch never takes less."""

    def _recall(self, learned: LearnedCosts, alone: Sizes) -> None:
        """Begin with what an earlier server learned; `alone`: what goes before sizes without rows."""
        self.batches = learned.batches
        corrections = {(*alone, *sizes): seconds for sizes, seconds in learned.seconds.items()}
        for sizes in self._static.keys() & corrections.keys():
            self._static[sizes] = Grid({sizes: corrections[sizes]})
        if self._grid is not None:
            for sizes in sorted(corrections.keys() - self._static.keys(), key=elements_of):
                self._make_room_for(sizes)
            self.tries.recall(self._grid.recall(corrections))
            self._grid.publish(0.0, self.tries.bounding())
        self.new.recall(learned.preparation)

    # ------------------------------------------------------------ workers

    @property
    def slots(self) -> int:
        """Slots of all its workers."""
        return sum(self._slots.values())

    def has(self, worker: str) -> bool:
        """Tell whether a worker is present."""
        return worker in self._slots

    def slowdown(self, worker: str) -> float:
        """Return the seconds on a worker / mean seconds on all workers present; 1.0 of one that is not."""
        own = self._slowdowns.get(worker)
        return 1.0 if own is None else exp(own - self.mean_slowdown_log)

    def join(self, worker: str) -> None:
        """Add a slot of a worker. A new worker is assumed to be as fast as the present ones in the mean."""
        if worker not in self._slots:
            usual = self._slowdowns_sum / len(self._slots) if self._slots else 0.0
            self._slots[worker], self._slowdowns[worker] = 0, 0.0
            self._slow_down(worker, usual)
        self._slots[worker] += 1

    def leave(self, worker: str) -> None:
        """Remove a slot of a worker. When the last worker leaves, the grid keeps what it learned of its slowdown."""
        self._slots[worker] -= 1
        if self._slots[worker]:
            return
        if len(self._slots) == 1:
            self._publish()
        del self._slots[worker]
        self._slow_down(worker, -self._slowdowns[worker])
        del self._slowdowns[worker]
        self.tries.forget(worker)

    def _slow_down(self, worker: str, difference: float) -> None:
        """Move the slowdown of a worker by a logarithm."""
        self._slowdowns[worker] += difference
        self._slowdowns_sum += difference
        self.mean_slowdown_log = self._slowdowns_sum / (len(self._slots) or 1)

    # ------------------------------------------------------------ the table

    def prices(self, shape: Sizes) -> ShapePrices:
        """Return the prices of a shape."""
        found = self._table.get(shape)
        return self.price([shape])[0] if found is None else found

    def price(self, shapes: Sequence[Sizes]) -> list[ShapePrices]:
        """Return the prices of several shapes, which take less time together."""
        table = self._table
        if len(table) * (self.profile.max_batch + 1) > _MOST_SECONDS:
            table.clear()
        missing = [shape for shape in dict.fromkeys(shapes) if shape not in table]
        if missing:
            table.update(zip(missing, map(ShapePrices, self._rows_at(missing)), strict=True))
        return [table[shape] for shape in shapes]

    def run_seconds(self, prices: ShapePrices, shape: Sizes) -> Floats:
        """Return the seconds of 0 to `max_batch` rows at one shape, at the sizes that they are run at."""
        if self.is_plain:
            return prices.seconds
        if prices.run is None:
            count = len(prices.seconds)
            shapes = np.broadcast_to(np.array(shape, np.intp), (count, len(shape)))
            prices.run = self.run_seconds_of(np.arange(count), shapes)
        return prices.run

    def second(self, rows: int, shape: Sizes) -> float:
        """Return the seconds of one batch of exactly these sizes."""
        if rows <= self.profile.max_batch:
            return float(self.prices(shape).seconds[rows])
        return float(self.seconds(*_parted([(rows, *shape)]))[0])

    def steady_call(self, rows: int, shape: Sizes) -> tuple[int, Sizes, float]:
        """Return the sizes that a batch is run at, and its seconds without preparation."""
        call_rows, call_shape = rows, shape
        if self.rounding is not None:
            call_rows, call_shape = self.rounding.call_sizes(rows, shape)
        seconds = self.second(call_rows, call_shape)
        for static_rows, static in self.statics:
            fits = static_rows == rows and self._fits(shape, static)
            if fits and self.bytes.allow(rows, static, shape):
                other_s = self.second(rows, static)
                if other_s < seconds:
                    call_rows, call_shape, seconds = rows, static, other_s
        return call_rows, call_shape, seconds

    def _fits(self, shape: Sizes, larger: Sizes) -> bool:
        """Tell whether requests of a shape may be padded to a larger one."""
        return all(
            size == other or (padded and size < other)
            for size, other, padded in zip(shape, larger, self._paddable, strict=True)
        )

    def useful_rows(self, shape: Sizes) -> tuple[int, int]:
        """Return two numbers of rows at one shape: with the least seconds per row, or nearly so; and within `CLOSE`."""
        prices = self.prices(shape)
        if prices.useful is None:
            # Once all of them are known to the device: requests of another shape may share a call without preparing.
            seconds = self.run_seconds(prices, shape)[1:]
            each = seconds / np.arange(1, len(seconds) + 1)
            least = each.min()
            prices.useful = (
                int((each <= NEAR_BEST * least).argmax()) + 1,
                int((each <= CLOSE * least).argmax()) + 1,
            )
        return prices.useful

    def batched_share_s(self, rows: int, shape: Sizes) -> tuple[float, float]:
        """Return the seconds per request in an efficient batch of requests of these sizes, and the seconds of such a batch.

        Batches of 1, 2, 4, ... equal requests are compared by seconds per request. The first figure is the least of them.
        The second is of the smallest batch within `CLOSE` of it.
        """
        prices = self.prices(shape)
        share = prices.shares.get(rows)
        if share is None:
            own_s, call_s = self._share(prices, rows, shape)
            longest_s = self.longest_s(rows, shape)
            share = prices.shares[rows] = min(own_s, longest_s), min(call_s, longest_s)
        return share

    def _share(self, prices: ShapePrices, rows: int, shape: Sizes) -> tuple[float, float]:
        most = self.profile.max_batch
        if not self.profile.has_batch or not rows or 0 in shape or 2 * rows > most:
            own_s = self.second(rows, shape)  # a request without elements stays alone
            return own_s, own_s
        seconds = prices.seconds[[rows << power for power in range((most // rows).bit_length())]].tolist()
        each_s = [batch_s / (1 << power) for power, batch_s in enumerate(seconds)]
        least_s = min(each_s)
        return least_s, next(
            batch_s for batch_s, own_s in zip(seconds, each_s, strict=True) if own_s <= CLOSE * least_s
        )

    def longest_s(self, rows: int, shape: Sizes) -> float:
        """Return the seconds of such a batch if each of its calls were the longest that was measured, or ran.

        No request is charged more. Clients choose their sizes, and far beyond all measured sizes a prediction means nothing.
        """
        if self._row_calls is None:
            return self.longest_call_s
        return sum([times for times, _ in self.calls(rows, shape)]) * self.longest_call_s

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

    # ------------------------------------------------------------ seconds

    def run_seconds_of(self, rows: Integers, shapes: Integers) -> Floats:
        """Return the seconds of many different batches at the sizes that they are run at: rows (n,), shapes (n, d).

        The table would have a row for each of the shapes, of which one place is asked for.
        """
        rows = np.maximum(rows, 1)
        called = (rows, shapes) if self.rounding is None else self.rounding.preview(rows, shapes)
        seconds = self.seconds(*called)
        for static_rows, static in self.statics:
            here = rows == static_rows
            for axis, padded in enumerate(self._paddable):
                column = shapes[:, axis]
                here &= column <= static[axis] if padded else column == static[axis]
            seconds[here] = np.minimum(seconds[here], self.second(static_rows, static))
        return seconds

    def seconds(self, rows: Integers, shapes: Integers) -> Floats:
        """Return the seconds of many batches of exactly these sizes; inf for what cannot be run.

        `rows` (n,), `shapes` (n, d).
        """
        columns = np.empty((1 + shapes.shape[1], len(rows)))
        columns[0], columns[1:] = rows, shapes.T
        if self._row_calls is None:
            seconds = self._call_seconds(columns)
        else:
            counts = self._row_calls.counts(rows)
            batches, places = np.nonzero(counts)
            calls = columns[:, batches]
            calls[0] = np.array(self._row_calls.sizes)[places]
            each = self._call_seconds(calls) * counts[batches, places]
            seconds = np.asarray(np.bincount(batches, each, len(rows)), np.float64)
        if self._is_bounded:
            seconds[(columns > self._bounds).any(axis=0)] = inf
        return seconds

    def _rows_at(self, shapes: Sequence[Sizes]) -> list[Floats]:
        """Return the seconds of batches of 0 to `max_batch` rows at each shape."""
        count = self.profile.max_batch + 1
        found: list[Floats | None] = [None] * len(shapes)
        if self._grid is not None and self._row_calls is None and not self._static:
            found = self._grid.row_seconds(count - 1, shapes)
        missing = [shape for shape, seconds in zip(shapes, found, strict=True) if seconds is None]
        if missing:
            _, wide = _parted([(0, *shape) for shape in missing])
            many = self.seconds(np.tile(np.arange(count), len(missing)), np.repeat(wide, count, axis=0))
            others = iter(many.reshape(len(missing), count))
            rows = [next(others) if seconds is None else seconds for seconds in found]
        else:
            rows = [seconds for seconds in found if seconds is not None]
        if self._is_bounded:
            for shape, seconds in zip(shapes, rows, strict=True):
                if any(size > most for size, most in zip(shape, self._most[1:], strict=True)):
                    seconds[:] = inf
                elif self._most[0] < count:
                    seconds[int(self._most[0]) + 1 :] = inf
        return rows

    def _call_seconds(self, columns: Floats) -> Floats:
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

    # ------------------------------------------------------------ tries

    def is_try_due(self, calls: Calls, excess_s: float = 0.0, padded: float = 1.0) -> bool:
        """Tell whether a batch of these calls should be tried.

        `excess_s`: what it is predicted to take more than its requests apart. `padded`: its elements / those of the calls
        apart.
        """
        if not self.measured:
            return False
        tries = self.tries
        if tries.batches >= EVERY:
            grid = self._grid
            if grid is not None and all(tries.met_lately(grid.nearest(sizes)) for _, sizes in calls):
                return False
        elif tries.awaited or self._knows(calls):
            return False
        return excess_s <= TRIES_PART * tries.busy_s or (padded <= MOST_PADDED and not self._knows(calls))

    def _knows(self, calls: Calls) -> bool:
        """Tell whether these calls were measured, or ran since costs changed, and were not short the last time.

        Calls of several sizes count as known: one batch cannot tell their seconds apart.
        """
        ((_, sizes), *others) = calls
        if others or sizes in self._static:
            return True
        if self._grid is None:
            return elements_of(sizes) <= self._linear.reach[1]
        node = self._grid.nearest(sizes)
        return self.tries.knows(node) and not self.tries.was_short(node)

    # ------------------------------------------------------------ learning

    def observe(
        self,
        worker: str,
        rows: int,
        shape: Sizes,
        busy_s: float,
        preparations: int,
        requests: int,
    ) -> None:
        """Learn from a finished batch of these sizes."""
        calls = self.calls(rows, shape)
        self.batches += 1
        self.tries.ended(busy_s)
        number = 0
        for count, _ in calls:
            number += count
        ran_s = busy_s / number
        if ran_s > self._ran_s:
            self._ran_s = ran_s
            if ran_s > self.longest_call_s:
                self.longest_call_s = ran_s
                self.renew()
        if not preparations or self._is_too_dear(worker, rows, shape, busy_s):
            self._learn(worker, calls, busy_s, number, requests)
        elif self.measured:
            steady_s = self.second(rows, shape) * self.slowdown(worker)
            self.prepared(elements_of(calls[0][1]), steady_s, busy_s, preparations)
        else:
            self._fit(self.paid, calls, busy_s, number, requests)

    def _is_too_dear(self, worker: str, rows: int, shape: Sizes, busy_s: float) -> bool:
        """Tell whether a batch took much less with its preparation than its price without.

        Where sizes hardly ever come again, no other batch shows that a price is too high. A report of no seconds shows
        nothing.
        """
        if not self.measured or busy_s <= 0.0:
            return False
        return busy_s * exp(CLIP) < self.second(rows, shape) * self.slowdown(worker)

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
        worker: str,
        calls: Calls,
        busy_s: float,
        number: int,
        requests: int,
    ) -> None:
        own = self._slowdowns.get(worker, 0.0)
        if self._grid is None and worker in self._slots:
            # A linear cost has learned what all workers are off; a grid takes it over later.
            own -= self.mean_slowdown_log
        any_static = False
        for _, sizes in calls:
            if sizes in self._static:
                any_static = True
            else:
                self._make_room_for(sizes)
        each_s, expected_s = [], 0.0
        for count, sizes in calls:
            call_s = self._expected_s(sizes)
            each_s.append(call_s)
            expected_s += count * call_s
        off = log(max(busy_s, 1e-9) / max(expected_s, 1e-12)) - own
        if not any_static and self._test(worker, calls, off):
            return
        grid = self._grid
        difference = off if -CLIP <= off <= CLIP else copysign(CLIP, off)
        moved = False
        if self.measured:
            if worker in self._slots and (grid is not None or len(self._slots) > 1):
                self._slow_down(worker, SLOWDOWN_STEP * difference)
            moved = self._correct(calls, each_s, difference)
        if grid is None and not any_static:  # else the two parts cannot be told apart
            steady_s = busy_s / exp(own) if self._linear.measured else busy_s
            self._fit(self._linear, calls, steady_s, number, requests)
            self.measured = True
            if self._linear.moved():
                self.renew()
        if moved:
            self._publish()

    def _test(self, worker: str, calls: Calls, off: float) -> bool:
        """Test the prices of these calls by the logarithm of observed / expected seconds; tell if it was believed."""
        grid, tries = self._grid, self.tries
        if grid is None:
            if change := tries.lasting_change(worker, off):
                if len(self._slots) == 1:
                    self._linear = LinearCost()  # how its two parts compare is out of date as well
                else:
                    self._linear.rescale(exp(change))
            return False
        if len(calls) > 1:
            return False
        sizes = calls[0][1]
        node = grid.nearest(sizes)
        if tries.knows(node) and (change := tries.lasting_change(worker, off)):
            off = change - self._change(worker, change)
            if len(self._slots) == 1:
                tries.doubt()
        elif not tries.met_lately(node):
            tries.ran(node, off)
        if tries.knows(node):
            return False
        grid.believe(sizes, off, tries.knows)
        tries.believe(node)
        self._publish()
        return True

    def _change(self, worker: str, change: float) -> float:
        """Move a worker's slowdown by what all calls share of a lasting change; return by how much.

        Sizes that did not run are assumed at their best. If calls became shorter, all did. If they became longer, their
        size may be the cause, and other sizes shall be tried: the change is divided between slowdown and grid like that of
        one batch. If there are several workers, which share one grid, the worker has changed.
        """
        if worker not in self._slots:
            return 0.0
        is_all = change < 0.0 or len(self._slots) > 1
        moved = change if is_all else SLOWDOWN_STEP / (SLOWDOWN_STEP + STEP) * change
        self._slow_down(worker, moved)
        return moved

    def _expected_s(self, sizes: Sizes) -> float:
        """Return the expected seconds of one call by all observations, published or not."""
        if 0 in sizes:
            sizes = (1,) * len(sizes)
        grid = self._static.get(sizes) or self._grid
        return (
            float(self._call_seconds(np.array([sizes], np.float64).T)[0])
            if grid is None
            else grid.expected(sizes)
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
                if grid is self._grid:
                    self.tries.visit(grid.nearest(sizes))
                off = max(shift, -shift, max(nodes) + own, -min(nodes) - own)
                moved = moved or off * call_s > MOVED * (call_s + BATCH_S)
        return moved

    def _publish(self) -> None:
        """Let predictions follow all that was learned. The mean slowdown of all workers becomes part of the grid."""
        shift = self.mean_slowdown_log if self._grid is not None else 0.0
        for worker in self._slowdowns:
            self._slowdowns[worker] -= shift
        self._slowdowns_sum -= shift * len(self._slots)
        self.mean_slowdown_log = self._slowdowns_sum / max(1, len(self._slots))
        if self._grid is not None:
            self._grid.publish(shift, self.tries.bounding(), self.tries.estimating())
        for static in self._static.values():
            if static is not None:
                # Its only node has followed what its calls took, on whichever worker.
                static.publish(0.0)
        self._find_longest()
        self.renew()

    def renew(self) -> None:
        """Begin a new version: the prices of the last one are out of date."""
        self.version = next(self._versions)
        self._table.clear()

    def _make_room_for(self, sizes: Sizes) -> None:
        """Give the grid nodes for a call that lies far beyond it."""
        grid = self._grid
        if grid is None or grid.holds(sizes):
            return
        larger = grid.extended(sizes, self.tries.bounding())
        if larger is not grid:
            places = {node: place for place, node in enumerate(grid.nodes)}
            self.tries.carry([places.get(node) for node in larger.nodes])
            self._grid = larger

    def _find_longest(self) -> None:
        grids = [grid for grid in (self._grid, *self._static.values()) if grid is not None]
        self.longest_call_s = max([self._ran_s, *[grid.longest_s for grid in grids]])

    def learned(self, saved_at: float) -> LearnedCosts | None:
        """Return the corrections of the table by traffic; None without a table, or before any batch ran."""
        if not self._digest or not self.batches:
            return None
        shift = self.mean_slowdown_log if self._grid is not None else 0.0
        corrections: dict[Sizes, float] = {}
        for static in self._static.values():
            if static is not None:
                corrections |= static.corrections(shift)
        if self._grid is not None:
            corrections |= self._grid.corrections(shift, self.tries.bounding())
        # Nodes that were not measured, and linear costs, may reach further than anything that may be kept.
        kept = (
            (sizes, seconds)
            for sizes, seconds in corrections.items()
            if elements_of(sizes) <= MAX_ELEMENTS and seconds <= MAX_SECONDS
        )
        ends = self.new.ends()
        may_be_kept = (
            max(ends, default=0.0) <= MAX_ELEMENTS and max(ends.values(), default=0.0) <= MAX_SECONDS
        )
        return LearnedCosts(
            table=self._digest,
            batches=self.batches,
            saved_at=saved_at,
            seconds={
                sizes[0 if self.profile.has_batch else 1 :]: seconds
                for sizes, seconds in islice(kept, MAX_POINTS)
            },
            preparation=ends if may_be_kept else {},
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


def _parted(calls: Sequence[Sizes]) -> tuple[Integers, Integers]:
    """Return the rows (n,) and shapes (n, d) of calls (rows, *shape), whose sizes may be claimed beyond 64 bits."""
    bounded = np.array([[min(size, _MOST_SIZE) for size in own] for own in calls], np.intp)
    return bounded[:, 0], bounded[:, 1:]
