"""Workers as the server knows them: their slots, and the batches that run there.

A worker has one link for its control, and one for each slot. A batch leaves on its slot's link as an `Execute`, whose
tensors are the received frames, untouched. The dispatcher's book changes what is written down here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import structlog

from shapestream.scheduling.events import StartBatch
from shapestream.serving.outgoing import Outgoing, PeerLink
from shapestream.serving.report_check import ReportCheck, ReportRefused
from shapestream.serving.sessions import RequestRecord
from shapestream.serving.slot_threads import SlotThreads
from shapestream.serving.worker_offer import Offer, read_tolerances
from shapestream.serving.worker_states import CONNECTED_WORKER_TABLE, WorkerState
from shapestream.wire.messages import (
    BatchDone,
    BatchFailedEntry,
    CancelBatchEntry,
    Execute,
    RecallBatchEntry,
    Timings,
)
from shapestream_engine.batch import BatchReport, ErrorCode
from shapestream_engine.layout import Tensors

log = structlog.get_logger()

# How long before a slot becomes free its next batch is sent, to be there in time: the event loop's turn, the decision, the
# sockets and the thread's wake-up. Seen on two busy cores: without prefetch a slot stood still for 0.2 to 0.3 ms between
# two batches, 0.5 ms in one of twenty. What comes late costs the slot that much idle time, what comes early is decided
# without the requests that arrive in between, so this is about twice what is usual.
LOCAL_PREFETCH_S = 0.0005
# The same to a slot of a worker: the way there and back took 1.1 to 1.8 ms over ipc on two busy cores, up to 200 KB of
# tensors making no difference.
REMOTE_PREFETCH_S = 0.002
# Codes of batches that a slot may be rid of before it has answered an earlier one.
GIVEN_BACK = (ErrorCode.CANCELLED, ErrorCode.RECALLED)


class ConnectedWorker(PeerLink):
    """A worker in one session, and the link to its control; its slots have links of their own."""

    __slots__ = (
        "_checks",
        "answered_at",
        "condemned_for",
        "costs",
        "dialled_in",
        "digests",
        "models",
        "name",
        "pid",
        "port",
        "session",
        "since",
        "slots",
        "state",
        "token",
        "tolerances",
    )

    prefetch_s = REMOTE_PREFETCH_S

    def __init__(
        self,
        peer: bytes | None,
        offer: Offer,
        outgoing: Outgoing,
        now: float,
        *,
        session: int,
        dialled_in: bool,
    ) -> None:
        super().__init__(peer, now)
        self.state = WorkerState.GREETING
        self.since = now
        """When that state began."""
        self.dialled_in = dialled_in
        """Whether its process was started elsewhere, so that this server cannot kill it, nor be told how it ended."""
        self.name = offer.name
        """As it appears in timings and logs: `name/slot`."""
        self.pid = offer.pid
        self.models = offer.models
        self.costs = offer.costs
        self.digests = offer.digests
        self.tolerances = offer.tolerances
        self.session = session
        """Number of the session; this server uses none twice."""
        self.token = os.urandom(16)
        """The proof by which its slots are known."""
        self.port = outgoing
        self.slots = [SlotRecord(self, slot, now) for slot in range(offer.slots)]
        self._checks = {key: ReportCheck(signature) for key, signature in offer.models.items()}
        self.condemned_for = ""
        """Why its process is to be ended, once that is so."""
        self.answered_at: float | None = None
        """When it last reported a batch that had run."""

    @property
    def running(self) -> list[int]:
        """Batches that it has not reported yet: those that run, and one that is queued behind each."""
        return [batch for slot in self.slots for batch in slot.running]

    def change(self, name: str, now: float) -> None:
        """Change the state of its session; raises KeyError for a change that the table does not list."""
        state = CONNECTED_WORKER_TABLE[name][self.state]
        if state is not self.state:
            self.state, self.since = state, now

    @property
    def has_greeted(self) -> bool:
        """Whether all its slots have greeted."""
        return all(slot.has_greeted for slot in self.slots)

    def cancel(self, slot: SlotRecord, batch: int) -> None:
        """Say that the results of a batch are not needed; its report still comes."""
        self.port.say(self, CancelBatchEntry(batch=batch, slot=slot.slot))

    def recall(self, slot: SlotRecord, batch: int) -> None:
        """Ask for a batch back; whether it had begun is in its report."""
        self.port.say(self, RecallBatchEntry(batch=batch, slot=slot.slot))

    def kill(self, reason: str, now: float) -> None:
        """End its process, since a slot hangs: the worker port does so when this turn's decisions are carried out."""
        if self.state not in (WorkerState.CONDEMNED, WorkerState.GONE):  # its other slots may hang, too
            self.change("condemn", now)
            self.condemned_for = reason
            self.port.lost.append((self, reason))

    def judge(self, running: RunningBatch, report: BatchReport, now: float) -> BatchReport:
        """The report with its times clipped to the time since the batch was sent.

        Raises ReportRefused where it contradicts the model or the batch.
        """
        self._checks[running.action.model].check(running.batch, report)
        most_s = now - running.sent_at
        if max(report.gather_s, report.run_s, report.busy_s) <= most_s:
            return report
        return replace(
            report,
            gather_s=min(report.gather_s, most_s),
            run_s=min(report.run_s, most_s),
            busy_s=min(report.busy_s, most_s),
        )

    def left(self, now: float) -> None:
        """End its session: nothing more is sent to it."""
        self.change("end", now)
        self.peer = None
        for slot in self.slots:
            slot.peer = None
            slot.running.clear()


