"""The dispatcher: it tells the scheduler each event, and carries out what the scheduler decides.

Batches go to slots, answers to egress, ends to the observers (ends.py). Actions carry the objects that they are about, so no
book of requests or batches is kept here: the scheduler has both. Every method is synchronous and is called from the event
loop's one thread, so that nothing comes between a decision and its effect. Carrying an action out makes no event. A slot
that cannot be reached is noticed when the turn's messages are sent.

To answer a batch takes a turn of the loop: a decision, messages to the client and to the slot, and mostly the client's next
request, which takes another turn. For calls of a millisecond, that costs as much as the call. So the report of a batch waits
while its slot has work (`HeldReports`): as long as more batches are left there than reports of it wait. Half of a bundle is
answered together while the other half runs. A slot that has one batch, and one behind it, has its reports taken at once.
A report that failed, or has a deadline that comes within `HOLD_S`, does not wait, and ends the wait of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import inf
from time import perf_counter
from typing import Protocol, assert_never

import trio

from shapestream.errors import Cancelled
from shapestream.quarantine import Quarantine
from shapestream.scheduling import events
from shapestream.scheduling.actions import (
    Action,
    CancelBatch,
    DeliverResults,
    FailRequest,
    ForgetRequest,
    KillSlot,
    RecallBatch,
    RejoinSlots,
    ReportFault,
    StartBatch,
    TellLoneRun,
)
from shapestream.scheduling.batches import AuditBatch, Batch, Submitted
from shapestream.scheduling.bundles import BUNDLE_S
from shapestream.scheduling.events import BatchFinished, RequestsArrived
from shapestream.scheduling.queueing import Occupancy
from shapestream.scheduling.scheduler import Scheduler
from shapestream.serving.announced import answer_of
from shapestream.serving.audits import AuditBook, AuditRun
from shapestream.serving.chain_desk import SLICE, ChainDesk, ChainRequest
from shapestream.serving.ends import (
    BatchEnded,
    ChainEnded,
    Egress,
    RequestEnded,
    StageFailed,
    run_of,
    told_code,
)
from shapestream.serving.grants import Grants
from shapestream.serving.journal import Journal
from shapestream.serving.port_traffic import REJOIN, Outgoing, PeerLink
from shapestream.serving.served_models import ServedModel
from shapestream.serving.sessions import ClientSession, RequestRecord
from shapestream.serving.workers import ConnectedWorker, SlotRecord
from shapestream.wire.messages import Execute, RunsAlone
from shapestream_engine.batch import BatchReport, ErrorCode
from shapestream_engine.cost_table import CostTable
from shapestream_engine.layout import Tensors

HOLD_S = BUNDLE_S
"""Seconds that a report waits at most: those of a bundle, since a slot is not late before."""
LONE_RUN_S = 1.0
"""Seconds that a client may take to repeat `RunsAlone`, while the slots of this process do nothing: as long as our client
waits for an answer to its greeting. It is looked at once per heartbeat."""


class Port(Protocol):
    """A port of the server, as the dispatcher sends by it."""

    outgoing: Outgoing

    def lost(self, link: PeerLink, why: str, now: float) -> None:
        """Handle messages to this link that could not be sent, or its end."""


class HeldReports:
    """The reports that the scheduler has not been told, in the order in which they came."""

    __slots__ = ("_counts", "_reports", "until")

    def __init__(self) -> None:
        self._reports: list[tuple[BatchReport, Batch, float]] = []
        self._counts: dict[SlotRecord, int] = {}
        self.until = inf
        """When they have waited long enough, in seconds of the server's clock."""

    def add(self, report: BatchReport, batch: Batch, now: float) -> None:
        """Let a report wait that has just come; `until` tells for how long."""
        slot: SlotRecord = batch.slot.peer
        self._reports.append((report, batch, now))
        held = self._counts[slot] = self._counts.get(slot, 0) + 1
        ends_at = now + HOLD_S
        if (
            held >= len(slot.running)
            or report.code is not None
            or any(arrival.deadline is not None and arrival.deadline <= ends_at for arrival in batch.arrivals)
        ):
            ends_at = now
        if ends_at < self.until:
            self.until = ends_at

    def take(self) -> list[tuple[BatchReport, Batch, float]]:
        """Return them all, each with its batch and with the time by which that had ended; none waits any more."""
        taken = []
        latest: dict[SlotRecord, float] = {}
        for report, batch, came_at in reversed(self._reports):
            slot: SlotRecord = batch.slot.peer
            ended_at = min(came_at, latest.get(slot, came_at))
            latest[slot] = ended_at - report.busy_s  # the batch before it had ended when it began
            taken.append((report, batch, ended_at))
        self._reports.clear()
        self._counts.clear()
        self.until = inf
        return taken[::-1]


