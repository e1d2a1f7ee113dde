"""Divides the outputs of a call among its requests, each output by its rule.

Each rule has a splitter, made once per signature:

- `RowSplitter` (`rows`, `crop`, `shared`, `whole`): each request's rows, or the whole output;
- `IndexSplitter` (`index_column`): rows by the batch index in one column;
- `ParallelSplitter` (`with`): rows parallel to another output's;
- `ConcatenatedSplitter` (`counts`): runs of rows, whose lengths another output counts;
- `PaddedSplitter` (`padded_counts`): one padded table per row;
- `TotalSplitter` (`recount`): one total, counted again per request.

A `Selection` says which rows belong to each request. Splitters of stage 1 and 2 reuse the selection of the output that
they follow, so the stages run in order. Axes that follow a padded dimension are trimmed to the request's size. Results are
copies; nothing aliases the engine's memory.

Some servers divide data-dependent rows by position, and silently give one caller's detections to another when counts
differ. Here every batch index and every count is checked: it is a whole number, exact in its element type, and all of them
add up to the rows of the output. A batch that cannot be divided with certainty is refused with `RuleError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shapestream_engine.arrays import array_dtype, sent_array
from shapestream_engine.element_types import EXACT_BITS, dtype_of
from shapestream_engine.errors import ElementTypeError, InferenceError, RuleError
from shapestream_engine.layout import REMEMBERED, RequestShape
from shapestream_engine.output_rules import (
    Counts,
    Crop,
    Extent,
    IndexColumn,
    PaddedCounts,
    Recount,
    Rows,
    Shared,
    Whole,
    With,
)
from shapestream_engine.ports import DimensionTable, OutputPort
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array

_SLICE_BELOW_BYTES = 4096
"""Mean bytes per request up to which the output is copied as a whole and then sliced. A slice of bytes costs about
50 ns, a NumPy copy several hundred. Beyond a few KiB, copying twice costs more."""

_Entry: TypeAlias = tuple[int, str, tuple[int, ...]]
_Follow: TypeAlias = tuple[int, int, Extent]
"""An axis, the number of the input dimension that it follows, and the extent."""


class Column(NamedTuple):
    """One output's part of each result, in the order of the requests."""

    entries: list[_Entry]
    """The layout entries of the results."""
    buffers: list[bytes]


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows of a data-dependent output that belong to each request; following outputs share it."""

    order: Array | None
    """Row numbers sorted by request, stable; None if the rows are in that order."""
    counts: list[int]
    """Rows of each request. Further rows, up to `total`, came from rows that filled the batch up."""
    total: int

    def apply(self, output: Array) -> Array:
        """Return the rows in the order of their requests."""
        return output if self.order is None else output[self.order]


@dataclass(slots=True)
class Division:
    """The outputs of one call, and the requests among which they are divided."""

    outputs: Sequence[Array]
    sizes: tuple[int, ...]
    """The call's sizes, parallel to the signature's `dimensions`."""
    shapes: Sequence[RequestShape]
    rows: list[int]
    """Rows of each request, along the batch axis."""
    batch: int
    """Rows of the call; rows after the requests' own belong to no request."""
    selections: dict[str, Selection] = field(default_factory=dict)
    """Selections of the outputs divided so far, by output name."""


