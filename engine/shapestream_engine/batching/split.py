"""One output of a call, divided among the requests by its rule. Everything is copied; nothing aliases it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import RuleError, ShapeError
from shapestream_engine.layout import RequestShape
from shapestream_engine.ports import DimensionTable, Extent, OutputPort

_SLICE_BELOW_BYTES = 4096
"""Mean bytes per request up to which the output is copied as a whole and then sliced.

A slice of bytes costs some 50 ns, a copy by NumPy several hundred; beyond a few KiB copying twice costs more.
"""

LARGEST_EXACT = {"bf16": 2**8, "f16": 2**11, "f32": 2**24, "f64": 2**53}
"""Up to here each float type holds every integer; above, neighbours are the same number."""

Array: TypeAlias = "np.ndarray[Any, Any]"
_Entry: TypeAlias = tuple[int, str, tuple[int, ...]]
_Follow: TypeAlias = tuple[int, int, Extent]
"""An axis, the number of the input dimension that it follows, and how."""


@dataclass(frozen=True, slots=True)
class Column:
    """One output's part of every result, in the order of the requests."""

    entries: list[_Entry]
    """Rows of the results' layouts."""
    buffers: list[bytes]


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows of a data-dependent output that belong to each request; shared with the outputs that follow it."""

    order: Array | None
    """Row numbers sorted by request, stable; None where the rows are in that order already."""
    counts: list[int]
    """Rows of each request. What is missing to `total` came from rows that only filled the batch up."""
    total: int

    def apply(self, output: Array) -> Array:
        """The rows in the order of their requests."""
        return output if self.order is None else output[self.order]


@dataclass(slots=True)
class Division:
    """The outputs of one call, while they are divided."""

    outputs: Sequence[Array]
    sizes: tuple[int, ...]
    """The call's, parallel to the signature's `dimensions`."""
    shapes: Sequence[RequestShape]
    rows: list[int]
    """Rows of each request, along the batch axis."""
    batch: int
    """Rows of the call; those after the requests' own, if there are any, belong to no request."""
    selections: dict[str, Selection] = field(default_factory=dict)
    """Selections of the outputs divided so far that others follow, by name."""

    @classmethod
    def of(
        cls,
        table: DimensionTable,
        sizes: tuple[int, ...],
        shapes: Sequence[RequestShape],
        outputs: Sequence[Array],
    ) -> Division:
        """Raises `ShapeError` where the requests have more rows than the call."""
        rows = [shape.rows for shape in shapes]
        batch = sizes[0] if table.has_batch else 1
        if sum(rows) > batch:
            raise ShapeError(f"the requests have {sum(rows)} rows, the call {batch}")
        return cls(outputs, sizes, shapes, rows, batch)


