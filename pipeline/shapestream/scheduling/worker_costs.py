"""The costs of one model's batches on one worker, each in the calls that it is run as (`WorkerCosts`).

A price is what its class knows (worker_class.py) and, once that is known to cost anything, a part of what it takes to
prepare shapes that are new to the worker's devices.
"""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite, prod
from typing import NamedTuple

import numpy as np

from shapestream.scheduling.cost_grid import Floats, Integers, Sizes, elements_of, elements_of_many
from shapestream.scheduling.worker_class import ShapePrices, WorkerClass

USES = 8
"""Batches over which the preparation of a new shape is amortised when batches are compared. If it were charged in full,
only shapes that are prepared already would ever be chosen."""
_REST_OF_FIRST = 1.0 - 1.0 / USES
"""Part of a preparation that `Call.seconds` leaves out."""
MOST_KNOWN_SHAPES = 4096
"""Call shapes that a worker's devices are assumed to keep prepared. The least recently used one is forgotten first."""
_REMEMBERED = 2048
"""Shapes whose preparations are remembered. When there are more, all are forgotten."""


class Call(NamedTuple):
    """The call that a batch is run as, and its seconds."""

    rows: int
    shape: Sizes
    seconds: float
    """For comparing calls: 1 / `USES` of the preparation is included."""
    preparation_s: float = 0.0
    """Seconds of preparing shapes that are new to the device."""