class OutputSplitter(ABC):
    """Base of the splitters: cuts an output into runs of rows.

    The rule itself cuts `own_axes`. Other axes that follow an input dimension are trimmed.
    """

    __slots__ = ("_dtype", "_entry", "_follows", "_is_string", "_port", "_rank", "number")

    STAGE = 0
    """Splitters of a later stage use selections of an earlier stage."""
    _join_axis: int | None = 0
    """Axis along which parts from several calls are joined."""

    def __init__(
        self, number: int, port: OutputPort, table: DimensionTable, own_axes: Sequence[int | None]
    ) -> None:
        self.number = number
        """Number of the output in the signature."""
        self._port = port
        self._is_string = port.is_string
        self._rank = port.shape.rank
        self._dtype = array_dtype(port.element_type)
        self._entry = lru_cache(REMEMBERED)(self._announced)
        """The layout entry of a result by its shape."""
        self._follows: tuple[_Follow, ...] = tuple(
            (axis, table.names.index(extent.dimension), extent)
            for axis, extent in enumerate(port.extents)
            if axis not in own_axes and extent is not None and extent.dimension in table.names
        )

    @abstractmethod
    def divide(self, division: Division) -> Column:
        """Divide the output among the requests; raises `RuleError` if the output breaks its rule."""

    def joined(self, parts: Sequence[Array], rows: Sequence[int]) -> tuple[_Entry, bytes]:
        """Join the parts of one request from several calls; `rows` has its rows in each call.

        Raises `RuleError` if the parts do not fit together, or make a result that the signature excludes.
        """
        shape, buffer = sent_array(self._port.element_type, self.join(parts, rows))
        return self._entry(shape), buffer

    def join(self, parts: Sequence[Array], rows: Sequence[int]) -> Array:
        """Return the parts of one request as one array; raises `RuleError` if they do not fit together."""
        assert self._join_axis is not None  # a splitter without the axis overrides `join`
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
        """Return the output; raises `RuleError` unless it has the port's type and rank."""
        output = division.outputs[self.number]
        if output.dtype != self._dtype:
            raise RuleError(
                f"output {self._port.name!r} is of type {output.dtype}, "
                f"its port says {self._port.element_type}"
            )
        if output.ndim != self._rank:
            raise RuleError(
                f"output {self._port.name!r} has the shape {list(output.shape)}, "
                f"its port says [{self._port.shape}]"
            )
        return output

    def _announced(self, shape: tuple[int, ...]) -> _Entry:
        """Return the layout entry of a result of this shape; raises `RuleError` for one that the signature excludes.

        Clients rely on the bounds: a chain derives its own from them, and a program reserves memory by them.
        """
        sizes = shape[:-1] if self._is_string else shape
        if not self._port.announces(sizes):
            raise RuleError(
                f"output {self._port.name!r} has the shape {list(sizes)}, and the signature announces "
                f"[{self._port.shape}]"
            )
        return self.number, self._port.element_type, shape

    def _wrong_size(self, output: Array, axis: int, size: int, extent: Extent | None = None) -> RuleError:
        """Return the error for an axis that has neither `size` nor the size that `extent` makes of it."""
        wanted = size if extent is None else extent.of(size)
        name = self._port.shape.names[axis]
        along = f"axis {axis}" if name is None else f"{name!r} (axis {axis})"
        rule = "" if wanted == size else f", whose {extent} is {wanted}"
        return RuleError(
            f"output {self._port.name!r} has {output.shape[axis]} along {along} in a call of {size}{rule}; "
            f"its shape is {list(output.shape)}"
        )

    def _trims(self, output: Array, division: Division) -> list[_Follow]:
        """Return the axes that follow a dimension along which some request was padded."""
        trims = []
        for axis, dimension, extent in self._follows:
            size = division.sizes[dimension]
            if output.shape[axis] != extent.of(size):
                raise self._wrong_size(output, axis, size, extent)
            if any(shape.sizes[dimension] != size for shape in division.shapes):
                trims.append((axis, dimension, extent))
        return trims

    def _cut(
        self, output: Array, counts: Sequence[int], division: Division, *, axis: int | None = 0
    ) -> Column:
        """Cut the output into consecutive runs of `counts` along `axis`, trimmed; with `axis` None, everyone gets
        everything."""
        trims = self._trims(output, division) if self._follows else ()
        shape = output.shape
        if self._is_string or trims or axis is None or (axis and prod(shape[:axis]) != 1):
            return self._column(self._pieces(output, counts, division, axis, trims))
        head, tail, entry_of = shape[:axis], shape[axis + 1 :], self._entry
        known: dict[int, _Entry] = {}
        entries: list[_Entry] = []
        for count in counts:
            if count not in known:
                known[count] = entry_of((*head, count, *tail))
            entries.append(known[count])
        rows_first = output.reshape(shape[axis:]) if axis else output
        # Past the constructor, whose function a lone request finds nowhere in the caches.
        return tuple.__new__(Column, (entries, _cut_bytes(rows_first, counts)))

    def _pieces(
        self,
        output: Array,
        counts: Sequence[int],
        division: Division,
        axis: int | None,
        trims: Sequence[_Follow],
    ) -> Iterator[Array]:
        # With an ellipsis the piece is an array also without axes, where an object would come alone.
        region: list[Any] = [*[slice(None)] * output.ndim, ...]
        start = 0
        for shape, count in zip(division.shapes, counts, strict=True):
            if axis is not None:
                region[axis] = slice(start, start + count)
                start += count
            for trimmed, dimension, extent in trims:
                region[trimmed] = slice(extent.of(shape.sizes[dimension]))
            yield output[tuple(region)]

    def _column(self, pieces: Iterable[Array]) -> Column:
        column = Column([], [])
        element_type = self._port.element_type
        try:
            for own in pieces:
                shape, buffer = sent_array(element_type, own)
                column.entries.append(self._entry(shape))
                column.buffers.append(buffer)
        except ElementTypeError as error:
            raise InferenceError(f"output {self._port.name!r}: {error}") from None
        return column


