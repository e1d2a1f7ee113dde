"""Gathers one input of a call: copies each request's bytes from the received buffer into the tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shapestream_engine import string_arrays
from shapestream_engine.arrays import array_dtype
from shapestream_engine.dimension_table import DimensionTable
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import Buffer, RequestShape, Tensors
from shapestream_engine.ports import InputPort
from shapestream_engine.tensor import Array

_JOIN_BELOW_BYTES = 4096
"""Mean bytes per request up to which pieces are joined first and then copied at once.

A NumPy copy costs about 0.5 us whatever its size; joining one more piece costs 30 ns. Beyond a few KiB, copying the bytes
twice costs more than that.
"""


class InputGatherer:
    """Fills the tensor of one input, for calls of any shape; made once per signature."""

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
        self._batch_axis = self._axes.index(0) if table.has_batch else None
        # Requests are contiguous in memory if only axes of size 1 precede `batch`.
        before = port.shape.dimensions[: self._batch_axis or 0]
        self._rows_are_contiguous = all(axis.is_static and axis.minimum == 1 for axis in before)
        dynamic = {axis for axis, dimension in enumerate(self._axes) if dimension is not None}
        self._pads_row_ends = self._batch_axis == 0 and dynamic == {0, 1}

    def shape(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape in a call, or a request, of these sizes."""
        return tuple([static if number is None else sizes[number] for static, number in self._sizes])

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
                given = memoryview(source).nbytes
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
    data.reshape(-1).view(np.uint8).data[:] = b"".join(pieces)


def _copy_each(data: Array, sources: list[Buffer], lengths: list[int]) -> None:
    # By NumPy, which lets other threads run meanwhile: a piece may be large.
    flat = data.reshape(-1).view(np.uint8)
    start = 0
    for source, length in zip(sources, lengths, strict=True):
        if length:
            flat[start : start + length] = np.frombuffer(source, np.uint8)
        start += length
