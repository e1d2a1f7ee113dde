"""How many bytes the inputs of a call hold: what a worker has to find room for before it can run one.

A request's own bytes say little about it: a call is as long as its longest member, and as many rows are filled up as its
strategy asks for.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from shapestream.scheduling.cost_grid import elements_of_many
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.rounding import ShapeRounding

__all__ = ["CallBytes"]

Shape = tuple[int, ...]
Integers = NDArray[np.intp]


class CallBytes:
    """Of the calls of one model. A shape has no batch axis, as everywhere in the scheduler."""

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
        rows = profile.max_batch if self._largest is None else int(self._largest.max())
        self.most = profile.max_batch_bytes if self._inputs else None
        """What a call may hold; None: any."""
        self.planned_most = self.most
        """The same for batches of several requests; None where none of them can hold more."""
        bounded = len(sizes) == len(bounds)
        if self.most is not None and bounded and rows * self._row_bytes(tuple(sizes)) <= self.most:
            self.planned_most = None

    def of_call(self, rows: int, shape: Shape) -> int:
        """Bytes of a call of just these sizes."""
        return rows * self._row_bytes(shape)

    def of_batch(self, rows: int, shape: Shape) -> int:
        """Bytes of the largest call of a batch of these sizes, filled up as it would be run."""
        if self._rounding is not None:
            rows, shape = self._rounding.call_sizes(rows, shape)
        if self._largest is not None:
            rows = int(self._largest[min(rows, len(self._largest) - 1)])
        return rows * self._row_bytes(shape)

    def of_batches(self, rows: Integers, shapes: Integers) -> NDArray[np.float64]:
        """The same of many: rows (n,), shapes (n, d)."""
        if self._rounding is not None:
            rows, shapes = self._rounding.preview(rows, shapes)
        if self._largest is not None:
            rows = self._largest[np.minimum(rows, len(self._largest) - 1)]
        per_row = np.zeros(len(rows))
        for nbytes, axes in self._inputs:
            per_row += nbytes * elements_of_many([shapes[:, axis] for axis in axes])
        return rows * per_row

    def _row_bytes(self, shape: Shape) -> int:
        return sum([nbytes * prod([shape[axis] for axis in axes]) for nbytes, axes in self._inputs])
