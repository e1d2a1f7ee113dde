"""Ends of batches and requests, and the row of observers that hear of them.

The dispatcher and egress add each end to the turn's list. Once the turn's messages have left, `Ends.tell` hands every end to
every observer, in order. So no client waits for counters, stories, log lines, spans or samples. A new observer is one more
entry of the row, which server.py makes, and one method `ended`.

Each end is told once. `BatchEnded` comes for each batch that was started, before the ends of those of its requests that
fail because of it. The answers of a batch are part of its end; each other end of a client's request is a `RequestEnded`. The
requests of a chain's stages are members of their batches, too; where one fails, that is a `StageFailed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Protocol, TypeAlias

from shapestream.scheduling.actions import FailRequest
from shapestream.scheduling.batches import Batch
from shapestream.serving.chain_desk import ChainRequest
from shapestream.serving.sessions import ClientSession, RequestRecord
from shapestream.serving.workers import SlotRecord
from shapestream.telemetry.runs import Member, Owner, Run
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


class Ends:
    """The ends of this turn, and the observers."""

    def __init__(self, *observers: Observer) -> None:
        """Tell each end to the observers in this order."""
        self._observers = observers
        self._ends: list[End] = []

    def add(self, end: End) -> None:
        """Add an end. The observers hear of it when this turn's messages have left."""
        self._ends.append(end)

    def tell(self) -> None:
        """Tell the observers of the added ends."""
        if self._ends:
            ends, self._ends = self._ends, []
            for end in ends:
                if type(end) is BatchEnded:
                    end.run = run_of(end.batch, end)
                for observer in self._observers:
                    observer.ended(end)


def _useful(shape: RequestShape, batch: Batch) -> int:
    """Return the elements of a member. Strings weigh as much as in its call, since nothing is added to any."""
    strings = batch.queue.profile.strings
    if not strings:
        return shape.elements
    return prod(
        [batch.sizes[number] if number in strings else size for number, size in enumerate(shape.sizes)]
    )


def run_of(batch: Batch, end: BatchEnded | None = None) -> Run:
    """Make the record of a run: of a batch as far as it is known now, or of one that ended."""
    report, arrivals = batch.report, batch.arrivals
    left_out = () if report is None else batch.left_out
    ids, ran, rows, useful = [], 0, 0, 0
    for record in arrivals:
        shape = record.shape
        ids.append(record.id)
        rows += shape.rows
        if record.id not in left_out:
            ran += 1
            useful += _useful(shape, batch)
    answered = () if end is None else end.answered
    began = batch.began
    if report is not None:
        if end is None or not ran:
            began = inf  # it left out the request in question, or all, since their deadlines had passed
    elif batch.behind is not None:
        began = inf if batch.is_behind else batch.started
    return Run(
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
        {} if answered else owners_of(batch),
        ran,
        rows,
        useful,
        [member_of(record) for record in answered],
    )


def owners_of(batch: Batch) -> dict[int, Owner]:
    """Return the owners of a batch's requests, by the scheduler's ids."""
    return {record.id: (record.tags or {}).get(CALLER) or record.session.client for record in batch.arrivals}


def member_of(record: RequestRecord) -> Member:
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
    # One is made per request: this takes a third of the time of `Member(*row)`.
    return tuple.__new__(Member, row)
