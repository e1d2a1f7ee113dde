"""Runs the batches of a slot, one after another, from received buffers to results.

A `Runner` belongs to the thread that calls `run`. The thread gathers the requests, runs the calls, copies the results out,
and gives the inference request back. The slots of servers and workers (`slot_threads.py` of the pipeline) read batches
from a socket; calibration, `check` and the proof make their own.

A batch can be withdrawn until it begins, even before it arrives: its number is then skipped. Of a cancelled batch, calls
that have not begun are left out. A call that has begun runs to its end, because engines that are asked to stop a call may
give wrong results later (docs/backends.md). Every error of a call fails the batch, even if it is no `Exception`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from time import perf_counter

from shapestream_engine.batch import BatchInputs, BatchReport, ErrorCode
from shapestream_engine.batch_run import BatchRun
from shapestream_engine.batching.calls import merge_sizes
from shapestream_engine.compiled_model import RequestPool
from shapestream_engine.errors import EngineError, InferenceError, InvalidInput, message_of
from shapestream_engine.infer_request import InferRequest
from shapestream_engine.layout import RequestShape, Tensors
from shapestream_engine.signature import ModelSignature


class Runner:
    """Runs batches of the models of `pools`, one after another, on the thread that calls `run`.

    `withdraw` and `cancel` are thread-safe and return at once. Batch numbers must ascend. A failed batch does not affect
    the next.
    """

    __slots__ = ("_begun", "_cancelled", "_halted", "_last", "_lock", "_pools", "_seen", "_withdrawn", "name")

    def __init__(self, name: str, pools: Mapping[str, RequestPool]) -> None:
        self.name = name
        self._pools = dict(pools)
        self._seen: dict[str, set[tuple[int, ...]]] = {name: set() for name in pools}
        """The call shapes of each model so far."""
        # Orders requests of other threads and this thread's work: a batch is withdrawn or begun, never both, and
        # `cancel` affects only its batch.
        self._lock = threading.Lock()
        self._last = -1
        """The number of the last batch that began or was skipped."""
        self._withdrawn: dict[int, bool] = {}
        """Numbers to skip, and whether `run` reports them. All exceed `_last`; a server bounds their number."""
        self._begun: int | None = None
        """The number of the running batch."""
        self._cancelled = False
        """True once the running batch is cancelled: no further call begins."""
        self._halted = False
        """True while all batches are skipped."""

    @property
    def begun(self) -> int | None:
        """The number of the batch that runs; None between batches."""
        return self._begun

    def run(self, batch: BatchInputs, ahead_s: float = 0.0) -> BatchReport | None:
        """Run a batch and return its report; None if it was withdrawn. Errors become reports.

        `ahead_s` is this process's `time.monotonic` minus the clock of `start_before`, in seconds.
        """
        with self._lock:
            self._last = batch.batch
            if self._halted:
                return None
            if self._withdrawn:
                reported = self._withdrawn.get(batch.batch)
                self._withdrawn = {
                    number: own for number, own in self._withdrawn.items() if number > batch.batch
                }
                if reported is not None:
                    if not reported:
                        return None
                    return _failed(batch, ErrorCode.CANCELLED, "cancelled before it began")
            self._begun, self._cancelled = batch.batch, False
        try:
            return self._process(batch, ahead_s)
        finally:
            with self._lock:
                self._begun = None

    def withdraw(self, batch: int) -> bool:
        """Skip this batch when it arrives; the caller reports its end.

        Returns False if the batch has begun, was reported, or is skipped already.
        """
        with self._lock:
            if self._halted or batch <= self._last or batch in self._withdrawn:
                return False
            self._withdrawn[batch] = False
            return True

    def cancel(self, batch: int) -> None:
        """Begin no further call of this batch; a running call goes on. A batch that has not begun is skipped.

        `run` reports the batch in both cases, with its results if no call was left out.
        """
        with self._lock:
            if self._begun == batch:
                self._cancelled = True
            elif not self._halted and batch > self._last:
                self._withdrawn.setdefault(batch, True)

    def halt(self) -> None:
        """Skip all batches, and further calls of the running batch, until `restart`."""
        with self._lock:
            self._halted = self._cancelled = True

    def restart(self) -> None:
        """Run batches again; numbers may start anew."""
        with self._lock:
            self._halted = False
            self._last = -1
            self._withdrawn.clear()

    def _process(self, batch: BatchInputs, ahead_s: float) -> BatchReport:
        began = perf_counter()
        pool = self._pools.get(batch.model)
        if pool is None:
            return _failed(batch, ErrorCode.UNAVAILABLE, f"model {batch.model!r} is not served here")
        try:
            shapes = batch.shapes or tuple([pool.resolve(member.layout) for member in batch.members])
        except EngineError as error:
            message = f"the members are no requests of model {batch.model!r}: {error}"
            return _failed(batch, ErrorCode.INTERNAL, message)
        request = pool.try_lease()
        if request is None and pool.prepared is None:
            message = f"model {batch.model!r} has no free request: {pool!r}"
            return _failed(batch, ErrorCode.UNAVAILABLE, message)
        try:
            seen = self._seen[batch.model]
            return BatchRun(batch, shapes, ahead_s, pool, request, self._infer, seen).run()
        except BaseException as error:  # noqa: BLE001
            # Every error becomes a coded report here, including those that are no `Exception`: a panic of a Rust
            # extension, SystemExit, trio's Cancelled. This thread has no caller for them. Ctrl-C reaches the main
            # thread only, and a dead thread would leave batches unanswered.
            return self._failure(batch, pool, error, began)
        finally:
            if request is not None:
                pool.give_back(request)

    def _infer(self, request: InferRequest) -> tuple[float, float]:
        """Run a call of the running batch; return the times of its start and end."""
        if self._cancelled:
            raise InferenceError("cancelled before its call began")
        started = perf_counter()
        request.infer()
        return started, perf_counter()

    def _failure(
        self, batch: BatchInputs, pool: RequestPool, error: BaseException, began: float
    ) -> BatchReport:
        words = f"{message_of(error)}{_about_empty(batch, pool)}"
        if self._cancelled:
            code, message = ErrorCode.CANCELLED, words
        elif isinstance(error, MemoryError):
            # The device caused it: the batch may run elsewhere, or later.
            code, message = ErrorCode.UNAVAILABLE, f"out of memory: {words}"
        elif isinstance(error, InvalidInput):
            code, message = ErrorCode.INVALID, words
        elif isinstance(error, EngineError | RuntimeError):
            code, message = ErrorCode.MODEL_ERROR, words
        elif isinstance(error, Exception):
            code, message = ErrorCode.INTERNAL, f"{type(error).__name__}: {words}"
        else:
            # shapestream raises no such error, so the model did.
            code, message = ErrorCode.MODEL_ERROR, f"{type(error).__name__}: {words}"
        return _failed(batch, code, message, busy_s=perf_counter() - began)


def run_batch(
    runner: Runner, signature: ModelSignature, members: Sequence[Tensors], shapes: Sequence[RequestShape]
) -> BatchReport:
    """Run these requests of a model as one batch, which nothing withdraws, at the sizes that they need together.

    `shapes` are the `resolve` results of the requests. Raises `ShapeError` for requests that cannot share a call.
    """
    report = runner.run(
        BatchInputs(
            batch=0,
            model=signature.name,
            sizes=merge_sizes(signature, [shape.rounded for shape in shapes]),
            members=tuple(members),
            shapes=tuple(shapes),
        )
    )
    assert report is not None  # nothing withdraws it
    return report


def _about_empty(batch: BatchInputs, pool: RequestPool) -> str:
    """Return advice if a member has no elements: few models take sizes of 0, and engines report them obscurely."""
    for member in batch.members:
        for number, _, shape in member.layout:
            port = pool.signature.inputs[number]
            # Not strict: the shape of strings ends with their bytes, which may be 0.
            empty = [name or "?" for name, size in zip(port.axis_names, shape, strict=False) if size == 0]
            if empty:
                bounds = ", ".join(f"{name}:1.." for name in empty)
                return (
                    f" (input {port.name!r} has no elements, {list(shape)}; if the model takes no such sizes, "
                    f"{bounds} in its shape refuses them on arrival)"
                )
    return ""


def _failed(batch: BatchInputs, code: ErrorCode, message: str, busy_s: float = 0.0) -> BatchReport:
    return BatchReport(batch=batch.batch, outputs=None, busy_s=busy_s, code=code, message=message)