class LocalWorker(ConnectedWorker):
    """The slots of the server's own process: their supervision is a call away."""

    __slots__ = ("_own",)

    prefetch_s = LOCAL_PREFETCH_S

    def __init__(self, own: SlotThreads, outgoing: Outgoing, now: float, *, session: int) -> None:
        offer = Offer(
            name="local",
            pid=os.getpid(),
            slots=own.slots,
            models=own.models,
            costs=own.costs,
            digests=own.digests,
            tolerances=read_tolerances(own.tolerances, own.models),
        )
        super().__init__(None, offer, outgoing, now, session=session, dialled_in=False)
        self._own = own

    def cancel(self, slot: SlotRecord, batch: int) -> None:
        """Interrupt a batch, or withdraw it."""
        self._own.withdraw(slot.slot, batch, ErrorCode.CANCELLED)

    def recall(self, slot: SlotRecord, batch: int) -> None:
        """Withdraw a batch if it has not begun."""
        self._own.withdraw(slot.slot, batch, ErrorCode.RECALLED)

    def kill(self, reason: str, now: float) -> None:
        """Log that nothing can end a thread: the slot stays occupied."""
        log.error(
            "slot hangs", worker=self.name, why=reason, advice="use worker processes, or restart the server"
        )

    def judge(self, running: RunningBatch, report: BatchReport, now: float) -> BatchReport:
        """The report as it is: it comes from this process."""
        return report


class SlotRecord(PeerLink):
    """A slot of a worker, and the link to it."""

    __slots__ = ("at_work", "batches", "behind", "busy_s", "label", "number", "running", "slot", "worker")

    def __init__(self, worker: ConnectedWorker, slot: int, now: float) -> None:
        super().__init__(None, now)
        self.worker = worker
        self.slot = slot
        """The worker's number of it."""
        self.number = -1
        """The scheduler's number of it, from when it joins; never used twice."""
        self.label = f"{worker.name}/{slot}"
        self.running: dict[int, RunningBatch] = {}
        """Batches that were sent to it and not reported: the one that runs, and one behind it."""
        self.behind: RunningBatch | None = None
        """The batch that is queued behind the one that runs."""
        self.at_work = False
        """Whether the book of slots counts its time: from a batch that is sent to it until none is left."""
        self.batches = 0
        self.busy_s = 0.0

    @property
    def has_greeted(self) -> bool:
        """Whether it has a connection, or had one until it ended."""
        return self.peer is not None or self.number >= 0

    def __repr__(self) -> str:
        return f"<slot {self.label}: {self.batches} batches>"

    def report(self, entry: BatchDone | BatchFailedEntry, now: float) -> BatchReport:
        """The report that an entry carries; its batch is open no more.

        Raises ReportRefused where it contradicts the model or the batch, for a batch that this slot was never sent, or has
        reported before, and out of turn: only a batch that is given back may be reported before an earlier one. Then
        nothing that the worker says can be believed.
        """
        running = self.running.get(entry.batch)
        if running is None:
            raise ReportRefused("it was never sent this batch, or has answered it already")
        if isinstance(entry, BatchDone):
            report = self.worker.judge(running, entry.report, now)
            self.worker.answered_at = now
        else:
            report = _failure(entry)
            if report.code is ErrorCode.RECALLED and not running.recalled:
                # Only what was asked back runs again without counting as an attempt.
                report = replace(report, code=ErrorCode.INTERNAL)
        if report.code not in GIVEN_BACK and entry.batch != min(self.running):
            raise ReportRefused("it was sent another batch before, and has not answered that")
        del self.running[entry.batch]
        return report


