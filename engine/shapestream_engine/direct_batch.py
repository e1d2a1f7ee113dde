"""A batch of a model that takes every shape as it comes: it runs as one call, on a slot's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from shapestream_engine.batch import Batch, BatchReport
from shapestream_engine.batching.pieces import Piece
from shapestream_engine.batching.plan import merge_sizes
from shapestream_engine.batching.strategy import PlannedCall
from shapestream_engine.layout import Tensors
from shapestream_engine.model import InferRequest
from shapestream_engine.planned_batch import in_time
from shapestream_engine.request_pool import RequestPool

__all__ = ["DirectBatch"]


class DirectBatch:
    """One batch, from its requests to their results. `infer` and `is_new` are the slot's."""

    def __init__(
        self,
        work: Batch,
        pool: RequestPool,
        request: InferRequest,
        infer: Callable[[InferRequest], tuple[float, float]],
        is_new: Callable[[str, tuple[int, ...]], bool],
    ) -> None:
        self._work = work
        self._pool = pool
        self._request = request
        self._infer = infer
        self._is_new = is_new
        self._shapes = work.shapes

    def run(self) -> BatchReport:
        """Runs the call, without the members whose time to start has passed; these get nothing.

        Members whose answer is known without a call take no part in it either.
        """
        work, request, assembly = self._work, self._request, self._pool.assembly
        members = len(work.members)
        reallocations = request.reallocations
        began = perf_counter()
        places: Sequence[int] = in_time(work.start_before, range(members))
        answered = [place for place in places if self._shapes[place].answer is not None]
        if answered:
            places = [place for place in places if self._shapes[place].answer is None]
        while places:
            sizes = self._gather(places)
            still = in_time(work.start_before, places)  # gathering takes time as well
            if len(still) == len(places):
                break
            places = still
        else:
            spent_s = perf_counter() - began
            outputs = self._outputs((), (), answered)
            return BatchReport(batch=work.batch, outputs=outputs, busy_s=spent_s)
        started, ended = self._infer(request)
        shapes = self._shapes if len(places) == members else [self._shapes[place] for place in places]
        results = assembly.split(sizes, shapes, request.outputs())
        return BatchReport(
            batch=work.batch,
            outputs=self._outputs(results, places, answered),
            run_s=ended - started,
            busy_s=perf_counter() - began,
            reallocations=request.reallocations - reallocations,
            preparations=int(self._is_new(work.model, sizes)),
            calls=() if sizes == work.sizes else ((1, sizes),),
        )

    def _gather(self, places: Sequence[int]) -> tuple[int, ...]:
        """Gathers these members, and what fills the call up; returns the call's sizes."""
        work, pool, shapes = self._work, self._pool, self._shapes
        if len(places) == len(work.members):
            sizes, members = work.sizes, work.members
        else:
            members = tuple([work.members[place] for place in places])
            shapes = tuple([shapes[place] for place in places])
            sizes = merge_sizes(pool.signature, [shape.sizes for shape in shapes])
        rows = sum([shape.rows for shape in shapes]) if pool.signature.has_batch else 0
        if pool.signature.has_batch and sizes[0] > rows:
            pieces = [Piece(place, 0, shape.rows) for place, shape in enumerate(shapes)]
            filling = list(pool.cutter.filling(PlannedCall(sizes, 0, rows), pieces, members, shapes))
            members = (*members, *[member for member, _ in filling])
            shapes = (*shapes, *[shape for _, shape in filling])
        pool.assembly.gather(sizes, members, shapes, self._request.input_tensors)
        return sizes

    def _outputs(
        self, results: Sequence[Tensors], places: Sequence[int], answered: Sequence[int]
    ) -> tuple[Tensors | None, ...]:
        """Parallel to the members: what the call gave, what needed no call, and None."""
        if len(results) == len(self._shapes):
            return tuple(results)
        outputs: list[Tensors | None] = [None] * len(self._shapes)
        for place, result in zip(places, results, strict=True):
            outputs[place] = result
        for place in answered:
            outputs[place] = self._shapes[place].answer
        return tuple(outputs)
