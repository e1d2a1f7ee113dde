"""Grants: the bytes that clients may send in large requests, of all clients together. Pure.

A request is in the server's memory before any admission looks at it. So a client asks before it sends a large one. The
server grants so many bytes at a time as its memory has room for, and the client sends only what was granted.

    ask ──> WAITING ──give──> OPEN ──use──> USED ──end──> OVER
               └───────────────┴─────end─────────────────^

A grant is OPEN while its request is on the way. It is USED from the request's arrival to its answer. OPEN and USED grants
hold their bytes; together they never hold more than `most_bytes`.

Turns. Clients with waiting grants stand in a ring, in the order in which they asked. Each has one grant in its turn, its
oldest. A newcomer stands behind all others, so a grant waits for at most one grant of each other client per grant of its
own client. Where the first grant does not fit, nothing behind it is granted, so that a large one is reached.

Quotas. A client that holds something gets no more than it leaves free, as callers of a gateway (`web/quotas.py`). So one
client alone, with a slow model, leaves room for another. Its turn is skipped until it has given something back. The same
rule holds for the places of those that wait.

Refusals. A grant is refused where it is larger than the whole, where too many wait, and where its predicted wait ends after
its deadline. That is predicted when it is asked for, and again while it waits. The prediction is the bytes before it by the
pace at which bytes came back while others waited. A grant that no other waits before is not refused by a prediction, so a
wrong one is corrected.

It reads no clock, sends nothing, and knows no session: `holder` is the caller's.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from enum import Enum
from itertools import zip_longest
from typing import Any

from shapestream.errors import DeadlineExceeded, Overloaded, RequestError, TooLarge
from shapestream_engine.layout import value

UNASKED_BYTES = 1 << 20
"""Bytes of the largest request that no client asks for: the way there and back takes as long as sending so many."""
MEMORY_PARTS = 8
"""Grants hold one of so many parts of the memory. Five copies of their bytes may exist at a time: here, in a worker's
connection, gathered for a call, as its outputs, and as the answers here. The rest is for models and processes."""
UNASKED_PARTS = 4
"""What is sent without a grant is one of so many parts of the bytes of grants, of all clients that ask first."""
UNUSED_S = 10.0
"""Seconds after which a grant comes back whose request has not come, besides the time for sending it."""
LEAST_BYTES_PER_S = 1 << 20
"""Bytes per second that a client sends at least, or its grant comes back before the request is here."""
PACE_KEPT = 7 / 8
"""Part of the measured pace that stays at each return: about the last eight count."""
SOON_S = 0.1
"""Shortest time after which a refused client should ask again, in seconds."""


@value
class RequestRoom:
    """Bytes of requests that the server lets in, by its memory and its settings."""

    grants: int
    """Of all grants together."""
    largest: int
    """Of the largest request that is granted."""
    unasked: int
    """Of all requests without a grant of all clients that ask first together, and of one client that never asks."""


def room_of(memory_bytes: int, max_queued_bytes: int, window_bytes: int) -> RequestRoom:
    """Return the room for requests of a process that may use so much memory."""
    grants = max(UNASKED_BYTES, min(max_queued_bytes, memory_bytes // MEMORY_PARTS))
    return RequestRoom(
        grants=grants,
        largest=min(window_bytes, grants),
        unasked=min(window_bytes, max(UNASKED_BYTES, grants // UNASKED_PARTS)),
    )


class GrantState(Enum):
    """The state of a grant. The head of this file draws the changes."""

    WAITING = "waiting"
    OPEN = "open"
    USED = "used"
    OVER = "over"


class Grant:
    """The right to send one request, from the question for it to the request's answer."""

    __slots__ = ("_grants", "deadline", "due", "holder", "nbytes", "owner", "sequence", "state")

    def __init__(
        self, grants: Grants, holder: Any, owner: int, sequence: int, nbytes: int, deadline: float | None
    ) -> None:
        self._grants = grants
        self.holder = holder
        """The session."""
        self.owner = owner
        """The number of the client, by which turns and quotas count."""
        self.sequence = sequence
        """The request's number in its session."""
        self.nbytes = nbytes
        self.deadline = math.inf if deadline is None else deadline
        """The time after which the request is of no use."""
        self.due = math.inf
        """The time by which the request must be here, of one that is OPEN."""
        self.state = GrantState.WAITING

    def use(self) -> None:
        """Note that its request is here, and admitted."""
        assert self.state is GrantState.OPEN
        self.state = GrantState.USED

    def end(self) -> None:
        """Give its bytes back, or its place among those that wait. A second call does nothing."""
        self._grants.end(self)

    def __repr__(self) -> str:
        return f"<grant {self.sequence} of client {self.owner}: {self.nbytes} bytes, {self.state.value}>"