def _failure(entry: BatchFailedEntry) -> BatchReport:
    """The report of a batch that failed. A code that is unknown here is `internal`."""
    try:
        code = ErrorCode(entry.code)
    except ValueError:
        code = ErrorCode.INTERNAL
    return BatchReport(batch=entry.batch, outputs=None, code=code, message=entry.message)


class RunningBatch:
    """A batch from its start to its report, and what its members are told about it."""

    __slots__ = (
        "action",
        "batch",
        "cancelled",
        "outputs",
        "recalled",
        "records",
        "report",
        "run_us",
        "sent_at",
        "slot",
        "slot_free",
        "started",
    )

    def __init__(
        self, action: StartBatch, slot: SlotRecord, records: Sequence[RequestRecord], now: float
    ) -> None:
        self.action = action
        self.slot = slot
        self.started = self.sent_at = now
        """When it was sent to its slot. `started` of one that was queued there is, once it has run, about when it began."""
        self.slot_free: float | None = None
        """When the batch that it was queued behind was reported."""
        self.cancelled = False
        """Whether the slot was told that nobody needs its results."""
        self.recalled = False
        """Whether it was asked back."""
        self.records = records
        """Its members; rows that fill the call up are not among them."""
        deadlines = tuple([record.deadline for record in records])
        self.batch = Execute(
            batch=action.batch,
            slot=slot.slot,
            model=action.model,
            sizes=action.sizes,
            members=tuple([record.tensors for record in records]),
            shapes=tuple([record.shape for record in records]),
            start_before=None if deadlines.count(None) == len(deadlines) else deadlines,
            session=slot.worker.session,
            sent_us=round(now * 1e6),
        )
        self.outputs: Sequence[Tensors | None] = ()
        """Parallel to the members, once it has run."""
        self.report: BatchReport | None = None
        """Once it has run."""
        self.run_us = 0

    def cancel(self) -> None:
        """Say that its results are not needed."""
        self.cancelled = True
        self.slot.worker.cancel(self.slot, self.batch.batch)

    def recall(self) -> None:
        """Ask for it back."""
        self.recalled = True
        self.slot.worker.recall(self.slot, self.batch.batch)

    def ran(self, report: BatchReport, outputs: Sequence[Tensors | None], now: float) -> None:
        """It has run, as is reported now; of one that was queued this tells when it began."""
        self.outputs = outputs
        self.report = report
        self.run_us = round(report.run_s * 1e6)
        self.slot.batches += 1
        self.slot.busy_s += report.busy_s
        if self.action.behind is not None:
            # It began when the one before it was done, so before that was heard of; and long enough ago.
            began = now - report.busy_s
            self.started = max(self.started, began if self.slot_free is None else min(self.slot_free, began))

    def held_s(self, now: float) -> float:
        """Seconds that it has held its slot, as far as the server heard of it."""
        if self.action.behind is None:
            return now - self.started
        return 0.0 if self.slot_free is None else now - self.slot_free

    def expired(self) -> frozenset[int]:
        """The members that have no outputs, since their deadline had passed before it began."""
        if self.batch.start_before is None or None not in self.outputs:
            return frozenset()
        members = zip(self.action.requests, self.outputs, strict=True)
        return frozenset(request for request, outputs in members if outputs is None)

    def outputs_of(self, requests: Sequence[int]) -> Sequence[Tensors | None]:
        """Parallel to `requests`, which are members."""
        if requests == self.action.requests:
            return self.outputs
        by_request = dict(zip(self.action.requests, self.outputs, strict=True))
        return [by_request[request] for request in requests]

    def timings(self, arrived: float, now: float) -> Timings:
        """The timings of a member that arrived then and is answered now."""
        return Timings(
            queue_us=round((self.started - arrived) * 1e6),
            run_us=self.run_us,
            total_us=round((now - arrived) * 1e6),
            batch_requests=len(self.action.requests),
            batch_rows=self.action.sizes[0] if self.records[0].served.profile.has_batch else 1,
            worker=self.slot.label,
            digest=self.slot.worker.digests.get(self.action.model),
        )
