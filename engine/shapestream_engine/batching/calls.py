"""Plans the calls of a batch: the rows that run together, and the sizes of each call.

All sizes are parallel to the `dimensions` of a signature. The code knows no tensors, engines or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, product
from math import gcd, prod

from shapestream_engine.errors import ShapeError
from shapestream_engine.layout import REMEMBERED
from shapestream_engine.signature import ModelSignature
from shapestream_engine.strategy import Sizes

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
