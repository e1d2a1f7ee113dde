"""The two ways to a slot: in this process (`LocalExecutor`), and in a worker (`RemoteExecutor`).

Neither decides anything. The local one hands work to a slot's thread and brings the report back into the
event loop; the remote one turns batches into `Execute` entries, whose tensors are the received frames,
untouched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol, TypeAlias

import structlog
import trio

from shapestream.serving.batches import Batch, BatchReport, Executor
from shapestream.serving.links import Link, Outgoing
from shapestream.serving.report_check import ReportCheck
from shapestream.wire.messages import CancelBatch, Clock, Execute, ExecuteMember, RecallBatch
from shapestream_engine.cost_table import CostTable
from shapestream_engine.model import CompiledModel
from shapestream_engine.request_pool import RequestPool
from shapestream_engine.signature import ModelSignature
from shapestream_engine.slot import Report, Slot, Work

__all__ = ["InProcessExecutor", "LocalExecutor", "LocalSlots", "RemoteExecutor", "Reports", "SlotSource"]

log = structlog.get_logger()

# How long the threads of local slots may take to end.
CLOSE_GRACE_S = 5.0
# How long before a slot becomes free its next batch is sent, if it is to be there in time. In this process: the
# event loop's turn, the decision and the thread's wake-up. To a worker: encoding, the socket, its event loop and
# the same. Seen on two busy cores: without prefetch a slot in this process stood still for 0.2 to 0.3 ms between
# two batches (0.5 ms in one of twenty); the way to a worker and back took 1.1 to 1.8 ms over ipc, up to 200 KB of
# tensors making no difference. What comes late costs the slot that much idle time, what comes early is decided
# without the requests that arrive in between, so these are about twice what is usual.
LOCAL_PREFETCH_S = 0.0005
REMOTE_PREFETCH_S = 0.002

Reports: TypeAlias = Callable[[Sequence[BatchReport]], None]


class InProcessExecutor(Executor, Protocol):
    """An executor that the server itself starts and ends."""

    async def aclose(self) -> None:
        """Ends it; takes a bounded time, also when cancelled."""


class SlotSource(Protocol):
    """What a server makes its own slots from. Tests have one without threads."""

    def start(self, report: Reports) -> InProcessExecutor:
        """Called inside trio; `report` is to be called in the event loop."""


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
        self._report = report
        self._token = trio.lowlevel.current_trio_token()
        # Bounded by what the slots take: each runs one batch, and one may wait behind it.
        self._reports: deque[Report] = deque()
        self._running: dict[int, Slot] = {}
        self._closing = False
        pools = {key: RequestPool(model, slots) for key, model in models.items()}
        self._slots = [Slot(f"{name}/{number}", pools, self._take) for number in range(slots)]

    def start_nowait(self, batch: Batch) -> None:
        """Hands the batch to its slot's thread, which may still run the one before."""
        slot = self._slots[batch.slot]
        self._running[batch.batch] = slot
        start_before = batch.start_before
        if start_before is not None:
            # The slots' threads cannot ask trio for the time. In this order, who is stopped in between starts nothing late.
            ahead_s = monotonic() - trio.current_time()
            start_before = tuple([None if at is None else at + ahead_s for at in start_before])
        work = Work(
            batch=batch.batch,
            model=batch.model,
            sizes=batch.sizes,
            members=batch.members,
            shapes=batch.shapes,
            start_before=start_before,
        )
        try:
            slot.start(work)
        except RuntimeError as error:  # its thread has ended, or another batch waits there already
            self._take(_not_started(batch.batch, str(error)))

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

    def _take(self, report: Report) -> None:
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
        reports = []
        while self._reports:
            report = self._reports.popleft()
            self._running.pop(report.batch, None)
            reports.append(
                BatchReport(
                    batch=report.batch,
                    outputs=report.outputs,
                    run_s=report.run_s,
                    busy_s=report.busy_s,
                    reallocations=report.reallocations,
                    preparations=report.preparations,
                    calls=report.calls,
                    code=report.error_code,
                    message=report.message,
                )
            )
        if reports:
            self._report(reports)


