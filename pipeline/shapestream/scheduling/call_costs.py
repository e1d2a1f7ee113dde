"""Seconds and bytes of the call that a batch is run in: where a batch's sizes become a call's.

A request may be padded when it comes (size_steps.py). A batch has the sum of its members' rows and their largest shape.
Its call may be larger: where learned sizes are rounded to (rounding.py), or where a static model of a somewhat larger
shape is faster than the dynamic one. Where only some numbers of rows are allowed, it is several calls (`BatchCosts.calls`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, prod

import numpy as np

from shapestream.scheduling.batch_costs import CLOSE, BatchCosts
from shapestream.scheduling.cost_grid import Floats, Integers, Sizes, elements_of_many
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.rounding import ShapeRounding

USES = 8
"""Batches over which the preparation of a new shape is amortised when batches are compared. If it were charged in full,
only shapes that are prepared already would ever be chosen."""
_REST_OF_FIRST = 1.0 - 1.0 / USES
"""Part of a preparation that `Call.seconds` leaves out."""
_REMEMBERED = 2048
"""Shapes whose costs are remembered, and calls. When there are more, all are forgotten."""
_NOTHING = np.zeros(1)
NEAR_BEST = 1.01
"""Factor of the least seconds per row up to which a number of rows counts as the best."""


@dataclass(frozen=True, slots=True)
class Call:
    """The call that a batch is run as, and its seconds."""

    rows: int
    shape: Sizes
    seconds: float
    """For comparing calls: 1 / `USES` of the preparation is included."""
    preparation_s: float = 0.0
    """Seconds of preparing shapes that are new to the device."""


class CallCosts:
    """The costs of one model's batches on one worker, each in the call that it is run as."""

    def __init__(
        self, batch_costs: BatchCosts, profile: ModelProfile, rounding: ShapeRounding | None = None
    ) -> None:
        self.batch_costs = batch_costs
        self.profile = profile
        self.rounding = rounding
        self.bytes = CallBytes(profile, rounding)
        first = 1 if profile.has_batch else 0
        axes = range(first, len(profile.dimensions))
        self._padded_axes = [axis - first for axis in axes if axis not in profile.strings]
        """Axes of a shape along which a call may hold padding: all but mean bytes of strings."""
        self._statics = (
            [(shape[0], shape[1:]) for shape in profile.static_shapes] if profile.has_batch else []
        )
        self.measured = False
        """Whether predictions are seconds. If not, they only compare calls, and no deadline is judged by them."""
        self._version = -1
        """Of the prices that are remembered; when it changes, they are out of date."""
        self._rounding_version = -1
        """The same of the sizes that calls are rounded up to."""
        self._calls: dict[tuple[int, Sizes], Call] = {}
        """By rows and shape of their batch, where nothing else decides about a call."""
        self._tables: dict[Sizes, Floats] = {}
        self._best: dict[Sizes, tuple[int, int]] = {}
        # Preparations outlive versions: that a shape has become known is noted one by one.
        self._new: dict[Sizes, Floats] = {}
        self.prepares = False
        """Whether shapes that are new to the device are known to cost anything."""

    def renew(self) -> None:
        """Forget prices that are out of date. Call it before each batch."""
        worker_class = self.batch_costs.worker_class
        self.measured = worker_class.measured
        rounding = self.rounding
        if (
            worker_class.version != self._version
            or self.prepares != worker_class.new.measured
            or (rounding is not None and rounding.version != self._rounding_version)
        ):
            self._version = worker_class.version
            if rounding is not None:
                self._rounding_version = rounding.version
            self.prepares = worker_class.new.measured
            self._calls.clear()
            self._tables.clear()
            self._best.clear()

    def padded_part(self, shape: Sizes) -> Sizes:
        """Return the sizes of a shape along which a call may hold padding: all but mean bytes of strings."""
        return tuple([shape[axis] for axis in self._padded_axes]) if self.profile.strings else shape

    def padded_columns(self, shapes: Integers) -> list[Integers]:
        """Return `padded_part` of many shapes (n, d), as one array per size."""
        return [shapes[:, axis] for axis in self._padded_axes]

    # ------------------------------------------------------------ which call

    def call(self, rows: int, shape: Sizes) -> Call:
        """Return the call for a batch of these sizes, with its predicted seconds."""
        call = self._calls.get((rows, shape))
        if call is None:
            call = self._new_call(rows, shape)
            if self.rounding is None and not self.prepares and self.batch_costs.worker_class.has_grid:
                if len(self._calls) >= _REMEMBERED:
                    self._calls.clear()
                self._calls[rows, shape] = call
        return call

    def _new_call(self, rows: int, shape: Sizes) -> Call:
        call_rows, call_shape = rows, shape
        if self.rounding is not None:
            call_rows, call_shape = self.rounding.call_sizes(rows, shape)
        batch_costs = self.batch_costs
        seconds = batch_costs.second(call_rows, call_shape)
        static = self._static(rows, shape, seconds) if self._statics else None
        if static is not None:
            # Static models are prepared before they serve.
            return Call(rows, static, batch_costs.second(rows, static))
        new_s = batch_costs.preparation_s(call_rows, call_shape)
        return Call(call_rows, call_shape, seconds + new_s / USES, new_s)

    def exact_call(self, rows: int, shape: Sizes) -> Call:
        """Return the call of exactly these sizes, with its predicted seconds."""
        new_s = self.batch_costs.preparation_s(rows, shape)
        return Call(rows, shape, self.batch_costs.second(rows, shape) + new_s / USES, new_s)

    def expected_s(self, call: Call) -> float:
        """Return the seconds to expect of a call, preparation included; 0.0 where nothing is measured or it cannot run.

        Without its preparation, it is expected to take no longer than the longest call that was measured, or ran.
        """
        if not self.measured or not isfinite(call.seconds):
            return 0.0
        first_s = call.seconds + call.preparation_s * _REST_OF_FIRST
        longest_s = self.batch_costs.longest_s(call.rows, call.shape) + call.preparation_s
        return longest_s if longest_s < first_s else first_s

    def _static(self, rows: int, shape: Sizes, seconds: float) -> Sizes | None:
        """Return the shape of the static model that serves such a batch in the fewest seconds; None: no static model."""
        best = None
        for static_rows, static in self._statics:
            if static_rows == rows and self._fits(shape, static) and self.bytes.allow(rows, static, shape):
                other = self.batch_costs.second(rows, static)
                if other < seconds:
                    best, seconds = static, other
        return best

    def _fits(self, shape: Sizes, larger: Sizes) -> bool:
        """Tell whether requests of a shape may be padded to a larger one."""
        paddable = self.profile.paddable[1:] if self.profile.has_batch else self.profile.paddable
        return all(
            size == other or (padded and size < other)
            for size, other, padded in zip(shape, larger, paddable, strict=True)
        )

    def started(self, rows: int, shape: Sizes) -> None:
        """Note that a call of these sizes is about to run, so that the device will know them."""
        new = self._new.get(shape)
        if new is None or rows >= len(new) or not new[rows]:
            return
        if self.rounding is None:
            new[rows] = 0.0
            self._tables.pop(shape, None)
        else:
            # Batches of other sizes may be rounded to the same call. This happens once for each that there is.
            self._new.clear()
            self._tables.clear()
            self._best.clear()

    # ------------------------------------------------------------ many at once

    def seconds(self, rows: Integers, shapes: Integers) -> Floats:
        """Return the seconds of many different batches, without first calls: there are too many to ask for."""
        rows = np.maximum(rows, 1)
        called = (rows, shapes) if self.rounding is None else self.rounding.preview(rows, shapes)
        seconds = self.batch_costs.seconds(*called)
        for static_rows, static in self._statics:
            here = rows == static_rows
            for axis, padded in enumerate(self.profile.paddable[1:]):
                column = shapes[:, axis]
                here &= column <= static[axis] if padded else column == static[axis]
            seconds[here] = np.minimum(seconds[here], self.batch_costs.second(static_rows, static))
        return seconds

    def table(self, shapes: Integers, max_rows: int) -> Floats:
        """Return the seconds of 0 to `max_rows` rows at each of `shapes` (n, d): (n, max_rows + 1)."""
        rows = self._rows_at([tuple(shape) for shape in shapes.tolist()])
        return np.concatenate(rows).reshape(len(rows), -1)[:, : max_rows + 1]

    def row_seconds(self, shape: Sizes) -> Floats:
        """Return the seconds of 0 to `max_batch` rows at one shape."""
        return self._rows_at([shape])[0]

    @property
    def grows(self) -> bool:
        """Whether each batch is one call of its own sizes, so that a larger batch never takes less."""
        return self.rounding is None and not self._statics and self.profile.row_calls is None

    def useful_rows(self, shape: Sizes) -> tuple[int, int]:
        """Return two numbers of rows at one shape: with the least seconds per row, or nearly so; and within `CLOSE`."""
        best = self._best.get(shape)
        if best is None:
            # Once all of them are known to the device: requests of another shape may share a call without preparing.
            seconds = self._steady_seconds([shape])[0][1:]
            each = seconds / np.arange(1, len(seconds) + 1)
            least = each.min()
            full, close = [int((each <= near * least).argmax()) + 1 for near in (NEAR_BEST, CLOSE)]
            best = self._best[shape] = full, close
        return best

    def _rows_at(self, shapes: list[Sizes]) -> list[Floats]:
        """Return the seconds of 0 to `max_batch` rows at each shape, parts of preparations included."""
        tables = self._tables
        if len(tables) > _REMEMBERED:
            tables.clear()
            self._best.clear()
        if len(self._new) > _REMEMBERED:
            self._new.clear()
        missing = [shape for shape in shapes if shape not in tables]
        for shape, seconds in zip(missing, self._steady_seconds(missing) if missing else (), strict=True):
            table = tables[shape] = seconds + self._preparations(shape)
            table[0] = table[1]  # no batch has no rows
        return [tables[shape] for shape in shapes]

    def _steady_seconds(self, shapes: list[Sizes]) -> list[Floats]:
        """Return the seconds of 0 to `max_batch` rows at each shape, without preparations."""
        if self.rounding is None and not self._statics:
            return self.batch_costs.row_seconds(shapes)
        count = self.profile.max_batch + 1
        rows = np.tile(np.arange(count), len(shapes))
        wide = np.repeat(np.array(shapes, dtype=np.intp).reshape(len(shapes), -1), count, axis=0)
        return list(self.seconds(rows, wide).reshape(len(shapes), count))

    def _preparations(self, shape: Sizes) -> Floats:
        if not self.prepares:
            return _NOTHING
        new = self._new.get(shape)
        if new is None:
            if self.grows:
                prepared = self.batch_costs.preparations_s(shape)
            else:
                rows = range(1, self.profile.max_batch + 1)
                prepared = [self.call(own, shape).preparation_s for own in rows]
            new = self._new[shape] = np.array([prepared[0], *prepared]) / USES
        return new


