"""Copies requests into a call's input tensors, and outputs into results: the only copies that a slot makes.

The code runs on the slot's thread, between the received buffers and the `InferRequest`.

`Assembly` has a gatherer for each input, which copies each request's bytes from the received buffer into the tensor, and a
splitter for each output (`split.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shapestream_engine import string_arrays
from shapestream_engine.arrays import array_dtype, array_of
from shapestream_engine.batching.split import Column, Division, splitters_of
from shapestream_engine.errors import RuleError, ShapeError
from shapestream_engine.layout import Buffer, RequestShape, Tensors
from shapestream_engine.ports import DimensionTable, InputPort
from shapestream_engine.signature import ModelSignature
from shapestream_engine.tensor import Array, TensorLike

_NO_COLUMN = Column([], [])
_BYTE, frombuffer = np.dtype(np.uint8), np.frombuffer
"""NumPy's namespace is large, and it makes a dtype of a scalar type by a search through all user-defined ones."""


class Assembly:
    """Gathers and splits the calls of one model, and joins results of several calls.

    Each signature has one assembly, which any number of threads may use. `sizes` are always the call's sizes. `shapes` are
    the `resolve` results of the requests, in the order of their rows.
    """

    __slots__ = ("_gatherers", "_in_order", "_signature", "_splitters")

    def __init__(self, signature: ModelSignature) -> None:
        self._signature = signature
        self._gatherers = tuple(
            gatherer_of(port)(number, port, signature.table) for number, port in enumerate(signature.inputs)
        )
        self._splitters = splitters_of(signature)
        self._in_order = sorted(self._splitters, key=lambda splitter: splitter.number)

    def gather(
        self,
        sizes: tuple[int, ...],
        members: Sequence[Tensors],
        shapes: Sequence[RequestShape],
        tensors: Sequence[TensorLike],
    ) -> int:
        """Resize each input tensor to the call's shape, and copy each request's bytes into it; return the number of
        reallocations.

        Padding gets the port's padding value; missing masks are made. Raises `ShapeError` if the requests do not add up to
        a call of these sizes, or a buffer's length does not match its shape.
        """
        self._check_call(sizes, shapes)
        reallocations = 0
        for gatherer, tensor in zip(self._gatherers, tensors, strict=True):
            shape = gatherer.shape(sizes)
            if tensor.shape != shape:
                before = tensor.reallocations
                tensor.shape = shape
                reallocations += tensor.reallocations - before
            gatherer.fill(tensor.data, sizes, members, shapes)
        return reallocations

    def split(
        self,
        sizes: tuple[int, ...],
        shapes: Sequence[RequestShape],
        outputs: Sequence[np.ndarray[Any, Any]],
    ) -> list[Tensors]:
        """Divide the outputs into a copy for each request, in order; layouts hold output numbers.

        Results of rows beyond the requests' own are dropped. Raises `RuleError` if an output breaks its rule.
        """
        expected = len(self._splitters)
        if len(outputs) != expected:
            raise RuleError(f"the model gave {len(outputs)} outputs, its signature has {expected}")
        rows = []
        for shape in shapes:
            rows.append(shape.rows)
        batch = sizes[0] if self._signature.has_batch else 1
        if sum(rows) > batch:
            raise ShapeError(f"the requests have {sum(rows)} rows, the call {batch}")
        division = Division(outputs, sizes, shapes, rows, batch)
        columns = [_NO_COLUMN] * expected
        for splitter in self._splitters:
            columns[splitter.number] = splitter.divide(division)
        entries, buffers = zip(*columns, strict=True)
        results = []
        for layout, parts in zip(zip(*entries, strict=True), zip(*buffers, strict=True), strict=True):
            results.append(Tensors(layout=layout, buffers=parts))
        return results

    def join(self, parts: Sequence[Tensors], rows: Sequence[int]) -> Tensors:
        """Join the results of one request from several calls, in order; `rows` has its rows in each call.

        Raises `RuleError` if the parts do not fit together.
        """
        layout: list[tuple[int, str, tuple[int, ...]]] = []
        buffers = []
        for splitter in self._in_order:
            number = splitter.number
            element_type = self._signature.outputs[number].element_type
            own = [array_of(element_type, part.layout[number][2], part.buffers[number]) for part in parts]
            entry, buffer = splitter.joined(own, rows)
            layout.append(entry)
            buffers.append(buffer)
        return Tensors(layout=tuple(layout), buffers=buffers)

    def _check_call(self, sizes: tuple[int, ...], shapes: Sequence[RequestShape]) -> None:
        """Check that the requests fill the call exactly; otherwise, rows of an earlier call would stay in the
        tensors."""
        signature = self._signature
        if len(sizes) != len(signature.dimensions):
            raise ShapeError(f"a call has {len(signature.dimensions)} sizes, not {len(sizes)}")
        if signature.has_batch:
            rows = 0
            for shape in shapes:
                rows += shape.rows
            if rows != sizes[0]:
                raise ShapeError(f"the requests have {rows} rows, the call {sizes[0]}")
            most = signature.strategy.most_rows
            if most is not None and rows > most and sum([shape.rows > 0 for shape in shapes]) > 1:
                raise ShapeError(_company_refused(signature.name, rows, most))
        elif len(shapes) != 1:
            raise ShapeError(f"model {signature.name!r} has no batch axis; it runs one request per call")
        first = 1 if signature.has_batch else 0
        wanted = sizes[first:]
        for shape in shapes:
            own = shape.sizes
            if own[first:] == wanted:
                continue
            for number in range(first, len(sizes)):
                if own[number] > sizes[number] or (
                    own[number] < sizes[number] and not signature.paddable[number]
                ):
                    raise ShapeError(
                        f"dimension {signature.dimensions[number]!r} is {own[number]} in a request and "
                        f"{sizes[number]} in the call"
                    )


