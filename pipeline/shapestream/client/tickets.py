"""Tickets: one per question of a caller, from the call until the answer is handed back. Pure.

A face (trio, asyncio, blocking) makes the ticket, the core's task gives it to the session, the session puts
the outcome on it and hands it back, exactly once, unless its owner withdrew it. It belongs to one of them at
a time, hence no lock. A caller's arguments for a ticket (name, deadline, priority) are checked here, before use.

A deadline is given as seconds from the call, and is a point in time from there on, by the core's clock. Seconds left would
begin anew with every look at a clock, and a process that stood still in between would forget that time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from shapestream.errors import InternalError, InvalidRequest, RequestError
from shapestream.wire.limits import MAX_NAME_CHARACTERS, MAX_PRIORITY
from shapestream.wire.messages import ResultEntry
from shapestream_engine.layout import Tensors

NEVER_S = 1e9
"""Thirty years: a deadline so far away is none."""

Kind = TypeVar("Kind")


class Owner(Protocol):
    """A waiting call, or a stream. The session never looks inside."""

    closed: bool
    """No caller waits: its tickets are neither submitted nor handed back."""

    def finish(self, tickets: list[AnyTicket]) -> None:
        """Take tickets back whose `outcome` is set."""


@dataclass(eq=False)
class ModelHandle:
    """A model as the server opened it, for any thread; `models.Model` encodes requests for it."""

    name: str
    described: dict[str, Any]
    """The signature as the server sent it."""
    number: int | None
    """None while a new server has not been asked yet."""
    stale: bool = False
    """The server now has another model under this name; requests checked against this signature are void."""

    @property
    def idempotent(self) -> bool:
        """Whether a request that may have run already may be sent to another server."""
        return self.described.get("idempotent") is not False


Outcome: TypeAlias = ResultEntry | RequestError | ModelHandle | dict[str, Any] | BaseException | bool
"""A result, an error, an opened model, statistics; at a stream's end the producer's exception, or True."""


@dataclass(slots=True, eq=False)
class Ticket:
    """`key` and `place` are the owner's, and come back untouched."""

    owner: Owner
    key: Any = None
    place: int = 0
    deadline: float | None = None
    """A point in time by the core's clock."""
    outcome: Outcome | None = None
    id: int = field(default=0, init=False)
    """Given by `InFlight`: a request's sequence number on the wire, and below 0 for other questions."""


@dataclass(slots=True, eq=False)
class RequestTicket(Ticket):
    """One inference request. Its tensors are kept until the terminal reply, since they may be sent again."""

    model: ModelHandle = field(kw_only=True)
    tensors: Tensors = field(kw_only=True)
    nbytes: int = field(kw_only=True)
    priority: int = field(kw_only=True, default=0)
    tags: dict[str, str] | None = field(kw_only=True, default=None)
    renewals: int = field(default=0, init=False)
    """Times that it got a new number, because the reply to the old one was lost and is no longer kept."""
    sent_at: float = field(default=0.0, init=False)
    """The time of the last sending, by the core's clock."""
    may_have_run: bool = field(default=False, init=False)
    """A server was given it, and has not said that it takes nothing new: also while it waits to be sent there again."""
    abandoned: bool = field(default=False, init=False)
    """Sent, and withdrawn since; it holds its share of the window until the terminal reply."""


@dataclass(slots=True, eq=False)
class OpenTicket(Ticket):
    """Asks for a model; its outcome is a `ModelHandle`."""

    name: str = field(kw_only=True)


@dataclass(slots=True, eq=False)
class StatisticsTicket(Ticket):
    """Asks for the server's counters; its outcome is a dict."""

    acknowledge: str | None = field(default=None, kw_only=True)
    """A model whose requests may share calls again first."""


@dataclass(slots=True, eq=False)
class StoriesTicket(Ticket):
    """Asks for stories of requests; its outcome is a dict."""

    request: str = field(kw_only=True)
    slowest: int = field(kw_only=True)


@dataclass(slots=True, eq=False)
class WelcomeTicket(Ticket):
    """Waits until a server has answered; its outcome is True."""


@dataclass(slots=True, eq=False)
class EndTicket(Ticket):
    """A stream gets no more than `place` items; below 0, no more than it has. Never reaches the session."""


