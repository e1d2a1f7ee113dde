"""What all sessions of one proven key have in common: a share of the slots, and a credit that is divided between them. Pure.

Whoever proves a key may open many sessions, so what limits a session limits nobody who has a key. Therefore a key has one
number at the scheduler (scheduling/fairness.py), whatever its sessions do, and a bound on what they have unanswered
together. So that no honest client runs into that bound, each session is told its part of it: the whole window of a
session while there are few, less when there are more. Where no key is asked for, a session has both for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapestream.wire.messages import Credit

if TYPE_CHECKING:
    from shapestream.serving.sessions import Session

__all__ = ["KeyCredit"]

RESERVE = 8
"""One part in so many is given to nobody: what a client had sent when it was told to send less must find room, too."""


class KeyCredit:
    """One key's: what its sessions have unanswered, and what each was told that it may have.

    Parts are equal, and halved with each doubling of the sessions, so that a new one seldom changes the others'. They
    shrink at once, when a session joins, and grow only in `grow`, which is called now and then: or a key could make
    the server send many messages for each session that it opens and ends.
    """

    __slots__ = ("_pool", "_told", "_window", "held_bytes", "max_bytes", "max_requests", "number", "requests")

    def __init__(self, number: int, window: Credit, windows: int) -> None:
        """`window`: what one session may have. `windows`: how many of these all sessions of the key may have together."""
        self.number = number
        """The scheduler's number of this key. It outlives its sessions: coming back is no way out of a debt."""
        self.requests = 0
        """Unanswered requests of all its sessions."""
        self.held_bytes = 0
        """The same in bytes."""
        self.max_requests = windows * window.window_requests
        self.max_bytes = windows * window.window_bytes
        self._window = window
        self._pool = Credit(
            window_requests=max(window.window_requests, self.max_requests - self.max_requests // RESERVE),
            window_bytes=max(window.window_bytes, self.max_bytes - self.max_bytes // RESERVE),
        )
        self._told: dict[Session, Credit] = {}

    def __repr__(self) -> str:
        return f"<credit of {len(self._told)} sessions: {self.requests} requests, {self.held_bytes} bytes>"

    # ------------------------------------------------------------ requests

    def covers(self, nbytes: int) -> bool:
        """Whether one more request, of so many bytes, is within the bound."""
        return self.requests < self.max_requests and self.held_bytes + nbytes <= self.max_bytes

    def take(self, nbytes: int) -> None:
        """A request was admitted."""
        self.requests += 1
        self.held_bytes += nbytes

    def give_back(self, nbytes: int) -> None:
        """It has ended."""
        self.requests -= 1
        self.held_bytes -= nbytes

    # ------------------------------------------------------------ sessions

    def told(self, session: Session) -> Credit:
        """What this session may have unanswered, as it was told."""
        return self._told[session]

    def join(self, session: Session) -> dict[Session, Credit]:
        """A new session gets its part, as far as the others leave it. Returns what those others must be told."""
        part = self._part(len(self._told) + 1)
        smaller = {other: _least(had, part) for other, had in self._told.items() if _least(had, part) != had}
        self._told |= smaller
        self._told[session] = _least(part, self._free())
        return smaller

    def leave(self, session: Session) -> None:
        """It is over; its part goes to the others at the next `grow`."""
        self._told.pop(session, None)

    def grow(self) -> dict[Session, Credit]:
        """Gives those that have less than their part what is free by now. Returns what they must be told."""
        part = self._part(len(self._told))
        if all(had == part for had in self._told.values()):
            return {}
        free = self._free()
        larger = {}
        for session, had in self._told.items():
            more = _least(_minus(part, had), free)
            free = _minus(free, more)
            if more.window_requests or more.window_bytes:
                larger[session] = _plus(had, more)
        self._told |= larger
        return larger

    def _part(self, sessions: int) -> Credit:
        """The part of each of so many sessions."""
        halvings = max(0, sessions - 1).bit_length()
        part = Credit(
            window_requests=self._pool.window_requests >> halvings,
            window_bytes=self._pool.window_bytes >> halvings,
        )
        return _least(part, self._window)

    def _free(self) -> Credit:
        """What no session has, nor was told that it may have."""
        told = self._told.items()
        requests = sum([max(len(session.running), had.window_requests) for session, had in told])
        nbytes = sum([max(session.held_bytes, had.window_bytes) for session, had in told])
        return Credit(
            window_requests=max(0, self._pool.window_requests - requests),
            window_bytes=max(0, self._pool.window_bytes - nbytes),
        )


def _least(one: Credit, other: Credit) -> Credit:
    return Credit(
        window_requests=min(one.window_requests, other.window_requests),
        window_bytes=min(one.window_bytes, other.window_bytes),
    )


def _plus(one: Credit, other: Credit) -> Credit:
    return Credit(
        window_requests=one.window_requests + other.window_requests,
        window_bytes=one.window_bytes + other.window_bytes,
    )


def _minus(one: Credit, other: Credit) -> Credit:
    return Credit(
        window_requests=one.window_requests - other.window_requests,
        window_bytes=one.window_bytes - other.window_bytes,
    )
