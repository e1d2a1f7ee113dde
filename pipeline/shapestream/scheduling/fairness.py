"""Fair shares between clients: of the slots' time, and of the queue's room.

A client, here and in all of the scheduler, is one share; the caller numbers them.

**Turns.** This is start-time fair queueing (P. Goyal, H. M. Vin, H. Cheng, "Start-time fair queuing", SIGCOMM 1996), in two
levels (P. Goyal, X. Guo, H. M. Vin, "A hierarchical CPU scheduler for multimedia operating systems", OSDI 1996): slots are
shared between clients, and a client's part between the models that it asks. Each `ClientShare` has an account on the scale
of virtual time, and in it one `Flow` per model on a scale of the client's own. The client whose account is smallest has the
turn, then the flow, then the first request of the flow.

An account is charged when a batch starts: each member pays its part of what the call is predicted to take, in proportion to
what it would cost in good company. So a request that shares no call pays for the whole. What a failed call makes run again
is the `Rework` of its members, and is paid once. A client without queued requests starts again at virtual time, or where its
account is if that is later. A client that was held up is owed what it did not get, within `OWED_S`.

A request's *rank* is a forecast of its turn at its arrival: its client's account, and the queued work that goes before. It
orders the requests of a flow, and the company in a bucket. Priorities move a request forward in both orders. Without
contention, order is arrival order.

Virtual time is the largest account that was given a turn; one that priority moved forward counts as it was moved. It also
passes with all work that has its turn, divided between the clients that are here and one more. The original does not
need that, since its flows are known and its packets have no priorities. Here it prevents starvation: see `begin`.

**Room.** The queue is bounded in requests, in bytes and, if asked, in seconds of predicted work. Requests and bytes are
divided first between *groups* of models that share slots. Each group for which requests wait has an equal part, and one
more part is for all the others: the first that comes finds room, whatever the rest does. No group has more than its
part. Two groups whose requests wait therefore never wait for each other's slots. A request that is larger than a part
may wait alone.

Within a group, a client's fair share is the whole of the part, divided by the clients that asked lately. A client may
have more than its share waiting, the whole part if no other client asks, but it leaves one share free: it is refused
while there is room for a client with less. The share of a client that asks several models is divided between these in
the same way. No admitted request is dropped to make room. A client that comes when one other fills the part is refused,
and finds room when that has drained by its share.

A group's content counts as replaced when as many requests were admitted, or as many clients asked, as the queue may hold
requests. A client asked lately if it asked since the last replacement, or between the last two. That also bounds the
clients that are remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

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

FlowT = TypeVar("FlowT", bound="Flow")


class ClientShare(Generic[FlowT]):
    """The account of a client at the models that share slots."""

    __slots__ = ("flows", "queued", "start_s", "unfinished", "virtual_s")

    def __init__(self) -> None:
        self.start_s = 0.0
        """Where its next turn starts, on the scale of virtual time."""
        self.virtual_s = 0.0
        """The virtual time of its own models: the largest account of a flow that was given a turn."""
        self.unfinished = 0
        """Requests that have not ended."""
        self.queued = 0
        """Lines with queued requests."""
        self.flows: dict[str, FlowT] = {}
        """By model."""


class Flow:
    """The queued requests of one client for one model, counted, and their account within the client's."""

    __slots__ = ("client", "has_priorities", "last", "queued", "queued_bytes", "queued_s", "start_s")

    def __init__(self, client: ClientShare[Any]) -> None:
        self.client = client
        self.start_s = client.virtual_s
        """Where its next turn starts, on the scale of its client's virtual time."""
        self.queued = 0
        """Requests that wait for their first turn."""
        self.queued_bytes = 0
        self.queued_s = 0.0
        """Predicted seconds of all slots that these take in good company."""
        self.last: dict[int, float] = {}
        """By priority, the rank of the last request, as long as any are queued."""
        self.has_priorities = False
        """Whether the next request may have another priority than the first: one had, since any are queued."""

    def run_empty(self) -> None:
        """Note that nothing is queued any more."""
        self.queued_s = 0.0  # sums of floats drift
        self.last.clear()
        self.has_priorities = False
        self.client.queued -= 1


