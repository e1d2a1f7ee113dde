"""A slot: one thread that runs one batch after the other, from the received buffers to results that are its own.

`Runner` is what a slot does with a batch. It belongs to the thread that calls `run`, which gathers the requests, runs
the call, copies the results out and gives the inference request back. A server's slots and a worker's (`slot_threads.py`
of the pipeline) take their batches from a socket. `Slot` takes them from a queue: for calibration, `check` and probes.

Until a batch has begun it can be withdrawn, also before it has arrived: its number is skipped. One that runs can be
interrupted. Whatever a model's call raises fails its batch, also an error that is no `Exception`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from time import perf_counter

from shapestream_engine.batch import Batch, BatchReport, ErrorCode
from shapestream_engine.batch_run import BatchRun
from shapestream_engine.errors import EngineError, InferenceError
from shapestream_engine.infer_request import InferRequest
from shapestream_engine.request_pool import RequestPool

MAX_WAITING = 1
"""Batches that may be queued behind the one that runs. One hides the way to the slot; more would be decided too early."""
_REMEMBERED_SHAPES = 4096
"""Call shapes remembered per model, to tell new ones; when so many are known, all are forgotten."""


class Runner:
    """Run batches of the models of `pools`, one after another, on the thread that calls `run`.

    `withdraw` and `cancel` return at once and may be called from any thread. They need batches with ascending numbers.
    A failed batch leaves the runner as good as new.
    """

    def __init__(self, name: str, pools: Mapping[str, RequestPool]) -> None:
        self.name = name
        self._pools = dict(pools)
        self._seen: dict[str, set[tuple[int, ...]]] = {name: set() for name in pools}
        # Ties other threads' wishes to this one's work: a batch is withdrawn or begun, never both, and `cancel` hits
        # the call of its batch or none.
        self._lock = threading.Lock()
        self._last = -1
        """The number that was begun, or skipped, last."""
        self._withdrawn: set[int] = set()
        """Numbers to skip. They exceed `_last`, and are as many as a server withdraws before it sends the next."""
        self._begun: int | None = None
        """The batch that the thread works on."""
        self._calling: InferRequest | None = None
        """The request that runs the present call of that batch."""
        self._cancelled = False
        """True once the end of that batch was asked for."""
        self._halted = False
        """True while all batches are skipped."""

    @property
    def begun(self) -> int | None:
        """The number of the batch that runs; None between batches."""
        return self._begun

    def run(self, batch: Batch) -> BatchReport | None:
        """Run a batch to its report; None if it was withdrawn. Errors become reports, of whatever kind they are."""
        with self._lock:
            self._last = batch.batch
            if self._halted:
                return None
            if self._withdrawn:
                skip = batch.batch in self._withdrawn
                self._withdrawn = {number for number in self._withdrawn if number > batch.batch}
                if skip:
                    return None
            self._begun, self._cancelled = batch.batch, False
        try:
            return self._process(batch)
        finally:
            with self._lock:
                self._begun = None

    def withdraw(self, batch: int) -> bool:
        """Skip this batch when its turn comes. False if it has begun, was reported, or is skipped anyway."""
        with self._lock:
            if self._halted or batch <= self._last or batch in self._withdrawn:
                return False
            self._withdrawn.add(batch)
            return True

    def cancel(self, batch: int) -> bool:
        """Withdraw this batch, or interrupt it if it runs: its call ends early, if the engine can do that."""
        if self.withdraw(batch):
            return True
        with self._lock:
            if self._begun == batch:
                self._interrupt()
        return False

    def halt(self) -> None:
        """Skip every batch, and interrupt the one that runs, until `restart`."""
        with self._lock:
            self._halted = True
            if self._begun is not None:
                self._interrupt()

    def restart(self) -> None:
        """Run batches again; their numbers may begin anew."""
        with self._lock:
            self._halted = False
            self._last = -1
            self._withdrawn.clear()

    def _interrupt(self) -> None:
        """End the call of the batch that runs; to be called with the lock."""
        self._cancelled = True
        if self._calling is not None:
            self._calling.cancel()

    def _process(self, batch: Batch) -> BatchReport:
        began = perf_counter()
        pool = self._pools.get(batch.model)
        request = None if pool is None else pool.try_lease()
        if pool is None or (request is None and pool.prepared is None):
            reason = "is not served here" if pool is None else f"has no free request: {pool!r}"
            message = f"model {batch.model!r} {reason}"
            return BatchReport(batch=batch.batch, outputs=None, code=ErrorCode.UNAVAILABLE, message=message)
        try:
            return BatchRun(batch, pool, request, self._infer, self._is_new).run()
        except BaseException as error:  # noqa: BLE001
            # The edge where whatever went wrong becomes a coded report. Also what is no `Exception`, such as the panic of
            # an extension in Rust, SystemExit or trio's Cancelled: this thread has no caller whom it could be meant for,
            # Ctrl-C reaches the main thread only, and a thread that ends answers nothing that was sent to it.
            return self._failure(batch, error, began)
        finally:
            if request is not None:
                pool.give_back(request)

    def _infer(self, request: InferRequest) -> tuple[float, float]:
        """Runs a call of the batch that has begun; returns when it started and ended."""
        with self._lock:
            if self._cancelled:
                raise InferenceError("cancelled before it started")
            self._calling = request
        started = perf_counter()
        try:
            request.infer()
            return started, perf_counter()
        finally:
            with self._lock:
                self._calling = None

    def _is_new(self, model: str, sizes: tuple[int, ...]) -> bool:
        seen = self._seen[model]
        if sizes in seen:
            return False
        if len(seen) >= _REMEMBERED_SHAPES:
            seen.clear()
        seen.add(sizes)
        return True

    def _failure(self, batch: Batch, error: BaseException, began: float) -> BatchReport:
        words = _words(error)
        if self._cancelled:
            code, message = ErrorCode.CANCELLED, words
        elif isinstance(error, MemoryError):
            # Of the device, not of the data: elsewhere, or later, the batch may run.
            code, message = ErrorCode.UNAVAILABLE, f"out of memory: {words}"
        elif isinstance(error, EngineError | RuntimeError):
            code, message = ErrorCode.MODEL_ERROR, words
        elif isinstance(error, Exception):
            code, message = ErrorCode.INTERNAL, f"{type(error).__name__}: {words}"
        else:
            code, message = (
                ErrorCode.MODEL_ERROR,
                f"{type(error).__name__}: {words}",
            )  # none of ours raises such
        return BatchReport(
            batch=batch.batch,
            outputs=None,
            busy_s=perf_counter() - began,
            code=code,
            message=message,
        )


def _words(error: BaseException) -> str:
    """The error's message. A model's own class may fail to give one."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - the same edge: it is the model's code that runs here
        return "(its message cannot be read)"


