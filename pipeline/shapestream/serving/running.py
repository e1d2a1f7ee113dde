"""Records of the dispatcher: a slot, and a batch from its start to its report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shapestream.scheduling.events import StartBatch
from shapestream.serving.executor import Executor
from shapestream.serving.sessions import RequestRecord
from shapestream.wire.messages import Timings
from shapestream_engine.batch import BatchReport
from shapestream_engine.layout import Tensors

__all__ = ["RunningBatch", "SlotRecord"]


class SlotRecord:
    """A slot, and where it really is."""

    __slots__ = ("batches", "behind", "busy_s", "executor", "label", "number", "slot")

    def __init__(self, number: int, executor: Executor, slot: int) -> None:
        self.number = number
        """The scheduler's number of it; never used twice."""
        self.executor = executor
        self.slot = slot
        """The executor's number of it."""
        self.label = f"{executor.name}/{slot}"
        self.behind: RunningBatch | None = None
        """The batch that waits for the end of the one that runs."""
        self.batches = 0
        self.busy_s = 0.0

    def __repr__(self) -> str:
        return f"<slot {self.label}: {self.batches} batches>"


class RunningBatch:
    """A batch from its start to its report, and what its members are told about it."""

    __slots__ = (
        "action",
        "elements",
        "member_rows",
        "outputs",
        "rows",
        "run_us",
        "slot",
        "slot_free",
        "start_before",
        "started",
    )

    def __init__(
        self, action: StartBatch, slot: SlotRecord, records: Sequence[RequestRecord], now: float
    ) -> None:
        self.action = action
        self.slot = slot
        self.started = now
        """When it was sent to its slot; of one that waited there, once it has run, about when it began."""
        self.slot_free: float | None = None
        """When the batch that it waited for was reported."""
        self.rows = action.sizes[0] if records[0].model.profile.has_batch else 1
        """Of the call."""
        self.member_rows = sum([record.shape.rows for record in records])
        """Of the requests: those that fill the call up are not among them."""
        self.elements = [record.shape.elements for record in records]
        """Of each member, without any padding."""
        deadlines = [record.deadline for record in records]
        self.start_before = None if deadlines.count(None) == len(deadlines) else tuple(deadlines)
        """Of each member; None if none has a deadline."""
        self.outputs: Sequence[Tensors | None] = ()
        """Parallel to the members, once it has run."""
        self.run_us = 0

    def ran(self, report: BatchReport, outputs: Sequence[Tensors | None], now: float) -> None:
        """It has run, as is reported now; of one that had waited this tells when it began."""
        self.outputs = outputs
        self.run_us = round(report.run_s * 1e6)
        self.slot.batches += 1
        self.slot.busy_s += report.busy_s
        if self.action.behind is not None:
            # It began when the one before it was done, so before that was heard of; and long enough ago.
            began = now - report.busy_s
            self.started = max(self.started, began if self.slot_free is None else min(self.slot_free, began))

    def expired(self) -> frozenset[int]:
        """The members that have no outputs, since their deadline had passed before it began."""
        if self.start_before is None or None not in self.outputs:
            return frozenset()
        members = zip(self.action.requests, self.outputs, strict=True)
        return frozenset(request for request, outputs in members if outputs is None)

    def outputs_of(self, requests: Sequence[int]) -> Iterable[Tensors | None]:
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
            batch_rows=self.rows,
            worker=self.slot.label,
            digest=self.slot.executor.digests.get(self.action.model),
        )
