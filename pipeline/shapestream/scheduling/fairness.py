"""Fair shares between clients: of the slots' time, and of the queue's room.

A client, here and in all of the scheduler, is one share; the caller numbers them.

**Turns.** This is start-time fair queueing (P. Goyal, H. M. Vin, H. Cheng, "Start-time fair queuing", SIGCOMM 1996). A
request's *start tag* is where its client's last request ends, on the scale of virtual time. A client that has no
unfinished request starts at the virtual time, if that is later. A client that has some, and is behind virtual time, is
owed what it did not get, within `OWED_S`. `FairShares._start` is the whole rule. A request ends at its start tag plus its
predicted seconds on all slots of the model. Requests go in the order of their *rank*: the start tag less what their
priority is worth. So a client that sends much queues behind itself, and one that sends little goes at the virtual time.
Without contention, order is arrival order.

Virtual time is the largest start tag that was given a batch; a request whose rank is smaller counts with its rank. It also
passes with all work that has its turn, divided between the clients that are here and one more. The original does not need
that, since its flows are known and its packets have no priorities. Here it prevents starvation: see `dispatched`.

**Room.** The queue is bounded in requests, in bytes and, if asked, in seconds of predicted work. A client's fair share
is the whole, divided by the clients that asked lately. A client may have more than its share waiting, the whole queue if
no other client asks, but it leaves one share free: it is refused while there is room for a client with less. No admitted
request is dropped to make room. A client that comes when one other fills the queue is refused, and finds room when the
queue has drained by its share.

The queue's content counts as replaced when as many requests were admitted, or as many clients asked, as it may hold
requests. A client asked lately if it asked since the last replacement, or between the last two. That also bounds the
clients that are remembered.
"""

from __future__ import annotations

from collections.abc import Callable

AGEING_S = 1.0
"""Seconds of waiting that are worth one step of priority."""

MAX_PRIORITY = 32
"""Priorities beyond this, either way, count as this: it bounds how long a request can be passed."""

NOMINAL_S = 1e-3
"""What every request is taken to cost while nothing is measured: shares are then equal by count."""

_LEAST_S = 1e-9
"""No request is free of charge, or an endless stream of them could pass others."""

OWED_S = MAX_PRIORITY * AGEING_S
"""Seconds of the slots' work of which a client that is here is owed its share, at most: as long as priorities may pass it.
A client that is held up for longer saves up no more."""

_FEW_CLIENTS = 64


class _Client:
    """The requests and debts of a client at the models that share slots."""

    __slots__ = ("finish", "last", "queued", "unfinished")

    def __init__(self) -> None:
        self.finish: float | None = None
        """The end of its last request, on the scale of virtual time; None where it owes nothing, and is owed nothing."""
        self.unfinished = 0
        """Requests that have not ended."""
        self.queued = 0
        """Requests that wait for their first turn."""
        self.last: dict[int, float] = {}
        """By priority, the rank of the last request, as long as any are queued; not of priority 0, where ranks only grow."""


