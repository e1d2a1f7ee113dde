"""Ends of batches and requests, and the row of observers that they are told to.

The dispatcher and egress add each end to the turn's list. Once the turn's messages have left, `Ends.tell` hands every end to
every observer, in order: so no client waits for counters, stories, log lines, spans or samples. A new observer is one more
entry of the row, which server.py makes, and one method `ended`.

An end is told once. `BatchEnded` comes for each batch that was started, before the ends of those of its requests that
fail because of it. The answers of a batch are part of its end; each other end of a request is a `RequestEnded`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any, NamedTuple, Protocol, TypeAlias

from shapestream.scheduling.actions import FailRequest
from shapestream.scheduling.batches import Batch, CutFacts
from shapestream.serving.kept_replies import ClientId
from shapestream.serving.sessions import ClientSession, RequestRecord
from shapestream.serving.workers import SlotRecord
from shapestream.wire.tags import REQUEST_ID
from shapestream_engine.batch import BatchReport
from shapestream_engine.layout import Tensors


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

    _run: Run | None = None

    @property
    def in_vain(self) -> bool:
        """Whether it ran although it was to be stopped or given back, perhaps for nobody."""
        return self.code is None and (self.batch.cancelled or self.batch.recalled)

    @property
    def run(self) -> Run:
        """The record of it that is kept: made once, for all observers."""
        if self._run is None:
            self._run = run_of(self.batch, self)
        return self._run


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
    """None: its client is gone, and was told nothing."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRefused:
    """A request was refused before it was admitted: it has no record."""

    session: ClientSession
    sequence: int
    at: float
    code: str
    message: str


End: TypeAlias = BatchEnded | RequestEnded | RequestRefused


class Observer(Protocol):
    """Follows ends, and decides nothing."""

    def ended(self, end: End) -> None:
        """Take note of an end."""


class Ends:
    """The ends of this turn, and the observers."""

    def __init__(self, *observers: Observer) -> None:
        """Each end is told to the observers in their order."""
        self._observers = observers
        self._ends: list[End] = []

    def add(self, end: End) -> None:
        """Note an end; it is told when this turn's messages have left."""
        self._ends.append(end)

    def tell(self) -> None:
        """Tell the observers of the ends so far."""
        if self._ends:
            ends, self._ends = self._ends, []
            for end in ends:
                for observer in self._observers:
                    observer.ended(end)


class Member(NamedTuple):
    """One request of a batch."""

    arrived: float
    number: int
    """The scheduler's id."""
    client: ClientId
    sequence: int
    sizes: tuple[int, ...]
    own_id: str | None
    """The id that its user gave it."""

    @property
    def id(self) -> str:
        """The id that its user knows it by."""
        return self.own_id or f"{self.client[0].hex()}-{self.sequence}"


class Run(NamedTuple):
    """One run of a batch, as it is remembered: numbers, ids and times, neither tensors nor sessions."""

    batch: int
    model: str
    requests: tuple[int, ...]
    """The scheduler's ids; none for an audit."""
    sizes: tuple[int, ...]
    behind: int | None
    facts: CutFacts
    slot: str
    sent: float
    began: float
    """`inf` where it did not begin: the request was queued at the slot, or left out of the call."""
    ended: float
    """`inf` while it runs; `nan` where it went on after its request had ended, and its end is forgotten."""
    run_us: int
    busy_s: float
    preparations: int
    calls: tuple[tuple[int, tuple[int, ...]], ...]
    code: str | None
    """The code of a run that failed."""
    why: str
    clients: Mapping[int, ClientId]
    """Those of all its requests by the scheduler's ids, where it answered none."""
    ran: int
    """Requests that were in its calls."""
    rows: int
    useful: int
    """Elements of the requests that ran."""
    members: Sequence[tuple[Any, ...]]
    """The requests that it answered, as rows of `Member`: plain, since there is one for each request."""

    @property
    def computed(self) -> int:
        """Elements that its calls computed."""
        return sum([count * prod(sizes) for count, sizes in self.calls or ((1, self.sizes),)])

    @property
    def padding_ratio(self) -> float:
        """Elements of these that were padding / all of these."""
        computed = self.computed
        return round(min(1.0, self.facts.padding / computed), 4) if computed else 0.0


def run_of(batch: Batch, end: BatchEnded | None = None) -> Run:
    """Return the run of a batch, as far as it is known now, or of one that ended."""
    report, arrivals = batch.report, batch.arrivals
    left_out = () if report is None else batch.left_out
    ran = [record.shape for record in arrivals if record.id not in left_out]
    answered = () if end is None else end.answered
    began = batch.began
    if report is not None:
        if end is None or not ran:
            began = inf  # it left out the request that is asked for, since its deadline had passed; or all
    elif batch.behind is not None:
        began = inf if batch.is_behind else batch.started
    return Run(
        batch.id,
        batch.model,
        tuple([record.id for record in arrivals]),
        batch.sizes,
        batch.behind,
        batch.facts,
        batch.slot.peer.label,
        batch.sent_at,
        began,
        inf if end is None else end.at,
        batch.run_us,
        0.0 if report is None else report.busy_s,
        0 if report is None else report.preparations,
        () if report is None else report.calls,
        None if end is None or end.code is None else str(end.code),
        "" if end is None else end.why,
        {} if answered else clients_of(batch),
        len(ran),
        sum([record.shape.rows for record in arrivals]),
        sum([shape.elements for shape in ran]),
        [row_of(record) for record in answered],
    )


def clients_of(batch: Batch) -> dict[int, ClientId]:
    """Return the clients of a batch's requests, by the scheduler's ids."""
    return {record.id: record.session.client for record in batch.arrivals}


def row_of(record: RequestRecord) -> tuple[Any, ...]:
    """Return a row of `Member`."""
    tags = record.tags
    own_id = None if tags is None else tags.get(REQUEST_ID)
    return record.arrived, record.id, record.session.client, record.sequence, record.shape.sizes, own_id
