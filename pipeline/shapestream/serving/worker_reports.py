"""What workers report, as the dispatcher takes it: from `BatchDone` and `BatchFailed`, checked against what they were sent.

A report is wrong when it contradicts the model (`report_check.py`), the batch, or the clock. Then nothing that the worker
says can be believed: it is cut off, and its work is done again by others.
"""

from __future__ import annotations

from dataclasses import replace

from shapestream.serving.batch_entries import read_report
from shapestream.serving.remote_executor import RemoteExecutor
from shapestream.serving.report_check import ReportRefused, check_numbers
from shapestream.wire.messages import BatchDone, BatchFailed
from shapestream_engine.batch import BatchReport, ErrorCode

__all__ = ["report_of_done", "report_of_failed"]

# What two clocks may differ by, and a report may wait before it is read, are no lies; a wrong unit is one.
TIME_SHARE = 1.1
TIME_SLACK_S = 1.0
# A worker counts half of the way back, at most so much (worker_session.py), and whole milliseconds.
EXPIRY_SLACK_S = 0.2


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
    elapsed_s = now - sent
    report = read_report(done)
    took_s = max(report.busy_s, report.run_s)
    if took_s > TIME_SHARE * elapsed_s + TIME_SLACK_S:
        raise ReportRefused(f"it took {took_s:.3f} s, though sent {elapsed_s:.3f} s ago")
    for start_before, outputs in zip(batch.start_before or (), done.outputs, strict=False):
        if outputs is None and start_before is not None and now < start_before - EXPIRY_SLACK_S:
            raise ReportRefused(f"a member was left out {start_before - now:.3f} s before its deadline")
    worker.answered(done.batch)
    worker.answered_at = now
    return report


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