class RowSplitter(OutputSplitter):
    """The rules `rows`, `crop`, `shared` and `whole`: consecutive rows or the whole output, trimmed."""

    __slots__ = ("_axis", "_join_axis")

    def __init__(self, number: int, port: OutputPort, table: DimensionTable) -> None:
        self._axis = self._join_axis = port.batch_axis if table.has_batch else None
        super().__init__(number, port, table, [self._axis])

    def divide(self, division: Division) -> Column:
        """Divide the output by rows; raises `RuleError` if it does not have the call's sizes."""
        output, axis = self._checked(division), self._axis
        if axis is not None and output.shape[axis] != division.batch:
            raise self._wrong_size(output, axis, division.batch)
        return self._cut(output, division.rows, division, axis=axis)

    def join(self, parts: Sequence[Array], rows: Sequence[int]) -> Array:
        """Join the rows; a shared output is equal in every call, so the first part is the result."""
        if self._axis is not None:
            return super().join(parts, rows)
        if any(part.shape != parts[0].shape for part in parts):
            raise self._unlike(parts)
        return parts[0]


class IndexSplitter(OutputSplitter):
    """Splits an output by the rule `index_column`: one column tells the request of each row."""

    def __init__(self, number: int, port: OutputPort, table: DimensionTable, column: int) -> None:
        super().__init__(number, port, table, [0])
        self._index_column = column

    def divide(self, division: Division) -> Column:
        """Select the rows of each request, and rewrite the index to count from 0 in the request.

        Raises `RuleError` for an index that is no integer within the batch, and if the element type cannot distinguish the
        rows.
        """
        output = self._checked(division)
        column, requests = self._index_column, len(division.rows)
        table = output[:, None] if output.ndim == 1 else output
        if column >= table.shape[1]:
            raise RuleError(
                f"output {self._port.name!r} has no column {column}; its shape is {list(output.shape)}"
            )
        index = self._batch_index(table[:, column], division.batch)
        # The first row of each request, then the first row that belongs to no request.
        starts = np.array([0, *accumulate(division.rows)])
        # The owner is the last request that starts at or before the index; requests without rows start with the next.
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
        """Join the rows of all calls; the index continues from call to call."""
        self._check_exact(sum(rows))
        shifted = []
        for part, start in zip(parts, accumulate(rows, initial=0), strict=False):
            own = part.copy()
            table = own[:, None] if own.ndim == 1 else own
            table[:, self._index_column] += np.asarray(start).astype(own.dtype)
            shifted.append(own)
        return super().join(shifted, rows)

    def _batch_index(self, given: Array, rows: int) -> Array:
        """Return the index column as integers; raises `RuleError` unless each is a row of the batch."""
        self._check_exact(rows)
        wrong = _no_whole_number(given, rows - 1)
        if wrong.any():
            raise RuleError(
                f"output {self._port.name!r}: index {given[wrong][0]} in row {int(wrong.argmax())} is outside the "
                f"batch of {rows} rows"
            )
        return given.astype(np.int64)

    def _check_exact(self, rows: int) -> None:
        element_type = self._port.element_type
        bits = EXACT_BITS.get(element_type)
        largest = int(np.iinfo(self._dtype).max) if bits is None else 1 << bits
        if rows - 1 > largest:
            raise RuleError(
                f"output {self._port.name!r}: an index of type {element_type} cannot tell {rows} rows apart"
            )