class Dispatcher:
    """Tells the scheduler each event, and carries its actions out."""

    __slots__ = (
        "_alarm_at",
        "_alarm_earlier",
        "_audit_runs",
        "_audits",
        "_awaited",
        "_busy",
        "_clock",
        "_egress",
        "_ends",
        "_followed",
        "_grants",
        "_handed_back",
        "_held",
        "_is_start_due",
        "_journal",
        "_left",
        "_lone",
        "_moved",
        "_numbers",
        "_prefetch",
        "_reported",
        "_scheduler",
        "desk",
        "ports",
        "quarantine",
        "slots",
    )

    def __init__(
        self,
        scheduler: Scheduler,
        egress: Egress,
        journal: Journal,
        *,
        clock: Callable[[], float],
        prefetch: bool,
        quarantine: Quarantine,
        audits: AuditBook,
        desk: ChainDesk,
        grants: Grants,
    ) -> None:
        """`prefetch`: may batches be sent to slots that are busy?"""
        self.quarantine = quarantine
        """What killed workers, and is refused."""
        self._scheduler = scheduler
        self.ports: Sequence[Port] = ()
        """The ports by which messages leave."""
        self._journal = journal
        self._egress = egress
        self._ends = egress.ends
        self._reported: BatchEnded | None = None
        """The end of the batch whose report the scheduler has."""
        self._audits = audits
        self._audit_runs: dict[events.AuditKind, AuditRun] = {}
        """The audits that are wanted, or run."""
        self._clock = clock
        self._prefetch = prefetch
        self._numbers = count()
        self.slots: dict[int, SlotRecord] = {}
        """Those that have joined and not left, by the scheduler's numbers."""
        self._busy = Occupancy()
        """The slots that have a batch."""
        self._held = HeldReports()
        self.desk = desk
        self._grants = grants
        self._followed = False
        """Whether the reports that are taken in have results of chains' stages."""
        self._is_start_due = False
        """Whether the scheduler waits for what follows from a batch, before it starts others."""
        self._lone: RequestRecord | None = None
        """The suspect that runs alone in this process, or is about to; its client was told."""
        self._handed_back = False
        self._alarm_at = inf
        """When the alarm rings: at the earliest time that the scheduler waits for."""
        self._alarm_earlier = trio.Event()
        """Set when that has become earlier."""
        self._left: str | None = None
        """The model that is being given up."""
        self._moved: list[RequestRecord] = []
        """The requests that go to another version of it."""
        self._awaited: dict[trio.Event, Callable[[], bool]] = {}
        """Conditions that are waited for; each event is set when its own holds."""

    # ---------------------------------------------------------------- events

    def submit(self, records: Sequence[RequestRecord], now: float) -> None:
        """Submit all requests that arrived in one turn, as one event."""
        if self.desk.has_chains:
            records = self._without_chains(records, now)
        if self.quarantine.kept:
            records = self._without_quarantined(records, now)
        if records:
            self._journal.arrived(records)
            self._handle(RequestsArrived(requests=tuple(records)), now)

    def _without_chains(self, records: Sequence[RequestRecord], now: float) -> Sequence[RequestRecord]:
        """Begin the requests of chains, whose stages' requests are submitted at the end of the turn. Return the others."""
        if all(record.served.chain is None for record in records):
            return records
        chains = [record for record in records if record.served.chain is not None]
        self._journal.arrived(chains)
        for record in chains:
            self.desk.begin(record, now)
        return [record for record in records if record.served.chain is None]

    def _follow_chains(self, now: float) -> None:
        """Submit and withdraw requests of stages, and reply to chains that are over, until nothing follows.

        After a slice of requests the rest is left for the next turn of the event loop (`_next_wakeup`).
        """
        tried = 0
        while self.desk.is_busy and tried < SLICE:
            over = self.desk.take(now)
            for request in over.ended:
                self._end_chain(request, now)
            for id_ in over.withdraw:
                self._handle(events.RequestCancelled(id=id_), now)
            if over.submit:
                self.submit(over.submit, now)
            tried += over.tried

    def _end_chain(self, request: ChainRequest, now: float) -> None:
        record, run = request.record, request.run
        if run.failure is not None:
            failed = FailRequest(request=record, code=run.failure.code, message=run.failure.message)
            self._fail(failed, now, may_have_run=request.may_have_run)
        elif run.outputs is not None:
            record.session.end(record)
            self._egress.deliver_chain(record, run.outputs, request.began, request.label, now)
        self._ends.add(ChainEnded(request=request, at=now))

    def _without_quarantined(self, records: Sequence[RequestRecord], now: float) -> list[RequestRecord]:
        """Fail the requests that equal those that killed workers before. Return the others."""
        others = []
        for record in records:
            if self.quarantine.holds(record.model, record.tensors, now):
                message = (
                    "a request like this one killed the worker that ran it, and is not run again for a while"
                )
                self._fail(FailRequest(request=record, code="poisoned", message=message), now)
            else:
                others.append(record)
        return others

    def cancel(self, request: int, now: float) -> None:
        """End a request that its caller withdrew."""
        if self.desk.has_chains and self.desk.cancel(request, now):
            return
        self._handle(events.RequestCancelled(id=request), now)

    def abandon(self, records: Sequence[RequestRecord], now: float) -> None:
        """Forget unfinished requests of a client that is gone."""
        ids = []
        for record in records:
            if record.served.chain is None:
                ids.append(record.id)
            else:
                ids += self.desk.forget(record, now)
                record.session.end(record)
                self._request_ended(record, Cancelled.code, "its client is gone", None, None, now)
        self._handle(events.RequestsAbandoned(ids=tuple(ids)), now)

    def lone_run_known(self, session: ClientSession, sequence: int | None, now: float) -> None:
        """Let a suspect begin whose client has repeated that it is about to run."""
        lone = self._lone
        if lone is not None and (lone.session, lone.sequence) == (session, sequence):
            self._handle(events.LoneRunKnown(id=lone.id), now)

    def lone_run_overdue(self, now: float) -> None:
        """Let a suspect begin whose client does not answer.

        If the client is connected, it is not asked again: its suspects run like other requests, or it could keep the slots
        from others.
        """
        lone = self._lone
        if lone is None:
            return
        session = lone.session
        if lone.sequence not in session.running:
            self._lone = None  # it has ended before it began
            return
        told_at = self._scheduler.lone_run_told_at
        if told_at is None or now < told_at + LONE_RUN_S:
            return
        if session.peer is not None:
            session.names_suspects = False
        self.lone_run_known(session, lone.sequence, now)

    def _lone_run_over(self, batches: Iterable[Batch]) -> None:
        """If the run of the suspect is over, and the request has no reply yet, tell its client that it does not run."""
        lone = self._lone
        if lone is None or not any(lone is record for batch in batches for record in batch.arrivals):
            return
        self._lone = None
        if lone.sequence in lone.session.running:
            self._egress.outgoing.say(lone.session, RunsAlone(sequence=None))

    def model_added(self, model: ServedModel, now: float) -> None:
        """Accept requests for this model from now on."""
        if model.chain is not None:
            self.desk.has_chains = True
            return
        if model.announced is not None:
            return  # its requests are its versions'
        self._handle(events.ModelAdded(model=model.profile, like=model.like), now)
        if self._audits.add(model).stopped:
            self._handle(events.ModelRunsAlone(model=model.key, alone=True), now)

    def is_idle(self, model: ServedModel) -> bool:
        """Tell whether no request of a model has not ended, nor one of a chain that may ask it."""
        return self._scheduler.is_idle(model.key) and not self.desk.may_ask(model)

    def model_removed(self, model: ServedModel, now: float) -> None:
        """Forget a model without requests."""
        self._audits.forget(model)
        if model.chain is None:
            self._handle(events.ModelRemoved(model=model.key), now)

    def model_given_up(self, key: str, message: str, now: float) -> None:
        """Fail the requests that wait for a model as `unavailable`: no worker will serve it.

        Those that named no version go to another one.
        """
        self._left = key
        self._handle(events.ModelUnavailable(model=key, message=message), now)
        self._left = None
        if self._moved:
            moved, self._moved = self._moved, []
            self.submit(moved, now)

    def costs_told(self, model: str, costs: CostTable, now: float) -> None:
        """Take in what a worker has measured, before it joins."""
        self._handle(events.CostsTold(model=model, costs=costs), now)

    def worker_joined(self, worker: ConnectedWorker, now: float) -> None:
        """Give batches to the slots of this worker from now on."""
        keys = {name: self.desk.models.keys_of(model) for name, model in worker.serves.items()}
        models = frozenset(key for found in keys.values() for key in found)
        costs, wide = (
            {key: table for name, table in tables.items() for key in keys.get(name, ())}
            for tables in (worker.costs, worker.wide)
        )
        prefetch_s = worker.prefetch_s if self._prefetch else None
        joining = []
        for slot in worker.slots:
            slot.number = next(self._numbers)
            self.slots[slot.number] = slot
            joined = events.SlotJoined(
                slot=slot.number,
                models=frozenset(wide) if slot.wide else models,
                worker=worker.name,
                costs=wide if slot.wide else costs,
                prefetch_s=None if slot.wide else prefetch_s,
                wide=slot.wide,
                in_server=worker.in_server,
                peer=slot,
            )
            joining.append(joined)
        self._handle(events.SlotsJoined(slots=tuple(joining)), now)

    def worker_closing(self, worker: ConnectedWorker, now: float) -> None:
        """Give no more batches to a worker that is about to leave. Its slots finish what they run."""
        for slot in self._joined(worker):
            self._handle(events.SlotClosing(slot=slot.number), now)

    def worker_left(self, worker: ConnectedWorker, now: float, *, died: bool = False) -> None:
        """Take out the slots of a worker that is gone; what they ran is run again elsewhere.

        `died`: its process is known to have ended by itself, or was killed because it hung; not for silence and cuts.
        """
        # All of them close first, or the scheduler would give those that are left what the others lose.
        self.worker_closing(worker, now)
        self._take_reports(now)
        left = self._joined(worker)
        self._leave(left, "its worker died" if died else "its worker left", now)
        for slot in left:
            self._handle(events.SlotLeft(slot=slot.number, died=died), now)

    def slot_ended(self, slot: SlotRecord, batch: int | None, now: float) -> None:
        """Take out a slot whose thread has ended. What it had begun may be to blame; the others run again elsewhere."""
        if slot.number not in self.slots:
            return
        self._handle(events.SlotClosing(slot=slot.number), now)  # or what fails would run again there
        self._take_reports(now)
        begun = None if batch is None else slot.running.pop(batch, None)
        if begun is not None:
            self._rest(slot, now)
            why = f"the thread of slot {slot.label!r} has ended"
            report = BatchReport(batch=begun.id, outputs=None, code=ErrorCode.INTERNAL, message=why)
            self._batch_failed(begun, slot, report, now)
        if slot.number not in self.slots:
            return  # the scheduler has started over meanwhile
        self._leave([slot], "its slot ended", now)
        self._handle(events.SlotLeft(slot=slot.number), now)

    def _joined(self, worker: ConnectedWorker) -> list[SlotRecord]:
        """Return the slots of this worker that have joined and not left."""
        return [slot for slot in worker.slots if slot.number in self.slots]

    def _leave(self, left: Sequence[SlotRecord], why: str, now: float) -> None:
        """Forget slots with their batches, and the audit that ran there or could run nowhere else."""
        lost = [batch for slot in left for batch in slot.running.values()]
        for slot in left:
            slot.running.clear()
            self._rest(slot, now)
            del self.slots[slot.number]
        self._lone_run_over(lost)
        for batch in lost:
            self._ends.add(
                BatchEnded(
                    batch=batch, slot=batch.slot.peer, at=now, report=None, code="worker_lost", why=why
                )
            )
        for run in [*self._audit_runs.values()]:
            if run.slots.isdisjoint(self.slots) if run.batch is None else run.batch in lost:
                self._audit_ended(run, None)

    def _rest(self, slot: SlotRecord, now: float) -> None:
        """Count the time of a slot no longer, if it has no batch."""
        if slot.at_work and not slot.running:
            slot.at_work = False
            self._busy.leave(1, now)

    def batches_reported(self, reports: Iterable[BatchReport], now: float) -> None:
        """Take in the reports of one turn, of batches that ran or failed; some wait for others (`HeldReports`)."""
        for report in reports:
            batch = self._scheduler.batches.get(report.batch)
            if batch is not None:  # or it was lost
                self._held.add(report, batch, now)
        if self._held.until <= now:
            self._take_reports(now)

    def _take_reports(self, now: float) -> None:
        taken = self._held.take()
        # Requests of chains' next stages arrive before any slot gets its next batch: they may be older than what is queued.
        self._followed = self.desk.has_chains and any(
            record.stage is not None for _, batch, _ in taken for record in batch.arrivals
        )
        for report, batch, ended_at in taken:
            if batch.id not in self._scheduler.batches or self._handed_back:
                continue  # it is dropped
            slot: SlotRecord = batch.slot.peer
            self._rest(slot, now)
            if report.code is None and report.outputs is not None:
                batch.ran(report, ended_at)
                self._batch_ran(batch, slot, report, report.outputs, now)
            else:
                self._batch_failed(batch, slot, report, now)
            if self._lone is not None:
                self._lone_run_over((batch,))
        if self._followed:
            self._followed = False
            self._follow_chains(now)
            if self._is_start_due:
                self._handle(events.TimePassed(), now)

    def audit(
        self,
        record: RequestRecord,
        slots: frozenset[int],
        now: float,
        *,
        kind: events.AuditKind = events.AuditKind.AUDIT,
        copies: int = 1,
    ) -> AuditRun:
        """Run an answered request again, alone, on one of these slots, when none is needed for anything else.

        With more `copies` than one, the call has rows for so many; copies of its rows fill them.
        """
        run = self._audit_runs[kind] = AuditRun(record, slots, kind)
        sizes = record.shape.rounded
        if copies > 1:
            sizes = (copies * sizes[0], *sizes[1:])
        wanted = events.AuditWanted(kind=kind, run=run, model=record.model, sizes=sizes, slots=slots)
        self._handle(wanted, now)
        self.end_turn()
        return run

    def _audit_ended(self, run: AuditRun, outputs: Tensors | None) -> None:
        if self._audit_runs.get(run.kind) is run:
            del self._audit_runs[run.kind]
        run.outputs = outputs
        run.done.set()

    def run_alone(self, model: str, alone: bool, now: float) -> None:
        """Run each request of this model alone from now on, or let them share calls again."""
        self._handle(events.ModelRunsAlone(model=model, alone=alone), now)
        self.end_turn()

    def drain(self, now: float) -> None:
        """Refuse new requests from now on."""
        self._handle(events.DrainStarted(), now)

    def hand_back(self, message: str) -> None:
        """End every request that is left as `draining`. For the very end: the scheduler decides nothing after this."""
        self._take_reports(self._clock())
        self._handed_back = True
        scheduler = self._scheduler
        for id_, request in scheduler.requests.items():
            batch = scheduler.batch_of.get(id_)
            failed = FailRequest(request=request.arrival, code="draining", message=message, batch=batch)
            self._fail(failed, self._clock())
        self.desk.hand_back(message, self._clock())

    def _batch_ran(
        self,
        batch: Batch,
        slot: SlotRecord,
        report: BatchReport,
        outputs: Sequence[Tensors | None],
        now: float,
    ) -> None:
        if type(batch) is AuditBatch:
            batch.run.others_s += self._busy.seconds(now) - (now - batch.run.began)
            self._audit_ended(batch.run, outputs[0])
            self._handle(BatchFinished(batch=batch.id, busy_s=report.busy_s), now)
            return
        slot.batches += 1
        slot.busy_s += report.busy_s
        self._reported = BatchEnded(batch=batch, slot=slot, at=now, report=report)
        self._ends.add(self._reported)
        event = BatchFinished(
            batch=batch.id,
            busy_s=report.busy_s,
            expired=batch.left_out,
            preparations=report.preparations,
            followed=self._followed,
        )
        self._handle(event, now)
        self._is_start_due = self._followed
        self._reported = None  # or its tensors would stay until the next report

    def _batch_failed(self, batch: Batch, slot: SlotRecord, report: BatchReport, now: float) -> None:
        code = report.code or ErrorCode.INTERNAL
        if type(batch) is AuditBatch:
            batch.run.is_broken = code in (
                ErrorCode.MODEL_ERROR,
                ErrorCode.INVALID,  # of a request that was answered
                ErrorCode.INTERNAL,
            )
            self._audit_ended(batch.run, None)
        else:
            self._ends.add(
                BatchEnded(batch=batch, slot=slot, at=now, report=report, code=code, why=report.message)
            )
        self._handle(events.BatchFailed(batch=batch.id, code=code, message=report.message), now)

    # ---------------------------------------------------------------- decisions

    def _handle(self, event: events.Event, now: float) -> None:
        if self._handed_back:
            return
        began = perf_counter()  # the decision is timed here, since the scheduler knows no clock
        actions = self._scheduler.handle(event, now)
        self._journal.statistics.scheduling_s += perf_counter() - began
        self._is_start_due = False
        for action in actions:
            self._carry_out(action, now)

    # ---------------------------------------------------------------- effects

    def _carry_out(self, action: Action, now: float) -> None:
        """Carry out one decision."""
        match action:
            case StartBatch():
                for batch in action.batches:
                    self._start(batch, now)
            case TellLoneRun(request=record):
                self._lone = record
                self._egress.outgoing.say(record.session, RunsAlone(sequence=record.sequence))
            case DeliverResults():
                self._deliver(action, now)
            case FailRequest():
                if action.code == "poisoned":
                    self._put_in_quarantine(action, now)
                self._fail(action, now)
            case ForgetRequest():
                self._forget(action, now)
            case CancelBatch(batch=batch):
                slot: SlotRecord = batch.slot.peer
                if batch.id in slot.running:
                    slot.worker.cancel(slot, batch.id)
            case RecallBatch(batch=batch):
                slot = batch.slot.peer
                if batch.id in slot.running:
                    self._journal.recalled(batch, slot)
                    slot.worker.recall(slot, batch.id)
            case KillSlot():
                slot = action.slot.peer
                if slot.number in self.slots:
                    slot.worker.kill(action.reason, now)
            case ReportFault():
                self._journal.fault(action)
            case RejoinSlots():
                self._rejoin_slots(now)
            case _:
                assert_never(action)

    def _rejoin_slots(self, now: float) -> None:
        """Forget all slots, as the scheduler has, and let their workers greet anew at the end of this turn."""
        self._held.take()
        slots = [*self.slots.values()]
        self._leave(slots, "the scheduler started over", now)
        for run in [*self._audit_runs.values()]:
            self._audit_ended(run, None)
        for worker in dict.fromkeys([slot.worker for slot in slots]):
            worker.port.lost.append((worker, REJOIN))

    def _start(self, batch: Batch, now: float) -> None:
        slot: SlotRecord = batch.slot.peer
        records: Sequence[RequestRecord] = batch.arrivals
        if records:
            self._journal.started(batch, slot)
        else:
            assert type(batch) is AuditBatch
            batch.run.batch, batch.run.began, batch.run.others_s = batch, now, -self._busy.seconds(now)
            records = [batch.run.record]
        # No comprehensions: before Python 3.12 each is a function, which a lone request finds nowhere in the caches.
        deadlines, members, shapes = [], [], []
        for record in records:
            deadlines.append(record.deadline)
            members.append(record.tensors)
            shapes.append(record.shape)
        execute = Execute(
            batch=batch.id,
            slot=slot.slot,
            model=records[0].served.name,
            sizes=batch.sizes,
            members=tuple(members),
            shapes=tuple(shapes),
            start_before=None if deadlines.count(None) == len(deadlines) else tuple(deadlines),
            session=slot.worker.session,
            sent_us=round(now * 1e6),
        )
        batch.sent(execute, now)
        slot.running[batch.id] = batch
        if not slot.at_work:
            slot.at_work = True
            self._busy.enter(1, now)
        slot.worker.port.say(slot, execute)

    def _deliver(self, action: DeliverResults, now: float) -> None:
        batch, records = action.batch, action.requests
        outputs = batch.outputs_of(records)
        assert self._reported is not None
        self._reported.answered, self._reported.outputs = records, outputs
        if self.desk.has_chains:
            records, outputs = self._without_stages(batch, records, outputs, now)
        for record in records:
            record.session.end(record)
        self._egress.deliver(records, outputs, batch, now)

    def _without_stages(
        self, batch: Batch, records: Sequence[RequestRecord], outputs: Sequence[Tensors | None], now: float
    ) -> tuple[Sequence[RequestRecord], Sequence[Tensors | None]]:
        """Give the results of chains' stages to the desk. Return the others, which are replies."""
        if all(record.stage is None for record in records):
            return records, outputs
        direct = []
        for record, result in zip(records, outputs, strict=True):
            if record.stage is None:
                direct.append((record, result))
            elif result is not None:
                self.desk.answered(record, answer_of(result, record.routed), batch, now)
        self._journal.statistics.stage_results += len(records) - len(direct)
        return [record for record, _ in direct], [result for _, result in direct]

    def _put_in_quarantine(self, action: FailRequest, now: float) -> None:
        record: RequestRecord = action.request
        digest = self.quarantine.keep(record.model, record.tensors, now)
        self._journal.poisoned(record, action, digest)

    def _fail(self, action: FailRequest, now: float, *, may_have_run: bool = False) -> None:
        """End a request without a result."""
        record: RequestRecord = action.request
        may_have_run = may_have_run or (action.batch is not None and not record.served.profile.idempotent)
        if record.stage is not None:
            if record.model == self._left and not may_have_run:
                again = self.desk.redrawn(record, now)
                if again is not None:
                    self._moved.append(again)
                    return
            code = told_code(action.code, may_have_run=may_have_run)
            if self.desk.failed(record, code, action.message, now):
                run = None if action.batch is None else run_of(action.batch)
                self._ends.add(StageFailed(record=record, at=now, code=code, run=run, action=action))
            return
        may_move = record.routed is not None or record.served.successor is not None
        moves = may_move and record.model == self._left and not may_have_run
        record.session.end(record)
        if moves and (moved := record.moved(self.desk.next_id(), self.desk.models)) is not None:
            record.session.begin(moved)
            self._moved.append(moved)
            return
        told = self._egress.fail(record, action, may_have_run=may_have_run)
        self._request_ended(record, told.code, told.message, action, action.batch, now)

    def _forget(self, action: ForgetRequest, now: float) -> None:
        """End a request whose client is gone."""
        record: RequestRecord = action.request
        if record.stage is not None:
            return  # its chain has ended
        record.session.end(record)
        if action.batch is not None and not record.served.profile.idempotent:
            self._egress.forgotten(record)
        self._request_ended(record, Cancelled.code, "its client is gone", None, action.batch, now)

    def _request_ended(
        self,
        record: RequestRecord,
        code: str,
        message: str,
        action: FailRequest | None,
        batch: Batch | None,
        now: float,
    ) -> None:
        run = None if batch is None else run_of(batch)
        self._ends.add(
            RequestEnded(record=record, at=now, code=code, message=message, run=run, action=action)
        )

    # ---------------------------------------------------------------- turns and time

    def end_turn(self) -> None:
        """Send what is ready, end the links that could not be sent to, and tell the observers.

        A port calls this at the end of its turn.
        """
        if self.desk.has_chains:
            self._follow_chains(self._clock())
        lost = True
        while lost:  # the end of a link may make more messages ready
            lost = False
            if self._grants.is_due:
                self._egress.grant(self._grants, self._clock())
            for port in self.ports:
                outgoing = port.outgoing
                if outgoing.ready or outgoing.lost:
                    for link, why in outgoing.flush():
                        lost = True
                        port.lost(link, why, self._clock())
        if self._ends.added:
            self._ends.tell()
        wakeup = self._next_wakeup()
        if wakeup < self._alarm_at:
            self._alarm_at = wakeup
            self._alarm_earlier.set()
        if self._awaited:
            self.look()

    async def run_alarm(self) -> None:
        """Tell the scheduler when a time has come that it waits for, or that reports wait for; until cancelled."""
        while True:
            self._alarm_earlier = trio.Event()
            self._alarm_at = self._next_wakeup()
            with trio.CancelScope(deadline=self._alarm_at):
                await self._alarm_earlier.wait()
            now = self._clock()
            if self._next_wakeup() <= now:
                if self._held.until <= now:
                    self._take_reports(now)
                self.desk.time_passed(now)
                self._handle(events.TimePassed(), now)
                self.end_turn()

    def _next_wakeup(self) -> float:
        wakeup, other = self._scheduler.next_wakeup(), self._held.until
        if self.desk.has_chains:
            if self.desk.is_busy:
                return -inf  # in the next turn
            other = min(other, self.desk.room.next_deadline())
        return other if wakeup is None else min(wakeup, other)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds. It is looked at when a turn ends, and must be cheap."""
        while not holds():
            met = trio.Event()
            self._awaited[met] = holds
            try:
                await met.wait()
            finally:
                del self._awaited[met]

    def look(self) -> None:
        """Look at the conditions that are waited for."""
        for met, holds in self._awaited.items():
            if holds():
                met.set()

    @property
    def requests(self) -> Iterable[RequestRecord]:
        """Requests that have no terminal reply yet."""
        left: list[Submitted] = [request.arrival for request in self._scheduler.requests.values()]
        chains = [request.record for request in self.desk.requests.values()]
        return () if self._handed_back else [*left, *chains]

    @property
    def unfinished(self) -> int:
        """Requests that have no terminal reply yet, counted."""
        if self._handed_back:
            return 0
        waiting = len(self.desk.room) if self.desk.has_chains else 0
        return len(self._scheduler.requests) + waiting

    def busy_s(self, now: float) -> float:
        """Return the seconds that slots have had batches, all slots together, also those of batches that still run."""
        return self._busy.seconds(now)