class OutputSplitter(ABC):
    """Base of the splitters, one per rule: the output's number and type, and cutting it into runs of rows.

    `own_axes` are those that the rule itself cuts. Other axes that follow a dimension of the inputs are trimmed.
    """

    STAGE = 0
    """Splitters of a later stage follow selections of an earlier one."""
    _join_axis: int | None = 0
    """Along which a result's parts from several calls follow each other."""

    def __init__(
        self, number: int, port: OutputPort, table: DimensionTable, own_axes: Sequence[int | None]
    ) -> None:
        self._number = number
        self._port = port
        self._dtype = dtype_of(port.element_type)
        self._follows: tuple[_Follow, ...] = tuple(
            (axis, table.names.index(extent.dimension), extent)
            for axis, extent in enumerate(port.extents)
            if axis not in own_axes and extent is not None and extent.dimension in table.names
        )

    @property
    def number(self) -> int:
        """Number of the output in the signature."""
        return self._number

    @abstractmethod
    def divide(self, division: Division) -> Column:
        """Divide the output among the requests; raises `RuleError` where the output breaks its rule."""

    def join(self, parts: Sequence[Array], rows: Sequence[int]) -> Array:
        """Join one request's parts of several calls to its result; `rows` are those of the request in each of them.

        Raises `RuleError` where they do not fit together.
        """
        assert self._join_axis is not None  # else the rule has its own way
        try:
            return np.concatenate(parts, axis=self._join_axis)
        except ValueError:
            raise self._unlike(parts) from None

    def _unlike(self, parts: Sequence[Array]) -> RuleError:
        shapes = sorted({part.shape for part in parts})
        return RuleError(
            f"output {self._port.name!r} has parts of {' and '.join(str(list(shape)) for shape in shapes)} from "
            f"the calls that a request was divided over, which do not fit together"
        )

    def _checked(self, division: Division) -> Array:
        """The output, which has the type and the number of axes that its port says."""
        output = division.outputs[self._number]
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
        return output

    def _check_size(self, output: Array, axis: int | None, size: int, extent: Extent | None = None) -> None:
        """Raises `RuleError` unless the axis has `size`: that of a call, or what `extent` makes of it."""
        wanted = size if extent is None else extent.of(size)
        if axis is not None and output.shape[axis] != wanted:
            name = self._port.shape.names[axis]
            along = f"axis {axis}" if name is None else f"{name!r} (axis {axis})"
            rule = "" if wanted == size else f", whose {extent} is {wanted}"
            raise RuleError(
                f"output {self._port.name!r} has {output.shape[axis]} along {along} in a call of {size}{rule}; "
                f"its shape is {list(output.shape)}"
            )

    def _trims(self, output: Array, division: Division) -> list[_Follow]:
        """Find the axes that follow a dimension along which some request was padded."""
        trims = []
        for axis, dimension, extent in self._follows:
            size = division.sizes[dimension]
            self._check_size(output, axis, size, extent)
            if any(shape.sizes[dimension] != size for shape in division.shapes):
                trims.append((axis, dimension, extent))
        return trims

    def _cut(
        self, output: Array, counts: Sequence[int], division: Division, *, axis: int | None = 0
    ) -> Column:
        """Consecutive runs along `axis`, `counts` long, trimmed; everything for everybody where `axis` is None."""
        trims = self._trims(output, division)
        if trims or axis is None or any(size != 1 for size in output.shape[:axis]):
            return self._cut_regions(output, counts, division, axis, trims)
        head, tail = output.shape[:axis], output.shape[axis + 1 :]
        entries = {
            count: (self._number, self._port.element_type, (*head, count, *tail)) for count in set(counts)
        }
        rows_first = output.reshape(output.shape[axis:])
        return Column([entries[count] for count in counts], _cut_bytes(rows_first, counts))

    def _cut_regions(
        self,
        output: Array,
        counts: Sequence[int],
        division: Division,
        axis: int | None,
        trims: Sequence[_Follow],
    ) -> Column:
        column = Column([], [])
        region = [slice(None)] * output.ndim
        start = 0
        for shape, count in zip(division.shapes, counts, strict=True):
            if axis is not None:
                region[axis] = slice(start, start + count)
                start += count
            for trimmed, dimension, extent in trims:
                region[trimmed] = slice(extent.of(shape.sizes[dimension]))
            self._append(column, output[tuple(region)])
        return column

    def _append(self, column: Column, own: Array) -> None:
        column.entries.append((self._number, self._port.element_type, own.shape))
        column.buffers.append(own.tobytes())


class RowSplitter(OutputSplitter):
    """The rules `rows`, `crop`, `shared` and `whole`: consecutive rows, or everything, with padded axes trimmed back."""

    def __init__(self, number: int, port: OutputPort, table: DimensionTable) -> None:
        self._axis = self._join_axis = port.batch_axis if table.has_batch else None
        super().__init__(number, port, table, [self._axis])

    def divide(self, division: Division) -> Column:
        """Divide the output by rows; raises `RuleError` where it does not have the call's sizes."""
        output = self._checked(division)
        self._check_size(output, self._axis, division.batch)
        return self._cut(output, division.rows, division, axis=self._axis)

    def join(self, parts: Sequence[Array], rows: Sequence[int]) -> Array:
        """The rows one after the other; of what is shared every call gave the same, and the first will do."""
        if self._axis is not None:
            return super().join(parts, rows)
        if any(part.shape != parts[0].shape for part in parts):
            raise self._unlike(parts)
        return parts[0]


def _cut_bytes(rows_first: Array, counts: Sequence[int]) -> list[bytes]:
    if len(counts) == 1 and counts[0] == len(rows_first):
        return [rows_first.tobytes()]
    ends = accumulate(counts)
    if rows_first.nbytes > _SLICE_BELOW_BYTES * len(counts):
        return [rows_first[end - count : end].tobytes() for end, count in zip(ends, counts, strict=True)]
    everything = rows_first.tobytes()
    row_nbytes = len(everything) // len(rows_first) if len(rows_first) else 0
    return [
        everything[(end - count) * row_nbytes : end * row_nbytes]
        for end, count in zip(ends, counts, strict=True)
    ]
