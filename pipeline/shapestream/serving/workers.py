"""Workers as the server knows them, and their slots.

A worker has one link for its control, and one for each slot. A batch leaves on its slot's link as an `Execute`, whose
tensors are the received frames, untouched. The scheduler's own slot refers to its `SlotRecord` as its peer.
"""

from __future__ import annotations

import os
from dataclasses import replace

import structlog

from shapestream.scheduling.batches import Batch
from shapestream.serving.outgoing import Outgoing, PeerLink
from shapestream.serving.report_check import ReportCheck, ReportRefused
from shapestream.serving.slot_threads import SlotThreads
from shapestream.serving.worker_offer import Offer, read_tolerances
from shapestream.serving.worker_states import CONNECTED_WORKER_TABLE, WorkerState
from shapestream.wire.messages import BatchDone, BatchFailedEntry, CancelBatchEntry, RecallBatchEntry
from shapestream_engine.batch import BatchReport, ErrorCode

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
        """Batches that it has not reported yet: those that run, and those that are queued behind."""
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

    def judge(self, batch: Batch, report: BatchReport, now: float) -> BatchReport:
        """Return the report with its times clipped to the time since the batch was sent.

        Raises ReportRefused where it contradicts the model or the batch.
        """
        assert batch.inputs is not None
        self._checks[batch.model].check(batch.inputs, report)
        most_s = now - batch.sent_at
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

    def judge(self, batch: Batch, report: BatchReport, now: float) -> BatchReport:
        """Return the report as it is: it comes from this process."""
        return report


class SlotRecord(PeerLink):
    """A slot of a worker, and the link to it."""

    __slots__ = ("at_work", "batches", "busy_s", "label", "number", "running", "slot", "worker")

    def __init__(self, worker: ConnectedWorker, slot: int, now: float) -> None:
        super().__init__(None, now)
        self.worker = worker
        self.slot = slot
        """The worker's number of it."""
        self.number = -1
        """The scheduler's number of it, from when it joins; never used twice."""
        self.label = f"{worker.name}/{slot}"
        self.running: dict[int, Batch] = {}
        """Batches that were sent on this link and not answered: the one that runs, and those behind it."""
        self.at_work = False
        """Whether the dispatcher counts its time: from a batch that is sent to it until none is left."""
        self.batches = 0
        self.busy_s = 0.0

    @property
    def has_greeted(self) -> bool:
        """Whether it has a connection, or had one until it ended."""
        return self.peer is not None or self.number >= 0

    def __repr__(self) -> str:
        return f"<slot {self.label}: {self.batches} batches>"

    def report(self, entry: BatchDone | BatchFailedEntry, now: float) -> BatchReport:
        """Return the report that an entry carries; its batch is open no more.

        Raises ReportRefused where it contradicts the model or the batch, for a batch that this slot was never sent, or has
        reported before, and out of turn: only a batch that is given back may be reported before an earlier one, or before
        one that was asked back. Then nothing that the worker says can be believed.
        """
        batch = self.running.get(entry.batch)
        if batch is None:
            raise ReportRefused("it was never sent this batch, or has answered it already")
        if isinstance(entry, BatchDone):
            report = self.worker.judge(batch, entry.report, now)
            self.worker.answered_at = now
        else:
            report = _failure(entry)
            if report.code is ErrorCode.RECALLED and not batch.recalled:
                # Only what was asked back runs again without counting as an attempt.
                report = replace(report, code=ErrorCode.INTERNAL)
        if report.code not in GIVEN_BACK:
            for number, earlier in self.running.items():
                if number < entry.batch and not earlier.recalled:
                    raise ReportRefused("it was sent another batch before, and has not answered that")
        del self.running[entry.batch]
        return report


def _failure(entry: BatchFailedEntry) -> BatchReport:
    """Return the report of a batch that failed. A code that is unknown here is `internal`."""
    try:
        code = ErrorCode(entry.code)
    except ValueError:
        code = ErrorCode.INTERNAL
    return BatchReport(batch=entry.batch, outputs=None, code=code, message=entry.message)
