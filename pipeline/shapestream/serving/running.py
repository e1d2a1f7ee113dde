"""Slots as the scheduler numbers them, and what runs on them: the dispatcher's own records."""

from __future__ import annotations

from collections.abc import Sequence

from shapestream.scheduling.actions import StartBatch
from shapestream.serving.batches import Executor
from shapestream.wire.messages import Timings
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
        "has_deadlines",
        "member_rows",
        "outputs",
        "rows",
        "run_us",
        "slot",
        "slot_free",
        "started",
    )

    def __init__(
        self,
        action: StartBatch,
        slot: SlotRecord,
        started: float,
        *,
        rows: int,
        member_rows: int,
        elements: Sequence[int],
        has_deadlines: bool,
    ) -> None:
        self.action = action
        self.slot = slot
        self.started = started
        """When it was sent to its slot; of one that waited there, once it has run, about when it began."""
        self.slot_free: float | None = None
        """When the batch that it waited for was reported."""
        self.rows = rows
        """Of the call."""
        self.member_rows = member_rows
        """Of the requests: those that fill the call up are not among them."""
        self.elements = elements
        """Of each member, without any padding."""
        self.has_deadlines = has_deadlines
        self.outputs: Sequence[Tensors | None] = ()
        """Parallel to the members, once it has run."""
        self.run_us = 0

    def ran_for(self, busy_s: float, now: float) -> None:
        """Its slot was busy with it for so long, as is reported now. Of one that waited this tells when it began."""
        if self.action.behind is None:
            return
        # It began when the one before it was done, so before that was heard of; and long enough ago.
        began = now - busy_s if self.slot_free is None else min(self.slot_free, now - busy_s)
        self.started = max(self.started, began)

    def timings(self, arrived: float, now: float) -> Timings:
        """The timings of a member that arrived then and is answered now."""
        return Timings(
            queue_us=round((self.started - arrived) * 1e6),
            run_us=self.run_us,
            total_us=round((now - arrived) * 1e6),
            batch_requests=len(self.action.requests),
            batch_rows=self.rows,
            worker=self.slot.label,
        )
