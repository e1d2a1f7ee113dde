"""The counters and the log lines about requests and batches, which follow each by its id.

The lines of single requests and batches are for `level: debug`. At `info` they cost a look at a boolean per batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog
import trio

from shapestream.errors import Cancelled
from shapestream.scheduling.events import DeliverResults, FailRequest, ReportFault
from shapestream.serving.sessions import RequestRecord
from shapestream.serving.stories import Stories
from shapestream.serving.workers import RunningBatch
from shapestream.telemetry.counters import ServerStatistics
from shapestream.telemetry.logging import PRESENT, RateLimit
from shapestream.telemetry.trace import TraceRecorder
from shapestream.wire.tags import REQUEST_ID, trace_of
from shapestream_engine.batch import BatchReport, ErrorCode

if TYPE_CHECKING:
    from shapestream.serving.tracing import RequestTracer

log = structlog.get_logger()


class Journal:
    """Observes the dispatcher, and decides nothing."""

    def __init__(
        self,
        statistics: ServerStatistics,
        stories: Stories,
        trace: TraceRecorder | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        """`trace` records the sizes of all requests, `tracer` makes their spans; the journal ends both."""
        self.statistics = statistics
        self.stories = stories
        self._trace = trace
        self._tracer = tracer
        self._limit = RateLimit()
        PRESENT.look()

    def arrived(self, records: Sequence[RequestRecord]) -> None:
        """Note requests that go to the scheduler."""
        self.statistics.scheduled_requests += len(records)
        models = self.statistics.models
        for record in records:
            models[record.model].arrived += 1
        if self._trace is not None:
            self._record(self._trace, records)
        if not PRESENT.debug:
            return
        for record in records:
            own_id = (record.tags or {}).get(REQUEST_ID)
            log.debug(
                "request arrived",
                request=record.id,
                client=record.session.label,
                sequence=record.sequence,
                model=record.model,
                **trace_of(record.tags),
                **({} if own_id is None else {REQUEST_ID: own_id}),
            )

    def close(self) -> None:
        """Close the trace, and let the tracer end."""
        if self._trace is not None:
            self._trace.close()
        if self._tracer is not None:
            self._tracer.stop()

    def _record(self, trace: TraceRecorder, records: Sequence[RequestRecord]) -> None:
        for record in records:
            trace.record(
                record.arrived,
                record.client,
                record.model,
                record.served.signature.dimensions,
                record.shape.sizes,
                record.deadline,
                record.priority,
            )

    def started(self, running: RunningBatch) -> None:
        """Note a batch that goes to its slot."""
        if running.action.behind is not None:
            self.statistics.batches_prefetched += 1
        if PRESENT.debug:
            action = running.action
            log.debug(
                "batch started",
                batch=action.batch,
                slot=running.slot.label,
                model=action.model,
                sizes=action.sizes,
                requests=action.requests,
                behind=action.behind,
            )

    def recalled(self, running: RunningBatch) -> None:
        """Note a batch that is recalled from its slot, where it is queued."""
        if PRESENT.debug:
            log.debug("batch recalled", batch=running.action.batch, slot=running.slot.label)

    def ran(self, running: RunningBatch, report: BatchReport, expired: frozenset[int], now: float) -> None:
        """Note a batch that has run."""
        action, slot = running.action, running.slot
        requests = len(action.requests) - len(expired)
        rows = sum([record.shape.rows for record in running.records])
        # What the requests that ran would have computed without any padding.
        elements = sum([record.shape.elements for record in running.records if record.id not in expired])
        computed = self.statistics.count_batch(
            action.model,
            report.calls or ((1, action.sizes),),
            requests=requests,
            rows=rows,
            elements=elements,
            gather_us=round(report.gather_s * 1e6),
            run_us=running.run_us,
            busy_us=round(report.busy_s * 1e6),
            reallocations=report.reallocations,
            preparations=report.preparations,
        )
        row = (
            running.started,
            now,
            slot.label,
            action.model,
            requests,
            rows,
            elements,
            computed,
            report.preparations,
            action.sizes,
        )
        self.statistics.recent.add_batch(row)
        if running.cancelled or running.recalled:  # perhaps for nobody
            self.stories.lost(running, ErrorCode.CANCELLED, "its results were not needed", now)
        if PRESENT.debug:
            log.debug(
                "batch ran",
                batch=report.batch,
                slot=slot.label,
                run_us=running.run_us,
                busy_us=round(report.busy_s * 1e6),
                reallocations=report.reallocations,
                preparations=report.preparations,
                calls=report.calls,
                expired=sorted(expired),
            )

    def lost(self, running: RunningBatch, why: str, now: float) -> None:
        """Note a batch whose slot is gone."""
        self.statistics.of(running.action.model).failed_us += round(running.held_s(now) * 1e6)
        self.stories.lost(running, "worker_lost", why, now)

    def failed(self, running: RunningBatch, report: BatchReport, now: float) -> None:
        """Note a batch that has failed. Clients may cause this at will, so the rate of lines is limited."""
        if report.code is ErrorCode.RECALLED:
            self.statistics.batches_recalled += 1
            if PRESENT.debug:
                log.debug("batch given back", batch=report.batch, slot=running.slot.label)
            return
        action = running.action
        counters = self.statistics.of(action.model)
        counters.batches_failed += 1
        counters.attempts_failed += len(action.requests)
        counters.failed_us += round(running.held_s(now) * 1e6)
        self.stories.lost(running, report.code or ErrorCode.INTERNAL, report.message, now)
        if report.code is ErrorCode.CANCELLED:  # as asked for
            log.debug("batch cancelled", batch=report.batch, slot=running.slot.label)
            return
        skipped = self._limit.admit(f"{action.model} {report.code}", trio.current_time())
        if PRESENT.debug or skipped is not None:
            log.warning(
                "batch failed",
                batch=report.batch,
                slot=running.slot.label,
                model=action.model,
                sizes=action.sizes,
                code=report.code,
                why=report.message,
                like_it_before=skipped or 0,
            )

    def delivered(
        self, action: DeliverResults, running: RunningBatch, records: Sequence[RequestRecord], now: float
    ) -> None:
        """Note results that go to their clients; `records` are parallel to the action's requests."""
        self.stories.delivered(running, records, now)
        if self._tracer is not None:
            self._tracer.ended(records, self.stories, now, run=self.stories.latest)
        if PRESENT.debug:
            log.debug("results delivered", batch=action.batch, requests=action.requests)

    def poisoned(self, record: RequestRecord, action: FailRequest, digest: str) -> None:
        """Note a request that brought two workers down; each line stands for two of those, so they need no limit."""
        log.error(
            "request poisoned",
            request=record.id,
            client=record.session.label,
            sequence=record.sequence,
            model=record.model,
            sizes=record.shape.sizes,
            digest=digest,
            why=action.message,
            **trace_of(record.tags),
        )

    def fault(self, action: ReportFault) -> None:
        """Note an error within the scheduler. Clients may cause it at will, so the rate of lines is limited."""
        self.statistics.faults += 1
        skipped = self._limit.admit(
            f"fault {action.about} {type(action.error).__name__}", trio.current_time()
        )
        if PRESENT.debug or skipped is not None:
            log.error(
                "scheduler fault",
                about=action.about,
                requests=action.requests,
                like_it_before=skipped or 0,
                exc_info=action.error,
            )

    def request_failed(self, action: FailRequest, record: RequestRecord, code: str, now: float) -> None:
        """Note a request that ends without a result; its client is told `code`."""
        self.stories.failed(record, action, code, now)
        if action.cause is not None:
            self.statistics.overloaded[action.cause] += 1
        if self._tracer is not None:
            self._tracer.ended([record], self.stories, now, code=code, message=action.message)
        if PRESENT.debug:
            log.debug(
                "request failed",
                request=action.id,
                code=action.code,
                why=action.message,
                **trace_of(record.tags),
            )

    def forgotten(self, record: RequestRecord, now: float) -> None:
        """Note a request that ends without any reply, since its client is gone."""
        if self._tracer is not None:
            self._tracer.ended([record], self.stories, now, code=Cancelled.code, message="its client is gone")
