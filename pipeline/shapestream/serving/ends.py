"""Ends of batches and requests: the replies that clients get, and the row of observers that hear of them.

The dispatcher and egress add each end to the turn's list. Once the turn's messages have left, `Ends.tell` hands every end to
every observer, in order. So no client waits for counters, stories, log lines, spans or samples. A new observer is one more
entry of the row, which server.py makes, and one method `ended`. Samples for audits need no more than the batches whose
answers may differ from those alone.

Each end is told once. `BatchEnded` comes for each batch that was started, before the ends of those of its requests that
fail because of it. The answers of a batch are part of its end; each other end of a client's request is a `RequestEnded`. The
requests of a chain's stages are members of their batches, too; where one fails, that is a `StageFailed`.

`Egress` makes the replies: results and failures become entries, with the timings of each request. They leave at the end of
the turn, grouped by client (`port_traffic.py`). Large results are sent from the arrays that the slot copied out. No bytes of
tensors are read or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Protocol, TypeAlias

import trio

from shapestream.errors import Draining, Overloaded, Unavailable, WorkerLost, error_from_code
from shapestream.scheduling.actions import FailRequest
from shapestream.scheduling.batches import Batch
from shapestream.serving.announced import answer_of
from shapestream.serving.chain_desk import ChainRequest
from shapestream.serving.grants import Grants
from shapestream.serving.kept_replies import KeptReplies
from shapestream.serving.port_traffic import Outgoing
from shapestream.serving.sessions import ClientSession, RequestRecord
from shapestream.serving.workers import SlotRecord
from shapestream.telemetry.runs import Owner, Run, RunMember
from shapestream.wire.messages import Failure, Granted, ResultEntry, Timings
from shapestream.wire.tags import CALLER, REQUEST_ID, TRACEPARENT
from shapestream_engine.batch import BatchReport
from shapestream_engine.layout import RequestShape, Tensors


@dataclass(slots=True, kw_only=True, eq=False)
class BatchEnded:
    """A batch ran, failed, was given back, or was lost with its slot."""

    batch: Batch
    slot: SlotRecord
    at: float
    report: BatchReport | None
    """None: it was lost."""
    code: str | None = None
    """None: it ran."""
    why: str = ""
    answered: Sequence[RequestRecord] = ()
    """The members that were answered with its results."""
    outputs: Sequence[Tensors | None] = ()
    """Their results."""

    run: Run = field(init=False)
    """The record of it that observers keep. `Ends.tell` makes it, once for all of them."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestEnded:
    """An admitted request ended without a result."""

    record: RequestRecord
    at: float
    code: str
    """The code that its client was told."""
    message: str
    run: Run | None
    """The attempt that it was in, as far as that was known then."""
    action: FailRequest | None
    """None: its client is gone, and got no answer."""


@dataclass(slots=True, kw_only=True, eq=False)
class StageFailed:
    """A request of a chain's stage ended without a result, before its chain did. What follows is the chain's affair."""

    record: RequestRecord
    at: float
    code: str
    """The code that its chain was told."""
    run: Run | None
    """The attempt that it was in, as far as that was known then."""
    action: FailRequest


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRefused:
    """A request was refused before it was admitted: it has no record."""

    session: ClientSession
    sequence: int
    at: float
    code: str
    message: str


@dataclass(slots=True, kw_only=True, eq=False)
class ChainEnded:
    """A request of a chain ended, with a result or, as its `RequestEnded` has told, without."""

    request: ChainRequest
    at: float


End: TypeAlias = BatchEnded | RequestEnded | StageFailed | RequestRefused | ChainEnded


class Observer(Protocol):
    """An observer of ends. It decides nothing."""

    def ended(self, end: End) -> None:
        """Take note of an end."""


def _sample_none(end: BatchEnded) -> None:
    """Do nothing."""


class Ends:
    """The ends of this turn, and the observers."""

    __slots__ = ("_observers", "_sample", "added")

    def __init__(self, *observers: Observer, sample: Callable[[BatchEnded], None] = _sample_none) -> None:
        """Tell each end to the observers in this order. Last `sample` gets batches whose answers are not those alone.

        Their requests shared a call, were padded, or ran on a wide slot.
        """
        self._observers = [*observers]
        self._sample = sample
        self.added: list[End] = []
        """The ends that the observers have not heard of."""

    def watch(self, observer: Observer) -> None:
        """Tell one more observer, after the others."""
        self._observers.append(observer)

    def add(self, end: End) -> None:
        """Add an end. The observers hear of it when this turn's messages have left."""
        self.added.append(end)

    def tell(self) -> None:
        """Tell the observers of the added ends."""
        ends, self.added = self.added, []
        for end in ends:
            if type(end) is BatchEnded:
                end.run = run_of(end.batch, end)
            for observer in self._observers:
                observer.ended(end)
            if type(end) is BatchEnded and end.answered:
                shared = len(end.batch.arrivals) > 1 or end.batch.sizes != end.answered[0].shape.rounded
                if shared or end.slot.wide:
                    self._sample(end)


def _useful(shape: RequestShape, batch: Batch) -> int:
    """Return the elements of a member with strings. These weigh as much as in its call, since nothing is added to any."""
    strings = batch.queue.profile.strings
    return prod(
        [batch.sizes[number] if number in strings else size for number, size in enumerate(shape.sizes)]
    )


_NO_OWNERS: dict[int, Owner] = {}
"""Of each run that answered its requests: runs are kept by the thousand."""


