"""Fair shares between clients: of the slots' time (`FairShares`), and of the queue's room (`GroupRoom`, `QueueRoom`).

A client is whatever the caller numbers as one: a key with all its connections, or a session.

**Turns.** Slots are shared by start-time fair queueing (P. Goyal, H. M. Vin, H. Cheng, "Start-time fair queuing", SIGCOMM
1996) in two levels (P. Goyal, X. Guo, H. M. Vin, "A hierarchical CPU scheduler for multimedia operating systems", OSDI
1996): first between clients, then between the models of one client. Predicted seconds take the place of packet lengths.

- Each client has an account on the scale of virtual time (`ClientShare.start_s`). It has one `Flow` per model, with an
  account on a scale of the client's own. The smallest account, less the bonus of priority, has the turn. The versions of a
  name, and its generations, have one account together, or a name with two would get twice the share of another.
- When a batch starts, its predicted seconds are charged to its members' clients, in proportion to what each request would
  cost in an efficient batch (`ModelQueue.take`). *Seconds of all slots* are slot seconds / slots that serve the model.
- A client that was held up is owed its share of at most `OWED_S` of work. A client that had nothing queued starts at virtual
  time, or at its account if that is later.
- Priority orders the requests of one client by `AGEING_S` per step. Before the turns of other clients it goes by a part of
  that (`LEAD_BATCHES`), so that a client with priorities cannot hold up others, however often it comes back.
- Virtual time is the largest account, less priority, that ever had a turn. It also advances by all work that has its turn,
  divided by the present clients plus one. The original algorithm does not need that, since its flows are known and its
  packets have no priorities.
  Here it prevents starvation: all work that has its turn moves virtual time by its `share_s / (present + 1)` at least, and
  `present` is bounded by the queue. A client that comes later starts at most a second of work before the virtual time, less
  the lead of the largest priority. Once virtual time is that much past the account of a client that waits, no new client
  passes it. Clients that were here pass it by what they are owed.
- A request's *rank* is a forecast of its turn, made at its arrival, plus `PATIENCE` x the predicted seconds of what was
  submitted with it. It orders the requests of a bucket, and those of a flow with the whole of their priority (their
  *place*). So the short passes the long, and nothing is passed by what comes later than that.
- The work that a failed call makes run again (`Rework`) is paid once, by the client whose request is to blame.

**Room.** The queue is bounded in requests, bytes and, if asked, seconds of predicted work. Requests and bytes are divided
between *groups* of models that share slots: each group with queued requests has an equal part, and one more part is kept
for the first request of any other group. Groups with versions of one name have one part together, which is divided between
them in the same way: a canary that hangs fills half of it at most. Within a group, a client may fill more than its fair
share, but must leave one share free. The share of a client that asks several names is divided between these in the same way.
A request that is larger than a part may wait alone. No admitted request is dropped to make room.

A client counts if it *asked lately*: since the group's content was replaced last, or between the last two replacements. It
is replaced when as many requests were admitted, or as many clients asked, as the queue may hold requests. That bounds the
clients that are remembered.

It promises that clients with queued requests get equal shares of predicted seconds, and that no request waits for ever. A
client or group without queued requests finds room once others have drained by its part. Shares have no weights. Without
contention, the order is that of arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Generic, TypeVar

from shapestream.scheduling.events import Arrival

AGEING_S = 1.0
"""Seconds of waiting that are worth one step of priority."""

MAX_PRIORITY = 32
"""Largest priority, either way: larger ones count as this."""

PATIENCE = 2.0
"""Seconds of its client's later work that pass a request, per second of what was submitted with it (docs/decisions.md)."""

LEAD_BATCHES = 8
"""Batches of mean length that the largest priority goes before other clients' turns, divided by the clients: a step is worth
a quarter of one. A second per step let one client pass another one by 20 s of work whenever it came back."""

_BATCH_WEIGHT = 1 / 16
"""Weight of the newest batch in their mean length: a change of the load counts within some ten batches."""

NOMINAL_S = 1e-3
"""Seconds charged for any request while nothing is measured: shares are then equal by count."""

_LEAST_S = 1e-9
"""Smallest charge, in seconds: an endless stream of free requests could pass all others."""

