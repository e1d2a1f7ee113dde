"""Actions: the only outputs of `Scheduler.handle`. The caller carries them out, in order.

An action carries the batch, the slot and the requests that it is about, not their numbers. A request is the object that
the caller submitted (`Submitted`). A batch is the scheduler's own record, which the caller completes (batches.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shapestream.scheduling.batches import Batch, Submitted
from shapestream.scheduling.events import Overload
from shapestream.scheduling.slots import Slot
from shapestream_engine.layout import value


@value
class StartBatch:
    """Hand these batches over to their slot, which runs them in this order."""

    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TellLoneRun:
    """Tell the client of this suspect that it is about to run alone in the server's process. `LoneRunKnown` is awaited."""

    request: Submitted


@value
class DeliverResults:
    """Deliver a batch's results to these members; the others (cancelled, gone, late) have actions of their own."""

    batch: Batch
    requests: Sequence[Submitted]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRequest:
    """This request ends without a result. The terminal reply carries `code` (see errors.py)."""

    request: Submitted
    code: str
    message: str
    retry_after_s: float | None = None
    ahead: int | None = None
    """Requests of its model that were queued when it arrived; None: it was not admitted."""
    batch: Batch | None = None
    """The batch that it was in, which may be over; None: it was queued, or not admitted."""
    cause: Overload | None = None
    """The bound that an `overloaded` one met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetRequest:
    """This request ends without any reply: its client is gone."""

    request: Submitted
    batch: Batch | None = None
    """The batch that it was in; None: it was queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelBatch:
    """Stop a running batch: all its members have ended, or it hangs. Its report is awaited all the same."""

    batch: Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallBatch:
    """Take back a batch that is queued behind another. Its report is awaited all the same: `recalled`, or its result or
    error if it had begun."""

    batch: Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class KillSlot:
    """End the process of a slot whose batch hangs, and did not end when it was cancelled. `SlotLeft` is awaited."""

    slot: Slot
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFault:
    """A defect of the scheduler, which went on without; the log should say so."""

    error: Exception
    about: str
    """The thing that could not be worked out."""
    requests: tuple[int, ...] = ()
    """The requests that it was for, by id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RejoinSlots:
    """Let all workers greet anew. After a defect the scheduler has forgotten all slots, with what they run."""


Action: TypeAlias = (
    StartBatch
    | TellLoneRun
    | DeliverResults
    | FailRequest
    | ForgetRequest
    | CancelBatch
    | RecallBatch
    | KillSlot
    | ReportFault
    | RejoinSlots
)
