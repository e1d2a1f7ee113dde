"""What the scheduler's decisions do: batches go to executors, answers to egress, lines to the journal.

All of it returns at once. The books of what was begun, and has not ended, are kept here.
"""

from __future__ import annotations

from typing import assert_never

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
from shapestream.serving.egress import Egress
from shapestream.serving.journal import Journal
from shapestream.serving.quarantine import Quarantine
from shapestream.serving.running import SlotBook
from shapestream.serving.sessions import RequestRecord
from shapestream_engine.batch import Batch

__all__ = ["Effects"]


class Effects:
    """Carries decisions out."""

    def __init__(self, egress: Egress, journal: Journal, quarantine: Quarantine) -> None:
        self._egress = egress
        self._journal = journal
        self._quarantine = quarantine
        self.requests: dict[int, RequestRecord] = {}
        """Those that have no terminal reply yet, by number."""
        self.book = SlotBook()

    def carry_out(self, action: Action, now: float) -> None:
        """One decision."""
        match action:
            case StartBatch():
                self._start(action, now)
            case DeliverResults():
                self._deliver(action, now)
            case FailRequest():
                if action.code == "poisoned":
                    self._put_in_quarantine(action, now)
                self.fail(action)
            case ForgetRequest():
                self._egress.forgotten(self._end(action.id))
            case CancelBatch():
                running = self.book.batches.get(action.batch)
                if running is not None:
                    running.slot.executor.cancel_nowait(action.batch)
            case RecallBatch():
                running = self.book.batches.get(action.batch)
                if running is not None:
                    self._journal.recalled(running)
                    running.slot.executor.recall_nowait(action.batch)
            case KillSlot():
                slot = self.book.slots.get(action.slot)
                if slot is not None:
                    slot.executor.kill_nowait(action.reason)
            case ReportFault():
                self._journal.fault(action)
            case _:
                assert_never(action)

    def _start(self, action: StartBatch, now: float) -> None:
        known = self.requests
        records = [known[request] for request in action.requests]
        if not records[0].model.profile.idempotent:
            for record in records:
                record.started = True
        running = self.book.start(action, records, now)
        self._journal.started(running)
        running.slot.executor.start_nowait(
            Batch(
                batch=action.batch,
                slot=running.slot.slot,
                model=action.model,
                sizes=action.sizes,
                members=tuple([record.tensors for record in records]),
                shapes=tuple([record.shape for record in records]),
                start_before=running.start_before,
            )
        )

    def _deliver(self, action: DeliverResults, now: float) -> None:
        running = self.book.batches[action.batch]
        outputs = running.outputs_of(action.requests)
        end = self._end
        self._egress.deliver([end(request) for request in action.requests], outputs, running, now)
        self._journal.delivered(action)

    def _put_in_quarantine(self, action: FailRequest, now: float) -> None:
        record = self.requests[action.id]
        digest = self._quarantine.keep(record.model.name, record.tensors, now)
        self._journal.poisoned(record, action, digest)

    def fail(self, action: FailRequest) -> None:
        """A request ends without a result."""
        self._journal.request_failed(action)
        self._egress.fail(self._end(action.id), action)

    def _end(self, request: int) -> RequestRecord:
        """The request's one end: its record goes, and its client's credit comes back."""
        record = self.requests.pop(request)
        record.session.end(record)
        return record