class ParallelSplitter(OutputSplitter):
    """Splits an output by the rule `with`: its rows are parallel to the rows of another output."""

    STAGE = 1

    def __init__(self, number: int, port: OutputPort, table: DimensionTable, leader: str) -> None:
        super().__init__(number, port, table, [0])
        self._leader = leader

    def divide(self, division: Division) -> Column:
        """Select the rows parallel to the leader's; raises `RuleError` if the numbers of rows differ."""
        output = self._checked(division)
        selection = division.selections[self._leader]
        if len(output) != selection.total:
            raise RuleError(
                f"output {self._port.name!r} has {len(output)} rows, and {self._leader!r}, which it is "
                f"parallel to, {selection.total}"
            )
        division.selections[self._port.name] = selection
        return self._cut(selection.apply(output), selection.counts, division)


class Counter:
    """An output that counts for others: one number per row of the batch."""

    def __init__(self, name: str, signature: ModelSignature) -> None:
        self._number = [port.name for port in signature.outputs].index(name)
        port = signature.outputs[self._number]
        self._dtype = dtype_of(port.element_type)
        bits = EXACT_BITS.get(port.element_type)
        exact = int(np.iinfo(self._dtype).max) + 1 if bits is None else 1 << bits
        # Larger values, such as a -1 that wrapped to u64, would wrap to -1 in `int64`.
        self._largest = min(exact, 1 << 63)
        self.name = name
        self.element_type = port.element_type

    def read(self, division: Division) -> Array:
        """Return the counts as `int64`, one per row; raises `RuleError` unless each is an exact count."""
        given = division.outputs[self._number]
        if given.dtype != self._dtype or given.size != division.batch:
            raise RuleError(
                f"output {self.name!r} counts {given.size} rows as {given.dtype}; "
                f"the call has {division.batch}, and its port says {self.element_type}"
            )
        given = given.reshape(-1)
        # The largest exact float may also stand for its neighbour; an integer stands for itself.
        wrong = _no_whole_number(given, self._largest - 1)
        if wrong.any():
            raise RuleError(
                f"output {self.name!r}: {given[wrong][0]} in row {int(wrong.argmax())} of the batch is no count; a "
                f"count is a whole number from 0 to {self._largest - 1}"
            )
        return given.astype(np.int64)

    def check_holds(self, size: int, port: OutputPort) -> None:
        """Raise `RuleError` if the element type has no exact number for `size`: counts may have wrapped."""
        if size >= self._largest:
            raise RuleError(
                f"output {port.name!r} has room for {size} entries, and {self.name!r}, which counts them, has the "
                f"type {self.element_type}, which holds no such number"
            )


