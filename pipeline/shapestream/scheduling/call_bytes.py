"""Bytes of the inputs of calls: what a worker has to find room for before it can run one (`CallBytes`)."""

from __future__ import annotations

from math import prod

import numpy as np

from shapestream.scheduling.cost_grid import Floats, Integers, Sizes, elements_of_many
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.rounding import ShapeRounding


class CallBytes:
    """Bytes of the inputs of one model's calls.

    A request's own bytes say little about a call: that is as long as its longest member, and its strategy fills up rows.
    """

    __slots__ = ("_inputs", "_largest", "most", "planned_most", "rounding")

    def __init__(self, profile: ModelProfile, rounding: ShapeRounding | None) -> None:
        first = 1 if profile.has_batch else 0
        # Every input has the batch axis, or the model has none.
        self._inputs = [
            (entry.nbytes, tuple([axis - first for axis in entry.axes if axis >= first]))
            for entry in profile.inputs
        ]
        self.rounding = rounding
        """The rounding of calls' sizes."""
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
        """Bytes that a batch of several requests may hold; None where none of them can hold more."""
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
        if self.rounding is not None:
            rows, shape = self.rounding.call_sizes(rows, shape)
        if self._largest is not None:
            rows = int(self._largest[min(rows, len(self._largest) - 1)])
        return rows * self._row_bytes(shape)

    def of_batches(self, rows: Integers, shapes: Integers) -> Floats:
        """Return `of_batch` of many batches: rows (n,), shapes (n, d)."""
        if self.rounding is not None:
            rows, shapes = self.rounding.preview(rows, shapes)
        if self._largest is not None:
            rows = self._largest[np.minimum(rows, len(self._largest) - 1)]
        per_row = np.zeros(len(rows))
        for nbytes, axes in self._inputs:
            per_row += nbytes * elements_of_many([shapes[:, axis] for axis in axes])
        return rows * per_row

    def _row_bytes(self, shape: Sizes) -> int:
        return sum([nbytes * prod([shape[axis] for axis in axes]) for nbytes, axes in self._inputs])