class Slot:
    """A thread that runs batches in the order in which they were started.

    `report` is called once per batch: on the slot's thread, or on the one that withdrew the batch. `start`, `cancel` and
    `recall` return at once and may be called from any thread. A thread that ends reports every batch that it was given.
    """

    def __init__(
        self, name: str, pools: Mapping[str, RequestPool], report: Callable[[BatchReport], None]
    ) -> None:
        self.name = name
        self._runner = Runner(name, pools)
        self._report = report
        self._lock = threading.Lock()
        self._given: set[int] = set()
        """Batches that were started and not reported. Bounded by `start`."""
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._live, name=f"slot {name}", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """True once the thread runs no further batch, although nothing has closed the slot."""
        return self._ended

    def start(self, batch: Batch) -> None:
        """Hand over a batch, to run when those before it are done.

        Raises `RuntimeError` while another is queued behind the running one, after `close`, and once the slot `has_ended`.
        """
        with self._lock:
            if self._closing or self._ended:
                raise RuntimeError(f"slot {self.name!r} has ended")
            if len(self._given) > MAX_WAITING:
                raise RuntimeError(f"slot {self.name!r} runs a batch, and another one waits for it")
            self._given.add(batch.batch)
            self._queue.put(batch)

    def recall(self, batch: int) -> bool:
        """Take a batch back that has not begun: it is reported as `recalled`. False: it is too late, or unknown."""
        return batch in self._given and self._take_back(
            batch, self._runner.withdraw, ErrorCode.RECALLED, "taken back before it began"
        )

    def cancel(self, batch: int) -> None:
        """Ask for the end of a batch. It is reported all the same: as done if it came too late.

        Unknown batches, and those that were reported, are ignored.
        """
        if batch in self._given:
            self._take_back(batch, self._runner.cancel, ErrorCode.CANCELLED, "cancelled before it began")

    def close(self) -> None:
        """End the thread, after the batches that it was given; blocks until then. The pools' requests are free then."""
        with self._lock:
            self._closing = True
            self._queue.put(None)
        self._thread.join()

    def _take_back(self, batch: int, ask: Callable[[int], bool], code: ErrorCode, why: str) -> bool:
        if not ask(batch):
            return False
        self._answer(BatchReport(batch=batch, outputs=None, code=code, message=why))
        return True

    def _answer(self, report: BatchReport) -> None:
        with self._lock:
            self._given.discard(report.batch)
        self._report(report)

    def _live(self) -> None:
        try:
            while (batch := self._queue.get()) is not None:
                report = self._runner.run(batch)
                del batch  # the buffers of this batch need not live until the next
                if report is not None:
                    self._answer(report)
                del report
        finally:
            with self._lock:
                self._ended = not self._closing or bool(self._given)
                left = sorted(self._given)
                self._given.clear()
            why = f"the thread of slot {self.name!r} has ended"
            for number in left:
                self._report(
                    BatchReport(
                        batch=number, outputs=None, code=ErrorCode.UNAVAILABLE, message=why, slot_ended=True
                    )
                )
