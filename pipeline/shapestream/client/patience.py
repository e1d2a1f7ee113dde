"""How long what waits is left to wait, and what its caller is told at the end of that. Pure.

Three things end a wait without an answer: the ticket's own deadline; no server at the address for a time; a server
there that takes nothing new, for the same time, while no other comes.
"""

from __future__ import annotations

from shapestream.client.ledger import NEVER_SENT, Ledger
from shapestream.client.link import Link
from shapestream.client.tickets import Question, WelcomeTicket
from shapestream.errors import DeadlineExceeded, Draining, RequestError, Unavailable

__all__ = ["Patience"]


class Patience:
    """Looks at the link and the ledger, and ends what has waited for long enough."""

    def __init__(self, *, server: str, link: Link, ledger: Ledger, unavailable_after_s: float) -> None:
        self._server = server
        self._link = link
        self._ledger = ledger
        self._after_s = unavailable_after_s
        self.trouble = ""
        """What went wrong with the last connection, to be put behind a sentence; empty once a server has welcomed us."""

    def next_wakeup(self) -> float:
        """When the next wait ends."""
        due = self._ledger.next_deadline()
        if self._link.lost_at is not None and self._ledger.tickets:
            due = min(due, self._link.lost_at + self._after_s)
        if self._ledger.held_at is not None and self._ledger.waiting():
            due = min(due, self._ledger.held_at + self._after_s)
        return due

    def end_waits(self, now: float) -> None:
        """End what has waited for long enough; each with its own words."""
        for ticket in self._ledger.expired(now):
            error = self._too_late(ticket)
            self._ledger.abandon(ticket)
            self._ledger.finish(ticket, error)
        lost_at, held_at = self._link.lost_at, self._ledger.held_at
        if lost_at is not None and now >= lost_at + self._after_s:
            text = f"no server has answered at {self._server} for {now - lost_at:.0f} s{self.trouble}"
            self._ledger.fail_all(lambda: Unavailable(text))
        if held_at is not None and now >= held_at + self._after_s:
            text = f"the server at {self._server} has taken nothing new for {now - held_at:.0f} s, and no other has come"
            for waiting in self._ledger.waiting():
                self._ledger.end(waiting, Draining(text))

    def _too_late(self, ticket: Question) -> RequestError:
        """What this ticket was waiting for when its deadline came."""
        if isinstance(ticket, WelcomeTicket):
            return Unavailable(f"no server answered at {self._server}{self.trouble}")
        if not self._link.is_open:
            return DeadlineExceeded(f"no server answers at {self._server}{self.trouble}")
        if not self._ledger.is_waiting(ticket):
            return DeadlineExceeded("the server's answer did not come in time")
        return DeadlineExceeded(NEVER_SENT if self._ledger.held_at is None else _DRAINED)


_DRAINED = "the server is leaving and takes nothing new, and no other has taken its place"