OWED_S = MAX_PRIORITY * AGEING_S
"""Longest backlog, in seconds of the slots' work, that a client can claim its share of. A client that is held up for longer
saves up no more."""

_FEW_CLIENTS = 64

FlowT = TypeVar("FlowT", bound="Flow")


class ClientShare(Generic[FlowT]):
    """The account of a client at the models that share slots."""

    __slots__ = ("flows", "has_versions", "queued", "start_s", "unfinished", "virtual_s")

    def __init__(self) -> None:
        self.has_versions = False
        """True if any two of its flows are of one name."""
        self.start_s = 0.0
        """Where its next turn starts, on the scale of virtual time."""
        self.virtual_s = 0.0
        """The virtual time of its own models: the largest account of a flow that was given a turn."""
        self.unfinished = 0
        """Requests that have not ended."""
        self.queued = 0
        """Flows with queued requests."""
        self.flows: dict[str, FlowT] = {}
        """By model."""


class Flow:
    """The account and the counters of one client's queued requests for one model."""

    __slots__ = ("client", "has_priorities", "last", "name", "queued", "queued_bytes", "queued_s", "start_s")

    def __init__(self, client: ClientShare[Any], name: str) -> None:
        """`name`: of the model, without its version and its generation."""
        self.client = client
        self.name = name
        self.start_s = client.virtual_s
        """Where its next turn starts, on the scale of its client's virtual time. Flows of one name have one account."""
        for other in self.others_of_name():
            self.start_s = other.start_s
            client.has_versions = True
        self.queued = 0
        """Requests that wait for their first turn."""
        self.queued_bytes = 0
        self.queued_s = 0.0
        """Predicted seconds of all slots of these requests, in efficient batches."""
        self.last: dict[tuple[int, int, tuple[int, ...]], tuple[float, float]] = {}
        """Place and rank of the newest of the requests that are alike; empty while nothing is queued."""
        self.has_priorities = False
        """Whether any request had a priority since the flow was empty: the next one may then go before the first."""

    def others_of_name(self) -> list[Flow]:
        """Return its client's other flows of the same name."""
        return [one for one in self.client.flows.values() if one.name == self.name and one is not self]

    def share_account(self) -> None:
        """Let the other flows of its name have the same account."""
        for other in self.others_of_name():
            other.start_s = self.start_s

    def run_empty(self) -> None:
        """Reset the counters when the last request has left."""
        self.queued_s = 0.0  # sums of floats drift
        self.last.clear()
        self.has_priorities = False
        self.client.queued -= 1


class Rework(Generic[FlowT]):
    """The work that a failed call makes run again.

    The first member that is found to blame pays. A later one pays nothing, since the calls ran once. If none is to blame,
    all `payers` pay in equal parts when the last member has ended.
    """

    __slots__ = ("_payers", "members", "share_s")

    def __init__(self, share_s: float, members: int, payers: Sequence[FlowT]) -> None:
        self.share_s = share_s
        """Predicted seconds of all slots."""
        self.members = members
        """Those that have not ended."""
        self._payers: Sequence[FlowT] | None = payers

    def pay(self, shares: FairShares[FlowT], flow: FlowT) -> None:
        """Charge this flow, a member of which is to blame."""
        if self._payers is not None:
            self._payers = None
            shares.blame(flow, self.share_s)

    def leave(self, shares: FairShares[FlowT]) -> None:
        """Note that a member has ended. When the last one has, and none was to blame, all payers are charged."""
        self.members -= 1
        if not self.members and self._payers:
            for flow in self._payers:
                shares.blame(flow, self.share_s / len(self._payers))


