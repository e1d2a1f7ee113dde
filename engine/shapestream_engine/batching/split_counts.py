"""Outputs that are counted by another: concatenated rows, padded tables, and totals over the batch.

Counts are an output of the model and as trustworthy as any: each must be a whole number from 0, exact in its element
type, and together they must be what is there. A batch of which that is not true is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from shapestream_engine.batching.split import (
    LARGEST_EXACT,
    Array,
    Column,
    Division,
    OutputSplitter,
    Selection,
)
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import RuleError
from shapestream_engine.ports import DimensionTable, OutputPort


class Counter:
    """The output that counts for others: one number per row of the batch."""

    def __init__(self, number: int, port: OutputPort) -> None:
        self._number = number
        self._dtype = dtype_of(port.element_type)
        exact = LARGEST_EXACT.get(port.element_type) or int(np.iinfo(self._dtype).max) + 1
        # What `int64` does not hold, such as a -1 that the model has wrapped to u64, would be -1 again.
        self._largest = min(exact, 1 << 63)
        self.name = port.name
        self.element_type = port.element_type

    def read(self, division: Division) -> Array:
        """The counts as `int64`, one per row; raises `RuleError` unless each is a count beyond doubt."""
        given = division.outputs[self._number]
        if given.dtype != self._dtype or given.size != division.batch:
            raise RuleError(
                f"output {self.name!r} counts {given.size} rows as {given.dtype}; "
                f"the call has {division.batch}, and its port says {self.element_type}"
            )
        given = given.reshape(-1)
        # Compared before the conversion, which would turn NaN, infinities and large values into anything. The largest
        # exact float may stand for its neighbour as well, an integer for no other.
        wrong = ~((given >= 0) & (given <= self._largest - 1))
        if given.dtype.kind not in "iu":
            wrong |= given != np.floor(given)
        if wrong.any():
            raise RuleError(
                f"output {self.name!r}: {given[wrong][0]} is no count, in row {int(wrong.argmax())} of the batch"
            )
        return given.astype(np.int64)

    def check_holds(self, size: int, port: OutputPort) -> None:
        """Raises `RuleError` where the element type has no exact number for `size`: a smaller one may be it, wrapped."""
        if size >= self._largest:
            raise RuleError(
                f"output {port.name!r} has room for {size}, which its counts, {self.name!r} of type "
                f"{self.element_type}, cannot say"
            )


class ConcatenatedSplitter(OutputSplitter):
    """The rule `counts`."""

    def __init__(self, number: int, port: OutputPort, table: DimensionTable, counter: Counter) -> None:
        super().__init__(number, port, table, [0])
        self._counter = counter

    def divide(self, division: Division) -> Column:
        """The rows of each request, one run each; raises `RuleError` where the counts do not sum up to the rows."""
        output = self._checked(division)
        counts = self._counter.read(division).tolist()
        if sum(counts) != len(output):
            raise RuleError(
                f"output {self._port.name!r} has {len(output)} rows, and {self._counter.name!r}, which counts "
                f"them, sums up to {sum(counts)}"
            )
        selection = Selection(None, _per_request(counts, division), len(output))
        division.selections[self._port.name] = selection
        return self._cut(output, selection.counts, division)


class PaddedSplitter(OutputSplitter):
    """The rule `padded_counts`."""

    def __init__(self, number: int, port: OutputPort, table: DimensionTable, counter: Counter) -> None:
        # The signature has checked that there are both.
        assert port.batch_axis is not None
        assert port.data_axis is not None
        self._batch_axis, self._data_axis = port.batch_axis, port.data_axis
        super().__init__(number, port, table, [self._batch_axis, self._data_axis])
        self._join_axis = self._batch_axis
        name = port.shape.names[self._data_axis]
        # The data axis of labels per character, say, is as long as the padded input; no request has more than its own.
        self._bound = table.names.index(name) if name in table.names else None
        self._counter = counter

    def divide(self, division: Division) -> Column:
        """Each request's own rows, the data axis trimmed to the largest count among them; 0 beyond each row's count.

        Raises `RuleError` where a row counts more than there is.
        """
        output = self._checked(division)
        self._check_size(output, self._batch_axis, division.batch)
        counts = self._counter.read(division)
        self._check_counts(output, counts, division)
        trims = self._trims(output, division)
        per_row = counts.tolist()
        division.selections[self._port.name] = Selection(None, _per_request(per_row, division), sum(per_row))
        column = Column([], [])
        region = [slice(None)] * output.ndim
        start = 0
        for shape in division.shapes:
            own_counts = per_row[start : start + shape.rows]
            most = max(own_counts, default=0)
            region[self._batch_axis] = slice(start, start + shape.rows)
            region[self._data_axis] = slice(most)
            for axis, dimension, extent in trims:
                region[axis] = slice(extent.of(shape.sizes[dimension]))
            own = output[tuple(region)]
            if own_counts and min(own_counts) < most:
                own = self._blanked(own, counts[start : start + shape.rows], most)
            self._append(column, own)
            start += shape.rows
        return column

    def join(self, parts: Sequence[Array], rows: Sequence[int]) -> Array:
        """One table as long as the longest of them; beyond a row's own count there is 0, as in each of them."""
        most = max(part.shape[self._data_axis] for part in parts)
        grown = []
        for part in parts:
            widths = [(0, 0)] * part.ndim
            widths[self._data_axis] = (0, most - part.shape[self._data_axis])
            grown.append(np.pad(part, widths))
        return super().join(grown, rows)

    def _blanked(self, own: Array, counts: Array, most: int) -> Array:
        """Copy the table without the model's leftovers beyond the counts, which may be anything."""
        own = own.copy()
        beyond = counts[:, None] <= np.arange(most)
        np.moveaxis(own, (self._batch_axis, self._data_axis), (0, 1))[beyond] = 0
        return own

    def _check_counts(self, output: Array, counts: Array, division: Division) -> None:
        room = output.shape[self._data_axis]
        self._counter.check_holds(room, self._port)
        limits = np.full(len(counts), room)
        if (bound := self._bound) is not None:
            self._check_size(output, self._data_axis, division.sizes[bound])
            own = np.repeat([shape.sizes[bound] for shape in division.shapes], division.rows)
            limits[: len(own)] = own
        over = counts > limits
        if over.any():
            row = int(over.argmax())
            raise RuleError(
                f"output {self._port.name!r} has room for {limits[row]} in row {row} of the batch, and "
                f"{self._counter.name!r} counts {counts[row]}"
            )


