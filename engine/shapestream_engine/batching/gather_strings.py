"""Gathers one input of strings of a call: makes the elements of each request, objects, from its received buffer."""

from __future__ import annotations

from collections.abc import Sequence

from shapestream_engine import string_arrays
from shapestream_engine.dimension_table import DimensionTable
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import RequestShape, Tensors
from shapestream_engine.ports import InputPort
from shapestream_engine.tensor import Array


class StringGatherer:
    """Fills the tensor of one input of strings, for calls of any shape; made once per signature.

    No string is ever added: the input's axes beside `batch` are not paddable, so all requests of a call are equal in them.
    """

    def __init__(self, number: int, port: InputPort, table: DimensionTable) -> None:
        self._number = number
        self._port = port
        self._axes = table.axes[number]
        self._batch_axis = self._axes.index(0) if table.has_batch else None

    def shape(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape in a call of these sizes."""
        dimensions = self._port.shape.dimensions
        return tuple(
            dimension.minimum if number is None else sizes[number]
            for number, dimension in zip(self._axes, dimensions, strict=True)
        )

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
                data[(slice(None),) * self._batch_axis + (slice(start, start + shape.rows),)] = strings
            start += shape.rows