class FairShares(Generic[FlowT]):
    """The accounts of all clients of the models that share slots, directly or through others.

    Models that share no slot have nothing to divide, so they have a `FairShares` each until a slot joins that
    serves both (`absorb`).
    """

    __slots__ = (
        "_batch_s",
        "_clean_at",
        "_clients",
        "_first_start_s",
        "_furthest_s",
        "present",
        "room",
        "virtual_s",
    )

    def __init__(self, first_start_s: Callable[[], float | None], room: GroupRoom) -> None:
        """`first_start_s`: returns the account of the first client that waits for its turn; None if none waits."""
        self._first_start_s = first_start_s
        self.room = room
        self.virtual_s = 0.0
        self.present = 0
        """Clients that have unfinished requests."""
        self._furthest_s = 0.0
        """The largest account that a client ever had."""
        self._clients: dict[int, ClientShare[FlowT]] = {}
        self._clean_at = _FEW_CLIENTS
        self._batch_s = 0.0
        """Mean seconds of all slots of recent batches."""

    def client(self, number: int) -> ClientShare[FlowT]:
        """Return the account of a client, and open one if there is none."""
        known = self._clients.get(number)
        if known is None:
            if len(self._clients) > self._clean_at:
                self._forget()
            known = self._clients[number] = ClientShare()
        return known

    def known(self, number: int) -> ClientShare[FlowT] | None:
        """Return the account of a client; None if it has none."""
        return self._clients.get(number)

    # ------------------------------------------------------------ forecasts

    def forecast(self, number: int, model: str, priority: int) -> float:
        """Return the rank that a request of this client for this model would get now, before its own work makes it later."""
        client = self._clients.get(number)
        present = self.present + (client is None or not client.unfinished)
        flow = None if client is None else client.flows.get(model)
        ahead_s = 0.0 if flow is None else _ahead_s(flow)
        start_s = self._start_s(client, present)
        return self._led(start_s, start_s + ahead_s - _bonus_s(priority, present))

    def turn_s(self, rank: float) -> float:
        """Return the seconds of the slots' work until a request of this rank has its turn."""
        return max(0.0, rank - self.virtual_s) * self.present

    def _start_s(self, client: ClientShare[FlowT] | None, present: int) -> float:
        """Return where the next turn of a client starts, which is never before its account.

        A client with queued requests starts at its account: it may have waited, and is owed what it did not get.

        Any other client starts at the virtual time. If the first client that waits has an earlier account, this one starts
        beside it, but at most a second of the slots' work before virtual time. Virtual time follows all work, also of
        members that share a batch out of turn, so it passes requests that wait. Without this rule a newcomer would wait for
        all of these. The bound keeps endless newcomers from being the first for ever.
        """
        if client is not None and client.queued:
            return client.start_s
        start_s = self.virtual_s
        if present > 1 and (beside := self._first_start_s()) is not None and beside < start_s:
            start_s = max(beside, start_s - AGEING_S / present)
        return start_s if client is None or client.start_s < start_s else client.start_s

    def _led(self, start_s: float, place: float) -> float:
        """Return the place among the requests of all clients of one that has this place among those of its client.

        `start_s`: where the client starts. No request without priority would have an earlier place than that, and virtual
        time: what priority gives beyond is scaled down to the lead over others.
        """
        floor_s = start_s if start_s < self.virtual_s else self.virtual_s
        if place >= floor_s:
            return place
        lead = LEAD_BATCHES * self._batch_s / (MAX_PRIORITY * AGEING_S)
        return floor_s - (floor_s - place) * lead if lead < 1.0 else place

    # ------------------------------------------------------------ requests

    def stamp(self, flow: FlowT, arrival: Arrival, share_s: float) -> tuple[float, float, float, float]:
        """Count a new request of `share_s` seconds of all slots.

        Return its place in its flow, its rank, and the virtual seconds of its priority: among its client's models, and
        among clients.

        Work is passed by what comes later and is shorter: both are later by `PATIENCE` x the seconds of all that was
        submitted with it. What comes once so much of its client's work has begun goes behind it.

        Priority is counted in seconds of all clients' work: virtual time grows by 1/clients while the slots work for
        one second, so a step is `AGEING_S / clients`. The number of clients and prices change, but requests of one flow that
        are alike (in sizes, priority and number submitted) must keep their order. So a place and a rank are never smaller
        than those of a queued one that is alike.
        """
        client: ClientShare[FlowT] = flow.client
        present = self.present + (not client.unfinished)
        self.present = present
        client.unfinished += 1
        if not client.queued:
            client.start_s = self._start_s(client, present)
            if len(client.flows) > 1:  # what its models owe each other is forgiven
                client.virtual_s = max([other.start_s for other in client.flows.values()])
        if not flow.queued:
            client.queued += 1
            if flow.start_s < client.virtual_s and not (
                client.has_versions and any(other.queued for other in flow.others_of_name())
            ):
                flow.start_s = client.virtual_s
        start_s = client.start_s
        place = start_s + (flow.queued_s if client.queued == 1 else _ahead_s(flow))
        rank = place = place + PATIENCE * arrival.submitted * share_s
        bonus_s = lead_s = 0.0
        priority = arrival.priority
        if priority:
            priority = _bounded(priority)
            bonus_s = _bonus_s(priority, present)
            lead_s = start_s - self._led(start_s, start_s - bonus_s)
            place -= bonus_s
            rank = self._led(start_s, place)
            flow.has_priorities = True
        alike = priority, arrival.submitted, arrival.sizes
        if flow.queued:
            last = flow.last.get(alike)
            if last is not None:
                if last[0] > place:
                    place = last[0]
                if last[1] > rank:
                    rank = last[1]
        flow.last[alike] = place, rank
        flow.queued += 1
        flow.queued_s += share_s
        return place, rank, bonus_s, lead_s

    def ended(self, flow: FlowT) -> None:
        """Note that a request of this flow has ended."""
        client = flow.client
        client.unfinished -= 1
        if not client.unfinished:
            self.present -= 1

    # ------------------------------------------------------------ turns

    def start(
        self,
        first: FlowT,
        bonus_s: float,
        lead_s: float,
        shares_s: Mapping[FlowT, float],
        share_s: float | None,
    ) -> None:
        """Advance virtual time for a batch that starts in the turn of the `first` flow, and charge its members' flows.

        `bonus_s`, `lead_s`: the priority of the request whose turn it is, as `stamp` returned it.
        `shares_s`: what the members of each flow would take in efficient batches. `share_s`: the batch, which is charged in
        these proportions, at least `_LEAST_S` to each flow; None: it takes as long as all of them. Both are seconds of all
        slots.

        The accounts of the other members do not count, since their turns may be far away. A priority changes the order,
        and must not move virtual time ahead.
        """
        total_s = sum(shares_s.values())
        if share_s is None:
            share_s = total_s
        part = share_s / total_s if total_s else 0.0
        self._batch_s += _BATCH_WEIGHT * (share_s - self._batch_s)
        if bonus_s < 0.0:
            bonus_s = lead_s = 0.0
        client = first.client
        virtual_s = self.virtual_s + share_s / (self.present + 1)
        turn_s = client.start_s - lead_s
        if turn_s > virtual_s:
            virtual_s = turn_s
        self.virtual_s = virtual_s
        turn_s = first.start_s - bonus_s
        if turn_s > client.virtual_s:
            client.virtual_s = turn_s
        least_start_s = virtual_s - OWED_S / self.present
        for flow, own_s in shares_s.items():
            own_s *= part
            if own_s < _LEAST_S:
                own_s = _LEAST_S
            client = flow.client
            start_s = flow.start_s + own_s
            least_s = client.virtual_s - OWED_S
            flow.start_s = start_s if start_s > least_s else least_s
            if client.has_versions:
                flow.share_account()
            start_s = client.start_s + own_s
            if start_s < least_start_s:
                start_s = least_start_s
            client.start_s = start_s
            if start_s > self._furthest_s:
                self._furthest_s = start_s

    def blame(self, flow: FlowT, share_s: float) -> None:
        """Charge a flow for `share_s` seconds of work that its request caused outside its turn. Its next turns are later.

        The work moves virtual time like any other, also where the client never comes back to pay. A client without queued
        requests would start again at virtual time, so it pays from there.
        """
        client = flow.client
        self.virtual_s += share_s / (self.present + 1)
        client.start_s = (client.start_s if client.queued else max(client.start_s, self.virtual_s)) + share_s
        flow.start_s += share_s
        if client.has_versions:
            flow.share_account()
        self._furthest_s = max(self._furthest_s, client.start_s)

    # ------------------------------------------------------------ clients

    def catch_up(self) -> None:
        """Forgive all debts, because nothing waits: all clients start at the same virtual time again."""
        if self._furthest_s > self.virtual_s:
            self.virtual_s = self._furthest_s

    def absorb(self, other: FairShares[FlowT]) -> None:
        """Merge two groups, because a slot joined that serves models of both: one virtual time, one part of the room."""
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
            own.has_versions = len({flow.name for flow in own.flows.values()}) < len(own.flows)
            for flow in theirs.flows.values():
                flow.client = own
        self.present = sum([known.unfinished > 0 for known in self._clients.values()])

    def unfinished(self) -> dict[int, tuple[int, int, int]]:
        """Return unfinished and queued requests, and bytes of these, of each client that has any; for checks only."""
        return {
            client: (
                known.unfinished,
                sum([flow.queued for flow in known.flows.values()]),
                sum([flow.queued_bytes for flow in known.flows.values()]),
            )
            for client, known in self._clients.items()
            if known.unfinished
        }

    def forget_model(self, model: str, name: str) -> None:
        """Forget the accounts of a model that is gone. None of its flows holds a request. `name`: without its version."""
        for client in self._clients.values():
            client.flows.pop(model, None)
        self.room.forget_model(name)

    def _forget(self) -> None:
        """Forget clients without requests that owe nothing."""
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
    """Return the bonus of a priority, in seconds of virtual time."""
    return _bounded(priority) * AGEING_S / present


