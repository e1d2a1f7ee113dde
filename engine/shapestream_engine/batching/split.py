"""One output of a call, divided among the requests by its rule. Everything is copied: nothing aliases the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from shapestream_engine.dimension_table import DimensionTable
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import RuleError
from shapestream_engine.ports import OutputPort
from shapestream_engine.resolution import RequestShape

__all__ = ["Column", "IndexSplitter", "RowSplitter", "Selection", "whole_column"]

_SLICE_BELOW_BYTES = 4096
"""Mean bytes per request up to which the output is copied as a whole and then sliced.

A slice of bytes costs some 50 ns, a copy by NumPy several hundred; beyond a few KiB copying twice costs more.
"""

_EXACT_FLOAT_INDICES = {"bf16": 2**8, "f16": 2**11, "f32": 2**24, "f64": 2**53}
"""Up to here each float type holds every integer; above, neighbouring rows have the same index."""

_Array: TypeAlias = "np.ndarray[Any, Any]"
_Entry: TypeAlias = tuple[int, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Column:
    """One output's part of every result: rows of their layouts, and their bytes."""

    entries: list[_Entry]
    buffers: list[bytes]


@dataclass(frozen=True, slots=True)
class Selection:
    """Whose rows a data-dependent output holds; shared with the outputs that run parallel to it."""

    order: _Array | None
    """Row numbers, sorted by request, stable; None where they are in order already."""
    counts: list[int]
    """Rows of each request."""
    total: int

    def apply(self, output: _Array) -> _Array:
        """The rows in the order of their requests."""
        return output if self.order is None else output[self.order]


def whole_column(number: int, port: OutputPort, output: _Array) -> Column:
    """The output as it is, for the only request of the call."""
    _check_type(port, output)
    return Column([(number, port.element_type, output.shape)], [output.tobytes()])


class RowSplitter:
    """The rule `rows`: consecutive rows of the batch axis, padded axes trimmed back."""

    def __init__(self, number: int, port: OutputPort, table: DimensionTable) -> None:
        assert port.batch_axis is not None
        self._number = number
        self._port = port
        self._axis = port.batch_axis
        # (axis, number of the input dimension that it follows), without the batch axis.
        self._follows = tuple(
            (axis, table.names.index(name))
            for axis, name in enumerate(port.shape.names)
            if axis != self._axis and name in table.names
        )

    def divide(self, output: _Array, sizes: tuple[int, ...], shapes: Sequence[RequestShape]) -> Column:
        """Each request's rows; raises `RuleError` where the output does not have the call's sizes."""
        self._check(output, sizes)
        trims = [
            (axis, dimension)
            for axis, dimension in self._follows
            if any(shape.sizes[dimension] != sizes[dimension] for shape in shapes)
        ]
        if trims or any(size != 1 for size in output.shape[: self._axis]):
            return self._divide_regions(output, trims, shapes)
        head, tail = output.shape[: self._axis], output.shape[self._axis + 1 :]
        rows = [shape.rows for shape in shapes]
        entries = {
            count: (self._number, self._port.element_type, (*head, count, *tail)) for count in set(rows)
        }
        rows_first = output.reshape(output.shape[self._axis], *tail)
        return Column([entries[count] for count in rows], _cut(rows_first, rows))

    def _divide_regions(
        self, output: _Array, trims: list[tuple[int, int]], shapes: Sequence[RequestShape]
    ) -> Column:
        column = Column([], [])
        region = [slice(None)] * output.ndim
        start = 0
        for shape in shapes:
            region[self._axis] = slice(start, start + shape.rows)
            start += shape.rows
            for axis, dimension in trims:
                region[axis] = slice(shape.sizes[dimension])
            own = output[tuple(region)]
            column.entries.append((self._number, self._port.element_type, own.shape))
            column.buffers.append(own.tobytes())
        return column

    def _check(self, output: _Array, sizes: tuple[int, ...]) -> None:
        _check_type(self._port, output)
        for axis, dimension in ((self._axis, 0), *self._follows):
            if output.shape[axis] != sizes[dimension]:
                name = self._port.shape.names[axis]
                raise RuleError(
                    f"output {self._port.name!r} has {output.shape[axis]} along {name!r} (axis {axis}) of a call "
                    f"with {sizes[dimension]}; its shape is {list(output.shape)}"
                )


