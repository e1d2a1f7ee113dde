"""The tickets of one session: which wait, which are sent, which deadline is next, which have ended. Pure.

How it works. A request is in one of three places:

    add ──> waiting ──take_sendable──> outstanding ──answered──> gone
               ^                            │
               └────────hold, recall────────┘

A *waiting* request is here, in order of submission. An *outstanding* one was sent, and holds its share of the server's
window (`window_requests`, `window_bytes`) until the server's terminal reply. `hold` puts a request back that a leaving
server refused; no other request is sent until `recall`. `recall` puts all outstanding requests back, for a server that does
not know them. A request whose caller has left is *abandoned*: if it was sent, it keeps its share until the reply.

Deadlines are in a heap. A ticket that ends stays there until its time, or until such entries are the majority.

What it promises:
- Each ticket is finished once, or removed without a finish where its caller has left. Every end passes `finish`.
- Requests leave in order of submission, except those whose model is being opened again.
- Numbers ascend: a server counts a number below its highest as answered. A request that was passed gets a new one.
- The sent requests fit into the window. One larger than the whole window goes alone, up to `largest_bytes`.

What it does not do: it sends nothing, reads no clock, and does not decide why a ticket ends (`session.py` does). The queue
needs no bound: each ticket stands for a caller that waits, and a stream has at most `max_in_flight` of them.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TypeVar

from shapestream.client.tickets import AnyTicket, ModelHandle, Outcome, Question, RequestTicket, Ticket
from shapestream.errors import DeadlineExceeded, RequestError, TooLarge
from shapestream.wire.messages import RequestEntry, ResultEntry
from shapestream.wire.tags import REQUEST_ID

Kind = TypeVar("Kind", bound=Ticket)


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
        self.outstanding_requests = 0
        self.outstanding_bytes = 0
        self.held_at: float | None = None
        """The time since which the server has taken nothing new: no request is sent before `recall`."""
        self.waiting: OrderedDict[int, RequestTicket] = OrderedDict()
        """The requests that are not at the server, in order."""
        self._deadlines: list[tuple[float, int]] = []
        self._with_deadline = 0
        self.highest_sent = 0
        """The highest sequence number that a server was sent; it may count lower ones that are new to it as answered."""
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
            heapq.heappush(self._deadlines, (ticket.deadline, ticket.id))

    def remove(self, ticket_id: int) -> Question | None:
        """Remove a ticket, sent or not; its share of the window is free again."""
        ticket = self.tickets.pop(ticket_id, None)
        if ticket is None:
            return None
        if ticket.deadline is not None:
            self._with_deadline -= 1
            if len(self._deadlines) > 2 * self._with_deadline + 64:
                self._forget_met_deadlines()
        if type(ticket) is RequestTicket and self.waiting.pop(ticket_id, None) is None:
            self.outstanding_requests -= 1
            self.outstanding_bytes -= ticket.nbytes
        return ticket

    def abandon(self, ticket: Question) -> bool:
        """Give up a ticket that no caller waits for. True where the server has it, and owes the terminal reply."""
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

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        """Return all tickets of one kind, in order of submission."""
        return [ticket for ticket in self.tickets.values() if type(ticket) is kind]

    def is_waiting(self, ticket: Question) -> bool:
        """Tell whether a request has not been sent."""
        return ticket.id in self.waiting

    def expired(self, now: float) -> Iterator[Question]:
        """Yield the tickets whose deadline has come and that a caller waits for."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, ticket_id = heapq.heappop(self._deadlines)
            ticket = self.tickets.get(ticket_id)
            if ticket is not None and not (type(ticket) is RequestTicket and ticket.abandoned):
                yield ticket

    def next_deadline(self) -> float:
        """Return the earliest deadline in the heap, perhaps of a ticket that has ended; infinity where there is none."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def hold(self, sequence: int, now: float) -> bool:
        """Keep a request that a leaving server refused. True: it waits for the next server. False: its caller has left."""
        ticket = self.tickets.get(sequence)
        if type(ticket) is not RequestTicket or ticket.abandoned:
            return False
        ticket.may_have_run = False
        if sequence not in self.waiting:
            self.outstanding_requests -= 1
            self.outstanding_bytes -= ticket.nbytes
            self.waiting[sequence] = ticket
        if self.held_at is None:
            self.held_at = now
        return True

    def fail_waiting(self, error: Callable[[], RequestError]) -> None:
        """End the requests that are not at the server with an error, one each."""
        for ticket in list(self.waiting.values()):
            self.end(ticket, error())

    def may_have_run(self) -> list[RequestTicket]:
        """Return the requests that a server may have run, and that a caller waits for."""
        return [
            ticket for ticket in self.of_kind(RequestTicket) if ticket.may_have_run and not ticket.abandoned
        ]

    def take_sendable(self, now: float, one_way_s: float) -> list[RequestEntry]:
        """Return the requests that fit into the window now, as entries; they are outstanding from here on.

        `one_way_s`, the seconds of the way to the server, is taken off their deadlines.

        A request that fits into no window that the server grants ends here, as does one that would be late on arrival.
        A request that other models' requests have passed gets a new number, unless a server may have run it: numbers that
        are new to a server come to it in ascending order.
        """
        sendable: list[RequestEntry] = []
        for ticket in self._may_be_sent():
            number = ticket.model.number
            assert number is not None  # or it might not be sent
            if ticket.nbytes > self.largest_bytes:
                reason = f"{ticket.nbytes} bytes of tensors; the server takes {self.largest_bytes} at most: send fewer rows"
                self.end(ticket, TooLarge(reason))
                continue
            if self.outstanding_requests >= self.window_requests:
                break
            if self.outstanding_bytes and self.outstanding_bytes + ticket.nbytes > self.window_bytes:
                break
            deadline = ticket.deadline
            remaining_ms = None if deadline is None else remaining_ms_on_arrival(deadline - now, one_way_s)
            if remaining_ms == 0:
                self.end(ticket, DeadlineExceeded(NEVER_SENT))
                continue
            if ticket.id < self.highest_sent and not ticket.may_have_run:
                self.remove(ticket.id)
                self.add(ticket)
            self.highest_sent = max(self.highest_sent, ticket.id)
            del self.waiting[ticket.id]
            self.outstanding_requests += 1
            self.outstanding_bytes += ticket.nbytes
            ticket.sent_at = now
            ticket.may_have_run = True
            sendable.append(
                RequestEntry(
                    sequence=ticket.id,
                    model=number,
                    remaining_ms=remaining_ms,
                    priority=ticket.priority,
                    tensors=ticket.tensors,
                    tags=ticket.tags,
                )
            )
        return sendable

    def _may_be_sent(self) -> Iterator[RequestTicket]:
        """Yield the requests that may be sent, in order. The caller removes each one before it asks for the next.

        A request whose model is being opened again lets those of other models pass: a server that has just started
        answers when the model is loaded, which may take minutes.
        """
        waiting = self.waiting
        while waiting and self.held_at is None:
            ticket = next(iter(waiting.values()))
            if ticket.model.number is None:
                yield from [other for other in waiting.values() if other.model.number is not None]
                return
            yield ticket

    def recall(self) -> list[int]:
        """Let all sent requests wait again, in order: the server has forgotten them. Returns the ids of abandoned ones."""
        unwanted = [ticket.id for ticket in self.of_kind(RequestTicket) if ticket.abandoned]
        for ticket_id in unwanted:
            self.remove(ticket_id)
        self.waiting = OrderedDict((ticket.id, ticket) for ticket in self.of_kind(RequestTicket))
        self.held_at = None
        self.outstanding_requests = 0
        self.outstanding_bytes = 0
        return unwanted

    def _forget_met_deadlines(self) -> None:
        self._deadlines = [entry for entry in self._deadlines if entry[1] in self.tickets]
        heapq.heapify(self._deadlines)

    def check_invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself; for tests."""
        requests = self.of_kind(RequestTicket)
        out = [ticket for ticket in requests if ticket.id not in self.waiting]
        assert self.outstanding_requests == len(out)
        assert self.outstanding_bytes == sum(ticket.nbytes for ticket in out)
        assert self.waiting.keys() <= self.tickets.keys()
        assert self.held_at is not None or list(self.waiting) == sorted(self.waiting)
        assert not any(ticket.abandoned for ticket in self.waiting.values())
        assert all(
            ticket.outcome is None or getattr(ticket, "abandoned", False) for ticket in self.tickets.values()
        )
        timed = [ticket for ticket in self.tickets.values() if ticket.deadline is not None]
        assert self._with_deadline == len(timed)
        filed = {ticket_id for _, ticket_id in self._deadlines}
        overdue = {ticket.id for ticket in requests if ticket.abandoned}
        assert {ticket.id for ticket in timed} <= filed | overdue


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