def _ahead_s(flow: Flow) -> float:
    """Return the queued work of a client that goes before one more request of this flow.

    Its models take turns, and those that had less of its time than this one catch up first.
    """
    ahead_s = own_s = flow.queued_s
    for other in flow.client.flows.values():
        if other.queued and other is not flow:
            if other.name == flow.name:
                ahead_s += other.queued_s  # one account, so they go in order of arrival
                continue
            ahead_s += min(own_s, other.queued_s) + max(0.0, flow.start_s - other.start_s)
    return ahead_s


class RoomPart:
    """The groups of models that have names in common: one part of the room."""

    __slots__ = ("groups", "models", "waiting")

    def __init__(self) -> None:
        self.groups: list[GroupRoom] = []
        self.models: Counter[str] = Counter()
        """The number of its models by name, without versions."""
        self.waiting = 0
        """Groups for which a request waits."""


class QueueRoom:
    """The content of the whole queue, its bounds, and the parts that divide it."""

    __slots__ = ("by_name", "groups", "max_bytes", "max_requests", "nbytes", "parts", "requests", "waiting")

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        if max_requests < 1 or max_bytes < 1:
            raise ValueError("the queue must have room for at least one request and one byte")
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.requests = 0
        self.nbytes = 0
        self.groups = 0
        self.by_name: dict[str, RoomPart] = {}
        self.parts = 0
        """Distinct ones of these."""
        self.waiting = 0
        """Parts for which a request waits."""


