"""A slot: one thread that runs one batch at a time, from the received buffers to results that are its own.

Everything that touches an engine's tensors happens on this thread: it gathers the requests, runs the call, copies
the results out, gives the inference request back, and reports once, whatever happened.

Handing a batch to the thread and its report back costs about 17 us of CPU, of which 12 us are the wake-ups of two
threads; what the slot itself does around gathering, running and splitting costs some 10 us per batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter

from shapestream_engine.batching.plan import merge_sizes
from shapestream_engine.errors import EngineError, InferenceError
from shapestream_engine.layout import Tensors
from shapestream_engine.model import InferRequest
from shapestream_engine.planned_batch import PlannedBatch
from shapestream_engine.request_pool import RequestPool
from shapestream_engine.signature import ModelSignature, RequestShape
from shapestream_engine.work import ErrorCode, Report, Work, in_time

__all__ = ["ErrorCode", "Report", "Slot", "Work"]

_REMEMBERED_SHAPES = 4096
"""Call shapes remembered per model, to tell new ones; when so many are known, all are forgotten."""


class Slot:
    """Runs batches of the models of `pools`, one at a time; `report` is called on its thread, once per batch.

    `start` and `cancel` return at once. A failed batch leaves the slot as good as new.
    """

    def __init__(self, name: str, pools: Mapping[str, RequestPool], report: Callable[[Report], None]) -> None:
        self.name = name
        self._pools = dict(pools)
        self._report = report
        # Holds one batch at most, and the None that ends the thread: `start` refuses a second batch.
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._busy = False
        self._seen: dict[str, set[tuple[int, ...]]] = {name: set() for name in pools}
        # `cancel` comes from another thread, and must hit the call of its batch or none: the lock ties the two.
        self._lock = threading.Lock()
        self._running: tuple[int, InferRequest] | None = None
        self._cancelled: int | None = None
        self._thread = threading.Thread(target=self._work_off, name=f"slot {name}", daemon=True)
        self._thread.start()

    def start(self, work: Work) -> None:
        """Hand over a batch; raises `RuntimeError` while the last one is not reported, and after `close`."""
        if self._busy or not self._thread.is_alive():
            state = "still runs a batch" if self._busy else "has ended"
            raise RuntimeError(f"slot {self.name!r} {state}")
        self._busy = True
        self._queue.put(work)

    def cancel(self, batch: int) -> None:
        """Ask for the end of a batch, from any thread. It is reported all the same: as done if it came too late."""
        with self._lock:
            self._cancelled = batch
            if self._running is not None and self._running[0] == batch:
                self._running[1].cancel()

    def close(self) -> None:
        """End the thread, after the batch that it runs; blocks until then. The pools' requests are free afterwards."""
        self._queue.put(None)
        self._thread.join()

    def _work_off(self) -> None:
        while (work := self._queue.get()) is not None:
            report = self._process(work)
            del work  # the buffers of this batch need not live until the next
            self._busy = False
            self._report(report)
            del report

    def _process(self, work: Work) -> Report:
        pool = self._pools.get(work.model)
        request = None if pool is None else pool.try_lease()
        if pool is None or (request is None and pool.prepared is None):
            reason = "is not served here" if pool is None else f"has no free request: {pool!r}"
            message = f"model {work.model!r} {reason}"
            return Report(batch=work.batch, outputs=None, error_code="unavailable", message=message)
        try:
            if pool.planner is not None:
                return PlannedBatch(work, pool, request, self._infer, self._is_new).run()
            assert request is not None  # models are only prepared for what is planned
            return self._run(work, pool, request)
        except Exception as error:  # noqa: BLE001 - the edge where whatever went wrong becomes a coded report
            return self._failure(work, error)
        finally:
            if request is not None:
                pool.give_back(request)

    def _run(self, work: Work, pool: RequestPool, request: InferRequest) -> Report:
        resolve = pool.signature.resolve
        shapes = work.shapes or tuple([resolve(member.layout) for member in work.members])
        reallocations = request.reallocations
        began = perf_counter()
        places: Sequence[int] = in_time(work.start_before, range(len(work.members)))
        while places:
            call = _Call.of(pool.signature, work, shapes, places)
            pool.assembly.gather(call.sizes, call.members, call.shapes, request.input_tensors)
            still = in_time(work.start_before, places)  # gathering takes time as well
            if len(still) == len(places):
                break
            places = still
        else:
            return Report(
                batch=work.batch, outputs=(None,) * len(work.members), gather_s=perf_counter() - began
            )
        started, ended = self._infer(work.batch, request)
        results = pool.assembly.split(call.sizes, call.shapes, request.outputs())
        return Report(
            batch=work.batch,
            outputs=_in_place(results, places, len(work.members)),
            run_s=ended - started,
            gather_s=started - began,
            reallocations=request.reallocations - reallocations,
            preparations=int(self._is_new(work.model, call.sizes)),
        )

    def _infer(self, batch: int, request: InferRequest) -> tuple[float, float]:
        """Runs the call; returns when it started and ended."""
        with self._lock:
            if self._cancelled == batch:
                raise InferenceError("cancelled before it started")
            self._running = (batch, request)
        started = perf_counter()
        try:
            request.infer()
            return started, perf_counter()
        finally:
            with self._lock:
                self._running = None

    def _is_new(self, model: str, sizes: tuple[int, ...]) -> bool:
        seen = self._seen[model]
        if sizes in seen:
            return False
        if len(seen) >= _REMEMBERED_SHAPES:
            seen.clear()
        seen.add(sizes)
        return True

    def _failure(self, work: Work, error: Exception) -> Report:
        code: ErrorCode
        if self._cancelled == work.batch:
            code, message = "cancelled", str(error)
        elif isinstance(error, MemoryError):
            # Of the device, not of the data: elsewhere, or later, the batch may run.
            code, message = "unavailable", f"out of memory: {error}"
        elif isinstance(error, EngineError | RuntimeError):
            code, message = "model_error", str(error)
        else:
            code, message = "internal", f"{type(error).__name__}: {error}"
        return Report(batch=work.batch, outputs=None, error_code=code, message=message)


@dataclass(frozen=True, slots=True)
class _Call:
    """What is run in the end: the batch, less the members whose time to start has passed."""

    sizes: tuple[int, ...]
    members: Sequence[Tensors]
    shapes: Sequence[RequestShape]

    @classmethod
    def of(
        cls, signature: ModelSignature, work: Work, shapes: Sequence[RequestShape], places: Sequence[int]
    ) -> _Call:
        if len(places) == len(work.members):
            return cls(work.sizes, work.members, shapes)
        left = [shapes[place] for place in places]
        sizes = merge_sizes(signature, [shape.sizes for shape in left])
        return cls(sizes, [work.members[place] for place in places], left)


def _in_place(results: Sequence[Tensors], places: Sequence[int], members: int) -> tuple[Tensors | None, ...]:
    if len(results) == members:
        return tuple(results)
    outputs: list[Tensors | None] = [None] * members
    for place, result in zip(places, results, strict=True):
        outputs[place] = result
    return tuple(outputs)