def _not_started(batch: int, why: str) -> Report:
    return Report(batch=batch, outputs=None, error_code="unavailable", message=why)


class RemoteExecutor(Link):
    """Slots of one worker. What it is told to run leaves through the worker port at the end of the turn."""

    __slots__ = (
        "_clock",
        "_outgoing",
        "answered_at",
        "checks",
        "costs",
        "draining",
        "first_batch",
        "killed_for",
        "models",
        "name",
        "parting_since",
        "pid",
        "recalled",
        "running",
        "sent_at",
        "slots",
    )

    prefetch_s = REMOTE_PREFETCH_S

    def __init__(
        self,
        peer: bytes,
        name: str,
        pid: int,
        slots: int,
        models: Mapping[str, ModelSignature],
        outgoing: Outgoing,
        now: float,
        costs: Mapping[str, CostTable] | None = None,
        *,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(peer, now)
        self.name = name
        self._clock = clock
        self.costs: Mapping[str, CostTable] = costs or {}
        self.pid = pid
        self.slots = slots
        self.models = models
        self.checks = {key: ReportCheck(signature) for key, signature in models.items()}
        self._outgoing = outgoing
        self.running: dict[int, Batch] = {}
        """Batches that it has not reported yet: those that run, and one that waits behind each."""
        self.sent_at: dict[int, float] = {}
        """When each of them was sent."""
        self.recalled: set[int] = set()
        """Those of them that were asked back."""
        self.draining = False
        """It wants to leave, and gets no more."""
        self.killed_for: str | None = None
        """Why its process is to be ended, once that is so."""
        self.parting_since: float | None = None
        """Since when it cannot be reached, or its process has ended; it gets no more, and its last words may yet come."""
        self.answered_at: float | None = None
        """When it last reported a batch that had run."""
        self.first_batch: int | None = None
        """The first that it was sent; smaller numbers are of an earlier session."""

    def start_nowait(self, batch: Batch) -> None:
        """Relays the members as they came; deadlines travel as the time that remains."""
        self.running[batch.batch] = batch
        now = self.sent_at[batch.batch] = self._clock()
        if self.first_batch is None:
            self.first_batch = batch.batch
        if batch.start_before is not None:
            self._outgoing.say(self, Clock(sent_us=round(now * 1e6)))
        start_before = batch.start_before or (None,) * len(batch.members)
        members = [
            ExecuteMember(
                remaining_ms=None if at is None else max(0, int((at - now) * 1000)), tensors=tensors
            )
            for tensors, at in zip(batch.members, start_before, strict=True)
        ]
        self._outgoing.say(
            self,
            Execute(
                batch=batch.batch,
                slot=batch.slot,
                model=batch.model,
                sizes=batch.sizes,
                members=tuple(members),
            ),
        )

    def recall_nowait(self, batch: int) -> None:
        """Asks the worker for a batch back; whether it had begun there is in its report."""
        if batch in self.running:
            self.recalled.add(batch)
            self._outgoing.say(self, RecallBatch(batch=batch))

    def answered(self, batch: int) -> None:
        """It has reported this batch, as it will not do again."""
        self.recalled.discard(batch)
        self.running.pop(batch, None)
        self.sent_at.pop(batch, None)

    def cancel_nowait(self, batch: int) -> None:
        """Tells the worker that nobody waits any more."""
        if batch in self.running:
            self._outgoing.say(self, CancelBatch(batch=batch))

    def kill_nowait(self, reason: str) -> None:
        """The worker port ends it when this turn's decisions are carried out."""
        if self.killed_for is None and self.peer is not None:
            self.killed_for = reason
            self._outgoing.lost.append((self, reason))
