"""Fair shares between clients, by cost: which request's turn it is, written as a number when it arrives.

A client, here and in all of the scheduler, is whoever has a share: the caller numbers them (serving/sessions.py).

This is start-time fair queueing (P. Goyal, H. M. Vin, H. Cheng, "Start-time fair queuing", SIGCOMM 1996). A
request's *start tag* is the virtual time, or where its client's former requests end on that scale if that is later;
its client's next request starts where this one ends: at its start tag plus its predicted seconds on all slots of
the model. Requests go in the order of their *rank*: the start tag less what their priority is worth. So a client
that sends much queues behind itself, one that sends little goes at the virtual time, which is now, and clients that
nobody has to wait for go in the order of arrival.

Virtual time is the largest start tag that was given a batch. It also passes with all work that is started, divided
between the clients that are here and one more. The original does not need that, since its flows are known and its
packets have no priorities. Here it is what keeps anybody from starving: see `dispatched`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shapestream.scheduling.model_queue import ModelQueue

__all__ = ["AGEING_S", "MAX_PRIORITY", "NOMINAL_S", "FairShares"]

AGEING_S = 1.0
"""Seconds of waiting that are worth one step of priority."""

MAX_PRIORITY = 32
"""Priorities beyond this, either way, count as this: it bounds how long a request can be passed."""

NOMINAL_S = 1e-3
"""What every request is taken to cost while nothing is measured: shares are then equal by count."""

_LEAST_S = 1e-9
"""No request is free of charge, or an endless stream of them could pass somebody."""

OWED_S = MAX_PRIORITY * AGEING_S
"""Seconds of the slots' work of which a client that is here is owed its share, at most: as long as priorities may pass it.
Whatever holds its requests up for longer saves nothing up for it."""

_FEW_CLIENTS = 64


class FairShares:
    """The tags of everybody who waits for the models in `queues`, which share slots, directly or through others.

    Models that share no slot have nothing to divide, so they have a `FairShares` each until a slot joins that
    serves both (`absorb`).
    """

    __slots__ = ("_clean_at", "_finish", "_last", "queues", "virtual_s")

    def __init__(self, queue: ModelQueue) -> None:
        self.queues = [queue]
        self.virtual_s = 0.0
        self._finish: dict[int, float] = {}
        """Where each client's last request ends."""
        self._last: dict[tuple[int, int], float] = {}
        """The last rank of a client's requests of one priority; not kept for priority 0, where ranks only grow."""
        self._clean_at = _FEW_CLIENTS

    def __repr__(self) -> str:
        return f"<fair shares at {self.virtual_s:.6f}: {len(self._finish)} clients remembered>"

    @property
    def remembered(self) -> int:
        """Clients whose past counts."""
        return len(self._finish)

    def rank(self, client: int, priority: int, here: Container[int], clients: int) -> float:
        """The rank that a request of this client would get now; the arguments are those of `admit`."""
        ahead_s = priority * AGEING_S / clients
        return self._start(client, here, clients) - ahead_s

    def _start(self, client: int, here: Container[int], clients: int) -> float:
        """The start tag of a client's next request.

        Where its last one ends. If that has passed, a client that is here has waited meanwhile, and is owed what it did
        not get: as much as its share of `OWED_S`. One that is not here starts at the virtual time.

        Or beside the first that waits, if that is at most a second of the slots' work before. Virtual time follows all
        work, also the company that a batch takes along from far behind. Requests of the same client that were no company
        to any are passed by it; nobody else should have to wait until they have gone, too. But not far before it: with
        endless newcomers the first that waits could be one of them for ever.
        """
        finish = self._finish.get(client)
        if finish is not None and client in here:
            return max(finish, self.virtual_s - OWED_S / clients)
        firsts = [first for queue in self.queues if (first := queue.oldest.first())]
        beside = min(firsts)[2].tag if firsts else self.virtual_s
        start = max(min(self.virtual_s, beside), self.virtual_s - AGEING_S / clients)
        return start if finish is None else max(start, finish)

    def admit(
        self, client: int, share_s: float, priority: int, here: Container[int], clients: int
    ) -> tuple[float, float]:
        """The start tag and the rank of a request that takes `share_s` seconds of all slots.

        `here` are the clients that have unfinished requests besides this one, and `clients` their number with this one's.

        Priority is counted in seconds of everybody's work: virtual time grows by 1/clients while the slots work for
        one second, so a step is `AGEING_S / clients`. The number of clients changes; that must not turn around two
        requests of one client and one priority, so a rank is never smaller than the last one.
        """
        ahead_s = priority * AGEING_S / clients
        tag = self._start(client, here, clients)
        if len(self._finish) > self._clean_at:
            self._forget(here)
        self._finish[client] = tag + max(share_s, _LEAST_S)
        if not priority:
            return tag, tag
        key = (client, priority)
        rank = max(tag - ahead_s, self._last.get(key, float("-inf")))
        self._last[key] = rank
        return tag, rank

    def withdraw(self, client: int, priority: int, rank: float, share_s: float) -> None:
        """A request of this client ends before it was given to any slot.

        If it was the client's last, the next one starts where it would have. In the middle of others it stays charged:
        those behind it have their tags. So does one with a priority, whose rank does not tell its tag.
        """
        if not priority and self._finish.get(client) == rank + max(share_s, _LEAST_S):
            self._finish[client] = rank

    def dispatched(self, tag: float, rank: float, share_s: float, clients: int) -> None:
        """A batch starts for the request with this tag and rank; all its members take `share_s` together.

        Why nobody starves: all that starts moves virtual time by its `share_s / (clients + 1)` at least, and `clients` is
        bounded by the queue. A client that comes later gets a tag that is at most a second of work before the virtual
        time, so a rank of at least that less `MAX_PRIORITY` steps. Once virtual time is that much past the rank of a
        request that waits, no new client passes it, and those that were here pass it by what they are owed.

        The company that a batch takes along does not count as its start tag: it may have come from far behind.
        """
        self.virtual_s = max(self.virtual_s + share_s / (clients + 1), min(tag, rank))

    def charge(self, client: int, share_s: float, clients: int) -> None:
        """Slots worked for `share_s` because of a request of this client, and not as its turn: it pays with later turns.

        The work moves virtual time like any other, also where the client never comes back to pay.
        """
        self.virtual_s += share_s / (clients + 1)
        self._finish[client] = max(self._finish.get(client, self.virtual_s), self.virtual_s) + share_s

    def catch_up(self) -> None:
        """Nothing waits: nobody owes anybody anything, and whoever comes next comes first."""
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
        for queue in other.queues:
            queue.shares = self
        self.queues.extend(other.queues)

    def _forget(self, here: Container[int]) -> None:
        """Drops the clients that are gone and owe nothing any more."""
        self._finish = {
            client: finish
            for client, finish in self._finish.items()
            if finish > self.virtual_s or client in here
        }
        self._last = {key: rank for key, rank in self._last.items() if key[0] in self._finish}
        self._clean_at = max(_FEW_CLIENTS, 2 * len(self._finish))
