"""What all sessions of one proven key have in common: a share of the slots, and a credit that is divided between them. Pure.

Whoever proves a key may open many sessions, so what limits a session limits nobody who has a key. Therefore a key has one
number at the scheduler (scheduling/fairness.py), whatever its sessions do, and a bound on what they have unanswered
together. So that no honest client runs into that bound, each session is told its part of it: the whole window of a
session while there are few, less when there are more. Where no key is asked for, a session has both for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import add, sub
from typing import TYPE_CHECKING

from shapestream.wire.messages import Credit

if TYPE_CHECKING:
    from shapestream.serving.sessions import Session

__all__ = ["KeyCredit"]

CONFIRM_WITHIN_S = 10.0
"""A client that has not repeated its smaller credit for so long is taken to have heard it: it may be one that never does."""

NOTHING = Credit(window_requests=0, window_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Former:
    """What a session may still believe that it has."""

    credit: Credit
    since: float


class KeyCredit:
    """One key's: what its sessions have unanswered, and what each was told that it may have.

    Parts are equal, and halved with each doubling of the sessions, so that a new one seldom changes the others'. They
    shrink at once, when a session joins; what was taken is given to new sessions when its client has repeated the smaller
    credit, so what was on its way has room. They grow only in `grow`, which is called now and then: or a key could
    make the server send many messages for each session that it opens and ends.
    """

    __slots__ = (
        "_former",
        "_largest",
        "_new",
        "_told",
        "_window",
        "held_bytes",
        "max_bytes",
        "max_requests",
        "number",
        "requests",
    )

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
        self._largest = window
        """No session was told more."""
        self._told: dict[Session, Credit] = {}
        """Of those with a connection."""
        self._former: dict[Session, _Former] = {}
        """Of those that were told less and have not repeated it."""
        self._new: dict[Session, None] = {}
        """Those that have not had their whole part yet."""

    def __repr__(self) -> str:
        return f"<credit of {len(self._told)} sessions: {self.requests} requests, {self.held_bytes} bytes>"

    @property
    def connected(self) -> int:
        """Its sessions that have a connection."""
        return len(self._told)

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

    def join(self, session: Session, now: float) -> dict[Session, Credit]:
        """A session gets its part, as far as the others leave it. Returns what those others must be told.

        One that has joined before, and not left since, keeps what it has.
        """
        if session in self._told:
            return {}
        part = self._part(len(self._told) + 1)
        smaller = {} if part == self._largest else self._shrink(part, now)
        self._told[session] = NOTHING
        self._new[session] = None
        self._give([session])
        return smaller

    def leave(self, session: Session) -> None:
        """It is over, or has no connection; its part goes to the others at the next `grow`."""
        self._told.pop(session, None)
        self._former.pop(session, None)
        self._new.pop(session, None)

    def confirm(self, session: Session, credit: Credit) -> dict[Session, Credit]:
        """A client repeats what it was told: it keeps to that from now on. Returns what new sessions must be told."""
        if self._told.get(session) != credit or self._former.pop(session, None) is None:
            return {}
        return self._give(self._new)

    def grow(self, now: float) -> dict[Session, Credit]:
        """Gives those that have less than their part what is free by now. Returns what they must be told."""
        for session in [other for other, was in self._former.items() if now - was.since > CONFIRM_WITHIN_S]:
            del self._former[session]
        part = self._part(len(self._told))
        return self._give([session for session, had in self._told.items() if had != part])

    def _shrink(self, part: Credit, now: float) -> dict[Session, Credit]:
        """Takes what is more than this from those that have it."""
        smaller = {}
        for session, had in self._told.items():
            less = _each(min, had, part)
            if less != had:
                smaller[session] = less
                former = self._former.get(session)
                most = had if former is None else _each(max, had, former.credit)
                self._former[session] = _Former(credit=most, since=now)
        self._told |= smaller
        return smaller

    def _give(self, sessions: Collection[Session]) -> dict[Session, Credit]:
        """Gives these what they lack, as far as it is free."""
        if not sessions:
            return {}
        part, free, given = self._part(len(self._told)), self._free(), {}
        self._largest = part
        # More sessions than requests: each may have one, so that none waits for ever, and some may be refused.
        crowded = len(self._told) > self.max_requests
        for session in list(sessions):
            has = Credit(window_requests=len(session.running), window_bytes=session.held_bytes)
            base = _each(max, self._told[session], _each(min, has, part))
            lacks = _each(sub, part, base)
            more = lacks if crowded else _each(min, lacks, free)
            free = _each(sub, free, more)
            new = _each(add, base, more)
            if new != self._told[session]:
                self._told[session] = given[session] = new
            if new == part:
                self._new.pop(session, None)
        return given

    def _part(self, sessions: int) -> Credit:
        """The part of each of so many sessions."""
        halvings = max(0, sessions - 1).bit_length()
        part = Credit(
            window_requests=max(1, self.max_requests >> halvings), window_bytes=self.max_bytes >> halvings
        )
        return _each(min, part, self._window)

    def _free(self) -> Credit:
        """What no session has, nor may believe that it may have."""
        requests, nbytes = self.max_requests - self.requests, self.max_bytes - self.held_bytes
        former = self._former
        for session, may in self._told.items():
            if session in former:
                may = _each(max, may, former[session].credit)
            if (more := may.window_requests - len(session.running)) > 0:
                requests -= more
            if (more := may.window_bytes - session.held_bytes) > 0:
                nbytes -= more
        return Credit(window_requests=max(0, requests), window_bytes=max(0, nbytes))


def _each(rule: Callable[[int, int], int], one: Credit, other: Credit) -> Credit:
    """By the same rule for requests and for bytes."""
    return Credit(
        window_requests=rule(one.window_requests, other.window_requests),
        window_bytes=rule(one.window_bytes, other.window_bytes),
    )
