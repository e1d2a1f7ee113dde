"""Slots in a worker: batches leave as `Execute` entries, whose tensors are the received frames, untouched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from shapestream.serving.batch_entries import entry_of_batch, read_report
from shapestream.serving.outgoing import Link, Outgoing
from shapestream.serving.report_check import ReportCheck, ReportRefused
from shapestream.wire.messages import BatchDone, BatchFailed, CancelBatch, Clock, RecallBatch
from shapestream_engine.batch import Batch, BatchReport, ErrorCode
from shapestream_engine.cost_table import CostTable
from shapestream_engine.signature import ModelSignature

__all__ = ["Offer", "RemoteExecutor"]

# As LOCAL_PREFETCH_S, for encoding, the socket, the worker's event loop and its slot's thread: the way to a worker
# and back took 1.1 to 1.8 ms over ipc on two busy cores, up to 200 KB of tensors making no difference.
REMOTE_PREFETCH_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A worker's greeting, as it was read and checked."""

    name: str
    pid: int
    slots: int
    models: Mapping[str, ModelSignature]
    costs: Mapping[str, CostTable] = field(default_factory=dict)
    """Measured costs of calls, of some of the models."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of the files that models were read from, of some of them."""


@dataclass(slots=True)
class _Sent:
    """A batch that the worker has, running or queued behind another."""

    batch: Batch
    at: float
    """Time when it was sent."""
    recalled: bool = False
    """Whether it was asked back."""


class RemoteExecutor(Link):
    """Slots of one worker. What it is told to run leaves through the worker port at the end of the turn."""

    __slots__ = (
        "_checks",
        "_clock",
        "_first_batch",
        "_outgoing",
        "answered_at",
        "costs",
        "digests",
        "draining",
        "killed_for",
        "models",
        "name",
        "parting_since",
        "pid",
        "running",
        "slots",
    )

    prefetch_s = REMOTE_PREFETCH_S

    def __init__(
        self,
        peer: bytes,
        offer: Offer,
        outgoing: Outgoing,
        now: float,
        *,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(peer, now)
        self.name = offer.name
        self.pid = offer.pid
        self.slots = offer.slots
        self.models = offer.models
        self.costs = offer.costs
        self.digests = offer.digests
        self._clock = clock
        self._checks = {key: ReportCheck(signature) for key, signature in offer.models.items()}
        self._outgoing = outgoing
        self.running: dict[int, _Sent] = {}
        """Batches that it has not reported yet: those that run, and one that is queued behind each."""
        self.draining = False
        """It wants to leave, and gets no more."""
        self.killed_for: str | None = None
        """Why its process is to be ended, once that is so."""
        self.parting_since: float | None = None
        """Since when it cannot be reached, or its process has ended; it gets no more, and its last words may yet come."""
        self.answered_at: float | None = None
        """When it last reported a batch that had run."""
        self._first_batch: int | None = None
        """The first that it was sent; smaller numbers are of an earlier session."""

    def start_nowait(self, batch: Batch) -> None:
        """Send a batch on its way, with the time by which its deadlines count."""
        now = self._clock()
        self.running[batch.batch] = _Sent(batch, now)
        if self._first_batch is None:
            self._first_batch = batch.batch
        if batch.start_before is not None:
            self._outgoing.say(self, Clock(sent_us=round(now * 1e6)))
        self._outgoing.say(self, entry_of_batch(batch, now))

    def recall_nowait(self, batch: int) -> None:
        """Asks the worker for a batch back; whether it had begun there is in its report."""
        if (sent := self.running.get(batch)) is not None:
            sent.recalled = True
            self._outgoing.say(self, RecallBatch(batch=batch))

    def reported(self, entry: BatchDone | BatchFailed, now: float) -> BatchReport | None:
        """The report that an entry carries; None for a batch of an earlier session, which is over.

        Raises ReportRefused where it contradicts the model or the batch, and for a batch that the worker was never sent, or
        has reported before. Then nothing that the worker says can be believed. Times are clipped to the time since the
        batch was sent.
        """
        sent = self.running.get(entry.batch)
        if sent is None:
            if self._first_batch is not None and entry.batch >= self._first_batch:
                raise ReportRefused("it was never sent this batch, or has answered it already")
            return None
        report = read_report(entry)
        if isinstance(entry, BatchDone):
            self._checks[sent.batch.model].check(sent.batch, report)
            self.answered_at = now
            most_s = now - sent.at
            report = replace(report, run_s=min(report.run_s, most_s), busy_s=min(report.busy_s, most_s))
        elif report.code is ErrorCode.RECALLED and not sent.recalled:
            # Only what was asked back runs again without counting as an attempt.
            report = replace(report, code=ErrorCode.INTERNAL)
        del self.running[entry.batch]
        return report

    def cancel_nowait(self, batch: int) -> None:
        """Tells the worker that nobody waits any more."""
        if batch in self.running:
            self._outgoing.say(self, CancelBatch(batch=batch))

    def kill_nowait(self, reason: str) -> None:
        """The worker port ends it when this turn's decisions are carried out."""
        if self.killed_for is None and self.peer is not None:
            self.killed_for = reason
            self._outgoing.lost.append((self, reason))

    def left(self) -> None:
        """It is gone: nothing more is said to it, and what it reports is of an earlier session."""
        self.peer = None
        self.running.clear()
