"""Outputs with as many rows as the data gave: a batch index, in each row or beside it, says whose it is.

Well-known servers divide such outputs by position, and hand one caller's detections to another without a word
when counts differ. Here every index is checked, and a batch that cannot be divided with certainty is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from shapestream_engine.batching.split import Array, Column, OutputSplitter
from shapestream_engine.errors import RuleError
from shapestream_engine.ports import OutputPort

__all__ = ["IndexSplitter", "ParallelSplitter", "Selection"]

_LARGEST_EXACT_INDEX = {"bf16": 2**8, "f16": 2**11, "f32": 2**24, "f64": 2**53}
"""Up to here each float type holds every integer; above, neighbouring rows of a batch have the same index."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of a data-dependent output are whose; shared with the outputs that run parallel to it."""

    order: Array | None
    """Row numbers sorted by request, stable; None where the rows are in that order already."""
    counts: list[int]
    """Rows of each request."""
    total: int

    def apply(self, output: Array) -> Array:
        """The rows in the order of their requests."""
        return output if self.order is None else output[self.order]


class IndexSplitter(OutputSplitter):
    """The rule `index_column`."""

    def __init__(self, number: int, port: OutputPort, column: int) -> None:
        super().__init__(number, port)
        self.name = port.name
        self._index_column = column

    def divide(self, output: Array, rows: Sequence[int]) -> tuple[Column, Selection]:
        """The rows of each request, with the index rewritten to count from 0 within the request.

        `rows` are the batch rows of each request. Raises `RuleError` for an index that is no integer within
        the batch, and where the element type cannot tell the rows of so large a batch apart.
        """
        self._check_kind(output)
        column = self._index_column
        table = output[:, None] if output.ndim == 1 else output
        if column >= table.shape[1]:
            raise RuleError(
                f"output {self._port.name!r} has no column {column}; its shape is {list(output.shape)}"
            )
        index = self._batch_index(table[:, column], sum(rows))
        starts = np.array([0, *accumulate(rows)][:-1])
        # The last request that starts at or before the index: of those that start together, only it has rows.
        owner = np.searchsorted(starts, index, side="right") - 1
        counts = np.bincount(owner, minlength=len(rows))
        in_order = bool((owner[1:] >= owner[:-1]).all())
        selection = Selection(
            None if in_order else np.argsort(owner, kind="stable"), counts.tolist(), len(output)
        )
        own = selection.apply(table)
        if len(rows) > 1:
            own = own.copy() if in_order else own
            own[:, column] -= np.repeat(starts, counts).astype(output.dtype)
        return self._cut(own.reshape(output.shape), selection.counts), selection

    def _batch_index(self, given: Array, rows: int) -> Array:
        """The index column as integers, each of them a row of the batch."""
        element_type = self._port.element_type
        largest = _LARGEST_EXACT_INDEX.get(element_type)
        if largest is None:
            largest = int(np.iinfo(given.dtype).max)
        if rows - 1 > largest:
            raise RuleError(
                f"output {self._port.name!r}: an index of type {element_type} cannot tell {rows} rows apart"
            )
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


class ParallelSplitter(OutputSplitter):
    """The rule `with`."""

    def __init__(self, number: int, port: OutputPort, leader: str) -> None:
        super().__init__(number, port)
        self.leader = leader

    def divide(self, output: Array, selection: Selection) -> Column:
        """The rows beside those of `leader`; raises `RuleError` where their numbers differ."""
        self._check_kind(output)
        if len(output) != selection.total:
            raise RuleError(
                f"output {self._port.name!r} has {len(output)} rows, and {self.leader!r}, which it is "
                f"parallel to, {selection.total}"
            )
        return self._cut(selection.apply(output), selection.counts)
