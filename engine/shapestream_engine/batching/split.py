"""One output of a call, divided among the requests by its rule. Everything is copied; nothing aliases it."""

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

__all__ = ["Array", "Column", "OutputSplitter", "RowSplitter"]

_SLICE_BELOW_BYTES = 4096
"""Mean bytes per request up to which the output is copied as a whole and then sliced.

A slice of bytes costs some 50 ns, a copy by NumPy several hundred; beyond a few KiB copying twice costs more.
"""

Array: TypeAlias = "np.ndarray[Any, Any]"
_Entry: TypeAlias = tuple[int, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Column:
    """One output's part of every result, in the order of the requests."""

    entries: list[_Entry]
    """Rows of the results' layouts."""
    buffers: list[bytes]


class OutputSplitter:
    """What every rule needs of its output: its number, its type, and cutting it into runs of rows."""

    def __init__(self, number: int, port: OutputPort) -> None:
        self._number = number
        self._port = port
        self._dtype = dtype_of(port.element_type)

    def _check_kind(self, output: Array) -> None:
        if output.dtype != self._dtype:
            raise RuleError(
                f"output {self._port.name!r} is of type {output.dtype}, "
                f"its port says {self._port.element_type}"
            )
        if output.ndim != self._port.shape.rank:
            raise RuleError(
                f"output {self._port.name!r} has the shape {list(output.shape)}, "
                f"its port says [{self._port.shape}]"
            )

    def _cut(self, output: Array, counts: Sequence[int], *, axis: int = 0) -> Column:
        """Consecutive runs of rows, `counts` long; before `axis` there are only axes of size 1."""
        head, tail = output.shape[:axis], output.shape[axis + 1 :]
        entries = {
            count: (self._number, self._port.element_type, (*head, count, *tail)) for count in set(counts)
        }
        rows_first = output.reshape(output.shape[axis:])
        return Column([entries[count] for count in counts], _cut_bytes(rows_first, counts))


class RowSplitter(OutputSplitter):
    """The rules `rows` and `whole`: consecutive rows, or everything, with padded axes trimmed back."""

    def __init__(self, number: int, port: OutputPort, table: DimensionTable) -> None:
        super().__init__(number, port)
        self._axis = port.batch_axis if table.has_batch else None
        # (axis, number of the input dimension that it follows), without the batch axis.
        self._follows = tuple(
            (axis, table.names.index(name))
            for axis, name in enumerate(port.shape.names)
            if axis != self._axis and name in table.names
        )

    def divide(self, output: Array, sizes: tuple[int, ...], shapes: Sequence[RequestShape]) -> Column:
        """Each request's part; raises `RuleError` where the output does not have the call's sizes."""
        self._check_kind(output)
        self._check_size(output, self._axis, sizes[0] if sizes else 0)
        trims = []
        for axis, dimension in self._follows:
            self._check_size(output, axis, sizes[dimension])
            if any(shape.sizes[dimension] != sizes[dimension] for shape in shapes):
                trims.append((axis, dimension))
        if not trims and len(shapes) == 1:
            entry = (self._number, self._port.element_type, output.shape)
            return Column([entry], [output.tobytes()])
        if trims or self._axis is None or any(size != 1 for size in output.shape[: self._axis]):
            return self._divide_regions(output, trims, shapes)
        return self._cut(output, [shape.rows for shape in shapes], axis=self._axis)

    def _divide_regions(
        self, output: Array, trims: list[tuple[int, int]], shapes: Sequence[RequestShape]
    ) -> Column:
        column = Column([], [])
        region = [slice(None)] * output.ndim
        start = 0
        for shape in shapes:
            if self._axis is not None:
                region[self._axis] = slice(start, start + shape.rows)
                start += shape.rows
            for axis, dimension in trims:
                region[axis] = slice(shape.sizes[dimension])
            own = output[tuple(region)]
            column.entries.append((self._number, self._port.element_type, own.shape))
            column.buffers.append(own.tobytes())
        return column

    def _check_size(self, output: Array, axis: int | None, size: int) -> None:
        if axis is not None and output.shape[axis] != size:
            raise RuleError(
                f"output {self._port.name!r} has {output.shape[axis]} along {self._port.shape.names[axis]!r} "
                f"(axis {axis}) in a call of {size}; its shape is {list(output.shape)}"
            )


def _cut_bytes(rows_first: Array, counts: Sequence[int]) -> list[bytes]:
    ends = accumulate(counts)
    if rows_first.nbytes > _SLICE_BELOW_BYTES * len(counts):
        return [rows_first[end - count : end].tobytes() for end, count in zip(ends, counts, strict=True)]
    everything = rows_first.tobytes()
    row_nbytes = len(everything) // len(rows_first) if len(rows_first) else 0
    return [
        everything[(end - count) * row_nbytes : end * row_nbytes]
        for end, count in zip(ends, counts, strict=True)
    ]
