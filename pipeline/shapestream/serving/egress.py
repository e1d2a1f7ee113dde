"""Replies to clients: results and failures become entries, with the timings of each request.

They leave at the end of the turn, grouped by client (`outgoing.py`). Large results are sent from the arrays that the slot
copied out. Nothing here reads or copies tensor bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import trio

from shapestream.errors import Draining, Overloaded, Unavailable, WorkerLost, error_from_code
from shapestream.scheduling.actions import FailRequest
from shapestream.scheduling.batches import Batch
from shapestream.serving.ends import Ends, RequestRefused
from shapestream.serving.kept_replies import KeptReplies
from shapestream.serving.outgoing import Outgoing
from shapestream.serving.sessions import ClientSession, RequestRecord
from shapestream.wire.messages import Failure, ResultEntry, Timings
from shapestream_engine.layout import Tensors

REFUSALS = frozenset({Draining.code, Overloaded.code, Unavailable.code})
"""Codes of requests that did not run: they may be sent again under their numbers. Such replies are not kept."""


class Egress:
    """Makes replies of the ends of requests."""

    def __init__(self, outgoing: Outgoing, kept: KeptReplies, ends: Ends) -> None:
        self.outgoing = outgoing
        self.kept = kept
        self.ends = ends
        """The ends of this turn, for the observers."""
        self._statistics = outgoing.statistics

    def deliver(
        self,
        records: Sequence[RequestRecord],
        outputs: Iterable[Tensors | None],
        batch: Batch,
        now: float,
    ) -> None:
        """Reply with the results of one batch. Members that arrived in the same turn share their `Timings`."""
        say, keep = self.outgoing.say, self.kept.keep
        timings, arrived = None, 0.0
        for record, tensors in zip(records, outputs, strict=True):
            if tensors is None:
                raise AssertionError(f"{record!r} was delivered, but has no output")
            if timings is None or record.arrived != arrived:
                arrived = record.arrived
                timings = _timings(batch, record, now)
            session, sequence = record.session, record.sequence
            result = ResultEntry(sequence=sequence, timings=timings, tensors=tensors)
            say(session, result)
            keep(session.answered, sequence, record.served.number, record.tensors, result)

    def deliver_chain(
        self, record: RequestRecord, tensors: Tensors, began: float, label: str, now: float
    ) -> None:
        """Reply with the result of a chain, whose first call `began` then, and whose last one ran on the slot `label`."""
        began = min(began, now)
        timings = Timings(
            queue_us=round((began - record.arrived) * 1e6),
            run_us=round((now - began) * 1e6),
            total_us=round((now - record.arrived) * 1e6),
            batch_requests=1,
            batch_rows=1,
            worker=label,
            digest=None,
        )
        result = ResultEntry(sequence=record.sequence, timings=timings, tensors=tensors)
        self.outgoing.say(record.session, result)
        self.kept.keep(record.session.answered, record.sequence, record.served.number, record.tensors, result)

    def fail(self, record: RequestRecord, action: FailRequest, *, may_have_run: bool) -> Failure:
        """Reply to an admitted request that ends without a result. `may_have_run`: and must not run twice."""
        message = action.message
        code = told_code(action.code, may_have_run=may_have_run)
        if code != action.code:
            message = f"{message}; {_MAY_HAVE_RUN}"
        failure = _failure(record.sequence, code, message, action.retry_after_s)
        self.outgoing.say(record.session, failure)
        if code not in REFUSALS:
            self._keep(record, failure)
        return failure

    def forgotten(self, record: RequestRecord) -> None:
        """Note the end of a request that may have run and must not run twice, and whose client is gone."""
        why = f"its client left while it ran; {_MAY_HAVE_RUN}"
        self._keep(record, _failure(record.sequence, WorkerLost.code, why))

    def refuse(self, session: ClientSession, sequence: int, code: str, message: str) -> None:
        """Reply to a request that was not admitted, and has no record."""
        failure = _failure(sequence, code, message)
        self.outgoing.say(session, failure)
        self.ends.add(
            RequestRefused(
                session=session,
                sequence=sequence,
                at=trio.current_time(),
                code=failure.code,
                message=message,
            )
        )

    def repeat(self, session: ClientSession, reply: ResultEntry | Failure) -> None:
        """Give a reply again."""
        self._statistics.repeated += 1
        self.outgoing.say(session, reply)

    def _keep(self, record: RequestRecord, failure: Failure) -> None:
        self.kept.keep(
            record.session.answered, record.sequence, record.served.number, record.tensors, failure
        )


def told_code(code: str, *, may_have_run: bool) -> str:
    """Return the code that a client is told: a request that may have run, and must not run twice, was no refusal."""
    return WorkerLost.code if may_have_run and code in REFUSALS else code


def _timings(batch: Batch, record: RequestRecord, now: float) -> Timings:
    """Return the timings of a member that is answered now."""
    slot, arrived = batch.slot.peer, record.arrived
    return Timings(
        queue_us=round((batch.began - arrived) * 1e6),
        run_us=batch.run_us,
        total_us=round((now - arrived) * 1e6),
        batch_requests=len(batch.arrivals),
        batch_rows=batch.sizes[0] if record.served.profile.has_batch else 1,
        worker=slot.label,
        digest=slot.worker.digests.get(record.model),
    )


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
