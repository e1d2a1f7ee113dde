"""What callers wait for: one ticket per question, from the call until the answer is handed back.

A face (trio, asyncio, blocking) makes the ticket, the core's task gives it to the session, the session puts
the outcome on it and hands it back, exactly once, unless its owner withdrew it. It belongs to one of them at
a time, hence no lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from shapestream.errors import RequestError
from shapestream.wire.messages import Result
from shapestream_engine.layout import Tensors

__all__ = [
    "AnyTicket",
    "EndTicket",
    "ModelHandle",
    "OpenTicket",
    "Outcome",
    "Owner",
    "Question",
    "RequestTicket",
    "StatisticsTicket",
    "Ticket",
    "WelcomeTicket",
    "hand_back",
]


class Owner(Protocol):
    """Who waits: a waiting call, or a stream. The session never looks inside."""

    closed: bool
    """Nobody waits any more; its tickets are neither submitted nor handed back."""

    def finish(self, tickets: list[AnyTicket]) -> None:
        """Take tickets back whose `outcome` is set."""


@dataclass(slots=True, eq=False)
class ModelHandle:
    """A model as the server opened it. `number` is None while a new server has not been asked yet."""

    name: str
    signature: dict[str, Any]
    number: int | None
    stale: bool = False
    """The server now has another model under this name; what was checked against this signature is void."""

    @property
    def idempotent(self) -> bool:
        """Whether a request may be sent to another server that perhaps ran already."""
        return self.signature.get("idempotent") is not False


Outcome: TypeAlias = Result | RequestError | ModelHandle | dict[str, Any] | BaseException | bool
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
    """Given by the session: a request's sequence number on the wire, and below 0 for other questions."""


@dataclass(slots=True, eq=False)
class RequestTicket(Ticket):
    """One inference request. Its tensors are kept until the terminal reply, since they may be sent again."""

    model: ModelHandle = field(kw_only=True)
    tensors: Tensors = field(kw_only=True)
    nbytes: int = field(kw_only=True)
    priority: int = field(kw_only=True, default=0)
    renewals: int = field(default=0, init=False)
    """How often it got a new number, because the reply to the old one was lost and is no longer kept."""
    sent_at: float = field(default=0.0, init=False)
    """When it was sent last, by the core's clock."""
    may_have_run: bool = field(default=False, init=False)
    """A server was given it, and has not said that it takes nothing new: also while it waits to be sent there again."""
    abandoned: bool = field(default=False, init=False)
    """Sent, and nobody waits any more; it holds its share of the window until the terminal reply."""


@dataclass(slots=True, eq=False)
class OpenTicket(Ticket):
    """Asks for a model; its outcome is a `ModelHandle`."""

    name: str = field(kw_only=True)


@dataclass(slots=True, eq=False)
class StatisticsTicket(Ticket):
    """Asks for the server's counters; its outcome is a dict."""


@dataclass(slots=True, eq=False)
class WelcomeTicket(Ticket):
    """Waits until a server has answered; its outcome is True."""


@dataclass(slots=True, eq=False)
class EndTicket(Ticket):
    """A stream gets no more than `place` items; below 0, no more than it has. Never reaches the session."""


Question: TypeAlias = RequestTicket | OpenTicket | StatisticsTicket | WelcomeTicket
AnyTicket: TypeAlias = Question | EndTicket


def hand_back(finished: Sequence[AnyTicket]) -> None:
    """Give finished tickets to their owners, each owner's together and in order."""
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
