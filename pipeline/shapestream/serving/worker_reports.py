"""What workers report, as the dispatcher takes it: from `BatchDone` and `BatchFailed`, checked against what they were sent.

A report is wrong when it contradicts the model (`report_check.py`) or the batch. Then nothing that the worker says can be
believed: it is cut off, and its batches are run again by others. Times are clipped to the time since the batch was sent.
"""

from __future__ import annotations

from dataclasses import replace

from shapestream.serving.batch_entries import read_report
from shapestream.serving.remote_executor import RemoteExecutor
from shapestream.serving.report_check import ReportRefused, check_numbers
from shapestream.wire.messages import BatchDone, BatchFailed
from shapestream_engine.batch import BatchReport, ErrorCode

__all__ = ["report_of_done", "report_of_failed"]


def report_of_done(worker: RemoteExecutor, done: BatchDone, now: float) -> BatchReport | None:
    """The report, or None for one of an earlier session. Raises ReportRefused for what cannot be true."""
    sent = _sent(worker, done.batch)
    if sent is None:
        return None
    batch = worker.running[done.batch]
    check_numbers(done)
    worker.checks[batch.model].check(
        batch, done.outputs, done.calls, reallocations=done.reallocations, preparations=done.preparations
    )
    worker.answered(done.batch)
    worker.answered_at = now
    report, most_s = read_report(done), now - sent
    return replace(report, run_s=min(report.run_s, most_s), busy_s=min(report.busy_s, most_s))


def report_of_failed(worker: RemoteExecutor, failed: BatchFailed) -> BatchReport | None:
    """The same for a batch that did not run."""
    if _sent(worker, failed.batch) is None:
        return None
    report = read_report(failed)
    if report.code is ErrorCode.RECALLED and failed.batch not in worker.recalled:
        # Only what was asked back runs again without counting as an attempt.
        report = replace(report, code=ErrorCode.INTERNAL)
    worker.answered(failed.batch)
    return report


def _sent(worker: RemoteExecutor, batch: int) -> float | None:
    """When the worker was sent this batch; None if that was in an earlier session, which is over.

    Raises ReportRefused for one that it was never sent, or has answered before.
    """
    sent = worker.sent_at.get(batch)
    if sent is None and worker.first_batch is not None and batch >= worker.first_batch:
        raise ReportRefused("it was never sent this batch, or has answered it already")
    return sent
