"""One client's half of protocol version 1, as a plain object: entries and tickets in and out.

It stands between the core, which moves bytes, and the faces, which wait. No socket, no clock, no await:
the time is an argument. `turn()` says what is to be done now, `next_wakeup()` when to ask again.

What it promises: every submitted ticket is handed back exactly once, or withdrawn by its owner; requests are
sent in order of submission, within the server's window; when the server forgets the session, or another
server takes its place, models are opened again and unfinished requests are sent again under the same numbers. A server
that is leaving (`draining`) ends no request either: it waits for the next one. Only a request of a model that is not
idempotent, which a server had when another took its place, ends as `worker_lost`, since it may have run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from shapestream.client.catalogue import Catalogue
from shapestream.client.ledger import Ledger
from shapestream.client.link import Link, LinkSettings
from shapestream.client.tickets import (
    AnyTicket,
    ModelHandle,
    OpenTicket,
    Outcome,
    Owner,
    Question,
    RequestTicket,
    StatisticsTicket,
    WelcomeTicket,
)
from shapestream.client.transit import Transit
from shapestream.errors import (
    AlreadyAnswered,
    Cancelled,
    DeadlineExceeded,
    Draining,
    InternalError,
    RequestError,
    TooLarge,
    Unavailable,
    WorkerLost,
    error_from_code,
)
from shapestream.wire.messages import (
    Cancel,
    Clock,
    Credit,
    Entry,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    ModelOpened,
    ModelRefused,
    Result,
    Statistics,
    StatisticsRequest,
    Unknown,
    Welcome,
)

__all__ = ["Session", "Turn"]


@dataclass(slots=True, kw_only=True)
class Turn:
    """What is to be done now: hand these back, send these, and then perhaps start a new connection."""

    finished: list[AnyTicket]
    entries: list[Entry]
    reconnect: bool


class Session:
    """See the top of this module."""

    def __init__(
        self, *, client: bytes, software: str, server: str, settings: LinkSettings, now: float
    ) -> None:
        self._client = client
        self._software = software
        self._server = server
        self._settings = settings
        self._link = Link(settings, now)
        self._ledger = Ledger()
        self._transit = Transit()
        self._epoch: bytes | None = None
        self._catalogue = Catalogue()
        self._statistics_asked = False
        self._finished: list[AnyTicket] = []
        self._control: list[Entry] = []
        self._trouble = ""
        self._held_at: float | None = None
        """Since when the server has taken nothing new."""

    # ------------------------------------------------------------ callers

    def submit(self, ticket: Question) -> None:
        """Take a question."""
        match ticket:
            case RequestTicket():
                if ticket.model.stale:
                    self._finish(ticket, Unavailable(_CHANGED))
                else:
                    self._ledger.add(ticket)
            case OpenTicket():
                known = self._catalogue.known(ticket.name)
                if known is not None:
                    self._finish(ticket, known)
                    return
                self._ledger.add(ticket)
                if self._link.is_open:
                    self._control += self._catalogue.ask(ticket.name)
            case StatisticsTicket():
                self._ledger.add(ticket)
                if self._link.is_open:
                    self._ask_for_statistics()
            case WelcomeTicket():
                if self._link.is_open:
                    self._finish(ticket, True)
                else:
                    self._ledger.add(ticket)
            case _:
                assert_never(ticket)

    def cancel(self, ticket: Question) -> None:
        """Withdraw a question: it is not handed back, and the server is told where it has it."""
        if ticket.id in self._ledger.tickets and self._ledger.abandon(ticket) and self._link.is_open:
            self._control.append(Cancel(sequence=ticket.id))

    def cancel_owner(self, owner: Owner) -> None:
        """Withdraw everything of this owner that is unfinished."""
        for ticket in [ticket for ticket in self._ledger.tickets.values() if ticket.owner is owner]:
            self.cancel(ticket)

    # ------------------------------------------------------------ the connection

    def connected(self, now: float) -> None:
        """There is a new connection; nobody has answered on it yet."""
        self._link.connected(now)

    def receive(self, entries: Iterable[Entry], now: float) -> None:
        """Take what one or several messages held."""
        self._link.heard(now)
        for entry in entries:
            if type(entry) is Result:
                ticket = self._ledger.answered(entry.sequence)
                if ticket is not None:
                    self._transit.answered(now - ticket.sent_at, entry.timings.total_us)
                    self._finish(ticket, entry)
            else:
                self._receive_other(entry, now)

    def unreadable(self, reason: str, now: float) -> None:
        """A message made no sense at all: this connection is given up."""
        self._trouble = f"; last problem: {reason}"
        self._link.broken(now)

    def refused(self, reason: str | None) -> None:
        """The last connection was not let in; None: it was, or nobody is there."""
        if reason is not None:
            self._trouble = f"; {reason}"

    def unreadable_entry(self, id: int | None, reason: str) -> None:  # noqa: A002 - the protocol's word
        """One entry made no sense; where it names a request, that one fails."""
        ticket = self._ledger.answered(id) if id is not None else None
        if ticket is not None:
            self._finish(ticket, InternalError(f"the server's answer could not be read: {reason}"))

    def unsendable(self, sequence: int, error: RequestError) -> None:
        """A request that was to be sent cannot be written down; it fails, unheard of by the server."""
        ticket = self._ledger.answered(sequence)
        if ticket is not None:
            self._finish(ticket, error)

    # ------------------------------------------------------------ time

    def turn(self, now: float, *, may_send: bool = True) -> Turn:
        """What has become due. With `may_send=False` the unsent stays here, where it can be withdrawn."""
        self._expire(now)
        reconnect = self._link.must_reconnect(now)
        if reconnect:
            self._control.clear()
        entries = self._due_entries(now) if may_send else []
        if entries or not may_send:
            self._link.sent(now)  # what the transport still holds is a sign of life as well
        finished, self._finished = self._finished, []
        return Turn(finished=finished, entries=entries, reconnect=reconnect)

    def next_wakeup(self) -> float:
        """When `turn` must be called again, if nothing happens before; infinity for never."""
        due = min(self._link.next_wakeup(), self._ledger.next_deadline())
        if self._link.lost_at is not None and self._ledger.tickets:
            due = min(due, self._link.lost_at + self._settings.unavailable_after_s)
        if self._held_at is not None and self._ledger.waiting():
            due = min(due, self._held_at + self._settings.unavailable_after_s)
        return due

    def close(self) -> Turn:
        """Leave: every ticket ends with `Cancelled`, and the server hears `Goodbye`."""
        self._fail_all(Cancelled, "the client was closed")
        finished, self._finished = self._finished, []
        entries: list[Entry] = [*self._control, Goodbye()] if self._link.is_open else []
        self._control = []
        return Turn(finished=finished, entries=entries, reconnect=False)

    # ------------------------------------------------------------ inside

    def _receive_other(self, entry: Entry, now: float) -> None:
        match entry:
            case Failure(code=Draining.code) if self._ledger.hold(entry.sequence):
                if self._held_at is None:
                    self._held_at = now
            case Failure():
                ticket = self._ledger.answered(entry.sequence)
                if ticket is not None:
                    self._transit.refused(now - ticket.sent_at)
                if ticket is not None and not self._asks_anew(ticket, entry):
                    after = None if entry.retry_after_ms is None else entry.retry_after_ms / 1000
                    self._finish(ticket, error_from_code(entry.code, entry.message, retry_after_s=after))
            case Welcome():
                self._welcome(entry, now)
            case Unknown():
                self._link.forgotten(now)
            case ModelOpened():
                self._model_opened(entry)
            case ModelRefused():
                self._model_refused(entry)
            case Credit():
                self._ledger.window_requests = entry.window_requests
                self._ledger.window_bytes = entry.window_bytes
            case Statistics():
                self._statistics_asked = False
                for asked in self._ledger.of_kind(StatisticsTicket):
                    self._end(asked, entry.values)
            case Goodbye():
                self._link.left(now)
            case _:
                pass  # heartbeats count as traffic; the rest is not for a client, and the codec refused it

    def _asks_anew(self, ticket: RequestTicket, entry: Failure) -> bool:
        """The reply was lost on its way, and the server keeps it no longer: the request runs again, under a new number."""
        again = entry.code == AlreadyAnswered.code and ticket.model.idempotent
        if not again or ticket.renewals >= _MAX_RENEWALS:
            return False
        ticket.renewals += 1
        self._ledger.add(ticket)
        return True

    def _welcome(self, entry: Welcome, now: float) -> None:
        again = not self._link.is_open or entry.epoch != self._epoch
        self._ledger.window_requests = entry.window_requests
        self._ledger.window_bytes = entry.window_bytes
        self._link.welcomed(entry.heartbeat_ms / 1000)
        self._trouble = ""
        if entry.epoch != self._epoch:
            self._give_up_what_may_have_run()
            self._epoch = entry.epoch
        if again:
            self._transit.welcomed(now)
            self._held_at = None
            self._start_again()

    def _give_up_what_may_have_run(self) -> None:
        """Another server took the place of one that had these, and knows nothing of them."""
        for ticket in self._ledger.outstanding():
            if not ticket.model.idempotent:
                self._ledger.abandon(ticket)
                self._finish(ticket, WorkerLost(_MAY_HAVE_RUN))

    def _start_again(self) -> None:
        """The server may know nothing of this session: models, questions and requests are sent once more."""
        self._control.clear()
        self._control.extend(Cancel(sequence=unwanted) for unwanted in self._ledger.recall())
        self._catalogue.lose()
        self._statistics_asked = False
        for ticket in self._ledger.of_kind(WelcomeTicket):
            self._end(ticket, True)
        for name in self._catalogue.names():
            self._control += self._catalogue.ask(name)
        for opening in self._ledger.of_kind(OpenTicket):
            self._control += self._catalogue.ask(opening.name)
        if self._ledger.of_kind(StatisticsTicket):
            self._ask_for_statistics()

    def _model_opened(self, entry: ModelOpened) -> None:
        handle, replaced = self._catalogue.opened(entry)
        if replaced is not None:
            self._fail_requests_of(replaced, Unavailable.code, _CHANGED)
        for ticket in self._ledger.of_kind(OpenTicket):
            if ticket.name == entry.name:
                self._end(ticket, handle)

    def _model_refused(self, entry: ModelRefused) -> None:
        handle = self._catalogue.refused(entry.name)
        if handle is not None:
            self._fail_requests_of(handle, entry.code, entry.message)
        for ticket in self._ledger.of_kind(OpenTicket):
            if ticket.name == entry.name:
                self._end(ticket, error_from_code(entry.code, entry.message))

    def _due_entries(self, now: float) -> list[Entry]:
        if self._link.take_hello():
            self._transit.greeted(now)
            return [Hello(client=self._client, software=self._software), _clock(now)]
        if not self._link.is_open:
            return []
        entries, self._control = self._control, []
        sendable = self._ledger.take_sendable(now, self._transit)
        for ticket in sendable.hopeless:
            most = self._ledger.window_bytes
            reason = f"{ticket.nbytes} bytes of tensors; the server takes at most {most} from one client"
            self._finish(ticket, TooLarge(reason))
        for ticket in sendable.late:
            self._finish(ticket, DeadlineExceeded(_NEVER_SENT))
        if any(request.remaining_ms is not None for request in sendable.requests):
            entries.append(_clock(now))
        entries.extend(sendable.requests)
        if not entries and self._link.heartbeat_due(now):
            entries.append(Heartbeat())
        return entries

    def _expire(self, now: float) -> None:
        for ticket in self._ledger.expired(now):
            if isinstance(ticket, WelcomeTicket):
                error: RequestError = Unavailable(f"no server answered at {self._server}{self._trouble}")
            else:
                error = DeadlineExceeded(self._what_it_waited_for(ticket))
            self._ledger.abandon(ticket)
            self._finish(ticket, error)
        lost_at = self._link.lost_at
        if lost_at is not None and now >= lost_at + self._settings.unavailable_after_s:
            missing = f"no server has answered at {self._server} for {now - lost_at:.0f} s{self._trouble}"
            self._fail_all(Unavailable, missing)
        held_at = self._held_at
        if held_at is not None and now >= held_at + self._settings.unavailable_after_s:
            text = f"the server at {self._server} has taken nothing new for {now - held_at:.0f} s, and no other has come"
            for waiting in self._ledger.waiting():
                self._end(waiting, Draining(text))

    def _what_it_waited_for(self, ticket: Question) -> str:
        if not self._link.is_open:
            return f"no server answers at {self._server}{self._trouble}"
        if self._ledger.is_waiting(ticket):
            return _DRAINED if self._ledger.held else _NEVER_SENT
        return "the server's answer did not come in time"

    def _ask_for_statistics(self) -> None:
        if not self._statistics_asked:
            self._statistics_asked = True
            self._control.append(StatisticsRequest())

    def _fail_requests_of(self, handle: ModelHandle, code: str, message: str) -> None:
        for ticket in self._ledger.of_kind(RequestTicket):
            if ticket.model is handle and not ticket.abandoned:
                self._ledger.abandon(ticket)
                self._finish(ticket, error_from_code(code, message))

    def _fail_all(self, kind: type[RequestError], message: str) -> None:
        for ticket in list(self._ledger.tickets.values()):
            self._ledger.remove(ticket.id)
            if not (isinstance(ticket, RequestTicket) and ticket.abandoned):
                self._finish(ticket, kind(message))

    def _end(self, ticket: AnyTicket, outcome: Outcome) -> None:
        self._ledger.remove(ticket.id)
        self._finish(ticket, outcome)

    def _finish(self, ticket: AnyTicket, outcome: Outcome) -> None:
        ticket.outcome = outcome
        self._finished.append(ticket)

    def check_invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself; for tests, after every step."""
        self._ledger.check_invariants()
        unfinished = self._ledger.tickets.values()
        assert all(ticket.outcome is None or getattr(ticket, "abandoned", False) for ticket in unfinished)
        if self._link.is_open:
            assert all(self._catalogue.is_asked(ticket.name) for ticket in self._ledger.of_kind(OpenTicket))
        self._catalogue.check_invariants()


def _clock(now: float) -> Clock:
    return Clock(sent_us=max(0, round(now * 1e6)))


# Each takes a connection that broke right before a reply: who needs more has a server that always says so.
_MAX_RENEWALS = 3
_NEVER_SENT = (
    "it was never sent: the deadline had passed already, or passed while it waited for the server to grant this client "
    "more requests or bytes"
)
_DRAINED = "the server is leaving and takes nothing new, and no other has taken its place"
_MAY_HAVE_RUN = (
    "the server was replaced while it had this request; whether it ran is not known, and this model's requests are never "
    "run twice"
)
_CHANGED = "the server restarted with another signature for this model, or without it; submit again"