class ConcatenatedSplitter(OutputSplitter):
    """Splits an output by the rule `counts`: another output counts the rows of each request."""

    def __init__(self, number: int, port: OutputPort, table: DimensionTable, counter: Counter) -> None:
        super().__init__(number, port, table, [0])
        self._counter = counter

    def divide(self, division: Division) -> Column:
        """Cut one run per request; raises `RuleError` if the counts do not add up to the rows."""
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
    """Splits an output by the rule `padded_counts`: another output counts the valid entries of each row."""

    def __init__(self, number: int, port: OutputPort, table: DimensionTable, counter: Counter) -> None:
        # The signature guarantees both axes.
        assert port.batch_axis is not None
        assert port.data_axis is not None
        self._batch_axis, self._data_axis = port.batch_axis, port.data_axis
        super().__init__(number, port, table, [self._batch_axis, self._data_axis])
        self._join_axis = self._batch_axis
        name = port.shape.names[self._data_axis]
        # The data axis may follow a padded input dimension (labels per character); then no count exceeds the
        # request's size.
        self._bound = table.names.index(name) if name in table.names else None
        self._counter = counter

    def divide(self, division: Division) -> Column:
        """Cut each request's rows, trim the data axis to the largest count, and set entries beyond each row's count to
        0.

        Raises `RuleError` if a count exceeds the room.
        """
        output = self._checked(division)
        if output.shape[self._batch_axis] != division.batch:
            raise self._wrong_size(output, self._batch_axis, division.batch)
        counts = self._counter.read(division)
        self._check_counts(output, counts, division)
        per_row = counts.tolist()
        division.selections[self._port.name] = Selection(None, _per_request(per_row, division), sum(per_row))
        trims = self._trims(output, division)
        tables = self._pieces(output, division.rows, division, self._batch_axis, trims)
        ends = accumulate(division.rows)
        return self._column(
            self._trimmed(own, counts[end - rows : end])
            for own, end, rows in zip(tables, ends, division.rows, strict=True)
        )

    def join(self, parts: Sequence[Array], rows: Sequence[int]) -> Array:
        """Join the tables, padded with 0 to the longest."""
        most = max(part.shape[self._data_axis] for part in parts)
        grown = []
        for part in parts:
            widths = [(0, 0)] * part.ndim
            widths[self._data_axis] = (0, most - part.shape[self._data_axis])
            grown.append(np.pad(part, widths))
        return super().join(grown, rows)

    def _trimmed(self, table: Array, counts: Array) -> Array:
        """Return the table up to the largest count, with 0 beyond each row's count, where the model may have left
        anything."""
        most = int(counts.max(initial=0))
        own = table[(slice(None),) * self._data_axis + (slice(most),)]
        beyond = counts[:, None] <= np.arange(most)
        if beyond.any():
            own = own.copy()
            np.moveaxis(own, (self._batch_axis, self._data_axis), (0, 1))[beyond] = 0
        return own

    def _check_counts(self, output: Array, counts: Array, division: Division) -> None:
        room = output.shape[self._data_axis]
        self._counter.check_holds(room, self._port)
        limits = np.full(len(counts), room)
        if (bound := self._bound) is not None:
            if room != division.sizes[bound]:
                raise self._wrong_size(output, self._data_axis, division.sizes[bound])
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
    """Splits an output by the rule `recount`: each request gets the number of its own rows in another output."""

    STAGE = 2

    def __init__(self, number: int, port: OutputPort, table: DimensionTable, leader: str) -> None:
        super().__init__(number, port, table, ())
        self._leader = leader

    def divide(self, division: Division) -> Column:
        """Return the number of each request; raises `RuleError` unless the model's number is the total of the batch."""
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
        return Column([self._entry(output.shape)] * len(own), [number.tobytes() for number in own])

    def join(self, parts: Sequence[Array], rows: Sequence[int]) -> Array:
        """Return the sum over the calls."""
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


def _no_whole_number(given: Array, largest: int) -> Array:
    """Tell for each element whether it is no whole number from 0 to `largest`.

    The comparison precedes a conversion to integers, which is undefined for NaN, infinities and large values.
    """
    wrong = ~((given >= 0) & (given <= largest))
    return wrong if given.dtype.kind in "iu" else wrong | (given != np.floor(given))


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


def _per_request(per_row: list[int], division: Division) -> list[int]:
    ends = accumulate(division.rows)
    return [sum(per_row[end - rows : end]) for end, rows in zip(ends, division.rows, strict=True)]


def splitters_of(signature: ModelSignature) -> tuple[OutputSplitter, ...]:
    """Make the splitters, in the order in which outputs are divided."""
    splitters = [_splitter(number, port, signature) for number, port in enumerate(signature.outputs)]
    return tuple(sorted(splitters, key=lambda splitter: splitter.STAGE))


def _splitter(number: int, port: OutputPort, signature: ModelSignature) -> OutputSplitter:
    table = signature.table
    match port.rule:
        case Rows() | Crop() | Shared() | Whole():
            return RowSplitter(number, port, table)
        case IndexColumn(column=column):
            return IndexSplitter(number, port, table, column)
        case With(output=leader):
            return ParallelSplitter(number, port, table, leader)
        case Counts(output=counter):
            return ConcatenatedSplitter(number, port, table, Counter(counter, signature))
        case PaddedCounts(output=counter):
            return PaddedSplitter(number, port, table, Counter(counter, signature))
        case Recount(output=leader):
            return TotalSplitter(number, port, table, leader)
        case _:
            raise AssertionError(f"no splitter for the rule {port.rule.NAME}")
