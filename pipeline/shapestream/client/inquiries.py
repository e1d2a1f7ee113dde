"""What callers ask besides requests: for a model, for the counters, whether a server is there at all. Pure.

Each is asked once per connection, however many wait for it, and its answer is for all of them. A new connection knows
nothing of the old one's questions: `ask_again` repeats them. A model that nobody asked for is not listened to.
"""

from __future__ import annotations

from typing import TypeAlias, assert_never

from shapestream.client.catalogue import Catalogue
from shapestream.client.ledger import Ledger
from shapestream.client.tickets import OpenTicket, StatisticsTicket, WelcomeTicket
from shapestream.errors import Unavailable, error_from_code
from shapestream.wire.messages import Entry, ModelOpened, ModelRefused, Statistics, StatisticsRequest

__all__ = ["Inquiries", "Inquiry"]

Inquiry: TypeAlias = OpenTicket | StatisticsTicket | WelcomeTicket


class Inquiries:
    """The questions that are out; who waits for their answers is on the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._catalogue = Catalogue()
        self._statistics_asked = False

    def take(self, ticket: Inquiry, *, is_open: bool) -> list[Entry]:
        """A caller's question: what to send for it now. Where the answer is known, the ticket is finished."""
        known = self._catalogue.known(ticket.name) if isinstance(ticket, OpenTicket) else None
        if known is not None:
            self._ledger.finish(ticket, known)
        elif is_open and isinstance(ticket, WelcomeTicket):
            self._ledger.finish(ticket, True)
        else:
            self._ledger.add(ticket)
            return self._ask(ticket) if is_open else []
        return []

    def ask_again(self) -> list[Entry]:
        """A server has welcomed us, and may know nothing of this session: what to send it.

        Every model opened so far is among it, since requests that wait for credit name it by its number there.
        """
        self._catalogue.lose()
        self._statistics_asked = False
        for welcomed in self._ledger.of_kind(WelcomeTicket):
            self._ledger.end(welcomed, True)
        entries: list[Entry] = [
            entry for name in self._catalogue.names() for entry in self._catalogue.ask(name)
        ]
        waiting: list[Inquiry] = [*self._ledger.of_kind(OpenTicket), *self._ledger.of_kind(StatisticsTicket)]
        for ticket in waiting:
            entries += self._ask(ticket)
        return entries

    def model_opened(self, entry: ModelOpened) -> None:
        """Everybody who waits for this model gets it. What was checked against another signature of it fails."""
        if not self._catalogue.is_asked(entry.name):
            return
        handle, replaced = self._catalogue.opened(entry)
        if replaced is not None:
            self._ledger.fail_requests_of(replaced, lambda: Unavailable(CHANGED))
        for ticket in self._ledger.of_kind(OpenTicket):
            if ticket.name == entry.name:
                self._ledger.end(ticket, handle)

    def model_refused(self, entry: ModelRefused) -> None:
        """Everybody who waits for this model learns why there is none, and so do the requests of one that was."""
        if not self._catalogue.is_asked(entry.name):
            return
        handle = self._catalogue.refused(entry.name)
        if handle is not None:
            self._ledger.fail_requests_of(handle, lambda: error_from_code(entry.code, entry.message))
        for ticket in self._ledger.of_kind(OpenTicket):
            if ticket.name == entry.name:
                self._ledger.end(ticket, error_from_code(entry.code, entry.message))

    def statistics(self, entry: Statistics) -> None:
        """Everybody who waits for the counters gets these."""
        self._statistics_asked = False
        for ticket in self._ledger.of_kind(StatisticsTicket):
            self._ledger.end(ticket, entry.values)

    def _ask(self, ticket: Inquiry) -> list[Entry]:
        match ticket:
            case OpenTicket():
                return [*self._catalogue.ask(ticket.name)]
            case StatisticsTicket() if not self._statistics_asked:
                self._statistics_asked = True
                return [StatisticsRequest()]
            case StatisticsTicket() | WelcomeTicket():  # asked already; or by the greeting
                return []
            case _:
                assert_never(ticket)

    def check_invariants(self, *, is_open: bool) -> None:
        """Raise AssertionError where somebody waits for what was not asked; for tests."""
        self._catalogue.check_invariants()
        if is_open:
            assert all(self._catalogue.is_asked(ticket.name) for ticket in self._ledger.of_kind(OpenTicket))
            assert self._statistics_asked or not self._ledger.of_kind(StatisticsTicket)
            assert not self._ledger.of_kind(WelcomeTicket)


CHANGED = "the server restarted with another signature for this model, or without it; submit again"
