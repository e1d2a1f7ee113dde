"""Slots in this process: work goes to each one's thread, and its report comes back into the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import monotonic

import structlog
import trio

from shapestream.serving.executor import InProcessExecutor, Reports
from shapestream_engine.batch import Batch, BatchReport, ErrorCode
from shapestream_engine.cost_table import CostTable
from shapestream_engine.model import CompiledModel
from shapestream_engine.request_pool import RequestPool
from shapestream_engine.signature import ModelSignature
from shapestream_engine.slot import Slot

__all__ = ["LocalExecutor", "LocalSlots"]

log = structlog.get_logger()

# How long the threads of local slots may take to end.
CLOSE_GRACE_S = 5.0
# How long before a slot becomes free its next batch is handed over, if it is to be there in time: the event loop's
# turn, the decision and the thread's wake-up. Seen on two busy cores: without prefetch a slot stood still for 0.2 to
# 0.3 ms between two batches, 0.5 ms in one of twenty. What comes late costs the slot that much idle time, what comes
# early is decided without the requests that arrive in between, so this is about twice what is usual.
LOCAL_PREFETCH_S = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSlots:
    """Models that run in the server's own process, on so many threads."""

    models: Mapping[str, CompiledModel]
    slots: int = 1
    costs: Mapping[str, CostTable] = field(default_factory=dict)
    """What was measured of the models' calls, by model."""

    def start(self, report: Reports) -> InProcessExecutor:
        """Starts the threads."""
        return LocalExecutor(self.models, self.slots, report, costs=self.costs)


class LocalExecutor:
    """Slots of this process. Made inside trio; its slots' threads run until `close`.

    `report` is called in the event loop with everything that was reported since its last turn, so that one
    wake-up serves all slots that finished together.
    """

    prefetch_s = LOCAL_PREFETCH_S

    def __init__(
        self,
        models: Mapping[str, CompiledModel],
        slots: int,
        report: Reports,
        *,
        name: str = "local",
        costs: Mapping[str, CostTable] | None = None,
    ) -> None:
        self.name = name
        self.slots = slots
        self.costs: Mapping[str, CostTable] = costs or {}
        self.models: Mapping[str, ModelSignature] = {key: model.signature for key, model in models.items()}
        self.digests: Mapping[str, str] = {
            key: model.digest for key, model in models.items() if model.digest is not None
        }
        self._report = report
        self._token = trio.lowlevel.current_trio_token()
        # Bounded by what the slots take: each runs one batch, and one may wait behind it.
        self._reports: deque[BatchReport] = deque()
        self._running: dict[int, Slot] = {}
        self._closing = False
        pools = {key: RequestPool(model, slots) for key, model in models.items()}
        self._slots = [Slot(f"{name}/{number}", pools, self._take) for number in range(slots)]

    def start_nowait(self, batch: Batch) -> None:
        """Hands the batch to its slot's thread, which may still run the one before."""
        slot = self._slots[batch.slot]
        self._running[batch.batch] = slot
        if batch.start_before is not None:
            # The slots' threads cannot ask trio for the time. In this order, a process that is stopped in between starts
            # nothing late.
            ahead_s = monotonic() - trio.current_time()
            start_before = tuple([None if at is None else at + ahead_s for at in batch.start_before])
            batch = replace(batch, start_before=start_before)
        try:
            slot.start(batch)
        except RuntimeError as error:  # its thread has ended, or another batch waits there already
            self._take(_not_started(batch.batch, str(error), slot_ended=slot.has_ended))

    def cancel_nowait(self, batch: int) -> None:
        """Asks the engine to stop; the report still comes."""
        slot = self._running.get(batch)
        if slot is not None:
            slot.cancel(batch)

    def recall_nowait(self, batch: int) -> None:
        """Takes it back if its slot has not begun it; the report comes either way."""
        slot = self._running.get(batch)
        if slot is not None:
            slot.recall(batch)

    def kill_nowait(self, reason: str) -> None:
        """Nothing can end a thread: it is said, and the slot stays occupied."""
        log.error(
            "slot hangs", executor=self.name, why=reason, advice="use worker processes, or restart the server"
        )

    def close(self) -> None:
        """Ends the slots' threads; a running inference is cancelled first. Blocks until they have ended.

        What they still report is dropped: the dispatcher would start the next batch on a slot that has ended.
        """
        self._closing = True
        for batch, slot in list(self._running.items()):
            slot.cancel(batch)
        for slot in self._slots:
            slot.close()

    async def aclose(self) -> None:
        """The same, beside the event loop; an inference that does not stop in time is left behind."""
        self._closing = True
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_GRACE_S):
            await trio.to_thread.run_sync(self.close, abandon_on_cancel=True)

    def _take(self, report: BatchReport) -> None:
        """Called by a slot's thread, or for a batch that was taken back: the one hand-over per batch."""
        self._reports.append(report)
        try:
            self._token.run_sync_soon(self._hand_over, idempotent=True)
        except trio.RunFinishedError:
            return  # the event loop is gone, and with it everyone who waited

    def _hand_over(self) -> None:
        """Called in the event loop."""
        if self._closing:
            self._reports.clear()
        reports = list(self._reports)
        self._reports.clear()
        for report in reports:
            self._running.pop(report.batch, None)
        if reports:
            self._report(reports)


def _not_started(batch: int, why: str, *, slot_ended: bool) -> BatchReport:
    return BatchReport(
        batch=batch, outputs=None, code=ErrorCode.UNAVAILABLE, message=why, slot_ended=slot_ended
    )
