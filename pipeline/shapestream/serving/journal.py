"""The journal counts what happens to requests and batches, and writes log lines about it and the trace of arrivals.

The lines about single requests and batches need `level: debug`. At `info` they cost one test of a boolean per batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import trio

from shapestream.chains.plan import Chain
from shapestream.scheduling.actions import FailRequest, ReportFault
from shapestream.scheduling.batches import Batch
from shapestream.serving.ends import BatchEnded, ChainEnded, End, RequestRefused, StageFailed
from shapestream.serving.sessions import RequestRecord
from shapestream.serving.workers import SlotRecord
from shapestream.telemetry.counters import ServerStatistics
from shapestream.telemetry.logging import PRESENT, RateLimit, get_logger
from shapestream.telemetry.trace import TracePart, TraceRecorder, TraceStage
from shapestream.wire.tags import REQUEST_ID, trace_of
from shapestream_engine.batch import ErrorCode

log = get_logger()


class Journal:
    """Counts the dispatcher's actions and the ends, and writes log lines about them. It decides nothing."""

    __slots__ = ("_limit", "_trace", "statistics")

    def __init__(self, statistics: ServerStatistics, trace: TraceRecorder | None = None) -> None:
        """`trace` records the sizes of all requests; the journal closes it."""
        self.statistics = statistics
        self._trace = trace
        self._limit = RateLimit()
        PRESENT.look()

    def arrived(self, records: Sequence[RequestRecord]) -> None:
        """Note requests that go to the scheduler."""
        self.statistics.scheduled_requests += len(records)
        model, counters = "", None
        for record in records:
            if counters is None or record.served.name != model:
                model = record.served.name
                counters = self.statistics.to_add(model)
            counters.arrived += 1
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
                model=record.served.name,
                **trace_of(record.tags),
                **({} if own_id is None else {REQUEST_ID: own_id}),
            )

    def close(self) -> None:
        """Close the trace."""
        if self._trace is not None:
            self._trace.close()

    def _record(self, trace: TraceRecorder, records: Sequence[RequestRecord]) -> None:
        for record in records:
            if (chain := record.served.chain) is not None:
                trace.record_chain(
                    record.arrived,
                    record.client,
                    chain.name,
                    _stages_of(chain),
                    record.deadline,
                    record.priority,
                    record.id,
                )
                continue
            trace.record(
                record.arrived,
                record.client,
                record.served.name,
                record.served.signature.dimensions,
                record.shape.sizes,
                record.deadline,
                record.priority,
                _place_of(record),
            )

    def started(self, batch: Batch, slot: SlotRecord) -> None:
        """Note a batch that goes to its slot."""
        if batch.behind is not None:
            self.statistics.batches_prefetched += 1
        if slot.wide:
            self.statistics.batches_wide += 1
        if PRESENT.debug:
            log.debug(
                "batch started",
                batch=batch.id,
                slot=slot.label,
                model=batch.model,
                sizes=batch.sizes,
                requests=batch.ids,
                behind=batch.behind,
            )

    def recalled(self, batch: Batch, slot: SlotRecord) -> None:
        """Note a batch that is recalled from its slot, where it is queued."""
        if PRESENT.debug:
            log.debug("batch recalled", batch=batch.id, slot=slot.label)

    def ended(self, end: End) -> None:
        """Count an end, and write its lines."""
        if isinstance(end, BatchEnded):
            if end.code is None:
                self.statistics.count_batch(end.run)
                if PRESENT.debug:
                    self._ran(end)
                return
            self._count_failed(end)
            if end.report is not None:
                self._failed(end)
        elif isinstance(end, ChainEnded):
            self._count_chain(end)
            if PRESENT.debug:
                _chain_ended(end)
        elif isinstance(end, RequestRefused):
            self.statistics.failures[end.code] += 1
        elif isinstance(end, StageFailed):
            # Not counted: no client's request has failed, or the chain's will be counted.
            _request_failed(end.record, end.action, end.action.message)
        elif end.action is not None:
            self.statistics.to_add(end.record.served.name).failures[end.code] += 1
            if end.action.cause is not None:
                self.statistics.overloaded[end.action.cause] += 1
            self.statistics.failures[end.code] += 1
            _request_failed(end.record, end.action, end.message)

    def _count_failed(self, end: BatchEnded) -> None:
        if end.code == ErrorCode.RECALLED:
            self.statistics.batches_recalled += 1
            return
        counts = self.statistics.to_add(end.batch.model)
        counts.failed_us += round(end.batch.held_s(end.at) * 1e6)
        if end.report is not None:  # those that were lost with their slot are no failures of the model
            counts.batches_failed += 1
            counts.attempts_failed += len(end.batch.arrivals)

    def _count_chain(self, end: ChainEnded) -> None:
        record, run = end.request.record, end.request.run
        counts = self.statistics.to_add(record.served.name)
        counts.last_ended = max(counts.last_ended, end.at)
        begun = [each for each in run.stages if each.began < inf]
        counts.room_us += round((min([each.began for each in begun], default=end.at) - record.arrived) * 1e6)
        for each in begun:
            us = round((min(each.ended, end.at) - each.began) * 1e6)
            counts.count_stage(each.stage.name, us, each.requests, each.failed)
        if run.failure is None:
            began = min(end.request.began, end.at)
            counts.queue_us.record(round((began - record.arrived) * 1e6))
            counts.total_us.record(round((end.at - record.arrived) * 1e6))

    def _ran(self, end: BatchEnded) -> None:
        report = end.report
        assert report is not None
        log.debug(
            "batch ran",
            batch=end.batch.id,
            slot=end.slot.label,
            run_us=end.batch.run_us,
            busy_us=round(report.busy_s * 1e6),
            reallocations=report.reallocations,
            preparations=report.preparations,
            calls=report.calls,
            expired=sorted(end.batch.left_out),
        )
        if end.answered:
            requests = tuple([record.id for record in end.answered])
            log.debug("results delivered", batch=end.batch.id, requests=requests)

    def _failed(self, end: BatchEnded) -> None:
        """Write that a batch failed. Clients may cause this at will, so the rate of lines is limited."""
        batch, code = end.batch, end.code
        if code == ErrorCode.RECALLED:
            if PRESENT.debug:
                log.debug("batch given back", batch=batch.id, slot=end.slot.label)
            return
        if code == ErrorCode.CANCELLED:  # as asked for
            log.debug("batch cancelled", batch=batch.id, slot=end.slot.label)
            return
        skipped = self._limit.admit(f"{batch.model} {code}", trio.current_time())
        if PRESENT.debug or skipped is not None:
            log.warning(
                "batch failed",
                batch=batch.id,
                slot=end.slot.label,
                model=batch.model,
                sizes=batch.sizes,
                code=code,
                why=end.why,
                like_it_before=skipped or 0,
            )

    def poisoned(self, record: RequestRecord, action: FailRequest, digest: str) -> None:
        """Note a request that brought two workers down; each line stands for two of those, so they need no limit."""
        log.error(
            "request poisoned",
            request=record.id,
            client=record.session.label,
            sequence=record.sequence,
            model=record.served.name,
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


def _stages_of(chain: Chain) -> dict[str, TraceStage]:
    """Return what the simulator has to know of a chain's stages."""
    return {
        stage.name: TraceStage(tuple(sorted(stage.needs)), stage.at_most if stage.is_counted else None)
        for stage in chain.stages
    }


def _place_of(record: RequestRecord) -> TracePart | None:
    if record.stage is None or record.parent is None:
        return None
    return TracePart(record.parent.id, record.stage.run.stages.index(record.stage.stage))


def _request_failed(record: RequestRecord, action: FailRequest, why: str) -> None:
    if PRESENT.debug:
        log.debug("request failed", request=record.id, code=action.code, why=why, **trace_of(record.tags))


def _chain_ended(end: ChainEnded) -> None:
    record, run = end.request.record, end.request.run
    log.debug(
        "chain ended",
        request=record.id,
        model=record.served.name,
        code=None if run.failure is None else run.failure.code,
        total_us=round((end.at - record.arrived) * 1e6),
        stages={stage.stage.name: stage.requests for stage in run.stages},
        **trace_of(record.tags),
    )
