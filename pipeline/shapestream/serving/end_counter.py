"""The observer that counts ends: batches, results, failures, padding and times, by model."""

from __future__ import annotations

from math import inf
from operator import attrgetter

from shapestream.serving.ends import BatchEnded, ChainEnded, End, RequestEnded, StageFailed
from shapestream.telemetry.counters import ServerStatistics
from shapestream_engine.batch import BatchReport, ErrorCode

_ARRIVED = attrgetter("arrived")


class EndCounter:
    """Counts ends."""

    def __init__(self, statistics: ServerStatistics) -> None:
        self._statistics = statistics

    def ended(self, end: End) -> None:
        """Count an end."""
        statistics = self._statistics
        if isinstance(end, BatchEnded):
            if end.code is not None:
                self._count_failed(end)
            elif end.report is not None:
                self._count_ran(end, end.report)
            return
        if isinstance(end, ChainEnded):
            self._count_chain(end)
            return
        if isinstance(end, StageFailed):
            return  # no client's request has failed, or the chain's will be counted
        if isinstance(end, RequestEnded):
            if end.action is None:
                return
            statistics.to_add(end.record.model).failures[end.code] += 1
            if end.action.cause is not None:
                statistics.overloaded[end.action.cause] += 1
        statistics.failures[end.code] += 1

    def _count_ran(self, end: BatchEnded, report: BatchReport) -> None:
        run = end.run
        self._statistics.count_batch(
            run.model,
            run.sizes,
            report,
            requests=run.ran,
            rows=run.rows,
            elements=run.useful,
            began=end.batch.began,
            ended=end.at,
            arrived=[*map(_ARRIVED, end.answered)],
        )

    def _count_chain(self, end: ChainEnded) -> None:
        record, run = end.request.record, end.request.run
        counters = self._statistics.to_add(record.model)
        counters.last_ended = max(counters.last_ended, end.at)
        begun = [each for each in run.stages if each.began < inf]
        counters.room_us += round(
            (min([each.began for each in begun], default=end.at) - record.arrived) * 1e6
        )
        for each in begun:
            us = round((min(each.ended, end.at) - each.began) * 1e6)
            counters.count_stage(each.stage.name, us, each.requests, each.failed)
        if run.failure is None:
            began = min(end.request.began, end.at)
            counters.queue_us.record(round((began - record.arrived) * 1e6))
            counters.total_us.record(round((end.at - record.arrived) * 1e6))

    def _count_failed(self, end: BatchEnded) -> None:
        if end.code == ErrorCode.RECALLED:
            self._statistics.batches_recalled += 1
            return
        counters = self._statistics.to_add(end.batch.model)
        counters.failed_us += round(end.batch.held_s(end.at) * 1e6)
        if end.report is not None:  # those that were lost with their slot are no failures of the model
            counters.batches_failed += 1
            counters.attempts_failed += len(end.batch.arrivals)