class IndexSplitter:
    """The rules `index_column` and `with`: rows that name their request by its batch index, and rows beside them."""

    def __init__(self, number: int, port: OutputPort) -> None:
        self._number = number
        self._port = port

    def select(self, output: _Array, column: int, rows: Sequence[int]) -> tuple[Column, Selection]:
        """The rows of each request, with the index rewritten to count from 0 within the request.

        `rows` are the batch rows of each request. Raises `RuleError` for an index that is not an integer within the batch.
        """
        _check_type(self._port, output)
        table = output.reshape(len(output), -1) if output.ndim != 2 else output
        if not 0 <= column < table.shape[1]:
            raise RuleError(
                f"output {self._port.name!r} has no column {column}; its shape is {list(output.shape)}"
            )
        index = self._batch_index(table[:, column], sum(rows))
        starts = np.fromiter(accumulate(rows, initial=0), np.int64, len(rows) + 1)[:-1]
        # The last request that starts at or before the index: of those that start together only the last has rows.
        owner = np.searchsorted(starts, index, side="right") - 1
        counts = np.bincount(owner, minlength=len(rows))
        order = None if bool((owner[1:] >= owner[:-1]).all()) else np.argsort(owner, kind="stable")
        selection = Selection(order, counts.tolist(), len(output))
        own = selection.apply(table)
        if len(rows) > 1:
            own = own.copy() if order is None else own
            own[:, column] -= np.repeat(starts, counts).astype(output.dtype)
        return self._column(own.reshape(output.shape), selection), selection

    def follow(self, output: _Array, leader: str, selection: Selection) -> Column:
        """The rows beside those of `leader`; raises `RuleError` where there are more or fewer of them."""
        _check_type(self._port, output)
        if len(output) != selection.total:
            raise RuleError(
                f"output {self._port.name!r} has {len(output)} rows, and {leader!r}, which it runs parallel to, "
                f"{selection.total}"
            )
        return self._column(selection.apply(output), selection)

    def _batch_index(self, given: _Array, rows: int) -> _Array:
        """The index column as integers, checked: each one a row of the batch."""
        element_type = self._port.element_type
        highest = _EXACT_FLOAT_INDICES.get(element_type)
        if highest is None:
            highest = int(np.iinfo(given.dtype).max)
        if rows - 1 > highest:
            raise RuleError(
                f"output {self._port.name!r}: {element_type} cannot tell {rows} rows of a batch apart"
            )
        # Compared before the conversion, which would turn NaN, infinities and large values into anything.
        outside = ~((given >= 0) & (given < rows))
        if given.dtype.kind not in "iu":
            outside |= given != np.floor(given)
        if outside.any():
            wrong = given[outside][0]
            raise RuleError(f"output {self._port.name!r}: {wrong} is no row of a batch of {rows}")
        return given.astype(np.int64)

    def _column(self, own: _Array, selection: Selection) -> Column:
        tail = own.shape[1:]
        entries = {
            count: (self._number, self._port.element_type, (count, *tail)) for count in set(selection.counts)
        }
        return Column([entries[count] for count in selection.counts], _cut(own, selection.counts))


def _cut(rows_first: _Array, counts: Sequence[int]) -> list[bytes]:
    """The bytes of consecutive runs of rows, `counts` long."""
    ends = accumulate(counts)
    if rows_first.nbytes > _SLICE_BELOW_BYTES * len(counts):
        return [rows_first[end - count : end].tobytes() for end, count in zip(ends, counts, strict=True)]
    everything = rows_first.tobytes()
    row_nbytes = len(everything) // len(rows_first) if len(rows_first) else 0
    return [
        everything[(end - count) * row_nbytes : end * row_nbytes]
        for end, count in zip(ends, counts, strict=True)
    ]


def _check_type(port: OutputPort, output: _Array) -> None:
    if output.dtype != dtype_of(port.element_type):
        raise RuleError(f"output {port.name!r} is of type {output.dtype}, its port says {port.element_type}")
    if output.ndim != port.shape.rank:
        raise RuleError(
            f"output {port.name!r} has the shape {list(output.shape)}, its port says [{port.shape}]"
        )
