"""What to do about it: the only outputs of `Scheduler.handle`. The caller carries them out, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class StartBatch:
    """Run these requests in one call of this shape on this slot."""

    batch: int
    slot: int
    model: str
    requests: tuple[int, ...]
    sizes: tuple[int, ...]
    """The call's size of each of the model's `dimensions`: at least the sum of rows, else at least the largest."""
    behind: int | None = None
    """The batch that still runs on this slot: this one waits there for its end, unless it is recalled before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverResults:
    """A batch's results go to these members; the others (cancelled, gone, late) have actions of their own."""

    batch: int
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRequest:
    """This request ends without a result. The terminal reply carries `code` (see errors.py)."""

    id: int
    code: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetRequest:
    """This request ends without any reply: its client is gone."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelBatch:
    """Nobody waits for this running batch any more, or it hangs. Its report is awaited all the same."""

    batch: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallBatch:
    """Take a batch back that waits behind another one. Its report is awaited all the same: `recalled`, or
    whatever became of it if it had started."""

    batch: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillSlot:
    """What this slot runs hangs, and has not ended when it was cancelled: end its process. `SlotLeft` is awaited."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFault:
    """Something could not be worked out, which is a defect of the scheduler. It went on without; the log should say so."""

    error: Exception
    about: str
    """What was to be worked out."""
    requests: tuple[int, ...] = ()
    """For which requests."""


Action: TypeAlias = (
    StartBatch
    | DeliverResults
    | FailRequest
    | ForgetRequest
    | CancelBatch
    | RecallBatch
    | KillSlot
    | ReportFault
)
