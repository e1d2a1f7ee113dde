"""A slot: one thread that runs one batch after the other, from the received buffers to results that are its own.

Everything that touches an engine's tensors happens on this thread: it gathers the requests, runs the call, copies
the results out, gives the inference request back, and reports once, whatever happened.

One more batch may wait behind the one that runs. The thread goes from one to the next by itself, so that the slot
does not stand still while its report travels, is decided upon and answered; until it has begun, a batch that waits
can be taken back.

Whatever a model's call raises fails its batch, also what is no `Exception`. A thread that ends all the same reports every
batch that it was given, and says so in these reports.

Handing a batch to the thread and its report back costs about 17 us of CPU, of which 12 us are the wake-ups of two
threads; what the slot itself does around gathering, running and splitting costs some 10 us per batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from time import perf_counter

from shapestream_engine.batch import Batch, BatchReport, ErrorCode
from shapestream_engine.batch_run import BatchRun
from shapestream_engine.errors import EngineError, InferenceError
from shapestream_engine.model import InferRequest
from shapestream_engine.request_pool import RequestPool

__all__ = ["MAX_WAITING", "Slot"]

MAX_WAITING = 1
"""Batches that may wait behind the one that runs. One hides the way to the slot; more would only be decided too early."""
_REMEMBERED_SHAPES = 4096
"""Call shapes remembered per model, to tell new ones; when so many are known, all are forgotten."""


class Slot:
    """Runs batches of the models of `pools`, in the order in which they were started.

    `report` is called once per batch, without the slot's lock: on the slot's thread, or on the one that took a
    waiting batch back. `start`, `cancel` and `recall` return at once and may be called from any thread. A failed
    batch leaves the slot as good as new.
    """

    def __init__(
        self, name: str, pools: Mapping[str, RequestPool], report: Callable[[BatchReport], None]
    ) -> None:
        self.name = name
        self._pools = dict(pools)
        self._report = report
        self._seen: dict[str, set[tuple[int, ...]]] = {name: set() for name in pools}
        # Ties what other threads ask for to what this one does: a batch is taken back or begun, never both, and
        # `cancel` hits the call of its batch or none.
        self._lock = threading.Lock()
        self._waiting: deque[Batch] = deque()
        """Not begun yet. Bounded by `start`, which refuses what exceeds `MAX_WAITING`."""
        self._begun: int | None = None
        """The batch that the thread works on, until just before its report."""
        self._calling: InferRequest | None = None
        """What runs the present call of that batch."""
        self._cancelled = False
        """Whether nobody waits for that batch any more."""
        self._closing = False
        self._ended = False
        # Wakes the thread when it has announced that it sleeps: so it holds one token at most.
        self._asleep = False
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._live, name=f"slot {name}", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the thread runs no further batch, although nothing has closed the slot."""
        return self._ended

    def start(self, batch: Batch) -> None:
        """Hand over a batch, to run when those before it are done.

        Raises `RuntimeError` while one waits behind another already, after `close`, and once the slot `has_ended`.
        """
        with self._lock:
            if self._closing or self._ended:
                raise RuntimeError(f"slot {self.name!r} has ended")
            if len(self._waiting) + (self._begun is not None) > MAX_WAITING:
                raise RuntimeError(f"slot {self.name!r} runs a batch, and another one waits for it")
            self._waiting.append(batch)
            self._wake_up()

    def recall(self, batch: int) -> bool:
        """Take a batch back that has not begun: it is reported as `recalled`. False: it is too late, or unknown."""
        return self._take_back(batch, ErrorCode.RECALLED, "taken back before it began")

    def cancel(self, batch: int) -> None:
        """Ask for the end of a batch. It is reported all the same: as done if it came too late.

        Unknown batches, and those that were reported, are ignored.
        """
        if self._take_back(batch, ErrorCode.CANCELLED, "cancelled before it began"):
            return
        with self._lock:
            if self._begun == batch:
                self._cancelled = True
                if self._calling is not None:
                    self._calling.cancel()

    def close(self) -> None:
        """End the thread, after the batches that it was given; blocks until then. The pools' requests are free then."""
        with self._lock:
            self._closing = True
            self._wake_up()
        self._thread.join()

    def _wake_up(self) -> None:
        """To be called with the lock."""
        if self._asleep:
            self._asleep = False
            self._wake.put(None)

    def _take_back(self, batch: int, code: ErrorCode, why: str) -> bool:
        with self._lock:
            found = next((other for other in self._waiting if other.batch == batch), None)
            if found is None:
                return False
            self._waiting.remove(found)
        self._report(BatchReport(batch=batch, outputs=None, code=code, message=why))
        return True

    # ---------------------------------------------------------------- on the slot's thread

    def _live(self) -> None:
        try:
            self._work_off()
        finally:
            if not self._closing or self._begun is not None or self._waiting:
                self._report_end()

    def _report_end(self) -> None:
        """Report what the thread was given and will not run: what it had begun may be to blame, the rest is not."""
        with self._lock:
            self._ended = True
            begun, self._begun = self._begun, None
            waiting = list(self._waiting)
            self._waiting.clear()
        why = f"the thread of slot {self.name!r} has ended"
        failed: list[tuple[int, ErrorCode]] = [(batch.batch, ErrorCode.UNAVAILABLE) for batch in waiting]
        if begun is not None:
            failed.insert(0, (begun, ErrorCode.INTERNAL))
        for batch, code in failed:
            self._report(BatchReport(batch=batch, outputs=None, code=code, message=why, slot_ended=True))

    def _work_off(self) -> None:
        while True:
            with self._lock:
                if self._waiting:
                    batch = self._waiting.popleft()
                    self._begun, self._cancelled = batch.batch, False
                elif self._closing:
                    return
                else:
                    batch = None
                    self._asleep = True
            if batch is None:
                self._wake.get()
                continue
            report = self._process(batch)
            del batch  # the buffers of this batch need not live until the next
            with self._lock:
                self._begun = None  # before the report: whoever gets it may start the next batch at once
            self._report(report)
            del report

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