class GroupRoom:
    """The queued requests of models that share slots, and the clients that asked them lately."""

    __slots__ = (
        "_asked",
        "_asked_before",
        "_newest",
        "_newest_at",
        "_until_replaced",
        "nbytes",
        "others_at",
        "part",
        "requests",
        "several",
        "sharing",
        "whole",
    )

    def __init__(self, whole: QueueRoom, name: str) -> None:
        """`name`: of its only model, without the version."""
        self.whole = whole
        whole.groups += 1
        part = whole.by_name.get(name)
        if part is None:
            part = whole.by_name[name] = RoomPart()
            whole.parts += 1
        part.groups.append(self)
        part.models[name] += 1
        self.part = part
        self.requests = 0
        self.nbytes = 0
        self.sharing = 0
        """The number of clients that divide the group's part: those that asked lately."""
        self.several: set[int] = set()
        """Those of them that asked several models."""
        self._asked: dict[int, set[str]] = {}
        """The clients that asked since the content was replaced, and the names of models that they asked."""
        self._asked_before: dict[int, set[str]] = {}
        """Those that did while it was being replaced."""
        self._until_replaced = whole.max_requests
        self._newest: int | None = None
        """The client that asked last."""
        self._newest_at = -inf
        self.others_at = -inf
        """When another client than that one asked last."""

    @property
    def parts(self) -> int:
        """The number of pieces into which the room is divided once a request waits here; the group has one.

        The room has a part for all names for which requests wait, and one for the first that comes of all others. The
        groups of one name divide their part in the same way.
        """
        whole, part = self.whole, self.part
        waiting = whole.waiting + (not part.waiting)
        groups = part.waiting + (not self.requests)
        return (waiting + (waiting < whole.parts)) * (groups + (groups < len(part.groups)))

    def ask(self, client: int, model: str, now: float) -> None:
        """Note that a client wants room for a model: both have a share from now on."""
        if client != self._newest:
            self.others_at, self._newest = self._newest_at, client
        self._newest_at = now
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
        """Tell whether one more request would take a client above its share and leave no share free."""
        most, most_bytes = self.whole.max_requests / parts, self.whole.max_bytes / parts
        taken = 1.0 - 1.0 / self.sharing
        if self.requests + 1 <= taken * most and self.nbytes + nbytes <= taken * most_bytes:
            return False  # a share is free, whatever the client has
        flows = client.flows.values()
        share, share_bytes = most / self.sharing, most_bytes / self.sharing
        held, held_bytes = sum([flow.queued for flow in flows]), sum([flow.queued_bytes for flow in flows])
        return _crowds(held, 1, self.requests, most, share, share) or _crowds(
            held_bytes, nbytes, self.nbytes, most_bytes, share_bytes, share_bytes
        )

    def exceeds_part(self, flows: Sequence[Flow], models: int, nbytes: int, parts: int) -> bool:
        """Tell whether one more request would take the flows of a name above their part and leave no part free.

        The client asks so many `models`. Apart from a part for one of the others, a share for another client stays free.
        """
        whole = self.whole
        for held, more, used, most in (
            (sum([flow.queued for flow in flows]), 1, self.requests, whole.max_requests / parts),
            (sum([flow.queued_bytes for flow in flows]), nbytes, self.nbytes, whole.max_bytes / parts),
        ):
            share = most / self.sharing
            part = share / models
            if _crowds(held, more, used, most, part, part + (share if self.sharing > 1 else 0.0)):
                return True
        return False

    def enter_new(self, nbytes: int) -> None:
        """Count a request that was admitted just now."""
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
        """Count requests that wait again; the bounds do not apply to them."""
        whole = self.whole
        if not self.requests:
            part = self.part
            if not part.waiting:
                whole.waiting += 1
            part.waiting += 1
        self.requests += requests
        self.nbytes += nbytes
        whole.requests += requests
        whole.nbytes += nbytes

    def leave(self, requests: int, nbytes: int) -> None:
        """Count requests that have left the queue."""
        whole = self.whole
        self.requests -= requests
        self.nbytes -= nbytes
        whole.requests -= requests
        whole.nbytes -= nbytes
        if not self.requests:
            part = self.part
            part.waiting -= 1
            if not part.waiting:
                whole.waiting -= 1

    def forget_model(self, model: str) -> None:
        """Forget a model of this name. With the last one it is forgotten who asked for it."""
        left = self.part.models
        left[model] -= 1
        if left[model]:
            return
        del left[model], self.whole.by_name[model]
        for asked in (self._asked, self._asked_before):
            for models in asked.values():
                models.discard(model)
        self._count_sharing()

    def end(self) -> None:
        """End a group whose last model is gone."""
        self.whole.groups -= 1
        self.part.groups.remove(self)
        self.whole.parts -= not self.part.groups

    def absorb(self, other: GroupRoom) -> None:
        """Merge another group into this one."""
        whole, part, theirs = self.whole, self.part, other.part
        if theirs is not part:
            whole.parts -= 1
            whole.waiting -= bool(part.waiting and theirs.waiting)
            part.waiting += theirs.waiting
            part.groups += theirs.groups
            part.models += theirs.models
            whole.by_name.update(dict.fromkeys(theirs.models, part))
            for group in theirs.groups:
                group.part = part
        whole.groups -= 1
        part.groups.remove(other)
        part.waiting -= bool(self.requests and other.requests)
        self.requests += other.requests
        self.nbytes += other.nbytes
        for own, others in ((self._asked, other._asked), (self._asked_before, other._asked_before)):
            for client, models in others.items():
                own[client] = own.get(client, set()) | models
        self._count_sharing()
        # If the same client asked last in both, it counts as two for a moment.
        self.others_at = max(self.others_at, other.others_at, min(self._newest_at, other._newest_at))
        if other._newest_at > self._newest_at:
            self._newest, self._newest_at = other._newest, other._newest_at


def _crowds(held: float, more: float, used: float, most: float, part: float, kept: float) -> bool:
    """Tell whether an owner of `held` that gets `more` exceeds its part, and leaves less than `kept` of `most` free."""
    return held > 0 and held + more > part and used + more + kept > most
