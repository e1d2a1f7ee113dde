"""One client's half of protocol version 1, as a plain object: entries and tickets in and out.

It stands between the core, which moves bytes, and the faces, which wait. No socket, no clock, no await:
the time is an argument. `turn()` says what is to be done now, `next_wakeup()` when to ask again. What it knows lies
beside it: who waits (`ledger`), whether there is a server (`link`), what was asked of it besides requests
(`inquiries`), for how long to wait (`patience`), how long the way is (`transit`).

What it promises: every submitted ticket is handed back exactly once, or withdrawn by its owner; the requests
of a model are sent in order of submission, within the server's window; when the server forgets the session, or another
server takes its place, models are opened again and unfinished requests are sent again under the same numbers. A server
that is leaving (`draining`) ends no request either: it waits for the next one. Only a request of a model that is not
idempotent, which a server had when another took its place, ends as `worker_lost`, since it may have run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shapestream.client.inquiries import CHANGED, Inquiries
from shapestream.client.ledger import Ledger
from shapestream.client.link import Link, LinkSettings
from shapestream.client.patience import Patience
from shapestream.client.tickets import AnyTicket, Owner, Question, RequestTicket
from shapestream.client.transit import Transit
from shapestream.errors import (
    AlreadyAnswered,
    Cancelled,
    Draining,
    InternalError,
    RequestError,
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
        self._link = Link(settings, now)
        self._ledger = Ledger()
        self._inquiries = Inquiries(self._ledger)
        self._patience = Patience(
            server=server,
            link=self._link,
            ledger=self._ledger,
            unavailable_after_s=settings.unavailable_after_s,
        )
        self._transit = Transit()
        self._epoch: bytes | None = None
        self._control: list[Entry] = []
        self._credit: Credit | None = None
        """The server's last word on credit, to be repeated ahead of what is sent by it."""

    # ------------------------------------------------------------ callers

    def submit(self, ticket: Question) -> None:
        """Take a question."""
        if not isinstance(ticket, RequestTicket):
            self._control += self._inquiries.take(ticket, is_open=self._link.is_open)
        elif ticket.model.stale:
            self._ledger.finish(ticket, Unavailable(CHANGED))
        else:
            self._ledger.add(ticket)

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
        ledger, transit = self._ledger, self._transit
        for entry in entries:
            if type(entry) is Result:
                ticket = ledger.answered(entry.sequence)
                if ticket is not None:
                    transit.answered(now - ticket.sent_at, entry.timings.total_us)
                    ledger.finish(ticket, entry)
            else:
                self._receive_other(entry, now)

    def unreadable(self, reason: str, now: float) -> None:
        """A message made no sense at all: this connection is given up."""
        self._patience.trouble = f"; last problem: {reason}"
        self._link.broken(now)

    def refused(self, reason: str | None) -> None:
        """The last connection was not let in; None: it was, or nobody is there."""
        if reason is not None:
            self._patience.trouble = f"; {reason}"

    def unreadable_entry(self, id: int | None, reason: str) -> None:  # noqa: A002 - the protocol's word
        """One entry made no sense; where it names a request, that one fails."""
        if id is not None:
            self._fail(id, InternalError(f"the server's answer could not be read: {reason}"))

    def unsendable(self, sequence: int, error: RequestError) -> None:
        """A request that was to be sent cannot be written down; it fails, unheard of by the server."""
        self._fail(sequence, error)

    # ------------------------------------------------------------ time

    def turn(self, now: float, *, may_send: bool = True) -> Turn:
        """What has become due. With `may_send=False` the unsent stays here, where it can be withdrawn."""
        self._patience.end_waits(now)
        reconnect = self._link.must_reconnect(now)
        if reconnect:
            self._control.clear()
        entries = self._due_entries(now) if may_send else []
        if entries or not may_send:
            self._link.sent(now)  # what the transport still holds is a sign of life as well
        return Turn(finished=self._ledger.take_finished(), entries=entries, reconnect=reconnect)

    def next_wakeup(self) -> float:
        """When `turn` must be called again, if nothing happens before; infinity for never."""
        return min(self._link.next_wakeup(), self._patience.next_wakeup())

    def close(self) -> Turn:
        """Leave: every ticket ends with `Cancelled`, and the server hears `Goodbye`."""
        self._ledger.fail_all(lambda: Cancelled("the client was closed"))
        entries: list[Entry] = [*self._control, Goodbye()] if self._link.is_open else []
        self._control = []
        return Turn(finished=self._ledger.take_finished(), entries=entries, reconnect=False)

    # ------------------------------------------------------------ inside

    def _receive_other(self, entry: Entry, now: float) -> None:
        match entry:
            case Failure():
                self._failed(entry, now)
            case Welcome():
                self._welcome(entry, now)
            case Unknown():
                self._link.forgotten(now)
            case ModelOpened():
                self._inquiries.model_opened(entry)
            case ModelRefused():
                self._inquiries.model_refused(entry)
            case Credit():
                self._ledger.window_requests = entry.window_requests
                self._ledger.window_bytes = entry.window_bytes
                self._ledger.largest_bytes = max(self._ledger.largest_bytes, entry.window_bytes)
                self._credit = entry
            case Statistics():
                self._inquiries.statistics(entry)
            case Goodbye():
                self._link.left(now)
            case _:
                pass  # heartbeats count as traffic; the rest is not for a client, and the codec refused it

    def _failed(self, entry: Failure, now: float) -> None:
        """A request ends without a result, unless another server, or another run, may give one."""
        if entry.code == Draining.code and self._ledger.hold(entry.sequence, now):
            return
        ticket = self._ledger.answered(entry.sequence)
        if ticket is None:
            return
        self._transit.refused(now - ticket.sent_at)
        lost = entry.code == AlreadyAnswered.code  # on its way, and the server keeps the reply no longer
        if lost and ticket.model.idempotent and ticket.renewals < _MAX_RENEWALS:
            ticket.renewals += 1
            self._ledger.add(ticket)
        else:
            after = None if entry.retry_after_ms is None else entry.retry_after_ms / 1000
            self._ledger.finish(ticket, error_from_code(entry.code, entry.message, retry_after_s=after))

    def _welcome(self, entry: Welcome, now: float) -> None:
        again = not self._link.is_open or entry.epoch != self._epoch
        self._ledger.window_requests = entry.window_requests
        self._ledger.window_bytes = self._ledger.largest_bytes = entry.window_bytes
        self._link.welcomed(entry.heartbeat_ms / 1000)
        self._patience.trouble = ""
        if entry.epoch != self._epoch:
            self._give_up_what_may_have_run()
            self._epoch = entry.epoch
        if again:
            self._transit.welcomed(now)
            self._credit = None
            unwanted = self._ledger.recall()
            self._control = [Cancel(sequence=sequence) for sequence in unwanted]
            self._control += self._inquiries.ask_again()

    def _give_up_what_may_have_run(self) -> None:
        """Another server took the place of one that had these, and knows nothing of them."""
        for ticket in self._ledger.may_have_run():
            if not ticket.model.idempotent:
                self._ledger.abandon(ticket)
                self._ledger.finish(ticket, WorkerLost(_MAY_HAVE_RUN))

    def _due_entries(self, now: float) -> list[Entry]:
        if self._link.take_hello():
            self._transit.greeted(now)
            return [Hello(client=self._client, software=self._software), _clock(now)]
        if not self._link.is_open:
            return []
        entries, self._control = self._control, []
        repeats_credit = self._credit is not None
        if self._credit is not None:
            entries.append(self._credit)
            self._credit = None
        requests = self._ledger.take_sendable(now, self._transit)
        if repeats_credit or any(request.remaining_ms is not None for request in requests):
            entries.append(_clock(now))
        entries.extend(requests)
        if not entries and self._link.heartbeat_due(now):
            entries.append(Heartbeat())
        return entries

    def _fail(self, sequence: int, error: RequestError) -> None:
        ticket = self._ledger.answered(sequence)
        if ticket is not None:
            self._ledger.finish(ticket, error)

    def check_invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself; for tests, after every step."""
        self._ledger.check_invariants()
        self._inquiries.check_invariants(is_open=self._link.is_open)


def _clock(now: float) -> Clock:
    return Clock(sent_us=max(0, round(now * 1e6)))


# Each takes a connection that broke right before a reply: who needs more has a server that always says so.
_MAX_RENEWALS = 3
_MAY_HAVE_RUN = (
    "the server was replaced while it had this request; whether it ran is not known, and this model's requests are never "
    "run twice"
)
