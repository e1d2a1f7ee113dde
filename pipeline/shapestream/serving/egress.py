"""Replies to clients: results and failures become entries, with the timings of their way.

They leave at the end of the turn, grouped by client (`outgoing.py`). Large results are sent straight from
the arrays that the slot copied out; nothing here touches tensor bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import trio

from shapestream.errors import Draining, Overloaded, Unavailable, WorkerLost, error_from_code
from shapestream.scheduling.events import FailRequest
from shapestream.serving.kept_replies import KeptReplies
from shapestream.serving.outgoing import Outgoing
from shapestream.serving.sessions import ClientSession, RequestRecord
from shapestream.serving.workers import RunningBatch
from shapestream.telemetry.counters import ModelCounters
from shapestream.telemetry.recent import MOST_MESSAGE, RecentError
from shapestream.wire.messages import Failure, ResultEntry, Timings
from shapestream.wire.tags import REQUEST_ID
from shapestream_engine.layout import Tensors

REFUSALS = frozenset({Draining.code, Overloaded.code, Unavailable.code})
"""Codes of requests that did not run: they may be sent again under their numbers. Such replies are not kept."""


class Egress:
    """Turns ends of requests into replies."""

    def __init__(self, outgoing: Outgoing, kept: KeptReplies) -> None:
        self.outgoing = outgoing
        self.kept = kept
        self._statistics = outgoing.statistics

    def deliver(
        self,
        records: Sequence[RequestRecord],
        outputs: Iterable[Tensors | None],
        batch: RunningBatch,
        now: float,
    ) -> None:
        """Reply with the results of one batch. Members that arrived in the same turn share their `Timings`."""
        say, keep = self.outgoing.say, self.kept.keep
        counters = self._statistics.of(batch.action.model)
        alike, timings, arrived = 0, None, 0.0
        for record, tensors in zip(records, outputs, strict=True):
            if tensors is None:
                raise AssertionError(f"{record!r} was delivered, but has no output")
            if timings is None or record.arrived != arrived:
                if timings is not None:
                    _count(counters, timings, alike)
                alike, arrived = 0, record.arrived
                timings = batch.timings(arrived, now)
            alike += 1
            session, sequence = record.session, record.sequence
            result = ResultEntry(sequence=sequence, timings=timings, tensors=tensors)
            say(session, result)
            keep(session.answered, sequence, record.served.number, record.tensors, result)
        if timings is not None:
            _count(counters, timings, alike)

    def fail(self, record: RequestRecord, action: FailRequest, *, may_have_run: bool) -> str:
        """Reply to an admitted request that ends without a result; the code. `may_have_run`: and must not run twice."""
        code, message = action.code, action.message
        if may_have_run and code in REFUSALS:
            code, message = WorkerLost.code, f"{message}; {_MAY_HAVE_RUN}"
        failure = _failure(record.sequence, code, message, action.retry_after_s)
        self._statistics.of(record.model).failures[failure.code] += 1
        self._tell(record.session, failure, record)
        if code not in REFUSALS:
            self._keep(record, failure)
        return failure.code

    def forgotten(self, record: RequestRecord) -> None:
        """Note the end of a request that may have run and must not run twice, and whose client is gone."""
        why = f"its client left while it ran; {_MAY_HAVE_RUN}"
        self._keep(record, _failure(record.sequence, WorkerLost.code, why))

    def refuse(self, session: ClientSession, sequence: int, code: str, message: str) -> None:
        """Reply to a request that was not admitted, and has no record."""
        self._tell(session, _failure(sequence, code, message), None)

    def repeat(self, session: ClientSession, reply: ResultEntry | Failure) -> None:
        """Give a reply again."""
        self._statistics.repeated += 1
        self.outgoing.say(session, reply)

    def _keep(self, record: RequestRecord, failure: Failure) -> None:
        self.kept.keep(
            record.session.answered, record.sequence, record.served.number, record.tensors, failure
        )

    def _tell(self, session: ClientSession, failure: Failure, record: RequestRecord | None) -> None:
        self._statistics.failures[failure.code] += 1
        tags = None if record is None else record.tags
        error = RecentError(
            trio.current_time(),
            None if record is None else record.model,
            failure.code,
            failure.message[:MOST_MESSAGE],
            session.client[0],
            failure.sequence,
            None if tags is None else tags.get(REQUEST_ID),
        )
        self._statistics.recent.add_error(error)
        self.outgoing.say(session, failure)


def _count(counters: ModelCounters, timings: Timings, times: int) -> None:
    counters.queue_us.record(timings.queue_us, times)
    counters.total_us.record(timings.total_us, times)


def _failure(sequence: int, code: str, message: str, retry_after_s: float | None = None) -> Failure:
    error = error_from_code(code, message)
    return Failure(
        sequence=sequence,
        code=error.code,
        message=message,
        retryable=error.retryable,
        retry_after_ms=None if retry_after_s is None else max(1, round(retry_after_s * 1000)),
    )


_MAY_HAVE_RUN = "whether it ran is not known, and this model's requests are never run twice"
