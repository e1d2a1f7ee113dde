"""A batch of a model whose strategy allows certain call shapes only: it runs as one call or several, on a slot's thread.

What a request gets is the same as if it had been one call, whatever the calls were: requests that are divided are put
together again by their outputs' rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic, perf_counter

from shapestream_engine.batch import Batch, BatchReport
from shapestream_engine.batching.pieces import Piece, divide
from shapestream_engine.batching.plan import merge_sizes
from shapestream_engine.batching.strategy import PlannedCall
from shapestream_engine.layout import Tensors
from shapestream_engine.model import InferRequest
from shapestream_engine.request_pool import RequestPool

__all__ = ["PlannedBatch", "in_time"]


class PlannedBatch:
    """One batch, from its requests to their results. `infer` and `is_new` are the slot's."""

    def __init__(
        self,
        work: Batch,
        pool: RequestPool,
        request: InferRequest | None,
        infer: Callable[[InferRequest], tuple[float, float]],
        is_new: Callable[[str, tuple[int, ...]], bool],
    ) -> None:
        """`request` runs all calls where no models are prepared for their shapes."""
        assert pool.planner is not None
        self._work = work
        self._pool = pool
        self._planner = pool.planner
        self._request = request
        self._infer = infer
        self._is_new = is_new
        self._shapes = work.shapes
        self._parts: list[list[Tensors]] = [[] for _ in work.members]
        """Of each member, the results so far."""
        self._part_rows: list[list[int]] = [[] for _ in work.members]
        self._calls: Counter[tuple[int, ...]] = Counter()
        self._run_s = 0.0
        self._reallocations = self._preparations = 0

    def run(self) -> BatchReport:
        """Runs all calls; members whose time to start passes in between are left out of the rest, and get nothing."""
        began = perf_counter()
        places: Sequence[int] = range(len(self._work.members))
        for place in in_time(self._work.start_before, places):
            answer = self._shapes[place].answer
            if answer is not None:
                self._parts[place].append(answer)
                self._part_rows[place].append(self._shapes[place].rows)
        while places := in_time(self._work.start_before, self._unfinished(places)):
            self._run_calls(places)
        outputs = tuple([self._result(place) for place in range(len(self._parts))])
        return BatchReport(
            batch=self._work.batch,
            outputs=outputs,
            run_s=self._run_s,
            busy_s=perf_counter() - began,
            reallocations=self._reallocations,
            preparations=self._preparations,
            calls=tuple((count, sizes) for sizes, count in self._calls.items()),
        )

    def _unfinished(self, places: Sequence[int]) -> list[int]:
        return [place for place in places if not self._parts[place] or self._left(place)]

    def _left(self, place: int) -> int:
        """Rows of a member that have not run."""
        return self._shapes[place].rows - sum(self._part_rows[place])

    def _run_calls(self, places: Sequence[int]) -> None:
        """The calls for what is left of these members; returns early when one of them must not start any more."""
        left = [self._left(place) for place in places]
        done = [self._shapes[place].rows - rows for place, rows in zip(places, left, strict=True)]
        calls = self._plan(places, left)
        for call, pieces in zip(calls, divide(calls, left), strict=True):
            own = [
                Piece(places[piece.member], done[piece.member] + piece.start, done[piece.member] + piece.stop)
                for piece in pieces
            ]
            if not self._run_call(call, own):
                return

    def _plan(self, places: Sequence[int], left: Sequence[int]) -> Sequence[PlannedCall]:
        """The calls for so many rows of these members."""
        signature = self._pool.signature
        first = 1 if signature.has_batch else 0
        sizes = merge_sizes(
            signature,
            [
                (*(rows,) * first, *self._shapes[place].sizes[first:])
                for place, rows in zip(places, left, strict=True)
            ],
        )
        wanted = self._work.sizes
        if wanted == sizes or self._calls or len(places) < len(self._parts):
            return self._planner.plan(sizes)  # nothing is rounded for those who are left over
        calls = self._planner.plan(tuple(map(max, sizes, wanted)))
        return _covering(sizes[0], calls) if signature.has_batch and wanted[0] > sizes[0] else calls

    def _run_call(self, call: PlannedCall, pieces: Sequence[Piece]) -> bool:
        """False: it did not run, as a member's time to start had passed."""
        began = perf_counter()
        prepared, sizes = self._pool.prepared, self._planner.prepared_sizes(call.sizes)
        if prepared is None or sizes is None:
            assert self._request is not None
            if not self._run_on(self._request, call, pieces, began):
                return False
            self._preparations += self._is_new(self._work.model, call.sizes)
            return True
        request, new = prepared.lease(sizes)
        self._preparations += new
        try:
            return self._run_on(request, call, pieces, began)
        finally:
            prepared.give_back(sizes, request)

    def _run_on(
        self, request: InferRequest, call: PlannedCall, pieces: Sequence[Piece], began: float
    ) -> bool:
        work, assembly, cutter = self._work, self._pool.assembly, self._pool.cutter
        own = [cutter.cut(piece, work.members, self._shapes) for piece in pieces]
        given = [*own, *cutter.filling(call, pieces, work.members, self._shapes)]
        reallocations = request.reallocations
        assembly.gather(
            call.sizes, [member for member, _ in given], [shape for _, shape in given], request.input_tensors
        )
        self._reallocations += request.reallocations - reallocations
        members = [piece.member for piece in pieces]
        if in_time(work.start_before, members) is not members:  # waiting and gathering take time
            return False
        started, ended = self._infer(request)
        self._run_s += ended - started
        self._calls[call.sizes] += 1
        results = assembly.split(call.sizes, [shape for _, shape in own], request.outputs())
        for piece, result in zip(pieces, results, strict=True):
            self._parts[piece.member].append(result)
            self._part_rows[piece.member].append(piece.stop - piece.start)
        return True

    def _result(self, place: int) -> Tensors | None:
        """A member's result, if all of it ran."""
        parts = self._parts[place]
        if not parts or self._left(place):
            return None
        if len(parts) == 1:
            return parts[0]
        return self._pool.assembly.join(parts, self._part_rows[place])


def _covering(rows: int, calls: Sequence[PlannedCall]) -> Sequence[PlannedCall]:
    """The first of these calls, as far as there are rows; one at least."""
    covering = [replace(call, stop=min(call.stop, rows)) for call in calls if call.start < rows]
    return covering or [replace(calls[0], stop=0)]


def in_time(start_before: tuple[float | None, ...] | None, places: Sequence[int]) -> Sequence[int]:
    """The places of `places` whose members may still start; the same object where none is late."""
    if start_before is None:
        return places
    deadlines = [time for time in start_before if time is not None]
    if not deadlines:
        return places
    now = monotonic()
    if min(deadlines) > now:
        return places
    left = [place for place in places if (time := start_before[place]) is None or time > now]
    return places if len(left) == len(places) else left