class TotalSplitter(OutputSplitter):
    """The rule `recount`."""

    STAGE = 2

    def __init__(self, number: int, port: OutputPort, table: DimensionTable, leader: str) -> None:
        super().__init__(number, port, table, ())
        self._leader = leader

    def divide(self, division: Division) -> Column:
        """Each request's own number; raises `RuleError` where the model's is not that of the whole batch."""
        output = self._checked(division)
        selection = division.selections[self._leader]
        if output.size != 1:
            raise RuleError(
                f"output {self._port.name!r} is not one number; its shape is {list(output.shape)}"
            )
        if output.item() != selection.total:
            raise RuleError(
                f"output {self._port.name!r} says {output.item()}, and {self._leader!r}, which it counts, "
                f"has {selection.total}"
            )
        own = self._exact(selection.counts)
        entry = (self._number, self._port.element_type, output.shape)
        return Column([entry] * len(own), [number.tobytes() for number in own])

    def join(self, parts: Sequence[Array], rows: Sequence[int]) -> Array:
        """The sum of what was counted in each call."""
        total = sum(int(part.item()) for part in parts)
        return self._exact([total]).reshape(parts[0].shape)

    def _exact(self, counts: list[int]) -> Array:
        own = np.array(counts, np.int64).astype(self._dtype)
        if own.astype(np.int64).tolist() != counts:
            raise RuleError(
                f"output {self._port.name!r}: {self._port.element_type} has no exact number for one of the "
                f"requests' own counts of {self._leader!r}"
            )
        return own


def _per_request(per_row: list[int], division: Division) -> list[int]:
    ends = accumulate(division.rows)
    return [sum(per_row[end - rows : end]) for end, rows in zip(ends, division.rows, strict=True)]
