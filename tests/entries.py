"""Entries of the wire, as tests make and read them: no test but those of the wire itself knows their classes otherwise.

A kind that the product renames, or moves, is renamed in one line here. Kinds with many fields are made by functions, so
that a field which is added, or which most tests do not care about, stands here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shapestream.wire import messages
from shapestream_engine.layout import Tensors

Entry = messages.Entry
Role = messages.Role
Timings = messages.Timings
WORKER_PROTOCOL = messages.WORKER_PROTOCOL

Heartbeat = messages.Heartbeat
Goodbye = messages.Goodbye
Clock = messages.Clock
Unknown = messages.Unknown
RunsAlone = messages.RunsAlone

# client -> server
Hello = messages.Hello
OpenModel = messages.OpenModel
RequestEntry = messages.RequestEntry
Cancel = messages.Cancel
StatisticsRequest = messages.StatisticsRequest
Explain = messages.Explain
AcknowledgeAudit = messages.AcknowledgeAudit
AsksFirst = messages.AsksFirst
Ask = messages.Ask

# server -> client
Welcome = messages.Welcome
ModelOpened = messages.ModelOpened
ModelRefused = messages.ModelRefused
ResultEntry = messages.ResultEntry
Failure = messages.Failure
Credit = messages.Credit
StatisticsEntry = messages.StatisticsEntry
Explanation = messages.Explanation
GrantBounds = messages.GrantBounds
Granted = messages.Granted

# worker -> server
WorkerHello = messages.WorkerHello
BatchDone = messages.BatchDone
BatchFailedEntry = messages.BatchFailedEntry
WorkerDraining = messages.WorkerDraining
SlotHello = messages.SlotHello
SlotEnded = messages.SlotEnded

# server -> worker
WorkerWelcome = messages.WorkerWelcome
WorkerRefused = messages.WorkerRefused
Execute = messages.Execute
CancelBatchEntry = messages.CancelBatchEntry
RecallBatchEntry = messages.RecallBatchEntry


def timings_of(*, queue_us: int = 1, run_us: int = 2, total_us: int = 3, **more: Any) -> Timings:
    """Times of a request that ran alone on the slot `w/0`, but for what is said here."""
    alone: dict[str, Any] = {"batch_requests": 1, "batch_rows": 1, "worker": "w/0"}
    return Timings(queue_us=queue_us, run_us=run_us, total_us=total_us, **alone | more)


def request_of(
    sequence: int, tensors: Tensors, *, model: int = 0, remaining_ms: int | None = None, **more: Any
) -> RequestEntry:
    """A request for the first model of a session, without a deadline; `more` is its priority and its tags."""
    return RequestEntry(
        sequence=sequence, model=model, remaining_ms=remaining_ms, tensors=tensors, **{"priority": 0, **more}
    )


def result_of(sequence: int, tensors: Tensors, timings: Timings | None = None) -> ResultEntry:
    """The result of a request."""
    return ResultEntry(sequence=sequence, timings=timings or timings_of(), tensors=tensors)


def failure_of(
    sequence: int, code: str, message: str = "no", *, retryable: bool = False, **more: Any
) -> Failure:
    """The reason for having no result; `more` is `retry_after_ms`."""
    fields = {"retry_after_ms": None, **more}
    return Failure(sequence=sequence, code=code, message=message, retryable=retryable, **fields)


def execute_of(batch: int, members: Sequence[Tensors], *, model: str = "m", **more: Any) -> Execute:
    """A batch for slot 0 of a worker's first session, of one size; `more` is any other field."""
    first: dict[str, Any] = {"session": 1, "slot": 0, "sent_us": 0, "sizes": (1,)}
    return Execute(batch=batch, members=tuple(members), model=model, **first | more)


def batch_failed(execute: Execute, code: str = "model_error", message: str = "no") -> BatchFailedEntry:
    """A worker's answer to a batch that did not run."""
    return BatchFailedEntry(batch=execute.batch, session=execute.session, code=code, message=message)