class Rework(Generic[FlowT]):
    """What a failed call makes run again: the first member that is found to be to blame pays.

    If none is, all `payers` do in equal parts when the last member has ended. A later member that is to blame too pays
    nothing: the calls ran once.
    """

    __slots__ = ("_payers", "members", "share_s")

    def __init__(self, share_s: float, members: int, payers: Sequence[FlowT]) -> None:
        self.share_s = share_s
        """Predicted seconds of all slots."""
        self.members = members
        """Those that have not ended."""
        self._payers: Sequence[FlowT] | None = payers

    def pay(self, shares: FairShares[FlowT], flow: FlowT) -> None:
        """A member of this flow is to blame."""
        if self._payers is not None:
            self._payers = None
            shares.blame(flow, self.share_s)

    def leave(self, shares: FairShares[FlowT]) -> None:
        """A member has ended."""
        self.members -= 1
        if not self.members and self._payers:
            for flow in self._payers:
                shares.blame(flow, self.share_s / len(self._payers))


class FairShares(Generic[FlowT]):
    """The accounts of all clients of the models that share slots, directly or through others.

    Models that share no slot have nothing to divide, so they have a `FairShares` each until a slot joins that
    serves both (`absorb`).
    """

    __slots__ = ("_clean_at", "_clients", "_first_start_s", "_furthest_s", "present", "room", "virtual_s")

    def __init__(self, first_start_s: Callable[[], float | None], room: GroupRoom) -> None:
        """`first_start_s` tells the account of the first client that waits for its turn; None if there is none."""
        self._first_start_s = first_start_s
        self.room = room
        self.virtual_s = 0.0
        self.present = 0
        """Clients that have unfinished requests."""
        self._furthest_s = 0.0
        """The largest account that a client ever had."""
        self._clients: dict[int, ClientShare[FlowT]] = {}
        self._clean_at = _FEW_CLIENTS

    def __repr__(self) -> str:
        return f"<fair shares at {self.virtual_s:.6f}: {self.present} clients>"

    def client(self, number: int) -> ClientShare[FlowT]:
        """The account of a client, a new one if need be."""
        known = self._clients.get(number)
        if known is None:
            if len(self._clients) > self._clean_at:
                self._forget()
            known = self._clients[number] = ClientShare()
        return known

    def known(self, number: int) -> ClientShare[FlowT] | None:
        """The account of a client; None where there is none."""
        return self._clients.get(number)

    # ------------------------------------------------------------ forecasts

    def forecast(self, number: int, model: str, priority: int) -> float:
        """Return the rank that a request of this client for this model would get now."""
        client = self._clients.get(number)
        present = self.present + (client is None or not client.unfinished)
        flow = None if client is None else client.flows.get(model)
        ahead_s = 0.0 if flow is None else _ahead_s(flow)
        return self._start_s(client, present) + ahead_s - _bonus_s(_bounded(priority), present)

    def turn_s(self, rank: float) -> float:
        """Return the seconds of the slots' work until a request of this rank has its turn."""
        return max(0.0, rank - self.virtual_s) * self.present

    def _start_s(self, client: ClientShare[FlowT] | None, present: int) -> float:
        """Return where the next turn of a client starts, which is never before its account.

        A client that has requests queued starts at its account: it may have waited, and is owed what it did not get.

        Any other client starts at the virtual time. If the first client that waits has an earlier account, this one starts
        beside it, but at most a second of the slots' work before virtual time. Virtual time follows all work, also the
        company that batches take out of turn, so it passes requests that wait. A newcomer should not have to wait for all
        of these. The bound is needed, because with endless newcomers the first that waits could be one of them for ever.
        """
        if client is not None and client.queued:
            return client.start_s
        start_s = self.virtual_s
        if present > 1 and (beside := self._first_start_s()) is not None and beside < start_s:
            start_s = max(beside, start_s - AGEING_S / present)
        return start_s if client is None else max(start_s, client.start_s)

    # ------------------------------------------------------------ requests

    def stamp(self, flow: FlowT, share_s: float, priority: int) -> tuple[float, float]:
        """Queue a request that takes `share_s` seconds of all slots. Return its rank, and what its priority is worth.

        Priority is counted in seconds of all clients' work: virtual time grows by 1/clients while the slots work for
        one second, so a step is `AGEING_S / clients`. The number of clients changes; that must not turn around two
        requests of one flow and one priority, so a rank is never smaller than that of one that is queued.
        """
        client: ClientShare[FlowT] = flow.client
        present = self.present + (not client.unfinished)
        bonus_s = 0.0
        if priority:
            priority = _bounded(priority)
            bonus_s = _bonus_s(priority, present)
            flow.has_priorities = True
        self.present = present
        client.unfinished += 1
        if not client.queued:
            client.start_s = self._start_s(client, present)
            if len(client.flows) > 1:  # what its models owe each other is forgiven
                client.virtual_s = max([other.start_s for other in client.flows.values()])
        if not flow.queued:
            client.queued += 1
            if flow.start_s < client.virtual_s:
                flow.start_s = client.virtual_s
        rank = client.start_s - bonus_s + (flow.queued_s if client.queued == 1 else _ahead_s(flow))
        last = flow.last.get(priority)
        if last is not None and last > rank:
            rank = last
        flow.last[priority] = rank
        flow.queued += 1
        flow.queued_s += share_s
        return rank, bonus_s

    def ended(self, flow: FlowT) -> None:
        """Note that a request of this flow has ended."""
        client = flow.client
        client.unfinished -= 1
        if not client.unfinished:
            self.present -= 1

    # ------------------------------------------------------------ turns

    def begin(self, flow: FlowT, bonus_s: float, share_s: float) -> None:
        """A batch starts in the turn of this flow, for a request of this priority; all its members take `share_s` together.

        Why no client starves: all work that has its turn moves virtual time by its `share_s / (present + 1)` at least, and
        `present` is bounded by the queue. A client that comes later starts at most a second of work before the virtual
        time, less `MAX_PRIORITY` steps. Once virtual time is that much past the account of a client that waits, no new
        client passes it, and those that were here pass it by what they are owed.

        Company does not count with its accounts: it may have come from far behind. A priority changes the order, and must
        not move virtual time ahead.
        """
        client = flow.client
        if bonus_s < 0.0:
            bonus_s = 0.0
        self.virtual_s += share_s / (self.present + 1)
        if client.start_s - bonus_s > self.virtual_s:
            self.virtual_s = client.start_s - bonus_s
        if flow.start_s - bonus_s > client.virtual_s:
            client.virtual_s = flow.start_s - bonus_s

    def charge(self, shares_s: Mapping[FlowT, float], part: float) -> None:
        """Requests of these flows run in one call, of which each pays `part` of its seconds here; none is free of charge."""
        least_start_s = self.virtual_s - OWED_S / self.present
        for flow, share_s in shares_s.items():
            share_s *= part
            if share_s < _LEAST_S:
                share_s = _LEAST_S
            client = flow.client
            start_s = flow.start_s + share_s
            least_s = client.virtual_s - OWED_S
            flow.start_s = start_s if start_s > least_s else least_s
            start_s = client.start_s + share_s
            if start_s < least_start_s:
                start_s = least_start_s
            client.start_s = start_s
            if start_s > self._furthest_s:
                self._furthest_s = start_s

    def blame(self, flow: FlowT, share_s: float) -> None:
        """Slots work for `share_s` because of a request of this flow, and not as its turn: it pays with later turns.

        The work moves virtual time like any other, also where the client never comes back to pay. A client without queued
        requests would start again at virtual time, so it pays from there.
        """
        client = flow.client
        self.virtual_s += share_s / (self.present + 1)
        client.start_s = (client.start_s if client.queued else max(client.start_s, self.virtual_s)) + share_s
        flow.start_s += share_s
        self._furthest_s = max(self._furthest_s, client.start_s)

    # ------------------------------------------------------------ clients

    def catch_up(self) -> None:
        """Forgive all debts, because nothing waits: whoever comes next starts at the same virtual time."""
        self.virtual_s = max(self.virtual_s, self._furthest_s)

    def absorb(self, other: FairShares[FlowT]) -> None:
        """A slot joined that serves models of both: from now on they share one virtual time, and one part of the room."""
        self.room.absorb(other.room)
        self.virtual_s = max(self.virtual_s, other.virtual_s)
        self._furthest_s = max(self._furthest_s, other._furthest_s)
        for number, theirs in other._clients.items():
            own = self._clients.setdefault(number, theirs)
            if own is theirs:
                continue
            own.unfinished += theirs.unfinished
            own.queued += theirs.queued
            own.start_s = max(own.start_s, theirs.start_s)
            own.virtual_s = max(own.virtual_s, theirs.virtual_s)
            own.flows.update(theirs.flows)
            for flow in theirs.flows.values():
                flow.client = own
        self.present = sum([known.unfinished > 0 for known in self._clients.values()])

    def unfinished(self) -> dict[int, tuple[int, int, int]]:
        """Unfinished and queued requests, and bytes of these, of each client that has any; for checks only."""
        return {
            client: (
                known.unfinished,
                sum([flow.queued for flow in known.flows.values()]),
                sum([flow.queued_bytes for flow in known.flows.values()]),
            )
            for client, known in self._clients.items()
            if known.unfinished
        }

    def _forget(self) -> None:
        """Drops the clients that are gone and owe nothing any more."""
        gone = [
            (number, client)
            for number, client in self._clients.items()
            if not client.unfinished and client.start_s <= self.virtual_s
        ]
        for number, client in gone:
            client.flows.clear()  # a cycle of client and flow must not be left to the collector
            del self._clients[number]
        self._clean_at = max(_FEW_CLIENTS, 2 * len(self._clients))


