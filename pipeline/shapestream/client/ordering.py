"""In which order a stream gives its items, and when it is at its end. Pure."""

from __future__ import annotations

from collections import deque

from shapestream.client.tickets import EndTicket, RequestTicket

__all__ = ["ItemOrder"]


class ItemOrder:
    """Takes finished tickets in any order, and gives them in the producer's, or as they come."""

    def __init__(self, *, ordered: bool) -> None:
        self._ordered = ordered
        self._ready: deque[RequestTicket] = deque()
        self._early: dict[int, RequestTicket] = {}
        self._next_place = 0
        self._taken = 0
        self._total: int | None = None
        self.cut_off = False
        """No more items will come, whatever has been produced."""
        self.error: BaseException | None = None
        """What ended the producer, if it did not come to its own end."""

    def add(self, ticket: RequestTicket) -> None:
        """An item is finished, with or without a result."""
        if not self._ordered:
            self._ready.append(ticket)
        elif ticket.place != self._next_place:
            self._early[ticket.place] = ticket
        else:
            following: RequestTicket | None = ticket
            while following is not None:
                self._ready.append(following)
                self._next_place += 1
                following = self._early.pop(self._next_place, None) if self._early else None

    def end(self, ticket: EndTicket) -> None:
        """The producer has ended, or the client was closed; the first of these counts."""
        if self._total is not None or self.cut_off:
            return
        if ticket.place < 0:
            self.cut_off = True
        else:
            self._total = ticket.place
        self.error = ticket.outcome if isinstance(ticket.outcome, BaseException) else None

    def take(self) -> RequestTicket | None:
        """The next item, where it is there."""
        if not self._ready:
            return None
        self._taken += 1
        return self._ready.popleft()

    @property
    def at_end(self) -> bool:
        """Whether every item has been taken."""
        return not self._ready and (self.cut_off or self._taken == self._total)
