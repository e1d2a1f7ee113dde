"""Divides a batch over several calls: the rows of each request in each call, and the rows that fill calls up.

A request in one call is passed on unchanged. A piece of a divided request is a view of its bytes if its rows are
contiguous. Strings are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from shapestream_engine import string_arrays
from shapestream_engine.batching.calls import PlannedCall
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import Buffer, RequestShape, Tensors
from shapestream_engine.signature import ModelSignature
from shapestream_engine.string_arrays import STRING_TYPES


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `stop` of a member of the batch."""

    member: int
    start: int
    stop: int


def divide(calls: Sequence[PlannedCall], rows: Sequence[int]) -> list[list[Piece]]:
    """Return the pieces of each call, in order; `rows` has the members' rows. A member without rows is in one call too."""
    members = iter(enumerate(rows))
    member, left = next(members, (-1, 0))
    taken = 0
    divided = []
    for call in calls:
        room = call.stop - call.start
        pieces = []
        while member >= 0 and (room or left == 0):
            step = min(room, left)
            pieces.append(Piece(member, taken, taken + step))
            taken, left, room = taken + step, left - step, room - step
            if left == 0:
                member, left = next(members, (-1, 0))
                taken = 0
        divided.append(pieces)
    return divided


class PieceCutter:
    """Cuts requests of one model along their batch axis; thread-safe."""

    def __init__(self, signature: ModelSignature) -> None:
        self._signature = signature
        self._batch_axes = tuple(
            axes.index(0) if signature.has_batch else None for axes in signature.table.axes
        )

    def cut(
        self, piece: Piece, members: Sequence[Tensors], shapes: Sequence[RequestShape]
    ) -> tuple[Tensors, RequestShape]:
        """Make a request of the piece; return the member itself if the piece is the whole member."""
        member, shape = members[piece.member], shapes[piece.member]
        rows = piece.stop - piece.start
        if rows == shape.rows:
            return member, shape
        layout, buffers, nbytes = [], [], []
        for (number, element_type, own), buffer in zip(member.layout, member.buffers, strict=True):
            axis = self._batch_axes[number]
            assert axis is not None  # a request without a batch axis is never divided
            cut_shape, cut_buffer = _cut(buffer, element_type, own, axis, piece)
            layout.append((number, element_type, cut_shape))
            nbytes.append(memoryview(cut_buffer).nbytes)
            buffers.append(cut_buffer)
        # The means of strings stay those of the whole request: what they cost is not known by the piece.
        sizes = (rows, *shape.sizes[1:])
        cut = replace(
            shape, sizes=sizes, rows=rows, nbytes=tuple(nbytes), total_nbytes=sum(nbytes), rounded=sizes
        )
        return Tensors(layout=tuple(layout), buffers=buffers), cut

    def filling(
        self, missing: int, members: Sequence[Tensors], shapes: Sequence[RequestShape]
    ) -> list[tuple[Tensors, RequestShape]]:
        """Fill up a call with `missing` copies of a real row, because invented data could fail.

        At least one request of the call has a row: a request without rows needs no call, or runs at its own sizes.
        """
        place = next((place for place, shape in enumerate(shapes) if shape.rows), None)
        if place is None:
            raise ShapeError("a call has no row of a request to be filled up with")
        return [self.cut(Piece(place, 0, 1), members, shapes)] * missing


def _cut(
    buffer: Buffer, element_type: str, own: tuple[int, ...], axis: int, piece: Piece
) -> tuple[tuple[int, ...], Buffer]:
    """Return the shape and the bytes of the piece."""
    rows = (slice(None),) * axis + (slice(piece.start, piece.stop),)
    if element_type in STRING_TYPES:
        return string_arrays.pack(
            "bytes", string_arrays.unpack("bytes", own, buffer)[rows]
        )  # valid text stays so
    shape = (*own[:axis], piece.stop - piece.start, *own[axis + 1 :])
    if 0 in shape:
        return shape, b""
    if prod(own[:axis]) == 1:
        row_nbytes = dtype_of(element_type).itemsize * prod(own[axis + 1 :])
        return shape, np.frombuffer(buffer, np.uint8)[piece.start * row_nbytes : piece.stop * row_nbytes]
    # The rows are not contiguous, so they are copied once more.
    array = np.frombuffer(buffer, dtype_of(element_type)).reshape(own)
    return shape, array[rows].tobytes()