def _bounded(priority: int) -> int:
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))


def _bonus_s(priority: int, present: int) -> float:
    """What a priority is worth on the scale of virtual time."""
    return priority * AGEING_S / present


def _ahead_s(flow: Flow) -> float:
    """Queued work of a client that goes before one more request of this flow.

    Its models take turns, and those that had less of its time than this one catch up first.
    """
    ahead_s = own_s = flow.queued_s
    for other in flow.client.flows.values():
        if other.queued and other is not flow:
            ahead_s += min(own_s, other.queued_s) + max(0.0, flow.start_s - other.start_s)
    return ahead_s


class QueueRoom:
    """What waits of all models together, how much may, and how many groups of models divide it."""

    __slots__ = ("groups", "max_bytes", "max_requests", "max_s", "nbytes", "requests", "waiting")

    def __init__(self, max_requests: int, max_bytes: int, max_s: float | None) -> None:
        if max_requests < 1 or max_bytes < 1:
            raise ValueError("the queue must have room for at least one request and one byte")
        if max_s is not None and not max_s > 0.0:
            raise ValueError("the queue must have room for at least some seconds")
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.max_s = max_s
        """Bounds the predicted work for the slots of each group, not the sum of them."""
        self.requests = 0
        self.nbytes = 0
        self.groups = 0
        self.waiting = 0
        """Groups for which a request waits."""

    def __repr__(self) -> str:
        return f"<queue room: {self.requests} of {self.max_requests} requests, {self.groups} groups>"