def run_of(batch: Batch, end: BatchEnded | None = None) -> Run:
    """Make the record of a run: of a batch as far as it is known now, or of one that ended."""
    report, arrivals = batch.report, batch.arrivals
    left_out = () if report is None else batch.left_out
    ids, ran, rows, useful = [], 0, 0, 0
    strings = batch.queue.profile.strings
    for record in arrivals:
        shape = record.shape
        ids.append(record.id)
        rows += shape.rows
        if record.id not in left_out:
            ran += 1
            useful += _useful(shape, batch) if strings else shape.elements
    answered = () if end is None else end.answered
    began = batch.began
    if report is not None:
        if end is None or not ran:
            began = inf  # it left out the request in question, or all, since their deadlines had passed
    elif batch.behind is not None:
        began = inf if batch.is_behind else batch.started
    members = []
    for record in answered:  # no comprehension, see `Dispatcher._start`
        members.append(member_of(record))
    row = (
        batch.id,
        batch.model,
        tuple(ids),
        batch.sizes,
        batch.behind,
        batch.facts,
        batch.slot.peer.label,
        batch.sent_at,
        began,
        inf if end is None else end.at,
        0 if report is None else round(report.gather_s * 1e6),
        batch.run_us,
        0 if report is None else round(report.busy_s * 1e6),
        0 if report is None else report.reallocations,
        0 if report is None else report.preparations,
        () if report is None else report.calls,
        None if end is None or end.code is None else str(end.code),
        _NO_OWNERS if answered else owners_of(batch),
        ran,
        rows,
        useful,
        tuple(members),
    )
    return tuple.__new__(Run, row)  # see `member_of`


def owners_of(batch: Batch) -> dict[int, Owner]:
    """Return the owners of a batch's requests, by the scheduler's ids."""
    return {record.id: (record.tags or {}).get(CALLER) or record.session.client for record in batch.arrivals}


def member_of(record: RequestRecord) -> RunMember:
    """Return what is remembered of one request."""
    tags = record.tags
    own_id = caller = traceparent = None
    if tags is not None:
        own_id, caller, traceparent = tags.get(REQUEST_ID), tags.get(CALLER), tags.get(TRACEPARENT)
    row = (
        record.arrived,
        record.id,
        record.session.client,
        record.sequence,
        record.shape.sizes,
        own_id,
        caller,
        traceparent,
    )
    # One is made per request: this takes a third of the time of `RunMember(*row)`, a function with a namespace of its own,
    # which a lone request finds nowhere in the caches.
    return tuple.__new__(RunMember, row)


REFUSALS = frozenset({Draining.code, Overloaded.code, Unavailable.code})
"""Codes of requests that did not run: they may be sent again under their numbers. Such replies are not kept."""


class Egress:
    """Makes replies of the ends of requests."""

    __slots__ = ("_statistics", "ends", "kept", "outgoing")

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
        timings, arrived = None, 0.0
        for record, tensors in zip(records, outputs, strict=True):
            if tensors is None:
                raise AssertionError(f"{record!r} was delivered, but has no output")
            if timings is None or record.arrived != arrived:
                arrived = record.arrived
                timings = _timings(batch, record, now)
            session, sequence = record.session, record.sequence
            if record.routed is not None:
                tensors = answer_of(tensors, record.routed)
            result = ResultEntry(sequence=sequence, timings=timings, tensors=tensors)
            self.outgoing.say(session, result)
            self.kept.keep(session.answered, sequence, record.known_by, result)

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
            version=record.served.version,
        )
        tensors = answer_of(tensors, record.routed)
        result = ResultEntry(sequence=record.sequence, timings=timings, tensors=tensors)
        self.outgoing.say(record.session, result)
        self.kept.keep(record.session.answered, record.sequence, record.known_by, result)

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

    def refuse(
        self,
        session: ClientSession,
        sequence: int,
        code: str,
        message: str,
        retry_after_s: float | None = None,
    ) -> None:
        """Reply to a request that was not admitted, and has no record."""
        failure = _failure(sequence, code, message, retry_after_s)
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

    def grant(self, grants: Grants, now: float) -> None:
        """Tell clients which of the requests that they asked for they may send."""
        for grant in grants.give(now):
            self.outgoing.say(grant.holder, Granted(sequence=grant.sequence))

    def repeat(self, session: ClientSession, reply: ResultEntry | Failure) -> None:
        """Give a reply again."""
        self._statistics.repeated += 1
        self.outgoing.say(session, reply)

    def _keep(self, record: RequestRecord, failure: Failure) -> None:
        self.kept.keep(record.session.answered, record.sequence, record.known_by, failure)


def told_code(code: str, *, may_have_run: bool) -> str:
    """Return the code that a client is told: a request that may have run, and must not run twice, was no refusal."""
    return WorkerLost.code if may_have_run and code in REFUSALS else code


def _timings(batch: Batch, record: RequestRecord, now: float) -> Timings:
    """Return the timings of a member that is answered now."""
    slot, arrived = batch.slot.peer, record.arrived
    row = (
        round((batch.began - arrived) * 1e6),
        batch.run_us,
        round((now - arrived) * 1e6),
        len(batch.arrivals),
        batch.sizes[0] if record.served.profile.has_batch else 1,
        slot.label,
        slot.worker.digests.get(record.served.name),
        record.served.version,
    )
    return tuple.__new__(Timings, row)  # see `member_of`


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
