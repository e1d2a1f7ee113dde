"""Slots in a worker: batches leave as `Execute` entries, whose tensors are the received frames, untouched."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shapestream.serving.batch_entries import entry_of_batch
from shapestream.serving.outgoing import Link, Outgoing
from shapestream.serving.report_check import ReportCheck
from shapestream.wire.messages import CancelBatch, Clock, RecallBatch
from shapestream_engine.batch import Batch
from shapestream_engine.cost_table import CostTable
from shapestream_engine.signature import ModelSignature

__all__ = ["RemoteExecutor"]

# As LOCAL_PREFETCH_S, for encoding, the socket, the worker's event loop and its slot's thread: the way to a worker
# and back took 1.1 to 1.8 ms over ipc on two busy cores, up to 200 KB of tensors making no difference.
REMOTE_PREFETCH_S = 0.002


class RemoteExecutor(Link):
    """Slots of one worker. What it is told to run leaves through the worker port at the end of the turn."""

    __slots__ = (
        "_clock",
        "_outgoing",
        "answered_at",
        "checks",
        "costs",
        "digests",
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
        digests: Mapping[str, str] | None = None,
        *,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(peer, now)
        self.name = name
        self._clock = clock
        self.costs: Mapping[str, CostTable] = costs or {}
        self.digests: Mapping[str, str] = digests or {}
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
        """Send a batch on its way, with the time by which its deadlines count."""
        self.running[batch.batch] = batch
        now = self.sent_at[batch.batch] = self._clock()
        if self.first_batch is None:
            self.first_batch = batch.batch
        if batch.start_before is not None:
            self._outgoing.say(self, Clock(sent_us=round(now * 1e6)))
        self._outgoing.say(self, entry_of_batch(batch, now))

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

    def left(self) -> None:
        """It is gone: nothing more is said to it, and what it reports is of an earlier session."""
        self.peer = None
        self.running.clear()
        self.sent_at.clear()
        self.recalled.clear()