def _company_refused(model: str, rows: int, most: int) -> str:
    if most == 1:
        return f"requests of model {model!r} run alone; a call has no other rows"
    return f"requests of model {model!r} share calls of up to {most} rows, not of {rows}"


# ---------------------------------------------------------------- one input of a call

_JOIN_BELOW_BYTES = 4096
"""Mean bytes per request up to which pieces are joined first and then copied at once.

A NumPy copy costs about 0.5 us whatever its size; joining one more piece costs 30 ns. Beyond a few KiB, copying the bytes
twice costs more than that.
"""


class InputGatherer:
    """Fills the tensor of one input, for calls of any shape; made once per signature."""

    __slots__ = (
        "_axes",
        "_batch_axis",
        "_dtype",
        "_number",
        "_pads_row_ends",
        "_port",
        "_rows_are_contiguous",
        "_sizes",
        "_table",
    )

    def __init__(self, number: int, port: InputPort, table: DimensionTable) -> None:
        self._number = number
        self._port = port
        self._table = table
        self._dtype = array_dtype(port.element_type)
        self._axes = table.axes[number]
        self._sizes = tuple(
            (dimension.minimum, axis)
            for axis, dimension in zip(self._axes, port.shape.dimensions, strict=True)
        )
        """The size of each axis if it is static, and the number of its dimension otherwise."""
        self._batch_axis = self._axes.index(0) if table.has_batch and 0 in self._axes else None
        # Requests are contiguous in memory if only axes of size 1 precede `batch`.
        before = port.shape.dimensions[: self._batch_axis or 0]
        self._rows_are_contiguous = all(axis.is_static and axis.minimum == 1 for axis in before)
        dynamic = {axis for axis, dimension in enumerate(self._axes) if dimension is not None}
        self._pads_row_ends = self._batch_axis == 0 and dynamic == {0, 1}

    def shape(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape in a call, or a request, of these sizes."""
        shape = []
        for static, number in self._sizes:
            shape.append(static if number is None else sizes[number])
        return tuple(shape)

    def fill(
        self,
        data: Array,
        sizes: tuple[int, ...],
        members: Sequence[Tensors],
        shapes: Sequence[RequestShape],
    ) -> None:
        """Write every element of `data`, a tensor of the call's shape: first the requests, then the padding.

        Raises `ShapeError` if a buffer's length does not match its shape.
        """
        sources, lengths = self._sources(members, shapes)
        if data.nbytes == 0:
            return
        joins = len(members) > 1 and data.nbytes <= _JOIN_BELOW_BYTES * len(members)
        # No request exceeds the call's sizes, so equal totals mean no padding.
        if sum(lengths) == data.nbytes and (self._rows_are_contiguous or len(members) == 1):
            if joins:
                _copy_joined(data, sources)
            else:
                _copy_each(data, sources, lengths)
        elif joins and self._pads_row_ends:
            _copy_joined(data, self._padded_rows(data, sources, lengths, shapes))
        else:
            self._fill_regions(data, sizes, sources, shapes)

    def _sources(
        self, members: Sequence[Tensors], shapes: Sequence[RequestShape]
    ) -> tuple[list[Buffer], list[int]]:
        """Return each request's buffer of this input, and the length of it in bytes."""
        number = self._number
        sources, lengths = [], []
        for member, shape in zip(members, shapes, strict=True):
            position = shape.positions[number]
            if position is None:
                source = self._whole_mask(shape)
                length = len(source)
            else:
                source = member.buffers[position]
                length = shape.nbytes[position]
                given = len(source) if type(source) is bytes else memoryview(source).nbytes
                if given != length:
                    raise ShapeError(f"input {self._port.name!r} has {given} bytes, its shape needs {length}")
            sources.append(source)
            lengths.append(length)
        return sources, lengths

    def _whole_mask(self, shape: RequestShape) -> bytes:
        return np.ones(math.prod(self.shape(shape.sizes)), self._dtype).tobytes()

    def _padded_rows(
        self, data: Array, sources: list[Buffer], lengths: list[int], shapes: Sequence[RequestShape]
    ) -> list[Buffer]:
        """Return each row's bytes and its padding, for inputs in which only the axis after `batch` is padded."""
        row_nbytes = data.nbytes // data.shape[0]
        dimension = self._axes[1]
        assert dimension is not None
        value = self._port.pad_value(self._table.names[dimension])
        padding = np.asarray(value, self._dtype).tobytes() * (row_nbytes // self._dtype.itemsize)
        pieces: list[Buffer] = []
        for source, length, shape in zip(sources, lengths, shapes, strict=True):
            if shape.rows == 1:
                pieces.append(source)
                pieces.append(padding[length:])
            elif shape.rows:
                own = length // shape.rows
                rows = np.frombuffer(source, np.uint8)
                for row in range(shape.rows):
                    pieces.append(rows[row * own : (row + 1) * own])
                    pieces.append(padding[own:])
        return pieces

    def _fill_regions(
        self, data: Array, sizes: tuple[int, ...], sources: list[Buffer], shapes: Sequence[RequestShape]
    ) -> None:
        """Copy each request's block, then fill the slabs of padding around it, for any batch axis."""
        start = 0
        for source, shape in zip(sources, shapes, strict=True):
            own_shape = self.shape(shape.sizes)
            block = (
                data
                if self._batch_axis is None
                else _along(data, self._batch_axis, start, start + shape.rows)
            )
            start += shape.rows
            if 0 not in own_shape:
                block[tuple(map(slice, own_shape))] = np.frombuffer(source, self._dtype).reshape(own_shape)
            for axis, number in enumerate(self._axes):
                if number is not None and axis != self._batch_axis and own_shape[axis] < sizes[number]:
                    # The slabs are disjoint: each lies inside the request along earlier axes, and outside along this
                    # axis.
                    slab = (*map(slice, own_shape[:axis]), slice(own_shape[axis], None))
                    block[slab] = self._port.pad_value(self._table.names[number])


class CommonGatherer(InputGatherer):
    """Fills the tensor of an input that a call has once for all its requests; made once per signature."""

    def __init__(self, number: int, port: InputPort, table: DimensionTable) -> None:
        super().__init__(number, port, table)
        self._value = port.value_bytes

    def fill(
        self,
        data: Array,
        sizes: tuple[int, ...],
        members: Sequence[Tensors],
        shapes: Sequence[RequestShape],
    ) -> None:
        """Write the bytes that all requests have.

        Raises `ShapeError` if they differ, or are not the value that the signature fixes, or if a buffer's length does not
        match its shape.
        """
        own = self._value
        for member, shape in zip(members, shapes, strict=True):
            position = shape.positions[self._number]
            if position is None:
                continue
            given = bytes(memoryview(member.buffers[position]))
            if own is None:
                own = given
            elif own != given:
                raise ShapeError(common_refused(self._port))
        assert own is not None  # only fixed values may be left out
        if len(own) != data.nbytes:
            raise ShapeError(f"input {self._port.name!r} has {len(own)} bytes, its shape needs {data.nbytes}")
        if own:
            _copy_joined(data, [own])


def common_refused(port: InputPort) -> str:
    """Return the message for other bytes of a common input than the fixed value, or than another request of the call has."""
    if port.value is not None:
        return f"input {port.name!r} is always {port.value} (leave it out, or send that)"
    return f"requests with other bytes of input {port.name!r} share no call"


def gatherer_of(port: InputPort) -> type[InputGatherer]:
    """Return the class that gathers an input."""
    if port.is_common:
        return CommonGatherer
    return StringGatherer if port.is_string else InputGatherer


class StringGatherer(InputGatherer):
    """Fills the tensor of one input of strings, for calls of any shape; made once per signature.

    No string is ever added: the input's axes beside `batch` are not paddable, so all requests of a call are equal in them.
    """

    def fill(
        self,
        data: Array,
        sizes: tuple[int, ...],
        members: Sequence[Tensors],
        shapes: Sequence[RequestShape],
    ) -> None:
        """Write every element of `data`, an array of objects of the call's shape.

        Raises `ShapeError` if a buffer does not match its shape, and for text that is no UTF-8.
        """
        start = 0
        for member, shape in zip(members, shapes, strict=True):
            position = shape.positions[self._number]
            assert position is not None  # only masks may be left out
            _, element_type, own = member.layout[position]
            try:
                strings = string_arrays.unpack(element_type, own, member.buffers[position])
            except ShapeError as error:
                raise ShapeError(f"input {self._port.name!r}: {error}") from None
            if self._batch_axis is None:
                data[...] = strings
            else:
                _along(data, self._batch_axis, start, start + shape.rows)[...] = strings
            start += shape.rows


def _along(data: Array, axis: int, start: int, end: int) -> Array:
    return data[(slice(None),) * axis + (slice(start, end),)]


def _copy_joined(data: Array, pieces: list[Buffer]) -> None:
    data.reshape(-1).view(_BYTE).data[:] = b"".join(pieces)


def _copy_each(data: Array, sources: list[Buffer], lengths: list[int]) -> None:
    # By NumPy, which lets other threads run meanwhile: a piece may be large.
    flat = data.reshape(-1).view(_BYTE)
    start = 0
    for source, length in zip(sources, lengths, strict=True):
        if length:
            flat[start : start + length] = frombuffer(source, _BYTE)
        start += length
