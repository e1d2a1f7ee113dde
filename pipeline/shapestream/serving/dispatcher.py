"""The dispatcher: it tells the scheduler each event, and carries out what the scheduler decides.

Batches go to slots, answers to egress, lines to the journal. The books of requests, slots and batches are kept here.
Every method is synchronous and is called from the event loop's one thread, so that nothing comes between a
decision and its effect. No effect is an event: a slot that cannot be reached is found when the turn ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from time import perf_counter
from typing import assert_never

import trio

from shapestream.scheduling import events
from shapestream.scheduling.events import (
    Action,
    CancelBatch,
    DeliverResults,
    FailRequest,
    ForgetRequest,
    KillSlot,
    RecallBatch,
    ReportFault,
    StartBatch,
)
from shapestream.scheduling.occupancy import Occupancy
from shapestream.scheduling.scheduler import Scheduler
from shapestream.serving.audits import AuditBook, AuditRun
from shapestream.serving.egress import Egress
from shapestream.serving.journal import Journal
from shapestream.serving.quarantine import Quarantine
from shapestream.serving.served_models import ServedModel
from shapestream.serving.sessions import ClientSession, RequestRecord
from shapestream.serving.workers import ConnectedWorker, RunningBatch, SlotRecord
from shapestream_engine.batch import BatchReport, ErrorCode
from shapestream_engine.cost_table import CostTable
from shapestream_engine.layout import Tensors


class Dispatcher:
    """Events in, effects out; the only book of slots and of the batches that run there."""

    def __init__(
        self,
        scheduler: Scheduler,
        egress: Egress,
        journal: Journal,
        *,
        clock: Callable[[], float],
        flush: Callable[[], None],
        prefetch: bool,
        quarantine: Quarantine,
        audits: AuditBook,
    ) -> None:
        """`flush` makes the ports send what became ready. `prefetch`: may batches be sent to slots that are busy?"""
        self.quarantine = quarantine
        """What killed workers, and is refused."""
        self._scheduler = scheduler
        self._flush = flush
        self._journal = journal
        self._egress = egress
        self._book = SlotBook()
        self._audits = audits
        self._audit: AuditRun | None = None
        """The audit that is wanted, or runs."""
        self._clock = clock
        self._prefetch = prefetch
        self._requests: dict[int, RequestRecord] = {}
        """Those that have no terminal reply yet, by number."""
        self._run_once: set[int] = set()
        """Those of them that were started and must not run twice."""
        self.slots: Mapping[int, SlotRecord] = self._book.slots
        self._handed_back = False
        self._alarm_at = math.inf
        """When the alarm rings: at the earliest time that the scheduler waits for."""
        self._alarm_earlier = trio.Event()
        """Set when that has become earlier."""
        self._idle = trio.Event()

    # ---------------------------------------------------------------- events

    def submit(self, records: Sequence[RequestRecord], now: float) -> None:
        """Everything that arrived in one turn, as one event."""
        if self.quarantine:
            records = self._without_quarantined(records, now)
        known = self._requests
        for record in records:
            known[record.id] = record
        self._journal.arrived(records)
        self._handle(events.RequestsArrived(requests=tuple(records)), now)

    def _without_quarantined(self, records: Sequence[RequestRecord], now: float) -> list[RequestRecord]:
        """Answers those at once that equal what killed workers before; the others are returned."""
        others = []
        for record in records:
            if self.quarantine.holds(record.model, record.tensors, now):
                self._requests[record.id] = record
                message = (
                    "a request like this one killed the worker that ran it, and is not run again for a while"
                )
                self._fail(FailRequest(id=record.id, code="poisoned", message=message), now)
            else:
                others.append(record)
        return others

    def cancel(self, request: int, now: float) -> None:
        """The caller withdrew it."""
        self._handle(events.RequestCancelled(id=request), now)

    def client_left(self, session: ClientSession, now: float) -> None:
        """Nobody is there to answer."""
        ids = tuple([record.id for record in session.running.values()])
        self._handle(events.RequestsAbandoned(ids=ids), now)

    def model_added(self, model: ServedModel, now: float) -> None:
        """Requests for this model may come from now on."""
        self._handle(events.ModelAdded(model=model.profile), now)
        if self._audits.add(model).stopped:
            self._handle(events.ModelRunsAlone(model=model.name, alone=True), now)

    def model_given_up(self, name: str, message: str, now: float) -> None:
        """Nobody will serve it: what waits for it ends as `unavailable`."""
        self._handle(events.ModelUnavailable(model=name, message=message), now)

    def costs_told(self, model: str, costs: CostTable, now: float) -> None:
        """Take in what a worker has measured, before it joins."""
        self._handle(events.CostsTold(model=model, costs=costs), now)

    def worker_joined(self, worker: ConnectedWorker, now: float) -> None:
        """Its slots can be used from now on."""
        models = frozenset(worker.models)
        prefetch_s = worker.prefetch_s if self._prefetch else None
        joining = [
            events.SlotJoined(
                slot=slot.number, models=models, worker=worker.name, costs=worker.costs, prefetch_s=prefetch_s
            )
            for slot in self._book.join(worker)
        ]
        self._handle(events.SlotsJoined(slots=tuple(joining)), now)

    def worker_closing(self, worker: ConnectedWorker, now: float) -> None:
        """It is about to leave: its slots finish what they run and get nothing new."""
        for slot in self._book.of(worker):
            self._handle(events.SlotClosing(slot=slot.number), now)

    def worker_left(self, worker: ConnectedWorker, now: float, *, died: bool = False) -> None:
        """Its slots are gone, and what they ran is run again elsewhere.

        `died`: its process is known to have ended by itself, or was killed because it hung; not for silence and cuts.
        """
        # All of them close first, or the scheduler would give those that are left what the others lose.
        self.worker_closing(worker, now)
        left = self._book.of(worker)
        self._leave(left, "its worker died" if died else "its worker left", now)
        for slot in left:
            self._handle(events.SlotLeft(slot=slot.number, died=died), now)

    def slot_ended(self, slot: SlotRecord, batch: int | None, now: float) -> None:
        """A slot's thread has ended: what it had begun may be to blame, what it still had runs again elsewhere."""
        if slot.number not in self.slots:
            return
        self._handle(events.SlotClosing(slot=slot.number), now)  # or what fails would run again there
        begun = self._book.reported(batch, now) if batch in slot.running else None
        if begun is not None:
            why = f"the thread of slot {slot.label!r} has ended"
            report = BatchReport(batch=begun.batch.batch, outputs=None, code=ErrorCode.INTERNAL, message=why)
            self._batch_failed(begun, report, now)
            self._book.batches.pop(report.batch, None)
        self._leave([slot], "its slot ended", now)
        self._handle(events.SlotLeft(slot=slot.number), now)

    def _leave(self, slots: Sequence[SlotRecord], why: str, now: float) -> None:
        """Forget slots, and the audit that ran there or could run nowhere else."""
        for running in self._book.leave(slots, now):
            self._journal.lost(running, why, now)
        if (run := self._audit) is not None and (
            run.slots.isdisjoint(self.slots) if run.batch is None else run.batch not in self._book.batches
        ):
            self._audit_ended(None)

    def batches_reported(self, reports: Iterable[BatchReport], now: float) -> None:
        """Batches that ran, or failed: everything that was reported in one turn."""
        for report in reports:
            running = self._book.reported(report.batch, now)
            if running is None:
                continue
            if report.code is None and report.outputs is not None:
                self._batch_ran(running, report, report.outputs, now)
            else:
                self._batch_failed(running, report, now)
            self._book.batches.pop(report.batch, None)

    def audit(self, record: RequestRecord, slots: frozenset[int], now: float, *, copies: int = 1) -> AuditRun:
        """Run an answered request again, alone, on one of these slots, when none is needed for anything else.

        With more `copies` than one, the call has rows for so many; copies of its rows fill them.
        """
        run = self._audit = AuditRun(record, slots)
        sizes = record.shape.rounded
        if copies > 1:
            sizes = (copies * sizes[0], *sizes[1:])
        wanted = events.AuditWanted(model=record.model, sizes=sizes, slots=slots)
        self._handle(wanted, now)
        self.end_turn()
        return run

    def _audit_ended(self, outputs: Tensors | None) -> None:
        run, self._audit = self._audit, None
        if run is not None:
            run.outputs = outputs
            run.done.set()

    def run_alone(self, model: str, alone: bool, now: float) -> None:
        """Run each request of this model alone from now on, or let them share calls again."""
        self._handle(events.ModelRunsAlone(model=model, alone=alone), now)
        self.end_turn()

    def drain(self, now: float) -> None:
        """New requests are refused from now on."""
        self._handle(events.DrainStarted(), now)

    def hand_back(self, message: str) -> None:
        """Ends every request that is left as `draining`. For the very end: the scheduler decides nothing after this."""
        self._handed_back = True
        self._book.batches.clear()
        for request in list(self._requests):
            self._fail(FailRequest(id=request, code="draining", message=message), self._clock())

    def _batch_ran(
        self, running: RunningBatch, report: BatchReport, outputs: Sequence[Tensors | None], now: float
    ) -> None:
        if not running.action.requests:
            self._audit_ended(outputs[0])
            self._handle(events.BatchFinished(batch=report.batch, busy_s=report.busy_s), now)
            return
        running.ran(report, outputs, now)
        expired = running.expired()
        self._journal.ran(running, report, expired, now)
        event = events.BatchFinished(
            batch=report.batch, busy_s=report.busy_s, expired=expired, preparations=report.preparations
        )
        self._handle(event, now)

    def _batch_failed(self, running: RunningBatch, report: BatchReport, now: float) -> None:
        if running.action.requests:
            self._journal.failed(running, report, now)
        else:
            if self._audit is not None:
                self._audit.is_broken = report.code in (ErrorCode.MODEL_ERROR, ErrorCode.INTERNAL)
            self._audit_ended(None)
        code = report.code or ErrorCode.INTERNAL
        self._handle(events.BatchFailed(batch=report.batch, code=code, message=report.message), now)

    # ---------------------------------------------------------------- decisions

    def _handle(self, event: events.Event, now: float) -> None:
        if self._handed_back:
            return
        began = perf_counter()  # the decision is timed here, since the scheduler knows no clock
        actions = self._scheduler.handle(event, now)
        self._journal.statistics.scheduling_s += perf_counter() - began
        for action in actions:
            self._carry_out(action, now)

    # ---------------------------------------------------------------- effects

    def _carry_out(self, action: Action, now: float) -> None:
        """Carry out one decision."""
        match action:
            case StartBatch():
                self._start(action, now)
            case DeliverResults():
                self._deliver(action, now)
            case FailRequest():
                if action.code == "poisoned":
                    self._put_in_quarantine(action, now)
                self._fail(action, now)
            case ForgetRequest():
                may_have_run = action.id in self._run_once
                record = self._end(action.id)
                self._journal.forgotten(record, now)
                if may_have_run:
                    self._egress.forgotten(record)
            case CancelBatch():
                running = self._book.batches.get(action.batch)
                if running is not None:
                    running.cancel()
            case RecallBatch():
                running = self._book.batches.get(action.batch)
                if running is not None:
                    self._journal.recalled(running)
                    running.recall()
            case KillSlot():
                slot = self._book.slots.get(action.slot)
                if slot is not None:
                    slot.worker.kill(action.reason, now)
            case ReportFault():
                self._journal.fault(action)
            case _:
                assert_never(action)

    def _start(self, action: StartBatch, now: float) -> None:
        known = self._requests
        records = [known[request] for request in action.requests]
        if not records and self._audit is not None:
            self._audit.batch = action.batch
            running = self._book.start(action, [self._audit.record], now)
            running.slot.worker.port.say(running.slot, running.batch)
            return
        if not records[0].served.profile.idempotent:
            self._run_once.update(action.requests)
        running = self._book.start(action, records, now)
        self._journal.started(running)
        running.slot.worker.port.say(running.slot, running.batch)

    def _deliver(self, action: DeliverResults, now: float) -> None:
        running = self._book.batches[action.batch]
        records = [self._end(request) for request in action.requests]
        outputs = running.outputs_of(action.requests)
        self._egress.deliver(records, outputs, running, now)
        self._journal.delivered(action, running, records, now)
        self._audits.answered(running, records, outputs)

    def _put_in_quarantine(self, action: FailRequest, now: float) -> None:
        record = self._requests[action.id]
        digest = self.quarantine.keep(record.model, record.tensors, now)
        self._journal.poisoned(record, action, digest)

    def _fail(self, action: FailRequest, now: float) -> None:
        """End a request without a result."""
        may_have_run = action.id in self._run_once
        record = self._end(action.id)
        code = self._egress.fail(record, action, may_have_run=may_have_run)
        self._journal.request_failed(action, record, code, now)

    def _end(self, request: int) -> RequestRecord:
        """The request's one end: its record goes, and its client's credit comes back."""
        record = self._requests.pop(request)
        if self._run_once:
            self._run_once.discard(request)
        record.session.end(record)
        return record

    # ---------------------------------------------------------------- turns and time

    def end_turn(self) -> None:
        """Whoever brought events calls this when there are no more: what is ready leaves."""
        self._flush()
        wakeup = self._scheduler.next_wakeup()
        if wakeup is not None and wakeup < self._alarm_at:
            self._alarm_at = wakeup
            self._alarm_earlier.set()
        if not self._requests:
            self._idle.set()

    async def run_alarm(self) -> None:
        """Tells the scheduler when a time has come that it waits for; until cancelled."""
        while True:
            self._alarm_earlier = trio.Event()
            wakeup = self._scheduler.next_wakeup()
            self._alarm_at = math.inf if wakeup is None else wakeup
            with trio.CancelScope(deadline=self._alarm_at):
                await self._alarm_earlier.wait()
            wakeup, now = self._scheduler.next_wakeup(), self._clock()
            if wakeup is not None and wakeup <= now:
                self._handle(events.TimePassed(), now)
                self.end_turn()

    async def wait_idle(self) -> None:
        """Until no request is left."""
        while self._requests:
            self._idle = trio.Event()
            await self._idle.wait()

    @property
    def requests(self) -> Iterable[RequestRecord]:
        """Requests that have no terminal reply yet."""
        return self._requests.values()

    @property
    def batches(self) -> Mapping[int, RunningBatch]:
        """Batches that were started and not reported yet, by number."""
        return self._book.batches

    @property
    def unfinished(self) -> int:
        """Requests that have no terminal reply yet."""
        return len(self._requests)

    def busy_s(self, now: float) -> float:
        """Seconds that slots have had batches, all slots together, also those of batches that still run."""
        return self._book.busy.seconds(now)