Question: TypeAlias = RequestTicket | OpenTicket | StatisticsTicket | StoriesTicket | WelcomeTicket
AnyTicket: TypeAlias = Question | EndTicket


def hand_back(finished: Sequence[AnyTicket]) -> None:
    """Give finished tickets to their owners, each owner's together and in order."""
    if len(finished) == 1:
        (ticket,) = finished
        if not ticket.owner.closed:
            ticket.owner.finish([ticket])
        return
    by_owner: dict[int, list[AnyTicket]] = {}
    for ticket in finished:
        mine = by_owner.get(id(ticket.owner))
        if mine is None:
            by_owner[id(ticket.owner)] = [ticket]
        else:
            mine.append(ticket)
    for tickets in by_owner.values():
        owner = tickets[0].owner
        if not owner.closed:
            owner.finish(tickets)


def outcome_of(ticket: Ticket, kind: type[Kind]) -> Kind:
    """Return the outcome of a finished ticket, which is of this kind; raises the error that ended it instead.

    The frames that an error comes through hold the ticket, and the request's tensors. So neither the ticket nor this frame
    holds an error that was raised: a cycle would keep the tensors until the garbage collector runs.
    """
    outcome = ticket.outcome
    if type(outcome) is kind:
        return outcome
    if isinstance(outcome, BaseException):
        ticket.outcome = False
        try:
            raise outcome
        finally:
            del outcome
    raise InternalError(f"the session handed back {type(outcome).__name__}")


def stories_asked(request_id: str | None, slowest: int) -> dict[str, Any]:
    """Return the fields of a `StoriesTicket`; raises TypeError and ValueError."""
    if request_id is not None and not isinstance(request_id, str):
        raise TypeError(f"a request's id is a string, not {request_id!r}")
    if request_id is not None and not 0 < len(request_id) <= MAX_NAME_CHARACTERS:
        raise ValueError(f"a request's id has 1 to {MAX_NAME_CHARACTERS} characters, not {len(request_id)}")
    if type(slowest) is not int or slowest < 1:
        raise ValueError(f"slowest is an integer above 0, not {slowest!r}")
    return {"request": request_id or "", "slowest": slowest}


def stories_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the stories of an answer; raises `InvalidRequest` where the server has none of that request."""
    if (unknown := answer.get("unknown")) is not None:
        raise InvalidRequest(unknown)
    return list(answer["stories"])


def checked_deadline(seconds: float | None) -> float | None:
    """Return the seconds from the call; None for no deadline, and for infinity. A deadline of 0 or less has passed already.

    Raises TypeError for anything but a number that a float can hold, and ValueError for NaN.
    """
    if seconds is None:
        return None
    try:
        missing = math.isnan(seconds)
    except (TypeError, OverflowError):  # no number, or none that a float can hold
        raise TypeError(f"{_DEADLINE}; not {seconds!r}") from None
    if missing:
        raise ValueError(f"{_DEADLINE}; not {seconds!r}")
    return float(seconds) if seconds < NEVER_S else None


def deadline_at(clock: Callable[[], float], seconds: float | None) -> float | None:
    """Return the point in time `seconds` from now; raises as `checked_deadline` does."""
    if seconds is None:
        return None
    left_s = checked_deadline(seconds)
    return None if left_s is None else clock() + left_s


def checked_priority(priority: int) -> int:
    """Return the priority, an integer of at most 31 bits and a sign; raises TypeError and ValueError."""
    if type(priority) is not int:
        raise TypeError(f"a priority is an integer, not {priority!r}")
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise ValueError(
            f"a priority is an integer between -{MAX_PRIORITY} and {MAX_PRIORITY}, not {priority}"
        )
    return priority


def checked_name(model: str) -> str:
    """Return the model's name; raises TypeError and ValueError for one that the protocol cannot carry."""
    if not isinstance(model, str):
        raise TypeError(f"a model's name is a string, not {model!r}")
    if len(model) > MAX_NAME_CHARACTERS:
        raise ValueError(f"a model's name has at most {MAX_NAME_CHARACTERS} characters, not {len(model)}")
    try:
        model.encode()
    except UnicodeEncodeError:
        raise ValueError(f"a model's name is text that UTF-8 can write, not {model!r}") from None
    return model


_DEADLINE = "a deadline is a number of seconds from now, or None for no deadline"
