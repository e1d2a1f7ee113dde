"""Batches and reports as entries of the wire, in both directions: the one place that knows both forms.

A batch's tensors travel as the received frames, untouched. Its deadlines travel as the time that remains.
"""

from __future__ import annotations

from collections.abc import Callable

from shapestream.wire.limits import MAX_INTEGER
from shapestream.wire.messages import BatchDone, BatchFailed, Execute, ExecuteMember
from shapestream_engine.batch import Batch, BatchReport, ErrorCode
from shapestream_engine.layout import Layout
from shapestream_engine.signature import RequestShape

__all__ = ["entry_of_batch", "entry_of_report", "read_batch", "read_report"]


def entry_of_batch(batch: Batch, now: float) -> Execute:
    """The entry that asks a worker to run the batch; it is sent `now`."""
    start_before = batch.start_before or (None,) * len(batch.members)
    return Execute(
        batch=batch.batch,
        slot=batch.slot,
        model=batch.model,
        sizes=batch.sizes,
        members=tuple(
            [
                ExecuteMember(
                    remaining_ms=None if at is None else min(max(0, int((at - now) * 1000)), MAX_INTEGER),
                    tensors=tensors,
                )
                for tensors, at in zip(batch.members, start_before, strict=True)
            ]
        ),
    )


def read_batch(
    execute: Execute, resolve: Callable[[Layout], RequestShape], *, number: int, sent_at: float
) -> Batch:
    """The batch that an entry asks for, under a `number` of the reader's. Deadlines count from `sent_at`.

    `resolve` is that of the model's signature; whatever it raises is raised.
    """
    start_before = tuple(
        [
            None if member.remaining_ms is None else sent_at + member.remaining_ms / 1000
            for member in execute.members
        ]
    )
    return Batch(
        batch=number,
        slot=execute.slot,
        model=execute.model,
        sizes=execute.sizes,
        members=tuple([member.tensors for member in execute.members]),
        shapes=tuple([resolve(member.tensors.layout) for member in execute.members]),
        start_before=None if start_before.count(None) == len(start_before) else start_before,
    )


def entry_of_report(report: BatchReport, *, number: int) -> BatchDone | BatchFailed:
    """The entry that answers an `Execute` of this `number`."""
    if report.code is not None or report.outputs is None:
        return BatchFailed(batch=number, code=report.code or ErrorCode.INTERNAL, message=report.message)
    return BatchDone(
        batch=number,
        run_us=round(report.run_s * 1e6),
        busy_us=round(report.busy_s * 1e6),
        reallocations=report.reallocations,
        preparations=report.preparations,
        calls=report.calls,
        outputs=report.outputs,
    )


def read_report(entry: BatchDone | BatchFailed) -> BatchReport:
    """The report that an entry carries. A code that is unknown here is `internal`."""
    if isinstance(entry, BatchFailed):
        try:
            code = ErrorCode(entry.code)
        except ValueError:
            code = ErrorCode.INTERNAL
        return BatchReport(batch=entry.batch, outputs=None, code=code, message=entry.message)
    return BatchReport(
        batch=entry.batch,
        outputs=entry.outputs,
        run_s=entry.run_us * 1e-6,
        busy_s=entry.busy_us * 1e-6,
        reallocations=entry.reallocations,
        preparations=entry.preparations,
        calls=entry.calls,
    )