class SlotBook:
    """All slots, by the scheduler's numbers, and the batches that were started on them and not reported yet."""

    __slots__ = ("_numbers", "batches", "busy", "slots")

    def __init__(self) -> None:
        self._numbers = count()
        self.busy = Occupancy()
        """The slots that have a batch."""
        self.slots: dict[int, SlotRecord] = {}
        self.batches: dict[int, RunningBatch] = {}

    def join(self, worker: ConnectedWorker) -> list[SlotRecord]:
        """Gives each of its slots a number."""
        for slot in worker.slots:
            slot.number = next(self._numbers)
            self.slots[slot.number] = slot
        return worker.slots

    def of(self, worker: ConnectedWorker) -> list[SlotRecord]:
        """The slots of this worker that have joined and not left."""
        return [slot for slot in worker.slots if slot.number in self.slots]

    def leave(self, left: Sequence[SlotRecord], now: float) -> list[RunningBatch]:
        """Forgets these slots, and what ran or was queued there, which is returned."""
        numbers = {slot.number for slot in left}
        lost = [running for running in self.batches.values() if running.slot.number in numbers]
        for running in lost:
            del self.batches[running.action.batch]
        for slot in left:
            slot.running.clear()
            self._rest(slot, now)
            del self.slots[slot.number]
        return lost

    def start(self, action: StartBatch, records: Sequence[RequestRecord], now: float) -> RunningBatch:
        """These requests begin on their slot, or are queued there behind the batch that runs."""
        slot = self.slots[action.slot]
        running = self.batches[action.batch] = RunningBatch(action, slot, records, now)
        slot.running[action.batch] = running
        if action.behind is not None:
            slot.behind = running
        if not slot.at_work:
            slot.at_work = True
            self.busy.enter(1, now)
        return running

    def _rest(self, slot: SlotRecord, now: float) -> None:
        """Count the time of a slot no longer, if it has no batch."""
        if slot.at_work and not slot.running:
            slot.at_work = False
            self.busy.leave(1, now)

    def reported(self, batch: int, now: float) -> RunningBatch | None:
        """The batch of a report that has come; what was queued behind it runs now. None: it was lost, or is dropped."""
        running = self.batches.get(batch)
        if running is not None:
            slot = running.slot
            slot.running.pop(batch, None)
            behind, slot.behind = slot.behind, None
            if behind is not None:
                behind.slot_free = now
            self._rest(slot, now)
        return running
