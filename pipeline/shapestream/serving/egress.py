"""The answers: results and failures become entries for their clients, with the timings of their way.

They leave at the end of the turn, grouped by client (`links.Outgoing`). Large results are sent straight from
the arrays that the slot copied out; nothing here touches tensor bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shapestream.errors import error_from_code
from shapestream.scheduling.actions import FailRequest
from shapestream.serving.links import Outgoing
from shapestream.serving.running import RunningBatch
from shapestream.serving.sessions import RequestRecord, Session
from shapestream.telemetry.statistics import ServerStatistics
from shapestream.wire.messages import Failure, Result, Timings
from shapestream_engine.layout import Tensors

__all__ = ["Egress"]


class Egress:
    """Turns ends of requests into replies."""

    def __init__(self, outgoing: Outgoing, statistics: ServerStatistics) -> None:
        self._outgoing = outgoing
        self._statistics = statistics

    def deliver(
        self,
        records: Sequence[RequestRecord],
        outputs: Iterable[Tensors | None],
        batch: RunningBatch,
        now: float,
    ) -> None:
        """Results of one batch. Members that arrived in the same turn share their `Timings`."""
        say = self._outgoing.say
        alike, timings, arrived = 0, None, 0.0
        for record, tensors in zip(records, outputs, strict=True):
            if tensors is None:
                raise AssertionError(f"{record!r} was delivered, but has no output")
            if timings is None or record.arrived != arrived:
                self._count(timings, alike)
                alike, arrived = 0, record.arrived
                timings = batch.timings(arrived, now)
            alike += 1
            say(record.session, Result(sequence=record.sequence, timings=timings, tensors=tensors))
        self._count(timings, alike)
        self._statistics.results += len(records)

    def _count(self, timings: Timings | None, times: int) -> None:
        if timings is not None:
            self._statistics.queue_us.record(timings.queue_us, times)
            self._statistics.total_us.record(timings.total_us, times)

    def fail(self, record: RequestRecord, action: FailRequest) -> None:
        """An admitted request that ends without a result."""
        self.refuse(record.session, record.sequence, action.code, action.message, action.retry_after_s)

    def refuse(
        self, session: Session, sequence: int, code: str, message: str, retry_after_s: float | None = None
    ) -> None:
        """The same for a request that was never admitted, and has no record."""
        error = error_from_code(code, message)
        self._statistics.failures[error.code] += 1
        failure = Failure(
            sequence=sequence,
            code=error.code,
            message=message.encode(errors="replace").decode(),  # an engine's words may hold any surrogate
            retryable=error.retryable,
            retry_after_ms=None if retry_after_s is None else max(1, round(retry_after_s * 1000)),
        )
        self._outgoing.say(session, failure)