class _Client:
    """The grants of one client."""

    __slots__ = ("held_bytes", "waiting", "waiting_bytes")

    def __init__(self) -> None:
        self.waiting: deque[Grant] = deque()
        self.waiting_bytes = 0
        self.held_bytes = 0


class Grants:
    """All grants, and the turns of those that wait."""

    def __init__(self, most_bytes: int, largest_bytes: int, most_waiting: int) -> None:
        """`most_bytes`: of all grants together. `most_waiting`: grants that wait, at most; more are refused."""
        self.most_bytes = most_bytes
        self._largest_bytes = largest_bytes
        self._most_waiting = most_waiting
        self.held_bytes = 0
        """Bytes of all grants that are OPEN or USED."""
        self.waiting = 0
        """Grants that wait."""
        self.is_due = False
        """True where `give` may have something to give."""
        self._clients: dict[int, _Client] = {}
        self._ring: OrderedDict[int, _Client] = OrderedDict()
        """The clients with waiting grants, in the order of their turns."""
        self._held: dict[Grant, None] = {}
        """The grants that are OPEN or USED, the oldest first."""
        self._returned_bytes = 0
        """Bytes that came back since `_seen_at`, while others waited."""
        self._seen_at = 0.0
        self._pace_s = self._pace_bytes = 0.0
        """Seconds, and bytes that came back in them, of about the last eight returns while others waited."""

    def ask(
        self, holder: Any, owner: int, sequence: int, nbytes: int, deadline: float | None, now: float
    ) -> Grant:
        """Let a new grant wait for its turn.

        Raises TooLarge for one that is larger than any may be. Raises Overloaded, with the time after which to ask again,
        where too many wait, or where its turn is predicted to come after its deadline.
        """
        if nbytes > self._largest_bytes:
            raise TooLarge(
                f"{nbytes} bytes in one request; this server takes at most {self._largest_bytes}, by its memory and its "
                "window_bytes: send fewer rows, or give it more"
            )
        client = self._clients.get(owner)
        own = 0 if client is None else len(client.waiting)
        left = self._most_waiting - self.waiting - 1
        if left < 0 or (own and own >= left):
            text = f"{self.waiting} large requests wait for memory already, {own} of them of this client"
            raise Overloaded(text, retry_after_s=max(SOON_S, self.wait_s(owner, nbytes)))
        if deadline is not None and self._ring and now + (wait_s := self.wait_s(owner, nbytes)) > deadline:
            raise _too_late(nbytes, wait_s)
        grant = Grant(self, holder, owner, sequence, nbytes, deadline)
        if client is None:
            client = self._clients[owner] = _Client()
        client.waiting.append(grant)
        client.waiting_bytes += nbytes
        if not self.waiting:
            self._returned_bytes, self._seen_at = 0, now
        self.waiting += 1
        self._ring.setdefault(owner, client)
        self.is_due = True
        return grant

    def wait_s(self, owner: int, nbytes: int) -> float:
        """Predict the seconds until a further grant of this client is given; 0 where no pace is known."""
        if not self._pace_bytes:
            return 0.0
        own = self._clients.get(owner)
        turns = 1 if own is None else len(own.waiting) + 1
        before = self.held_bytes + nbytes + (0 if own is None else own.waiting_bytes)
        for number, other in self._ring.items():
            if number != owner:
                count = len(other.waiting)
                before += other.waiting_bytes * min(turns, count) // count
        return max(0, before - self.most_bytes) * self._pace_s / self._pace_bytes

    def give(self, now: float) -> list[Grant]:
        """Open the grants whose turn it is, as far as there is room, and return them."""
        self.is_due = False
        self._learn_pace(now)
        given: list[Grant] = []
        while (grant := self._next()) is not None:
            client = self._stop_waiting(grant)
            if client.waiting:
                self._ring.move_to_end(grant.owner)
            client.held_bytes += grant.nbytes
            self.held_bytes += grant.nbytes
            self._held[grant] = None
            grant.state = GrantState.OPEN
            grant.due = now + UNUSED_S + grant.nbytes / LEAST_BYTES_PER_S
            given.append(grant)
        return given

    def end(self, grant: Grant) -> None:
        """Give back what a grant holds, in any state."""
        state, grant.state = grant.state, GrantState.OVER
        if state is GrantState.OVER:
            return
        if state is GrantState.WAITING:
            client = self._stop_waiting(grant)
        else:
            client = self._clients[grant.owner]
            client.held_bytes -= grant.nbytes
            self.held_bytes -= grant.nbytes
            self._returned_bytes += grant.nbytes
            del self._held[grant]
        if not client.waiting and not client.held_bytes:
            del self._clients[grant.owner]
        self.is_due = self.waiting > 0

    def hopeless(self, now: float) -> list[tuple[Grant, RequestError]]:
        """Return the waiting grants that come after their deadlines, each with the error of its request.

        The caller ends them, and tells their clients. The first one in turn ends at its deadline only: it is tried.
        """
        found: list[tuple[Grant, RequestError]] = []
        before = self.held_bytes
        pace = self._pace_s / self._pace_bytes if self._pace_bytes else 0.0
        first = True
        for turn in zip_longest(*[client.waiting for client in self._ring.values()]):
            for grant in turn:
                if grant is None:
                    continue
                wait_s = max(0, before + grant.nbytes - self.most_bytes) * pace
                if grant.deadline <= now:
                    found.append((grant, DeadlineExceeded("the deadline passed while it waited for memory")))
                elif not first and grant.deadline < now + wait_s:
                    found.append((grant, _too_late(grant.nbytes, wait_s)))
                else:
                    before += grant.nbytes
                    first = False
        return found

    def unused(self, now: float) -> list[Grant]:
        """Return the open grants whose request has not come in time. The caller ends them."""
        return [grant for grant in self._held if grant.state is GrantState.OPEN and grant.due <= now]

    def _next(self) -> Grant | None:
        """Return the grant whose turn it is and that fits; None if there is none, or it does not fit."""
        for client in self._ring.values():
            grant = client.waiting[0]
            free = self.most_bytes - self.held_bytes - grant.nbytes
            if client.held_bytes and client.held_bytes + grant.nbytes > free:
                continue  # it holds its quota
            return grant if free >= 0 else None
        return None

    def _stop_waiting(self, grant: Grant) -> _Client:
        """Take a grant from those that wait, and its client out of the ring if that was its last one."""
        client = self._clients[grant.owner]
        client.waiting.remove(grant)
        client.waiting_bytes -= grant.nbytes
        self.waiting -= 1
        if not client.waiting:
            del self._ring[grant.owner]
        return client

    def _learn_pace(self, now: float) -> None:
        """Take the bytes that came back since the last time, while others waited, into the pace."""
        if self._returned_bytes and now > self._seen_at:
            self._pace_s = PACE_KEPT * self._pace_s + now - self._seen_at
            self._pace_bytes = PACE_KEPT * self._pace_bytes + self._returned_bytes
            self._returned_bytes, self._seen_at = 0, now

    def __repr__(self) -> str:
        return f"<grants: {self.held_bytes} of {self.most_bytes} bytes held, {self.waiting} wait>"

    def check_invariants(self) -> None:
        """Raise AssertionError if the sums are wrong; for tests."""
        assert 0 <= self.held_bytes <= self.most_bytes
        assert self.held_bytes == sum(grant.nbytes for grant in self._held)
        assert all(grant.state in (GrantState.OPEN, GrantState.USED) for grant in self._held)
        assert self.waiting == sum(len(client.waiting) for client in self._clients.values())
        assert set(self._ring) == {number for number, client in self._clients.items() if client.waiting}
        for number, client in self._clients.items():
            assert client.waiting or client.held_bytes
            assert client.waiting_bytes == sum(grant.nbytes for grant in client.waiting)
            assert client.held_bytes == sum(grant.nbytes for grant in self._held if grant.owner == number)
            assert all(grant.state is GrantState.WAITING for grant in client.waiting)


def _too_late(nbytes: int, wait_s: float) -> Overloaded:
    text = f"memory for {nbytes} bytes is expected in {wait_s:.3g} s, later than the deadline"
    return Overloaded(text, retry_after_s=max(SOON_S, wait_s))