class FairShares:
    """The tags of all clients of the models that share slots, directly or through others.

    Models that share no slot have nothing to divide, so they have a `FairShares` each until a slot joins that
    serves both (`absorb`).
    """

    __slots__ = ("_clean_at", "_clients", "_first_tag", "present", "virtual_s")

    def __init__(self, first_tag: Callable[[], float | None]) -> None:
        """`first_tag` tells the start tag of the first request that waits for its turn; None if there is none."""
        self._first_tag = first_tag
        self.virtual_s = 0.0
        self.present = 0
        """Clients that have unfinished requests."""
        self._clients: dict[int, _Client] = {}
        self._clean_at = _FEW_CLIENTS

    def __repr__(self) -> str:
        return f"<fair shares at {self.virtual_s:.6f}: {self.present} clients>"

    # ------------------------------------------------------------ places

    def place(self, client: int, priority: int) -> tuple[float, float]:
        """The start tag and the rank that a request of this client would get now.

        Priority is counted in seconds of all clients' work: virtual time grows by 1/clients while the slots work for
        one second, so a step is `AGEING_S / clients`. The number of clients changes; that must not turn around two
        requests of one client and one priority, so a rank is never smaller than that of one that is queued.
        """
        known = self._clients.get(client)
        present = self.present + (known is None or not known.unfinished)
        tag = self._start(known, present)
        if not priority:
            return tag, tag
        priority = _bounded(priority)
        rank = tag - priority * AGEING_S / present
        return tag, rank if known is None else max(rank, known.last.get(priority, rank))

    def turn_s(self, rank: float) -> float:
        """Return the seconds of the slots' work until a request of this rank has its turn."""
        return max(0.0, rank - self.virtual_s) * self.present

    def _start(self, known: _Client | None, present: int) -> float:
        """Return the start tag of a client's next request, which is never before the client's last one ends.

        A client that has requests queued, and whose last one ends before virtual time, has waited. It is owed what it did
        not get: its share of `OWED_S` at most.

        Any other client starts at the virtual time. If the first request that waits has an earlier tag, the client
        starts beside it, but at most a second of the slots' work before virtual time. Virtual time follows all work, also
        the company that batches take out of turn, so it passes requests that wait. A newcomer should not have to wait for
        all of these. The bound is needed, because with endless newcomers the first that waits could be one of them for
        ever.
        """
        finish = None if known is None else known.finish
        if known is not None and finish is not None and known.queued:
            return max(finish, self.virtual_s - OWED_S / present)
        beside = self._first_tag()
        if beside is None:
            beside = self.virtual_s
        start = max(min(self.virtual_s, beside), self.virtual_s - AGEING_S / present)
        return start if finish is None else max(start, finish)

    # ------------------------------------------------------------ requests

    def stamp(self, client: int, share_s: float, priority: int) -> tuple[float, float]:
        """The `place` of a request that is admitted and queued, and takes `share_s` seconds of all slots."""
        tag, rank = self.place(client, priority)
        known = self._clients.get(client)
        if known is None:
            if len(self._clients) > self._clean_at:
                self._forget()
            known = self._clients[client] = _Client()
        self.present += not known.unfinished
        known.unfinished += 1
        known.queued += 1
        known.finish = _end(tag, share_s)
        if priority:
            known.last[_bounded(priority)] = rank
        return tag, rank

    def withdraw(self, client: int, tag: float, share_s: float) -> None:
        """Take back the charge for a queued request of this client, with this start tag: it ends without a turn.

        If it was the client's last, the next one starts where it would have. In the middle of others it stays charged:
        those behind it have their tags.
        """
        known = self._clients[client]
        if known.finish == _end(tag, share_s):
            known.finish = tag

    def unqueued(self, client: int) -> None:
        """Note that a request of this client is queued no longer: it runs, or has ended."""
        known = self._clients[client]
        known.queued -= 1
        if not known.queued:
            known.last.clear()

    def ended(self, client: int) -> None:
        """Note that a request of this client has ended."""
        known = self._clients[client]
        known.unfinished -= 1
        self.present -= not known.unfinished

    def dispatched(self, tag: float, rank: float, share_s: float) -> None:
        """A batch starts for the request with this tag and rank; all its members take `share_s` together.

        Why no request starves: all work that has its turn moves virtual time by its `share_s / (present + 1)` at least, and
        `present` is bounded by the queue. A client that comes later gets a tag that is at most a second of work before the
        virtual time, so a rank of at least that less `MAX_PRIORITY` steps. Once virtual time is that much past the rank of
        a request that waits, no new client passes it, and those that were here pass it by what they are owed.

        The company that a batch takes along does not count with its start tags: it may have come from far behind. Of the
        tag and the rank the smaller counts: a priority changes the order, and must not move virtual time ahead.
        """
        self.virtual_s = max(self.virtual_s + share_s / (self.present + 1), min(tag, rank))

    def charge(self, client: int, share_s: float) -> None:
        """Slots worked for `share_s` because of a request of this client, and not as its turn: it pays with later turns.

        The work moves virtual time like any other, also where the client never comes back to pay.
        """
        self.virtual_s += share_s / (self.present + 1)
        known = self._clients.setdefault(client, _Client())
        finish = self.virtual_s if known.finish is None else known.finish
        known.finish = max(finish, self.virtual_s) + share_s

    # ------------------------------------------------------------ clients

    def catch_up(self) -> None:
        """Forgive all debts, because nothing waits: the next client to come goes first."""
        finishes = [known.finish for known in self._clients.values() if known.finish is not None]
        if finishes:
            self.virtual_s = max(self.virtual_s, *finishes)
            self._clients = {client: known for client, known in self._clients.items() if known.unfinished}
            for known in self._clients.values():
                known.finish = None
            self._clean_at = _FEW_CLIENTS

    def absorb(self, other: FairShares) -> None:
        """A slot joined that serves models of both: from now on they share one virtual time."""
        self.virtual_s = max(self.virtual_s, other.virtual_s)
        for client, theirs in other._clients.items():
            own = self._clients.setdefault(client, _Client())
            own.unfinished += theirs.unfinished
            own.queued += theirs.queued
            finishes = [finish for finish in (own.finish, theirs.finish) if finish is not None]
            own.finish = max(finishes, default=None)
            for priority, rank in theirs.last.items():
                own.last[priority] = max(rank, own.last.get(priority, rank))
        self.present = sum([known.unfinished > 0 for known in self._clients.values()])

    def unfinished(self) -> dict[int, tuple[int, int]]:
        """Unfinished and queued requests of each client that has any; for checks only."""
        return {
            client: (known.unfinished, known.queued)
            for client, known in self._clients.items()
            if known.unfinished
        }

    def _forget(self) -> None:
        """Drops the clients that are gone and owe nothing any more."""
        self._clients = {
            client: known
            for client, known in self._clients.items()
            if known.unfinished or (known.finish is not None and known.finish > self.virtual_s)
        }
        self._clean_at = max(_FEW_CLIENTS, 2 * len(self._clients))


