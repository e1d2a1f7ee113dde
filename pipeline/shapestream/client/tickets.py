"""Tickets, one per question of a caller, from the call until the answer is handed back; and those of a session. Pure.

A face (trio, asyncio, blocking) makes the ticket, the core's task gives it to the session, the session puts
the outcome on it and hands it back, exactly once, unless its owner withdrew it. It belongs to one of them at
a time, hence no lock. A caller's arguments for a ticket (name, deadline, priority) are checked here, before use.

A deadline is given as seconds from the call, and is a point in time from there on, by the core's clock. Seconds left would
begin anew with every look at a clock, and a process that stood still in between would forget that time.

`InFlight` has the tickets of one session. A request is in one of four places:

    add ──> waiting ──take_sendable──> outstanding ──answered──> gone
             ^   └──take_sendable──> asked ─granted─^   │
             └──────────────hold, recall────────────────┘

A *waiting* request is here, in order of submission. An *outstanding* one was sent, and holds its share of the server's
window (`window_requests`, `window_bytes`) until the server's terminal reply. A large one is *asked* for first: it holds a
place of `window_requests`, and no bytes of the window, before and after the server's grant. Smaller ones pass it. `hold`
puts a request back that a leaving server refused; no other request is sent until `recall`. `recall` puts all outstanding
requests back, for a server that does not know them. A request whose caller has left is *abandoned*: if it was sent, it
keeps its share until the reply.

Deadlines are in a heap. A ticket that ends stays there until its time, or until such entries are the majority.

What `InFlight` promises:
- Each ticket is finished once, or removed without a finish where its caller has left. Every end passes `finish`.
- Requests leave in order of submission, except those that were asked for, and those whose model is being opened again.
- Numbers ascend: a server counts a number below its highest as answered. A request that was passed gets a new one.
- The sent requests fit into the window, or were granted. One larger than the whole window goes alone, up to `largest_bytes`.

What it does not do: it sends nothing, reads no clock, and does not decide why a ticket ends (`session.py` does). The queue
needs no bound: each ticket stands for a caller that waits, and a stream has at most `max_in_flight` of them.

A request may have tags: the caller's own id, its place in a trace, and a gateway's caller. Only a process that has
imported OpenTelemetry before imports it here.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeAlias, TypeVar

from shapestream.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Poisoned,
    RequestError,
    TooLarge,
)
from shapestream.quarantine import KEEP_S, MOST_REQUESTS, Quarantine
from shapestream.versions import versioned
from shapestream.wire.limits import MAX_NAME_CHARACTERS, MAX_PRIORITY
from shapestream.wire.messages import Ask, Cancel, RequestEntry, ResultEntry
from shapestream.wire.tags import (
    CALLER,
    MAX_TOGETHER,
    MOST_LOSSES,
    REQUEST_ID,
    TOGETHER,
    TRACEPARENT,
    TRACESTATE,
    can_be_sent,
    rule_of,
    trace_id,
    with_losses,
)
from shapestream_engine.layout import Tensors

NEVER_S = 1e9
"""Thirty years: a deadline so far away is none."""

SETTLED_S = 5.0
"""Seconds for which a server must have been there before it gets a request of which a loss was counted: what ends servers
every few seconds, whatever they run, hits the same request again. Of 12 kills, each 20 ms after a client with 16 requests
had come, five blamed a request without this wait, and none with it."""

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
    """None while the server has not been asked yet, on this connection."""
    number_here: int | None = None
    """That of the last answer of this server, also on an earlier connection; None: it has not answered yet."""
    stale: bool = False
    """The server has no model of this name any more, as it has said; later it may have one again."""
    successor: Self | None = field(default=None, repr=False)
    """What the server, or the next one, has under this name since."""

    @property
    def latest(self) -> Self:
        """What has this name now: itself, or what came after it."""
        model = self
        while model.successor is not None:
            model = model.successor
        return model

    def encoded_anew(self, before: ModelHandle, tensors: Tensors) -> tuple[Tensors, int]:
        """Return a request as this model takes it, and its bytes; it was encoded for the model `before`.

        Raises `InvalidRequest` and `TooLarge` where this model does not take it. A plain handle, which reads no signature,
        takes none.
        """
        raise InvalidRequest(f"model {self.name!r} has changed; open it again")

    @property
    def idempotent(self) -> bool:
        """Whether a request that may have run already may be sent to another server."""
        return self.described.get("idempotent") is not False


@dataclass(frozen=True, slots=True)
class Moved:
    """The outcome of a request that a session gives up, since another server is to have it."""

    ran: bool
    """Whether the server was given it, and has not said that it takes nothing new: it may have run."""
    losses: int | None
    """As `RequestTicket.losses`, with the loss of this server."""


Outcome: TypeAlias = ResultEntry | RequestError | ModelHandle | Moved | dict[str, Any] | BaseException | bool
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
    losses: int | None = field(default=None, init=False)
    """Servers that vanished while it ran there alone, as they had said; None: no server vanished that had it."""
    lost_at: frozenset[int] = field(default=frozenset(), init=False)
    """The places of the addresses where a server vanished that had it."""
    not_before: float = field(default=-math.inf, init=False)
    """When it may be sent to the present server; infinity: never, as the only one that has not vanished with it."""
    looked: bool = field(default=False, init=False)
    """Whether it was looked since for a server that has come back."""
    client: str = field(default="", init=False)
    """The beginning of its id, where that is another session's than the core's own."""
    abandoned: bool = field(default=False, init=False)
    """Sent, and withdrawn since; it holds its share of the window until the terminal reply."""
    window_bytes: int = field(default=0, init=False)
    """Bytes of the window that it holds, once it was sent or asked for; a granted one holds none."""
    given: tuple[ModelHandle, Tensors] | None = field(default=None, init=False)
    """What its caller encoded it for, and as what; None while that is what is sent."""

    def move(self, model: ModelHandle) -> None:
        """Encode it anew for another model of its model's name; raises `InvalidRequest` and `TooLarge`.

        It begins with what the caller gave: a model that changes there and back loses no digits.
        """
        before, tensors = self.given or (self.model, self.tensors)
        self.tensors, self.nbytes = model.encoded_anew(before, tensors)
        self.model, self.given = model, (before, tensors)


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


def named(model: str, version: str | None) -> str:
    """Return the name of a version of a model; raises TypeError for a version that is no string."""
    if version is None:
        return model
    if not isinstance(version, str):
        raise TypeError(f"a version is a string, not {version!r}")
    return versioned(checked_name(model), version)


_DEADLINE = "a deadline is a number of seconds from now, or None for no deadline"


def tags_of(
    request_id: str | None, trace: Mapping[str, str] | None, caller: str | None, together: int = 1
) -> dict[str, str] | None:
    """Return the tags of one request, None for none. Without a `trace` they tell the current span.

    Raises TypeError and ValueError for an id, a caller or a number that cannot be sent. A `trace` that cannot be
    understood is ignored.
    """
    tags = None
    if trace is not None:
        tags = _given(trace)
    elif "opentelemetry.trace" in sys.modules:
        tags = _current_trace()
    if request_id is None and caller is None and together == 1:
        return tags
    tags = {} if tags is None else tags
    if request_id is not None:
        tags[REQUEST_ID] = _checked(REQUEST_ID, "a request's id", request_id)
    if caller is not None:
        tags[CALLER] = _checked(CALLER, "the name of a caller", caller)
    if together != 1:
        if type(together) is not int or not 1 <= together <= MAX_TOGETHER:
            raise ValueError(f"together is an integer from 1 to {MAX_TOGETHER}, not {together!r}")
        tags[TOGETHER] = str(together)
    return tags


def checked_caller(caller: str | None) -> str | None:
    """Return the name of a caller, or None; raises TypeError and ValueError for one that cannot be sent."""
    return None if caller is None else _checked(CALLER, "the name of a caller", caller)


def _checked(tag: str, what: str, text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{what} is a string, not {text!r}")
    if not can_be_sent(tag, text):
        raise ValueError(f"{what} has {rule_of(tag)}, unlike {text[:200]!r}")
    return text


def _current_trace() -> dict[str, str] | None:
    """Return the tags that tell the current OpenTelemetry span; None where there is none."""
    from opentelemetry.trace import get_current_span

    span = get_current_span().get_span_context()
    if not span.is_valid:
        return None
    traceparent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    return _tags(traceparent, span.trace_state.to_header())


def _given(trace: Mapping[str, str]) -> dict[str, str] | None:
    traceparent, tracestate = trace.get(TRACEPARENT), trace.get(TRACESTATE)
    if not isinstance(traceparent, str) or trace_id(traceparent) is None:
        return None
    return _tags(traceparent, tracestate) if can_be_sent(TRACEPARENT, traceparent) else None


def _tags(traceparent: str, tracestate: object) -> dict[str, str]:
    tags = {TRACEPARENT: traceparent}
    if isinstance(tracestate, str) and can_be_sent(TRACESTATE, tracestate):
        tags[TRACESTATE] = tracestate
    return tags


TicketKind = TypeVar("TicketKind", bound=Ticket)


class InFlight:
    """Every ticket by its id, and the window that requests must fit into. Every ending passes here."""

    def __init__(self, client: bytes) -> None:
        """`client`: the session's id, which begins the ids of its requests."""
        self.client = client.hex()
        self.tickets: dict[int, Question] = {}
        """All tickets not answered yet, in order of submission; abandoned requests too."""
        self.window_requests = 0
        self.window_bytes = 0
        self.largest_bytes = 0
        """Bound on one request. Such a request may go when no other bytes are out, however small the window is then."""
        self.unasked_bytes: float = math.inf
        """Bytes of the largest request that is sent without a grant; infinity for a server that grants none."""
        self.most_granted_bytes = 0
        """Bound on one request that is asked for."""
        self.asked: dict[int, RequestTicket] = {}
        """The requests that were asked for and are not sent."""
        self._granted: dict[int, None] = {}
        """The numbers of those that may be sent now; some may have ended. The values have no meaning."""
        self._withdrawn: list[int] = []
        """The numbers of those that ended before they were sent, of which the server was not told yet."""
        self.outstanding_requests = 0
        self.outstanding_bytes = 0
        """Bytes of the window that are held."""
        self.paused = False
        """Whether no request is sent before `recall`, because this server is about to be left for another one."""
        self.put_off_until = math.inf
        """When the next request may be sent that is put off."""
        self.held_at: float | None = None
        """The time since which the server has taken nothing new: no request is sent before `recall`."""
        self.waiting: OrderedDict[int, RequestTicket] = OrderedDict()
        """The requests that are not at the server, in order."""
        self.deadlines: list[tuple[float, int]] = [(math.inf, 0)]
        """A heap of deadlines, perhaps of tickets that have ended; the last one is no ticket's."""
        self._with_deadline = 0
        self.highest_sent = 0
        """The highest sequence number that a server was sent; it may count lower ones that are new to it as answered."""
        self.quarantine = Quarantine(MOST_REQUESTS, KEEP_S)
        """What ended servers, and is not sent again."""
        self._last_sequence = 0
        self._last_other_id = 0
        self._finished: list[AnyTicket] = []

    def add(self, ticket: Question) -> None:
        """Give a new ticket its number; a request queues for credit."""
        if type(ticket) is RequestTicket:
            self._last_sequence += 1
            ticket.id = self._last_sequence
            self.waiting[ticket.id] = ticket
        else:
            self._last_other_id -= 1
            ticket.id = self._last_other_id
        self.tickets[ticket.id] = ticket
        if ticket.deadline is not None:
            self._with_deadline += 1
            heapq.heappush(self.deadlines, (ticket.deadline, ticket.id))

    def remove(self, ticket_id: int) -> Question | None:
        """Remove a ticket, sent or not; its share of the window is free again."""
        ticket = self.tickets.pop(ticket_id, None)
        if ticket is None:
            return None
        if ticket.deadline is not None:
            self._with_deadline -= 1
            if len(self.deadlines) > 2 * self._with_deadline + 64:
                self._forget_met_deadlines()
        if type(ticket) is RequestTicket and self.waiting.pop(ticket_id, None) is None:
            self._not_outstanding(ticket)
        return ticket

    def _not_outstanding(self, ticket: RequestTicket) -> None:
        self.outstanding_requests -= 1
        self.outstanding_bytes -= ticket.window_bytes
        if self.asked:
            self.asked.pop(ticket.id, None)

    def abandon(self, ticket: Question) -> bool:
        """Give up a ticket that no caller waits for. True where the server has it, and owes the terminal reply."""
        if type(ticket) is RequestTicket and ticket.id in self.asked:
            self._withdrawn.append(ticket.id)
            self.remove(ticket.id)
            return False
        if type(ticket) is not RequestTicket or ticket.id in self.waiting:
            self.remove(ticket.id)
            return False
        ticket.abandoned = True
        return True

    def answered(self, sequence: int) -> RequestTicket | None:
        """Remove the request that a terminal reply ends, and return it; None where no caller waits for it."""
        ticket = self.remove(sequence) if sequence > 0 else None
        return ticket if type(ticket) is RequestTicket and not ticket.abandoned else None

    def finish(self, ticket: AnyTicket, outcome: Outcome) -> None:
        """Hand back a ticket that is no longer in `tickets`, or abandoned there."""
        if (
            type(outcome) is not ResultEntry
            and type(ticket) is RequestTicket
            and isinstance(outcome, RequestError)
        ):
            own_id = (ticket.tags or {}).get(REQUEST_ID)
            outcome.request_id = own_id or (f"{self.client}-{ticket.id}" if ticket.id else None)
        ticket.outcome = outcome
        self._finished.append(ticket)

    def end(self, ticket: Question, outcome: Outcome) -> None:
        """Remove a ticket, and hand it back."""
        self.remove(ticket.id)
        self.finish(ticket, outcome)

    def move(self, tickets: Iterable[RequestTicket]) -> None:
        """Encode requests anew for what their models are now; those that do not fit end."""
        for ticket in tickets:
            try:
                ticket.move(ticket.model.latest)
            except RequestError as error:
                self.abandon(ticket)
                self.finish(ticket, error)

    def fail_requests_of(self, model: ModelHandle, error: Callable[[], RequestError]) -> None:
        """End the requests of a model that is void, each with an error of its own."""
        for ticket in self.of_kind(RequestTicket):
            if ticket.model is model and not ticket.abandoned:
                self.abandon(ticket)
                self.finish(ticket, error())

    def has_ticket_besides(self, kind: type[Ticket]) -> bool:
        """Tell whether there is a ticket of another kind."""
        return any(type(ticket) is not kind for ticket in self.tickets.values())

    def fail_all(self, error: Callable[[], RequestError], *, besides: type[Ticket] | None = None) -> None:
        """Remove all tickets besides those of one kind; those that a caller waits for end with an error each."""
        for ticket in list(self.tickets.values()):
            if type(ticket) is besides:
                continue
            self.remove(ticket.id)
            if not (isinstance(ticket, RequestTicket) and ticket.abandoned):
                self.finish(ticket, error())

    def take_finished(self) -> list[AnyTicket]:
        """Return the tickets that have ended since the last call, in the order of their ends."""
        finished, self._finished = self._finished, []
        return finished

    def of_kind(self, kind: type[TicketKind]) -> list[TicketKind]:
        """Return all tickets of one kind, in order of submission."""
        return [ticket for ticket in self.tickets.values() if type(ticket) is kind]

    def expired(self, now: float) -> Iterator[Question]:
        """Yield the tickets whose deadline has come and that a caller waits for."""
        while self.deadlines[0][0] <= now:
            _, ticket_id = heapq.heappop(self.deadlines)
            ticket = self.tickets.get(ticket_id)
            if ticket is not None and not (type(ticket) is RequestTicket and ticket.abandoned):
                yield ticket

    def hold(self, sequence: int, now: float) -> bool:
        """Keep a request that a leaving server refused. True: it waits for the next server. False: its caller has left."""
        ticket = self.tickets.get(sequence)
        if type(ticket) is not RequestTicket or ticket.abandoned:
            return False
        ticket.may_have_run = False
        if sequence not in self.waiting:
            self._not_outstanding(ticket)
            self.waiting[sequence] = ticket
        if self.held_at is None:
            self.held_at = now
        return True

    def give_up(self, requests: Iterable[RequestTicket], alone: int | None, *, vanished: bool) -> None:
        """Hand requests back for other servers. What this one was sent is withdrawn when it is there again.

        `vanished`: it is gone without a word, so what it had is suspect; it has said that it runs the request `alone`.
        """
        for ticket in requests:
            ran = ticket.may_have_run
            losses = (ticket.losses or 0) + (ticket.id == alone) if ran and vanished else ticket.losses
            self.abandon(ticket)
            self.finish(ticket, Moved(ran, losses))

    def fail_waiting(self, error: Callable[[], RequestError]) -> None:
        """End the requests that are not at the server with an error, one each."""
        for ticket in list(self.waiting.values()):
            self.end(ticket, error())

    def may_have_run(self) -> list[RequestTicket]:
        """Return the requests that a server may have run, and that a caller waits for."""
        return [
            ticket for ticket in self.of_kind(RequestTicket) if ticket.may_have_run and not ticket.abandoned
        ]

    def suspect(self, place: int, alone: int | None) -> list[RequestTicket]:
        """Suspect the requests that a server had which vanished, and count a loss for the one that ran `alone` there.

        `place` is that of its address. Return those that have been lost alone too often, at most one: no server is to get
        it again.
        """
        guilty = []
        for ticket in self.of_kind(RequestTicket):
            if ticket.id in self.waiting or ticket.abandoned or not ticket.may_have_run:
                continue
            ticket.losses = (ticket.losses or 0) + (ticket.id == alone)
            ticket.lost_at |= {place}
            if ticket.losses >= MOST_LOSSES:
                guilty.append(ticket)
        return guilty

    def put_off(self, place: int, others: int, since: float, now: float) -> list[RequestTicket]:
        """Put off the waiting requests of which a loss was counted, for a server at this place, which is there `since` then.

        They wait until it was there for `SETTLED_S`. If a server vanished with them at each of the `others`, besides this
        place, this one is spared: if they are to blame, no server is left after the next loss. Return those that are not
        sent here at all.
        """
        for ticket in self.waiting.values():
            lost_at = ticket.lost_at
            if not ticket.losses:
                ticket.not_before = -math.inf
            elif others and place not in lost_at and len(lost_at) >= others:
                ticket.not_before = math.inf
            else:
                ticket.not_before = since + SETTLED_S
        self.note_put_off(now)
        return self.spared()

    def note_put_off(self, now: float) -> None:
        """Note when the next request may be sent that is put off."""
        later = [ticket.not_before for ticket in self.waiting.values() if ticket.not_before > now]
        self.put_off_until = min(later, default=math.inf)

    def spared(self) -> list[RequestTicket]:
        """Return the waiting requests that are not sent to the present server at all."""
        return [ticket for ticket in self.waiting.values() if ticket.not_before == math.inf]

    def granted(self, sequence: int) -> None:
        """Let a request that was asked for be sent in the next turn. One that has ended since was withdrawn."""
        if sequence in self.asked:
            self._granted[sequence] = None

    @property
    def has_sendable(self) -> bool:
        """Whether `take_sendable` may have something to send."""
        return bool(self.waiting or self._granted or self._withdrawn)

    def take_sendable(self, now: float, one_way_s: float) -> list[Cancel | Ask | RequestEntry]:
        """Return the requests that were granted, or fit into the window now, as entries; they are outstanding from here on.

        Of a large one the entry asks for its grant. Asked ones that have ended are withdrawn.

        `one_way_s`, the seconds of the way to the server, is taken off their deadlines.

        A request that fits into no window that the server grants ends here, as does one that would be late on arrival, and
        one that equals a request which ended servers.
        A request that other models' requests have passed gets a new number, unless a server may have run it: numbers that
        are new to a server come to it in ascending order.
        """
        sendable: list[Cancel | Ask | RequestEntry] = []
        if self._granted or self._withdrawn:
            sendable += self._take_granted(now, one_way_s)
        for ticket in self._may_be_sent(now):
            asks = ticket.nbytes > self.unasked_bytes
            most = self.most_granted_bytes if asks else self.largest_bytes
            if ticket.nbytes > most:
                reason = f"{ticket.nbytes} bytes of tensors; the server takes {most} at most: send fewer rows"
                self.end(ticket, TooLarge(reason))
                continue
            if self.outstanding_requests >= self.window_requests:
                break
            window_bytes = 0 if asks else ticket.nbytes
            if (
                window_bytes
                and self.outstanding_bytes
                and self.outstanding_bytes + window_bytes > self.window_bytes
            ):
                break
            remaining_ms = _remaining_ms(ticket, now, one_way_s)
            if remaining_ms == 0:
                self.end(ticket, DeadlineExceeded(NEVER_SENT))
                continue
            if self.quarantine.kept and self.quarantine.holds(ticket.model.name, ticket.tensors, now):
                self.end(ticket, Poisoned(QUARANTINED))
                continue
            sendable.append(self._begin(ticket, now, remaining_ms, asks=asks))
        return sendable

    def _begin(
        self, ticket: RequestTicket, now: float, remaining_ms: int | None, *, asks: bool
    ) -> Ask | RequestEntry:
        """Return the entry that sends a waiting request, or asks for it. It is outstanding, or asked for, from here on."""
        if ticket.id < self.highest_sent and not ticket.may_have_run:
            self.remove(ticket.id)
            self.add(ticket)
        self.highest_sent = max(self.highest_sent, ticket.id)
        del self.waiting[ticket.id]
        self.outstanding_requests += 1
        if asks:
            ticket.window_bytes = 0
            ticket.sent_at = now
            self.asked[ticket.id] = ticket
            return Ask(sequence=ticket.id, nbytes=ticket.nbytes, remaining_ms=remaining_ms)
        ticket.window_bytes = ticket.nbytes
        self.outstanding_bytes += ticket.nbytes
        return _sent(ticket, now, remaining_ms)

    def _take_granted(self, now: float, one_way_s: float) -> list[Cancel | Ask | RequestEntry]:
        """Return the requests that were granted, and the withdrawals of those that ended first."""
        requests: list[RequestEntry] = []
        granted, self._granted = self._granted, {}
        for sequence in granted:
            ticket = self.asked.get(sequence)
            if ticket is None:
                continue
            remaining_ms = _remaining_ms(ticket, now, one_way_s)
            if remaining_ms == 0:
                self.abandon(ticket)
                self.finish(ticket, DeadlineExceeded(NEVER_SENT))
            else:
                del self.asked[sequence]
                requests.append(_sent(ticket, now, remaining_ms))
        withdrawn, self._withdrawn = self._withdrawn, []
        return [*[Cancel(sequence=sequence) for sequence in withdrawn], *requests]

    def _may_be_sent(self, now: float) -> Iterator[RequestTicket]:
        """Yield the requests that may be sent, in order. The caller removes each one before it asks for the next.

        A request whose model is being opened again lets those of other models pass: a server that has just started
        answers when the model is loaded, which may take minutes. So does one that is put off.
        """
        waiting = self.waiting
        while waiting and self.held_at is None and not self.paused:
            ticket = next(iter(waiting.values()))
            if ticket.model.number is None or ticket.not_before > now:
                yield from [
                    other
                    for other in waiting.values()
                    if other.model.number is not None and other.not_before <= now
                ]
                return
            yield ticket

    def recall(self) -> list[int]:
        """Let all sent requests wait again, in order: the server has forgotten them. Returns the ids of abandoned ones."""
        unwanted = [ticket.id for ticket in self.of_kind(RequestTicket) if ticket.abandoned]
        for ticket_id in unwanted:
            self.remove(ticket_id)
        self.waiting = OrderedDict((ticket.id, ticket) for ticket in self.of_kind(RequestTicket))
        self.held_at = None
        self.asked.clear()
        self._granted.clear()
        self._withdrawn.clear()
        self.paused = False
        self.outstanding_requests = 0
        self.outstanding_bytes = 0
        return unwanted

    def _forget_met_deadlines(self) -> None:
        self.deadlines = [entry for entry in self.deadlines if entry[1] in self.tickets or not entry[1]]
        heapq.heapify(self.deadlines)

    def check_invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself; for tests."""
        requests = self.of_kind(RequestTicket)
        out = [ticket for ticket in requests if ticket.id not in self.waiting]
        assert self.outstanding_requests == len(out)
        assert self.outstanding_bytes == sum(ticket.window_bytes for ticket in out)
        assert self.asked.items() <= {ticket.id: ticket for ticket in out}.items()
        assert not any(ticket.window_bytes for ticket in self.asked.values())
        assert self.waiting.keys() <= self.tickets.keys()
        assert self.held_at is not None or list(self.waiting) == sorted(self.waiting)
        assert not any(ticket.abandoned for ticket in self.waiting.values())
        assert all(
            ticket.outcome is None or getattr(ticket, "abandoned", False) for ticket in self.tickets.values()
        )
        timed = [ticket for ticket in self.tickets.values() if ticket.deadline is not None]
        assert self._with_deadline == len(timed)
        filed = {ticket_id for _, ticket_id in self.deadlines}
        overdue = {ticket.id for ticket in requests if ticket.abandoned}
        assert {ticket.id for ticket in timed} <= filed | overdue


def _sent(ticket: RequestTicket, now: float, remaining_ms: int | None) -> RequestEntry:
    """Return the entry of a request that is sent now."""
    number = ticket.model.number
    assert number is not None  # or it might not be sent
    ticket.sent_at = now
    ticket.may_have_run = True
    return RequestEntry(
        sequence=ticket.id,
        model=number,
        remaining_ms=remaining_ms,
        priority=ticket.priority,
        tensors=ticket.tensors,
        tags=ticket.tags if ticket.losses is None else with_losses(ticket.tags, ticket.losses),
    )


def _remaining_ms(ticket: RequestTicket, now: float, one_way_s: float) -> int | None:
    deadline = ticket.deadline
    return None if deadline is None else remaining_ms_on_arrival(deadline - now, one_way_s)


def remaining_ms_on_arrival(left_s: float, one_way_s: float) -> int:
    """Return the part of `left_s` that is left on arrival, rounded down to ms; 0 where the request cannot be in time.

    The result is never less than half of `left_s`: a wrong estimate must not end requests that would be in time, since
    their replies would then never correct it.
    """
    return int(max(left_s - one_way_s, left_s / 2) * 1000)


NEVER_SENT = (
    "it was never sent: the deadline had passed already, or passed while it waited for the server to grant this client "
    "more requests or bytes"
)
QUARANTINED = "a request like this one ended the servers that ran it, and is not sent again for a while"
