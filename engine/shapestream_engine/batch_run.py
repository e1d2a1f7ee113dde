"""The run of one batch on a slot's thread: from requests, through one or several calls, to results.

1. *Plan.* The strategy divides the batch into calls (`batching/calls.py`).
2. *Cut.* A request that spans calls is cut into pieces, views of its bytes where possible (`batching/calls.py`).
3. *Gather.* The pieces of a call are copied into the input tensors of a leased request; missing rows are copies.
4. *Run and split.* The outputs are divided among the requests by their rules (`batching/split.py`).
5. *Join.* The parts of a request from several calls are joined by the same rules.

A request gets the same result whatever the calls were. Before each call, members whose time to start has passed are left
out, and the remaining members are planned again. A failed call fails the whole batch; the slot's `Runner` makes the
report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic, perf_counter

from shapestream_engine.batch import BatchInputs, BatchReport
from shapestream_engine.batching.calls import Piece, PlannedCall, divide, merge_sizes
from shapestream_engine.compiled_model import RequestPool
from shapestream_engine.infer_request import InferRequest
from shapestream_engine.layout import RequestShape, Tensors

_REMEMBERED_SHAPES = 4096
"""Number of call shapes remembered per model, to recognise new ones; then all are forgotten."""


class BatchRun:
    """The state of one batch while it runs; the slot provides `infer` and `seen`, the shapes that it has run."""

    __slots__ = (
        "_ahead_s",
        "_batch",
        "_call_due",
        "_calls",
        "_gather_s",
        "_infer",
        "_outputs",
        "_parts",
        "_pool",
        "_preparations",
        "_reallocations",
        "_request",
        "_run_s",
        "_seen",
        "_shapes",
    )

    def __init__(
        self,
        batch: BatchInputs,
        shapes: Sequence[RequestShape],
        ahead_s: float,
        pool: RequestPool,
        request: InferRequest | None,
        infer: Callable[[InferRequest], tuple[float, float]],
        seen: set[tuple[int, ...]],
    ) -> None:
        """`shapes` has the members' sizes; `ahead_s` is this process's clock minus the clock of `start_before`, in
        seconds. `request` runs the calls of shapes without a prepared model; None if every shape has one."""
        self._batch = batch
        self._shapes = shapes
        self._ahead_s = ahead_s
        self._pool = pool
        self._request = request
        self._infer = infer
        self._seen = seen
        self._outputs: list[Tensors | None] = []
        # No comprehension: before Python 3.12 each is a function, which a lone request finds nowhere in the caches.
        for shape in shapes:
            self._outputs.append(shape.answer)
        """The members' results, including answers that need no call; None for open members."""
        self._parts: dict[int, tuple[list[Tensors], list[int]]] = {}
        """Per divided member: its results so far, and the rows of each."""
        self._calls: dict[tuple[int, ...], int] = {}
        """Number of calls so far, by sizes."""
        self._call_due = 0.0
        """Time at which the gathering of the next call began."""
        self._gather_s = self._run_s = 0.0
        self._reallocations = self._preparations = 0

    def run(self) -> BatchReport:
        """Run all calls and return the report.

        Members whose time to start passes between calls get no result. Members whose answer needs no call take part in
        none.
        """
        batch = self._batch
        began = self._call_due = perf_counter()
        if batch.start_before is not None:
            answered = [place for place, output in enumerate(self._outputs) if output is not None]
            for late in set(answered).difference(self._in_time(answered)):
                self._outputs[late] = None
        done = False
        while not done:
            places = []
            for place, output in enumerate(self._outputs):
                if output is None:
                    places.append(place)
            if batch.start_before is not None:
                places = self._in_time(places)
            if not places:
                break
            done = self._run_calls(places)
        return BatchReport(
            batch=batch.batch,
            outputs=tuple(self._outputs),
            gather_s=self._gather_s,
            run_s=self._run_s,
            busy_s=perf_counter() - began,
            reallocations=self._reallocations,
            preparations=self._preparations,
            calls=()
            if self._calls == {batch.sizes: 1}
            else tuple([(count, sizes) for sizes, count in self._calls.items()]),
        )

    def _in_time(self, places: Sequence[int]) -> list[int]:
        """Return the places of members that may still start, of a batch with times to start."""
        start_before, now = self._batch.start_before or (), monotonic() - self._ahead_s
        return [place for place in places if (time := start_before[place]) is None or time > now]

    def _run_calls(self, places: Sequence[int]) -> bool:
        """Run the calls for the remaining rows of these members; stop early if one of them may not start any more.

        Returns True if all of them ran together, so that each has its result; else some may be left.
        """
        members, shapes = self._batch.members, self._shapes
        if len(places) < len(members):
            members, shapes = tuple([members[place] for place in places]), [shapes[place] for place in places]
        left, done = [], None
        for shape in shapes:
            left.append(shape.rows)
        if self._parts:
            done = [self._rows_done(place) for place in places]
            left = [rows - ran for rows, ran in zip(left, done, strict=True)]
        calls = self._plan(shapes, left)
        if len(calls) == 1 and done is None:
            results = self._run_call(calls[0], places, members, shapes)
            if results is None:
                return False
            for place, result in zip(places, results, strict=True):
                self._outputs[place] = result
            return True
        self._run_pieces(calls, places, left, done or [0] * len(left))
        return False

    def _run_pieces(
        self, calls: Sequence[PlannedCall], places: Sequence[int], left: Sequence[int], done: Sequence[int]
    ) -> None:
        """Run calls for rows of these members: `left` rows of each, after `done` rows; stop early as `_run_calls` does."""
        members, shapes = self._batch.members, self._shapes
        cut = self._pool.cutter.cut
        for call, pieces in zip(calls, divide(calls, left), strict=True):
            own = [
                Piece(places[piece.member], done[piece.member] + piece.start, done[piece.member] + piece.stop)
                for piece in pieces
            ]
            cuts = [cut(piece, members, shapes) for piece in own]
            results = self._run_call(
                call,
                [piece.member for piece in own],
                [member for member, _ in cuts],
                [shape for _, shape in cuts],
            )
            if results is None:
                return
            for piece, result in zip(own, results, strict=True):
                self._keep(piece, result)

    def _plan(self, shapes: Sequence[RequestShape], left: Sequence[int]) -> Sequence[PlannedCall]:
        """Plan calls for the remaining rows of members of these shapes; `left` has the rows of each.

        The rest of a batch gets the sizes that it needs. Under a cap on shapes it keeps the batch's sizes, so that the
        device meets only shapes that the scheduler chose.
        """
        signature, sizes = self._pool.signature, self._batch.sizes
        rows = sum(left)
        if len(shapes) < len(self._outputs) or self._calls:
            if signature.strategy.max_prepared is None:
                first = 1 if signature.has_batch else 0
                own = [shape.sizes[first:] for shape in shapes]
                sizes = merge_sizes(
                    signature, [(*(rows,) * first, *others) for rows, others in zip(left, own, strict=True)]
                )
            if signature.has_batch and not signature.strategy.fill_rows:
                sizes = (rows, *sizes[1:])
        plan = (
            self._pool.planner.plan
        )  # an attribute, not a method: looked up as one, it is not found at once
        calls = plan(sizes)
        return _covering(rows, calls) if signature.has_batch and sizes[0] > rows else calls

    def _run_call(
        self,
        call: PlannedCall,
        places: Sequence[int],
        members: Sequence[Tensors],
        shapes: Sequence[RequestShape],
    ) -> Sequence[Tensors] | None:
        """Run a call and return the results in order; None if the time to start of a member had passed."""
        prepared = self._pool.prepared
        sizes = None if prepared is None else self._pool.planner.prepared_sizes(call.sizes)
        if prepared is None or sizes is None:
            assert self._request is not None  # only a pool whose shapes are all prepared has no requests
            results = self._run_on(self._request, call, places, members, shapes)
            of_tensors = self._pool.shape_of_tensors
            known = call.sizes if of_tensors is None else of_tensors(call.sizes)
            if results is not None and known not in self._seen:
                self._preparations += 1
                if len(self._seen) >= _REMEMBERED_SHAPES:
                    self._seen.clear()
                self._seen.add(known)
            return results
        request, new = prepared.lease(sizes)
        self._preparations += new
        try:
            return self._run_on(request, call, places, members, shapes)
        finally:
            prepared.give_back(sizes, request)

    def _run_on(
        self,
        request: InferRequest,
        call: PlannedCall,
        places: Sequence[int],
        members: Sequence[Tensors],
        shapes: Sequence[RequestShape],
    ) -> list[Tensors] | None:
        assembly = self._pool.assembly
        given, given_shapes = members, shapes
        missing = call.sizes[0] - (call.stop - call.start) if self._pool.signature.has_batch else 0
        if missing > 0:
            filling = self._pool.cutter.filling(missing, members, shapes)
            given = [*members, *[member for member, _ in filling]]
            given_shapes = [*shapes, *[shape for _, shape in filling]]
        self._reallocations += assembly.gather(call.sizes, given, given_shapes, request.input_tensors)
        if self._batch.start_before is not None and len(self._in_time(places)) < len(places):
            return None  # gathering took too long
        infer = self._infer
        started, ended = infer(request)
        self._gather_s += started - self._call_due
        self._run_s += ended - started
        self._calls[call.sizes] = self._calls.get(call.sizes, 0) + 1
        results = assembly.split(call.sizes, shapes, request.outputs())
        self._call_due = perf_counter()
        return results

    def _rows_done(self, place: int) -> int:
        return sum(self._parts[place][1]) if place in self._parts else 0

    def _keep(self, piece: Piece, result: Tensors) -> None:
        """Keep the result of a piece; join the parts when the member is complete."""
        rows = piece.stop - piece.start
        whole = self._shapes[piece.member].rows
        if rows == whole:
            self._outputs[piece.member] = result
            return
        parts, part_rows = self._parts.setdefault(piece.member, ([], []))
        parts.append(result)
        part_rows.append(rows)
        if sum(part_rows) == whole:
            self._outputs[piece.member] = self._pool.assembly.join(parts, part_rows)


def _covering(rows: int, calls: Sequence[PlannedCall]) -> Sequence[PlannedCall]:
    """Return the calls that cover `rows` rows; at least one."""
    covering = [
        PlannedCall(call.sizes, call.start, min(call.stop, rows)) for call in calls if call.start < rows
    ]
    return covering or [PlannedCall(calls[0].sizes, calls[0].start, 0)]