class WorkerCosts:
    """The costs of one model's batches on one worker, each in the calls that it is run as."""

    __slots__ = (
        "_is_one_call",
        "_known",
        "_new",
        "_padded_axes",
        "_version",
        "_windows",
        "bytes",
        "profile",
        "rounding",
        "worker",
        "worker_class",
    )

    def __init__(self, worker_class: WorkerClass, worker: str) -> None:
        self.worker_class = worker_class
        self.profile = profile = worker_class.profile
        self.rounding = worker_class.rounding
        self.worker = worker
        self.bytes = worker_class.bytes
        self._is_one_call = profile.row_calls is None
        first = 1 if profile.has_batch else 0
        self._padded_axes = [
            axis - first for axis in range(first, len(profile.dimensions)) if axis not in profile.strings
        ]
        """Axes of a shape along which a call may hold padding: all but mean bytes of strings."""
        self._known: dict[Sizes, None] = {}
        self._new: dict[Sizes, Floats] = {}
        """By shape, what preparing costs a batch of 0 to `max_batch` rows. It outlives versions: that the device has come to
        know a shape is noted one by one."""
        self._windows: dict[Sizes, Floats] = {}
        """The seconds of the table with these, by shape, in one version."""
        self._version = -1

    @property
    def slowdown(self) -> float:
        """Seconds on this worker / mean seconds on all workers of its class; 1.0 of a worker that left."""
        return self.worker_class.slowdown(self.worker)

    def padded_part(self, shape: Sizes) -> Sizes:
        """Return the sizes of a shape along which a call may hold padding: all but mean bytes of strings."""
        return tuple([shape[axis] for axis in self._padded_axes]) if self.profile.strings else shape

    def padded_columns(self, shapes: Integers) -> list[Integers]:
        """Return `padded_part` of many shapes (n, d), as one array per size."""
        return [shapes[:, axis] for axis in self._padded_axes]

    # ------------------------------------------------------------ calls

    def call(self, rows: int, shape: Sizes) -> Call:
        """Return the call for a batch of these sizes, with its predicted seconds."""
        prices = self.worker_class
        if prices.is_plain:
            return self.exact_call(rows, shape)
        call_rows, call_shape, seconds = prices.steady_call(rows, shape)
        if call_rows == rows and (rows, call_shape) in prices.statics:
            # Static models are prepared before they serve.
            return Call(rows, call_shape, seconds)
        new_s = self.preparation_s(call_rows, call_shape)
        return Call(call_rows, call_shape, seconds + new_s / USES, new_s)

    def exact_call(self, rows: int, shape: Sizes) -> Call:
        """Return the call of exactly these sizes, with its predicted seconds."""
        seconds, new_s = self.worker_class.second(rows, shape), 0.0
        if self.worker_class.new.measured:
            new_s = self.preparation_s(rows, shape)
            seconds += new_s / USES
        return tuple.__new__(Call, (rows, shape, seconds, new_s))  # see `member_of` in ends.py

    def expected_s(self, call: Call) -> float:
        """Return the seconds to expect of a call, preparation included; 0.0 where nothing is measured or it cannot run.

        Without its preparation, it is expected to take no longer than the longest call that was measured, or ran.
        """
        rows, shape, seconds, preparation_s = call
        if not self.worker_class.measured or not isfinite(seconds):
            return 0.0
        first_s = seconds + preparation_s * _REST_OF_FIRST
        longest_s = self.worker_class.longest_s(rows, shape) + preparation_s
        return longest_s if longest_s < first_s else first_s

    def row_seconds(self, shape: Sizes) -> Floats:
        """Return the seconds of 0 to `max_batch` rows at one shape, parts of preparations included."""
        prices = self.worker_class
        row = prices.prices(shape)
        if not prices.new.measured:
            return prices.run_seconds(row, shape)
        return self._with_preparations(row, shape)

    def table(self, shapes: Integers, max_rows: int) -> Floats:
        """Return the seconds of 0 to `max_rows` rows at each of `shapes` (n, d): (n, max_rows + 1)."""
        prices, named = self.worker_class, [tuple(shape) for shape in shapes.tolist()]
        found = zip(prices.price(named), named, strict=True)
        if prices.new.measured:
            rows = [self._with_preparations(row, shape) for row, shape in found]
        else:
            rows = [prices.run_seconds(row, shape) for row, shape in found]
        return np.concatenate(rows).reshape(len(rows), -1)[:, : max_rows + 1]

    def _with_preparations(self, row: ShapePrices, shape: Sizes) -> Floats:
        prices = self.worker_class
        if self._version != prices.version or len(self._windows) > _REMEMBERED:
            self._version = prices.version
            self._windows.clear()
        seconds = self._windows.get(shape)
        if seconds is None:
            seconds = self._windows[shape] = prices.run_seconds(row, shape) + self._preparations(shape)
        return seconds

    def seconds(self, rows: Integers, shapes: Integers) -> Floats:
        """Return the seconds of many different batches, parts of preparations included: rows (n,), shapes (n, d)."""
        seconds = self.worker_class.run_seconds_of(rows, shapes)
        if self.worker_class.new.measured and self.worker_class.grows:
            seconds += self._first_calls_s(rows, shapes) / USES
        return seconds

    def _first_calls_s(self, rows: Integers, shapes: Integers) -> Floats:
        """Return `preparation_s` of many batches, each one call of its own sizes."""
        new, known = self.worker_class.new, self._known
        first_s = np.minimum(
            new.fixed_s + new.element_s * rows * elements_of_many(shapes.T.astype(np.float64)), new.longest_s
        )
        sizes = zip(rows.tolist(), *shapes.T.tolist(), strict=True)
        met = [place for place, own in enumerate(sizes) if self._of_tensors(own) in known]
        first_s[met] = 0.0
        first_s[(shapes == 0).any(axis=1)] = 0.0
        return first_s

    # ------------------------------------------------------------ preparations

    def started(self, rows: int, shape: Sizes) -> None:
        """Note that a call of these sizes is about to run, so that the device will know them."""
        new = self._new.get(shape)
        if new is None or rows >= len(new) or not new[rows]:
            return
        if self.rounding is None:
            new[rows] = 0.0
            self._windows.pop(shape, None)
        else:
            # Batches of other sizes may be rounded to the same call. This happens once for each that there is.
            self._new.clear()
            self._windows.clear()

    def _preparations(self, shape: Sizes) -> Floats:
        new = self._new.get(shape)
        if new is None:
            if len(self._new) > _REMEMBERED:
                self._new.clear()
            if self.worker_class.grows:
                prepared = self.preparations_s(shape)
            else:
                rows = range(1, self.profile.max_batch + 1)
                prepared = [self.call(own, shape).preparation_s for own in rows]
            new = self._new[shape] = np.array([prepared[0], *prepared]) / USES
        return new

    def first_call_s(self, elements: float) -> float:
        """Return the extra seconds of a call of so many elements whose shape is new to the device; 0.0 while unknown."""
        new = self.worker_class.new
        return min(new.second(elements), new.longest_s) if new.measured else 0.0

    def preparation_s(self, rows: int, shape: Sizes) -> float:
        """Return the extra seconds of a batch for calls whose shapes are new to the device.

        0.0 if all are prepared, if no preparation was measured, or if the batch has no elements.
        """
        new = self.worker_class.new
        if not new.measured or (not rows and self._is_one_call) or 0 in shape:
            return 0.0
        if self._is_one_call:
            sizes = (rows, *shape)
            if (self._of_tensors(sizes) if self.profile.strings else sizes) in self._known:
                return 0.0
        unknown = [
            sizes
            for _, sizes in self.worker_class.calls(rows, shape)
            if self._of_tensors(sizes) not in self._known
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

    def met(self, rows: int, shape: Sizes) -> None:
        """Note that the device has prepared the calls of a batch of these sizes."""
        known = self._known
        for _, call_sizes in self.worker_class.calls(rows, shape):
            sizes = self._of_tensors(call_sizes) if self.profile.strings else call_sizes
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