def _bounded(priority: int) -> int:
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))


def _end(tag: float, share_s: float) -> float:
    """Where a request ends, on the scale of virtual time."""
    return tag + max(share_s, _LEAST_S)


class QueueRoom:
    """What waits, of all clients together and of each, and which clients asked for room lately."""

    __slots__ = (
        "_asked",
        "_asked_before",
        "_held",
        "_until_replaced",
        "max_bytes",
        "max_requests",
        "max_s",
        "nbytes",
        "requests",
        "sharing",
    )

    def __init__(self, max_requests: int, max_bytes: int, max_s: float | None) -> None:
        if max_requests < 1 or max_bytes < 1:
            raise ValueError("the queue must have room for at least one request and one byte")
        if max_s is not None and not max_s > 0.0:
            raise ValueError("the queue must have room for at least some seconds")
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.max_s = max_s
        self.requests = 0
        self.nbytes = 0
        self.sharing = 0
        """The number of clients that divide the queue: those that asked lately."""
        self._held: dict[int, tuple[int, int, float]] = {}
        """Requests, bytes and predicted seconds of each client that has any waiting."""
        self._asked: set[int] = set()
        """The clients that asked since the content was replaced."""
        self._asked_before: set[int] = set()
        """Those that did while it was being replaced."""
        self._until_replaced = max_requests

    def __repr__(self) -> str:
        return f"<queue room: {self.requests} of {self.max_requests} requests, {self.sharing} clients>"

    def ask(self, client: int) -> None:
        """A client wants room: it has a share from now on."""
        asked = self._asked
        if client in asked:
            return
        if len(asked) >= self.max_requests:
            self._replaced()
        self._asked.add(client)
        if client not in self._asked_before:
            self.sharing += 1

    def exceeds(self, client: int, nbytes: int) -> bool:
        """Whether one more request of a client would take it above its share, and leave no share free."""
        requests, held_bytes, _ = self._held.get(client, (0, 0, 0.0))
        return self._crowds(requests, 1, self.requests, self.max_requests) or self._crowds(
            held_bytes, nbytes, self.nbytes, self.max_bytes
        )

    def exceeds_s(self, client: int, share_s: float, queued_s: float) -> bool:
        """The same in seconds of predicted work, of which `queued_s` wait."""
        held_s = self._held.get(client, (0, 0, 0.0))[2]
        return self.max_s is not None and self._crowds(held_s, share_s, queued_s, self.max_s)

    def _crowds(self, held: float, more: float, used: float, most: float) -> bool:
        share = most / max(1, self.sharing)
        return held > 0 and held + more > share and used + more + share > most

    def enter_new(self, client: int, nbytes: int, share_s: float) -> None:
        """A request waits that was admitted just now."""
        self.enter(client, nbytes, share_s)
        self._until_replaced -= 1
        if not self._until_replaced:
            self._replaced()

    def _replaced(self) -> None:
        self._asked_before, self._asked = self._asked, set()
        self.sharing = len(self._asked_before)
        self._until_replaced = self.max_requests

    def enter(self, client: int, nbytes: int, share_s: float) -> None:
        """A request of this client waits, beyond the bounds if it was admitted before."""
        requests, held_bytes, held_s = self._held.get(client, (0, 0, 0.0))
        self._held[client] = (requests + 1, held_bytes + nbytes, held_s + share_s)
        self.requests += 1
        self.nbytes += nbytes

    def leave(self, client: int, nbytes: int, share_s: float) -> None:
        """A request of this client waits no longer."""
        requests, held_bytes, held_s = self._held[client]
        if requests > 1:
            self._held[client] = (requests - 1, held_bytes - nbytes, held_s - share_s)
        else:
            del self._held[client]
        self.requests -= 1
        self.nbytes -= nbytes

    def held(self) -> dict[int, tuple[int, int]]:
        """Requests and bytes of each client that has any waiting; for checks only."""
        return {client: (requests, nbytes) for client, (requests, nbytes, _) in self._held.items()}
