"""Actions as a test sees them: plain values with numbers, as they were when the scheduler decided.

An action carries the scheduler's own records, which change later. A test compares what was said, not what became of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from shapestream.scheduling.actions import (
    Action,
    CancelBatch,
    DeliverResults,
    FailRequest,
    ForgetRequest,
    KillSlot,
    RecallBatch,
    RejoinSlots,
    ReportFault,
    StartBatch,
    TellLoneRun,
)
from shapestream.scheduling.batches import NO_FACTS, Batch, CutFacts
from shapestream.scheduling.events import Overload


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A batch was given to a slot."""

    batch: int
    slot: int
    model: str
    requests: tuple[int, ...]
    sizes: tuple[int, ...]
    behind: int | None = None
    facts: CutFacts = field(default=NO_FACTS, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A batch's results were delivered to these."""

    batch: int
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A request ended with an error."""

    id: int
    code: str
    message: str
    retry_after_s: float | None = None
    ahead: int | None = field(default=None, compare=False)
    batch: int | None = field(default=None, compare=False)
    cause: Overload | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """A request ended without a word."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAsked:
    """A slot was asked to stop its batch."""

    batch: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallAsked:
    """A slot was asked to give a batch back."""

    batch: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAsked:
    """The process of a slot is to be ended."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoneRunTold:
    """The client of a suspect is to be told that it is about to run alone."""

    id: int


Seen: TypeAlias = (
    Started
    | LoneRunTold
    | Delivered
    | Failed
    | Forgotten
    | CancelAsked
    | RecallAsked
    | KillAsked
    | ReportFault
    | RejoinSlots
)


def seen(actions: Iterable[Action]) -> list[Seen]:
    """These actions as plain values."""
    return [one for action in actions for one in _seen(action)]


def in_order(actions: Iterable[Seen]) -> list[Seen]:
    """The same with starts in the order of their decisions; an event's actions have them by slot."""
    actions = list(actions)
    started = iter(sorted((one for one in actions if isinstance(one, Started)), key=lambda one: one.batch))
    return [next(started) if isinstance(one, Started) else one for one in actions]


def _seen(action: Action) -> Iterator[Seen]:
    match action:
        case StartBatch():
            for batch in action.batches:
                yield _started(batch)
        case TellLoneRun():
            yield LoneRunTold(id=action.request.id)
        case DeliverResults():
            yield Delivered(batch=action.batch.id, requests=_ids(action.requests))
        case FailRequest():
            yield Failed(
                id=action.request.id,
                code=action.code,
                message=action.message,
                retry_after_s=action.retry_after_s,
                ahead=action.ahead,
                batch=None if action.batch is None else action.batch.id,
                cause=action.cause,
            )
        case ForgetRequest():
            yield Forgotten(id=action.request.id)
        case CancelBatch(batch=batch):
            yield CancelAsked(batch=batch.id, slot=batch.slot.id)
        case RecallBatch(batch=batch):
            yield RecallAsked(batch=batch.id, slot=batch.slot.id)
        case KillSlot():
            yield KillAsked(slot=action.slot.id, reason=action.reason)
        case ReportFault() | RejoinSlots():
            yield action
        case _:
            assert_never(action)


def _started(batch: Batch) -> Started:
    return Started(
        batch=batch.id,
        slot=batch.slot.id,
        model=batch.model,
        requests=_ids(batch.arrivals),
        sizes=batch.sizes,
        behind=batch.behind,
        facts=batch.facts,
    )


def _ids(requests: Iterable[object]) -> tuple[int, ...]:
    return tuple([request.id for request in requests])
