"""Plans the calls of a batch: the rows that run together, the sizes of each call, and the rows of each request in it.

All sizes are parallel to the `dimensions` of a signature. The plan knows no tensors, engines or time.

A request in one call is passed on unchanged. A piece of a divided request is a view of its bytes if its rows are contiguous.
Strings are copied. Rows that fill calls up are copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, product
from math import gcd, prod

import numpy as np

from shapestream_engine import string_arrays
from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import REMEMBERED, Buffer, RequestShape, Tensors
from shapestream_engine.signature import ModelSignature
from shapestream_engine.strategy import Sizes
from shapestream_engine.string_arrays import STRING_TYPES

_EXACT_ROWS = 1 << 14
"""Rows up to which covers are always searched exactly; see `RowCover`."""


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """Rows `start` to `stop` of the batch, run at `sizes`; missing rows are filled up."""

    sizes: Sizes
    start: int
    stop: int


class CallPlanner:
    """Divides batches into calls by the model's strategy; thread-safe."""

    def __init__(self, signature: ModelSignature) -> None:
        self._signature = signature
        self._static = frozenset(signature.static_sizes)
        rows = signature.strategy.sizes.get(signature.dimensions[0]) if signature.has_batch else None
        self._cover = None if rows is None else RowCover(rows, divide=signature.strategy.partitioned)
        # Plans of divided batches are not remembered, because clients choose the number of rows.
        self.plan = lru_cache(REMEMBERED)(self._planned) if self._cover is None else self._planned
        """Plan the calls of a batch: each row is in one call, in order, and the largest call comes first.

        Raises `ShapeError` for a size beyond the largest allowed size.
        """

    def _planned(self, sizes: Sizes) -> tuple[PlannedCall, ...]:
        rounded = self._signature.round_up(sizes)
        if not self._signature.has_batch:
            return (PlannedCall(rounded, 0, 1),)
        rows, others = rounded[0], rounded[1:]
        calls = []
        start = 0
        for call_rows in (rows,) if self._cover is None else self._cover(rows):
            stop = min(rows, start + call_rows)
            calls.append(PlannedCall((call_rows, *others), start, stop))
            start = stop
        return tuple(calls)

    def prepared_sizes(self, sizes: Sizes) -> tuple[int | None, ...] | None:
        """Return the key of the prepared model that runs a call of `sizes`; None in place of a free size.

        None as a whole: the dynamic model runs the call.
        """
        if not self._signature.strategy.sizes:
            return sizes if sizes in self._static else None
        allowed = self._signature.allowed
        return tuple([None if own is None else size for size, own in zip(sizes, allowed, strict=True)])

    def prepared_shapes(self, most: int = 1024) -> list[tuple[int | None, ...]]:
        """Return the shapes for which models may be prepared, those with the fewest elements first; no more than `most`."""
        choices = [(None,) if own is None else own for own in self._signature.allowed]
        shapes = islice(product(*choices), most)
        return sorted(shapes, key=lambda sizes: prod(size or 1 for size in sizes))

    def extreme_shapes(self) -> list[tuple[int | None, ...]]:
        """Return the largest and the smallest shape of `prepared_shapes`."""
        ends = [
            tuple(None if own is None else own[end] for own in self._signature.allowed) for end in (-1, 0)
        ]
        return list(dict.fromkeys(ends))


class RowCover:
    """Finds the best calls for a number of rows, by exact dynamic programming, once per number.

    With `divide`, the fewest filled-up rows come first, then the fewest calls; otherwise the reverse.

    Of many rows, as many as possible go into calls of the largest size L. The best cover does the same: of L/g smaller
    calls (g divides all sizes), some always have rows that add up to a multiple of L, and fewer calls of L replace them.
    So the search below L * L / g + L rows is exact, and nothing is lost above. If that bound exceeds 16384 rows, covers
    above it may differ from the best by their last call.
    """

    def __init__(self, sizes: Sizes, *, divide: bool) -> None:
        self._sizes = sizes
        self._divide = divide
        largest = sizes[-1]
        self._searched = min(largest * largest // gcd(*sizes), max(_EXACT_ROWS, largest))
        # Per number of rows: the minimal key, and the size of one call of the best cover.
        self._best: list[tuple[tuple[int, int], int]] = [((0, 0), 0)]

    def __call__(self, rows: int) -> Sizes:
        """Return the rows of each call, the largest first; 0 rows take one call of the smallest size."""
        if rows == 0:
            return (self._sizes[0],)
        largest = self._sizes[-1]
        calls = []
        if rows > self._searched:
            many = -(-(rows - self._searched) // largest)
            calls = [largest] * many
            rows -= many * largest
        self._search(rows)
        while rows > 0:
            size = self._best[rows][1]
            calls.append(size)
            rows -= size
        return tuple(sorted(calls, reverse=True))

    def _search(self, rows: int) -> None:
        best = list(self._best)
        for target in range(len(best), rows + 1):
            best.append(
                min((self._key(best[max(0, target - size)][0], target, size), size) for size in self._sizes)
            )
        if len(best) > len(self._best):
            self._best = best  # assigned as a whole, because other threads read it

    def _key(self, rest: tuple[int, int], rows: int, size: int) -> tuple[int, int]:
        filled = max(0, size - rows)
        return (rest[0] + filled, rest[1] + 1) if self._divide else (rest[0] + 1, rest[1] + filled)


def merge_sizes(signature: ModelSignature, member_sizes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sizes of the smallest call that holds these requests.

    Rows add up; each other dimension takes the largest size. Raises `ShapeError` for no requests, for several requests
    without a batch axis, and where a dimension differs that may not be padded.
    """
    if not member_sizes:
        raise ShapeError("a call needs at least one request")
    if len(member_sizes) == 1:
        return member_sizes[0]
    if not signature.has_batch:
        raise ShapeError(f"model {signature.name!r} has no batch axis; it runs one request per call")
    merged = [sum(sizes[0] for sizes in member_sizes)]
    for number in range(1, len(signature.dimensions)):
        found = {sizes[number] for sizes in member_sizes}
        if len(found) > 1 and not signature.paddable[number]:
            raise ShapeError(
                f"requests whose {signature.dimensions[number]!r} differs cannot share a call, since it may "
                f"not be padded: {sorted(found)}"
            )
        merged.append(max(found))
    return tuple(merged)


# ---------------------------------------------------------------- the rows of each request in each call


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
            axes.index(0) if signature.has_batch and 0 in axes else None for axes in signature.table.axes
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
            # What requests have in common is not divided.
            cut_shape, cut_buffer = (
                (own, buffer) if axis is None else _cut(buffer, element_type, own, axis, piece)
            )
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
