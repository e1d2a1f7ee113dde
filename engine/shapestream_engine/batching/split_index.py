"""Outputs with as many rows as the data gave: a batch index, in each row or beside it, says whose it is.

Well-known servers divide such outputs by position, and hand one caller's detections to another without a word
when counts differ. Here every index is checked, and a batch that cannot be divided with certainty is refused.
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
from shapestream_engine.errors import RuleError
from shapestream_engine.ports import DimensionTable, OutputPort


class IndexSplitter(OutputSplitter):
    """The rule `index_column`."""

    def __init__(self, number: int, port: OutputPort, table: DimensionTable, column: int) -> None:
        super().__init__(number, port, table, [0])
        self._index_column = column

    def divide(self, division: Division) -> Column:
        """The rows of each request, with the index rewritten to count from 0 within the request.

        Raises `RuleError` for an index that is no integer within the batch, and where the element type cannot
        tell the rows of so large a batch apart.
        """
        output = self._checked(division)
        column, requests = self._index_column, len(division.rows)
        table = output[:, None] if output.ndim == 1 else output
        if column >= table.shape[1]:
            raise RuleError(
                f"output {self._port.name!r} has no column {column}; its shape is {list(output.shape)}"
            )
        index = self._batch_index(table[:, column], division.batch)
        # The start of each request, and behind the last that of the rows that belong to no request.
        starts = np.array([0, *accumulate(division.rows)])
        # The last request that starts at or before the index: of those that start together, only it has rows.
        owner = np.searchsorted(starts, index, side="right") - 1
        if starts[-1] == division.batch:
            starts = starts[:-1]
        counts = np.bincount(owner, minlength=len(starts))
        in_order = bool((owner[1:] >= owner[:-1]).all())
        order = None if in_order else np.argsort(owner, kind="stable")
        selection = Selection(order, counts[:requests].tolist(), len(output))
        division.selections[self._port.name] = selection
        own = selection.apply(table)
        if len(starts) > 1:
            own = own.copy() if in_order else own
            own[:, column] -= np.repeat(starts, counts).astype(output.dtype)
        return self._cut(own.reshape(output.shape), selection.counts, division)

    def join(self, parts: Sequence[Array], rows: Sequence[int]) -> Array:
        """The rows of each call after those of the one before, the index counting on."""
        self._check_exact(sum(rows))
        shifted = []
        for part, start in zip(parts, accumulate(rows, initial=0), strict=False):
            own = part.copy()
            table = own[:, None] if own.ndim == 1 else own
            table[:, self._index_column] += np.asarray(start).astype(own.dtype)
            shifted.append(own)
        return super().join(shifted, rows)

    def _batch_index(self, given: Array, rows: int) -> Array:
        """The index column as integers, each of them a row of the batch."""
        self._check_exact(rows)
        # Compared before the conversion, which would turn NaN, infinities and large values into anything.
        wrong = ~((given >= 0) & (given < rows))
        if given.dtype.kind not in "iu":
            wrong |= given != np.floor(given)
        if wrong.any():
            raise RuleError(
                f"output {self._port.name!r}: {given[wrong][0]} is no row of a batch of {rows}, "
                f"in row {int(wrong.argmax())}"
            )
        return given.astype(np.int64)

    def _check_exact(self, rows: int) -> None:
        element_type = self._port.element_type
        largest = LARGEST_EXACT.get(element_type)
        if largest is None:
            largest = int(np.iinfo(self._dtype).max)
        if rows - 1 > largest:
            raise RuleError(
                f"output {self._port.name!r}: an index of type {element_type} cannot tell {rows} rows apart"
            )


class ParallelSplitter(OutputSplitter):
    """The rule `with`."""

    STAGE = 1

    def __init__(self, number: int, port: OutputPort, table: DimensionTable, leader: str) -> None:
        super().__init__(number, port, table, [0])
        self._leader = leader

    def divide(self, division: Division) -> Column:
        """The rows beside those of the leader; raises `RuleError` where their numbers differ."""
        output = self._checked(division)
        selection = division.selections[self._leader]
        if len(output) != selection.total:
            raise RuleError(
                f"output {self._port.name!r} has {len(output)} rows, and {self._leader!r}, which it is "
                f"parallel to, {selection.total}"
            )
        division.selections[self._port.name] = selection
        return self._cut(selection.apply(output), selection.counts, division)