class CallBytes:
    """Bytes of the inputs of one model's calls: what a worker has to find room for before it can run one.

    A request's own bytes say little about a call: that is as long as its longest member, and its strategy fills up rows.
    """

    __slots__ = ("_inputs", "_largest", "_rounding", "most", "planned_most")

    def __init__(self, profile: ModelProfile, rounding: ShapeRounding | None) -> None:
        first = 1 if profile.has_batch else 0
        # Every input has the batch axis, or the model has none.
        self._inputs = [
            (entry.nbytes, tuple([axis - first for axis in entry.axes if axis >= first]))
            for entry in profile.inputs
        ]
        self._rounding = rounding
        calls = profile.row_calls
        self._largest = None if calls is None else np.array([max(rows, default=0) for rows in calls], np.intp)
        """The rows of the largest call, by the rows of a batch; None: all of them."""
        bounds = profile.bounds[first:] if profile.bounds else (None,) * (len(profile.dimensions) - first)
        sizes = [most for most in bounds if most is not None]
        rows = profile.max_batch if rounding is None else rounding.most_rows
        if self._largest is not None:
            rows = int(self._largest.max())
        self.most = profile.max_batch_bytes if self._inputs else None
        """Bytes that a call may hold; None: any."""
        self.planned_most = self.most
        """The same for batches of several requests; None where none of them can hold more."""
        bounded = len(sizes) == len(bounds)
        if self.most is not None and bounded and rows * self._row_bytes(tuple(sizes)) <= self.most:
            self.planned_most = None

    def of_call(self, rows: int, shape: Sizes) -> int:
        """Return the bytes of a call of just these sizes."""
        return rows * self._row_bytes(shape)

    def allow(self, rows: int, larger: Sizes, shape: Sizes) -> bool:
        """Tell whether rows of a shape may be padded to a larger one: within the limit, which their own sizes may pass."""
        return self.most is None or self.of_call(rows, larger) <= max(self.most, self.of_call(rows, shape))

    def of_batch(self, rows: int, shape: Sizes) -> int:
        """Return the bytes of the largest call of a batch of these sizes, filled up as it would be run."""
        if self._rounding is not None:
            rows, shape = self._rounding.call_sizes(rows, shape)
        if self._largest is not None:
            rows = int(self._largest[min(rows, len(self._largest) - 1)])
        return rows * self._row_bytes(shape)

    def of_batches(self, rows: Integers, shapes: Integers) -> Floats:
        """Return `of_batch` of many batches: rows (n,), shapes (n, d)."""
        if self._rounding is not None:
            rows, shapes = self._rounding.preview(rows, shapes)
        if self._largest is not None:
            rows = self._largest[np.minimum(rows, len(self._largest) - 1)]
        per_row = np.zeros(len(rows))
        for nbytes, axes in self._inputs:
            per_row += nbytes * elements_of_many([shapes[:, axis] for axis in axes])
        return rows * per_row

    def _row_bytes(self, shape: Sizes) -> int:
        return sum([nbytes * prod([shape[axis] for axis in axes]) for nbytes, axes in self._inputs])
