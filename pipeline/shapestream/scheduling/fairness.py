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

from collections.abc import Callable, Collection, Container

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


class FairShares:
    """The tags of all clients of the models that share slots, directly or through others.

    Models that share no slot have nothing to divide, so they have a `FairShares` each until a slot joins that
    serves both (`absorb`).
    """

    __slots__ = ("_clean_at", "_finish", "_first_tag", "_last", "virtual_s")

    def __init__(self, first_tag: Callable[[], float | None]) -> None:
        """`first_tag` tells the start tag of the first request that waits for its turn; None if there is none."""
        self._first_tag = first_tag
        self.virtual_s = 0.0
        self._finish: dict[int, float] = {}
        """Where each client's last request ends."""
        self._last: dict[tuple[int, int], float] = {}
        """The last rank of a client's requests of one priority; not kept for priority 0, where ranks only grow."""
        self._clean_at = _FEW_CLIENTS

    def __repr__(self) -> str:
        return f"<fair shares at {self.virtual_s:.6f}: {len(self._finish)} clients remembered>"

    def place(self, client: int, priority: int, here: Collection[int]) -> tuple[float, float]:
        """The start tag and the rank that a request of this client would get now.

        `here` are the clients that have unfinished requests besides this one.

        Priority is counted in seconds of all clients' work: virtual time grows by 1/clients while the slots work for
        one second, so a step is `AGEING_S / clients`. The number of clients changes; that must not turn around two
        requests of one client and one priority, so a rank is never smaller than the last one.
        """
        clients = len(here) + (client not in here)
        tag = self._start(client, here, clients)
        if not priority:
            return tag, tag
        priority = _bounded(priority)
        return tag, max(
            tag - priority * AGEING_S / clients, self._last.get((client, priority), float("-inf"))
        )

    def turn_s(self, rank: float, clients: int) -> float:
        """Return the seconds of the slots' work until a request of this rank has its turn, with so many clients here."""
        return max(0.0, rank - self.virtual_s) * clients

    def _start(self, client: int, here: Container[int], clients: int) -> float:
        """Return the start tag of a client's next request, which is never before the client's last one ends.

        A client that is here, with unfinished requests, has waited if virtual time is past that end. It is owed what it did
        not get: its share of `OWED_S` at most.

        A client that is not here starts at the virtual time. If the first request that waits has an earlier tag, the client
        starts beside it, but at most a second of the slots' work before virtual time. Virtual time follows all work, also
        the company that batches take out of turn, so it passes requests that wait. A newcomer should not have to wait for
        all of these. The bound is needed, because with endless newcomers the first that waits could be one of them for
        ever.
        """
        finish = self._finish.get(client)
        if finish is not None and client in here:
            return max(finish, self.virtual_s - OWED_S / clients)
        beside = self._first_tag()
        if beside is None:
            beside = self.virtual_s
        start = max(min(self.virtual_s, beside), self.virtual_s - AGEING_S / clients)
        return start if finish is None else max(start, finish)

    def stamp(self, client: int, share_s: float, priority: int, here: Collection[int]) -> tuple[float, float]:
        """The `place` of a request that is admitted, and takes `share_s` seconds of all slots."""
        tag, rank = self.place(client, priority, here)
        if len(self._finish) > self._clean_at:
            self._forget(here)
        self._finish[client] = _end(tag, share_s)
        if priority:
            self._last[client, _bounded(priority)] = rank
        return tag, rank

    def withdraw(self, client: int, tag: float, share_s: float) -> None:
        """End a request of this client, with this start tag, before it was given to any slot.

        If it was the client's last, the next one starts where it would have. In the middle of others it stays charged:
        those behind it have their tags.
        """
        if self._finish.get(client) == _end(tag, share_s):
            self._finish[client] = tag

    def dispatched(self, tag: float, rank: float, share_s: float, clients: int) -> None:
        """A batch starts for the request with this tag and rank; all its members take `share_s` together.

        Why no request starves: all work that has its turn moves virtual time by its `share_s / (clients + 1)` at least, and
        `clients` is bounded by the queue. A client that comes later gets a tag that is at most a second of work before the
        virtual time, so a rank of at least that less `MAX_PRIORITY` steps. Once virtual time is that much past the rank of
        a request that waits, no new client passes it, and those that were here pass it by what they are owed.

        The company that a batch takes along does not count with its start tags: it may have come from far behind. Of the
        tag and the rank the smaller counts: a priority changes the order, and must not move virtual time ahead.
        """
        self.virtual_s = max(self.virtual_s + share_s / (clients + 1), min(tag, rank))

    def charge(self, client: int, share_s: float, clients: int) -> None:
        """Slots worked for `share_s` because of a request of this client, and not as its turn: it pays with later turns.

        The work moves virtual time like any other, also where the client never comes back to pay.
        """
        self.virtual_s += share_s / (clients + 1)
        self._finish[client] = max(self._finish.get(client, self.virtual_s), self.virtual_s) + share_s

    def catch_up(self) -> None:
        """Forgive all debts, because nothing waits: the next client to come goes first."""
        if self._finish:
            self.virtual_s = max(self.virtual_s, *self._finish.values())
            self._finish.clear()
            self._last.clear()
            self._clean_at = _FEW_CLIENTS

    def absorb(self, other: FairShares) -> None:
        """A slot joined that serves models of both: from now on they share one virtual time."""
        self.virtual_s = max(self.virtual_s, other.virtual_s)
        for client, finish in other._finish.items():
            self._finish[client] = max(finish, self._finish.get(client, finish))
        for key, rank in other._last.items():
            self._last[key] = max(rank, self._last.get(key, rank))

    def _forget(self, here: Container[int]) -> None:
        """Drops the clients that are gone and owe nothing any more."""
        self._finish = {
            client: finish
            for client, finish in self._finish.items()
            if finish > self.virtual_s or client in here
        }
        self._last = {key: rank for key, rank in self._last.items() if key[0] in self._finish}
        self._clean_at = max(_FEW_CLIENTS, 2 * len(self._finish))


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
