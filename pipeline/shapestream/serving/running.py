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

    __slots__ = ("batches", "busy_s", "executor", "label", "number", "slot")

    def __init__(self, number: int, executor: Executor, slot: int) -> None:
        self.number = number
        """The scheduler's number of it; never used twice."""
        self.executor = executor
        self.slot = slot
        """The executor's number of it."""
        self.label = f"{executor.name}/{slot}"
        self.batches = 0
        self.busy_s = 0.0

    def __repr__(self) -> str:
        return f"<slot {self.label}: {self.batches} batches>"


class RunningBatch:
    """A batch from its start to its report, and what its members are told about it."""

    __slots__ = ("action", "elements", "has_deadlines", "outputs", "rows", "run_us", "slot", "started")

    def __init__(
        self,
        action: StartBatch,
        slot: SlotRecord,
        started: float,
        *,
        rows: int,
        elements: Sequence[int],
        has_deadlines: bool,
    ) -> None:
        self.action = action
        self.slot = slot
        self.started = started
        self.rows = rows
        self.elements = elements
        """Of each member, without any padding."""
        self.has_deadlines = has_deadlines
        self.outputs: Sequence[Tensors | None] = ()
        """Parallel to the members, once it has run."""
        self.run_us = 0

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