class GroupRoom:
    """What waits of the models that share slots, and which clients asked them for room lately."""

    __slots__ = (
        "_asked",
        "_asked_before",
        "_until_replaced",
        "nbytes",
        "requests",
        "several",
        "sharing",
        "whole",
    )

    def __init__(self, whole: QueueRoom) -> None:
        self.whole = whole
        whole.groups += 1
        self.requests = 0
        self.nbytes = 0
        self.sharing = 0
        """The number of clients that divide the group's part: those that asked lately."""
        self.several: set[int] = set()
        """Those of them that asked several models."""
        self._asked: dict[int, set[str]] = {}
        """The clients that asked since the content was replaced, and the models that they asked."""
        self._asked_before: dict[int, set[str]] = {}
        """Those that did while it was being replaced."""
        self._until_replaced = whole.max_requests

    def __repr__(self) -> str:
        return f"<room of a group: {self.requests} requests, {self.nbytes} bytes, {self.sharing} clients>"

    @property
    def parts(self) -> int:
        """Into how many parts the room is divided once a request waits here.

        One for each group for which requests wait, and one for the first that comes of all others.
        """
        waiting = self.whole.waiting + (not self.requests)
        return waiting + (waiting < self.whole.groups)

    def ask(self, client: int, model: str) -> None:
        """A client wants room for a model: both have a share from now on."""
        asked = self._asked.get(client)
        if asked is not None and model in asked:
            return
        if asked is None:
            if len(self._asked) >= self.whole.max_requests:
                self._replaced()
            asked = self._asked[client] = set()
            if client not in self._asked_before:
                self.sharing += 1
        asked.add(model)
        if self.models(client) > 1:
            self.several.add(client)

    def models(self, client: int) -> int:
        """Count the models that a client asked lately."""
        return len(self._asked.get(client, set()) | self._asked_before.get(client, set()))

    def is_full(self, nbytes: int, parts: int) -> bool:
        """Tell whether one more request would take the group above its part; a single one may have any size."""
        whole = self.whole
        return self.requests > 0 and (
            self.requests + 1 > whole.max_requests / parts or self.nbytes + nbytes > whole.max_bytes / parts
        )

    def exceeds(self, client: ClientShare[Any], nbytes: int, parts: int) -> bool:
        """Whether one more request of a client would take it above its share, and leave no share free."""
        most, most_bytes = self.whole.max_requests / parts, self.whole.max_bytes / parts
        taken = 1.0 - 1.0 / self.sharing
        if self.requests + 1 <= taken * most and self.nbytes + nbytes <= taken * most_bytes:
            return False  # a share is free, whatever the client has
        flows = client.flows.values()
        return self._crowds(sum([flow.queued for flow in flows]), 1, self.requests, most) or self._crowds(
            sum([flow.queued_bytes for flow in flows]), nbytes, self.nbytes, most_bytes
        )

    def exceeds_s(self, client: ClientShare[Any], share_s: float, queued_s: float) -> bool:
        """The same in seconds of predicted work, of which `queued_s` wait."""
        most_s = self.whole.max_s
        held_s = sum([flow.queued_s for flow in client.flows.values()])
        return most_s is not None and self._crowds(held_s, share_s, queued_s, most_s)

    def _crowds(self, held: float, more: float, used: float, most: float) -> bool:
        share = most / self.sharing
        return held > 0 and held + more > share and used + more + share > most

    def exceeds_part(
        self, flow: Flow, models: int, nbytes: int, share_s: float, queued_s: float, parts: int
    ) -> bool:
        """Whether one more request would take a flow above its part of its client's share, and leave none free.

        The client asks so many `models`. Apart from a part for one of the others, a share for another client stays free.
        """
        whole = self.whole
        requests, held_bytes, held_s = flow.queued, flow.queued_bytes, flow.queued_s
        return (
            self._crowds_models(models, requests, 1, self.requests, whole.max_requests / parts)
            or self._crowds_models(models, held_bytes, nbytes, self.nbytes, whole.max_bytes / parts)
            or (
                whole.max_s is not None
                and self._crowds_models(models, held_s, share_s, queued_s, whole.max_s)
            )
        )

    def _crowds_models(self, models: int, held: float, more: float, used: float, most: float) -> bool:
        share = most / self.sharing
        part = share / models
        kept = part + (share if self.sharing > 1 else 0.0)
        return held > 0 and held + more > part and used + more + kept > most

    def enter_new(self, nbytes: int) -> None:
        """A request waits that was admitted just now."""
        self.enter(1, nbytes)
        self._until_replaced -= 1
        if not self._until_replaced:
            self._replaced()

    def _replaced(self) -> None:
        self._asked_before, self._asked = self._asked, {}
        self._until_replaced = self.whole.max_requests
        self._count_sharing()

    def _count_sharing(self) -> None:
        clients = self._asked.keys() | self._asked_before.keys()
        self.sharing = len(clients)
        self.several = {client for client in clients if self.models(client) > 1}

    def enter(self, requests: int, nbytes: int) -> None:
        """Some requests wait, beyond the bounds if they were admitted before."""
        whole = self.whole
        if not self.requests:
            whole.waiting += 1
        self.requests += requests
        self.nbytes += nbytes
        whole.requests += requests
        whole.nbytes += nbytes

    def leave(self, requests: int, nbytes: int) -> None:
        """Some requests wait no longer."""
        whole = self.whole
        self.requests -= requests
        self.nbytes -= nbytes
        whole.requests -= requests
        whole.nbytes -= nbytes
        if not self.requests:
            whole.waiting -= 1

    def absorb(self, other: GroupRoom) -> None:
        """The groups become one, with one part."""
        whole = self.whole
        whole.groups -= 1
        whole.waiting -= bool(self.requests and other.requests)
        self.requests += other.requests
        self.nbytes += other.nbytes
        for own, theirs in ((self._asked, other._asked), (self._asked_before, other._asked_before)):
            for client, models in theirs.items():
                own[client] = own.get(client, set()) | models
        self._count_sharing()
