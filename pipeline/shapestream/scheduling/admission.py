"""Admission and deadlines: the reasons to refuse a request at once, or to end it early.

The queue is bounded over all models, and divided between clients (`fairness.QueueRoom`). Without room, a request is
refused as `overloaded`, with an estimate of when the queue will have drained. Requests that are to be run again were
admitted before, and are never refused.

Until costs are measured, only deadlines that have passed refuse anything. After that a request is refused whose deadline
not even an optimistic prediction meets, and one that would probably wait too long. An idle slot with an empty queue tries
whatever comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from typing import Final, NamedTuple

from shapestream.scheduling.events import Arrival
from shapestream.scheduling.fairness import MAX_PRIORITY, NOMINAL_S, QueueRoom
from shapestream.scheduling.queueing import RUNNING, LazyHeap, ModelQueue, Queues, Request
from shapestream.scheduling.slots import SlotTable

SAFETY: Final = 1.4
"""Factor by which estimated waits and calls are multiplied where they are compared with what is left of a deadline.

Batches take longer in company, predictions err, and later requests may go first. Measured (docs/decisions.md): 1.25 loses
5 % of the goodput where calls vary by 40 %; a factor learned from late results gained nothing over 1.4, and what one
client did raised it for all."""

OPTIMISM: Final = 0.5
"""Of the predicted seconds; a deadline that not even this share leaves room for cannot be met."""


class Expiry:
    """The live requests that have a deadline."""

    __slots__ = ("_first",)

    def __init__(self) -> None:
        self._first = LazyHeap(RUNNING)
        """By when not even an optimistic prediction would start them any more, while they wait; by their deadline
        otherwise."""

    def __len__(self) -> int:
        return len(self._first)

    def watch(self, request: Request, deadline: float, alone_s: float | None) -> None:
        """Remember a deadline. `alone_s`: the seconds that the request takes on the fastest slot, where that is known."""
        self._first.push(deadline if alone_s is None else deadline - OPTIMISM * alone_s, request)

    def due(self, now: float) -> Request | None:
        """A request whose deadline has passed, or, while it waits, cannot be met any more; None if there is none."""
        while (first := self._first.first()) is not None and first[0] <= now:
            request = first[2]
            deadline = request.deadline
            if deadline is None or deadline <= now or request.state is not RUNNING:
                return request
            # It left the queue in time; now its deadline itself counts.
            self._first.postpone(deadline)
        return None

    def next(self) -> float | None:
        """When to look again."""
        first = self._first.first()
        return None if first is None else first[0]

    def shrink(self, living: int) -> None:
        """Throws out what has ended, if it outnumbers the `living` requests."""
        self._first.shrink(living)

    def living(self) -> list[Request]:
        """Every live request with a deadline; for checks only."""
        return self._first.living()


MAX_RETRY_AFTER_S = 60.0
"""No caller is asked to wait longer than this, however slow the model."""


class Refusal(NamedTuple):
    """Why a request does not come in."""

    code: str
    message: str
    retry_after_s: float | None = None


class Terms(NamedTuple):
    """What a request is predicted to cost."""

    cost_s: float
    """Seconds of one slot, in good company; 0.0 while nothing is measured."""
    share_s: float
    """What counts for its client's share: the same divided by the model's slots, nominal while nothing is measured."""
    alone_s: float | None = None
    """Seconds from its start to its end on the fastest slot; None without a deadline, or while nothing is measured."""
    call_s: float = 0.0
    """Seconds of its call in good company, with as many of its like as pay; 0.0 while nothing is measured.

    On the most common slot; of a request with a deadline, on the fastest."""


class Admission:
    """What may come into the queue, and what it costs.

    `room` is how much the queue holds and may hold, `queues` are what waits in it, and `slots` where it may run.
    """

    __slots__ = (
        "_alone_s",
        "_refused_at",
        "_slots",
        "_terms",
        "draining",
        "queues",
        "room",
    )

    def __init__(
        self,
        room: QueueRoom,
        queues: Queues,
        slots: SlotTable,
    ) -> None:
        self.room = room
        self.queues = queues
        self._slots = slots
        self.draining = False
        self._terms: dict[tuple[str, tuple[int, ...]], Terms | Refusal] = {}
        self._refused_at: dict[str, float] = {}
        """By model, the last time that a request was refused because of its predicted wait."""
        self._alone_s: dict[tuple[str, tuple[int, ...]], float | None] = {}

    def new_turn(self) -> None:
        """Predictions are looked up once for all that arrive together."""
        self._terms.clear()
        self._alone_s.clear()

    def consider(
        self, arrival: Arrival, queue: ModelQueue | None, clients: Mapping[int, int], now: float
    ) -> Terms | Refusal:
        """What this request for the model of `queue` will cost, or why it must not come in.

        `clients` are those that have unfinished requests, and how many. Raises any error of a prediction; no book of
        requests is changed here.
        """
        if self.draining:
            return Refusal("draining", "the server finishes what it has and takes nothing new")
        if queue is None:
            return Refusal("unavailable", f"no model {arrival.model!r} is served here")
        if len(arrival.sizes) != len(queue.profile.dimensions) or min(arrival.sizes, default=0) < 0:
            raise ValueError(f"{arrival.sizes} are no sizes of {', '.join(queue.profile.dimensions)}")
        if arrival.deadline is not None and arrival.deadline <= now:
            return Refusal("deadline_exceeded", "the deadline had passed on arrival")
        room = self.room
        room.ask(arrival.client)
        if room.requests >= room.max_requests or room.nbytes + arrival.nbytes > room.max_bytes:
            return self._full(arrival)
        if room.exceeds(arrival.client, arrival.nbytes):
            return self._above_share()
        terms = self._terms_of(arrival, queue)
        if isinstance(terms, Refusal):
            return terms
        if room.max_s is not None and terms.cost_s:
            queued_s = self.queued_s()
            # One request may always wait, however long it lasts.
            if queued_s and queued_s + terms.share_s > room.max_s:
                message = f"the queue is full: {queued_s:.3f} of {room.max_s:g} s of predicted work"
                return Refusal("overloaded", message, self.drain_s())
            if room.exceeds_s(arrival.client, terms.share_s, queued_s):
                return self._above_share()
        if arrival.deadline is None:
            return terms
        return self._with_deadline(arrival, arrival.deadline, queue, terms, clients, now)

    def _full(self, arrival: Arrival) -> Refusal:
        if self.room.requests < self.room.max_requests and arrival.nbytes > self.room.max_bytes:
            message = (
                f"the request holds {arrival.nbytes} bytes; the queue takes {self.room.max_bytes} at most"
            )
            return Refusal("too_large", message)
        message = (
            f"the queue is full: {self.room.requests} of {self.room.max_requests} requests, "
            f"{self.room.nbytes} of {self.room.max_bytes} bytes"
        )
        return Refusal("overloaded", message, self.drain_s())

    def _above_share(self) -> Refusal:
        message = (
            f"this client has its share of the queue, which {self.room.sharing} clients divide, "
            f"and what is left is kept for the others"
        )
        return Refusal("overloaded", message, self.drain_s())

    def _too_large(self, queue: ModelQueue, rows: int, shape: tuple[int, ...]) -> Refusal | None:
        """Refuses what would be filled up to a call that holds more than calls may; its own sizes may be any.

        Without elements no byte stands for any size. So a size of 0 counts as 1, and rows are no more than a batch has:
        outputs may be as large as what is claimed.
        """
        profile = queue.profile
        call = queue.costs.call_bytes
        empty = not rows or 0 in shape
        if empty and rows > profile.max_batch:
            message = (
                f"the request has {rows} rows and no elements, and a batch of model {profile.name!r} has "
                f"{profile.max_batch} rows at most; send fewer rows"
            )
            return Refusal("too_large", message)
        if call.most is None:
            return None
        own = 0 if empty else call.of_call(rows, shape)
        if empty:
            rows, shape = max(1, rows), tuple([max(1, size) for size in shape])
        nbytes = call.of_batch(rows, shape)
        if nbytes <= max(call.most, own):
            return None
        message = (
            f"the smallest call that can run this request holds {nbytes} bytes of input, padding included, and calls of "
            f"model {profile.name!r} hold {call.most} at most; send fewer or smaller rows, or raise max_batch_bytes"
        )
        return Refusal("too_large", message)

    def _terms_of(self, arrival: Arrival, queue: ModelQueue) -> Terms | Refusal:
        sizes = arrival.sizes
        key = (arrival.model, sizes)
        terms = self._terms.get(key)
        if terms is None:
            rows, shape = (sizes[0], sizes[1:]) if queue.has_batch else (1, sizes)
            if (refusal := self._too_large(queue, rows, shape)) is not None:
                self._terms[key] = refusal
                return refusal
            company = queue.costs.company_s(sizes)
            slots = self._slots_of(queue)
            if company is None:
                rough_s = queue.costs.rough_s(sizes)
                terms = Terms(0.0, (NOMINAL_S if rough_s is None else rough_s) / slots)
            else:
                cost_s, call_s = company
                if not (isfinite(cost_s) and isfinite(call_s)):
                    raise ArithmeticError(f"a request of sizes {sizes} cannot be priced")
                terms = Terms(cost_s, cost_s / slots, call_s=call_s)
            self._terms[key] = terms
        return terms

    def _with_deadline(
        self,
        arrival: Arrival,
        deadline: float,
        queue: ModelQueue,
        terms: Terms,
        clients: Mapping[int, int],
        now: float,
    ) -> Terms | Refusal:
        """Refuses what cannot be met, or will hardly be, as far as that is known."""
        key = (arrival.model, arrival.sizes)
        if key not in self._alone_s:
            self._alone_s[key] = queue.costs.batch_s(arrival.sizes)
        alone_s = self._alone_s[key]
        pool = self._slots.pools[arrival.model]
        if alone_s is None or not pool.count:
            return terms
        alone_s *= pool.fastest
        left_s = deadline - now
        idle = bool(pool.free) and not queue.waiting
        free_s = pool.free_in_s(0.0, now)[0]
        if OPTIMISM * (free_s + alone_s) >= left_s:
            if idle:
                # It is tried, until its deadline: a prediction that is far too long must not keep all from running.
                return terms
            message = (
                f"the deadline cannot be met: {left_s:.3f} s are left, a slot is free in about {free_s:.3f} s, "
                f"and then it takes about {alone_s:.3f} s"
            )
            return Refusal("deadline_exceeded", message)
        terms = Terms(terms.cost_s, terms.share_s, alone_s, max(alone_s, terms.call_s * pool.fastest))
        return terms if idle else self._with_others(arrival, queue, terms, alone_s, left_s, clients, now)

    def _with_others(
        self,
        arrival: Arrival,
        queue: ModelQueue,
        terms: Terms,
        alone_s: float,
        left_s: float,
        clients: Mapping[int, int],
        now: float,
    ) -> Terms | Refusal:
        """Refuse what would probably wait, and then take, longer than what is left.

        It waits for what the slots hold, for reruns and suspects, and for the queued work that goes before it. Its call is
        one in good company, as far as there is any.
        """
        # A refusal a short while ago shows that the queue is as long as deadlines allow: it will not empty.
        crowded = now - self.refused_at(queue) < left_s
        pool = self._slots.pools[arrival.model]
        queued_s = sum([other.cost_s / self._slots_of(other) for other in queue.sharing])
        again_s = sum([other.again_s / self._slots_of(other) for other in queue.sharing])
        # Its company is queued already, and the planner cuts a call smaller that would take most of the time left.
        call_s = min(terms.call_s, alone_s + queued_s, max(alone_s, left_s / 2))

        def wait_for_s(before_s: float) -> float:
            return pool.free_in_s((again_s + before_s) * pool.count, now)[0]

        if not crowded and SAFETY * (wait_for_s(queued_s) + call_s) <= left_s:
            return terms  # whatever its turn, no more goes before it
        priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, arrival.priority))
        here = len(clients)
        rank = queue.shares.rank(arrival.client, priority, clients, here + (arrival.client not in clients))
        wait_s = wait_for_s(self._before_s(queue, rank, here, queued_s, crowded=crowded))
        if not wait_s or SAFETY * (wait_s + call_s) <= left_s:
            return terms
        self._refused_at[arrival.model] = now
        message = (
            f"the deadline would pass: {left_s:.3f} s are left, the wait is about {wait_s:.3f} s, "
            f"and then it takes about {call_s:.3f} s"
        )
        return Refusal("overloaded", message, min(wait_s, MAX_RETRY_AFTER_S))

    def _before_s(
        self, queue: ModelQueue, rank: float, clients: int, queued_s: float, *, crowded: bool
    ) -> float:
        """Return the predicted seconds of queued work that goes before a request of this rank.

        Virtual time has to come to the rank, at 1/clients of the slots' time. While the queue is `crowded`, newcomers take
        the turns of what is refused, so that may be more than `queued_s`, which is all that is queued now. What has a
        smaller rank goes before in any case.
        """
        until_rank_s = max(0.0, rank - queue.shares.virtual_s) * clients
        if until_rank_s >= queued_s:
            return until_rank_s if crowded else queued_s
        smaller_s = [
            min(other.cost_s, other.by_rank.cost_until(rank)) / self._slots_of(other)
            for other in queue.sharing
            if other.count
        ]
        return max(until_rank_s, sum(smaller_s))

    def _slots_of(self, queue: ModelQueue) -> int:
        """The slots that serve a model; one may come where there is none."""
        return max(1, self._slots.pools[queue.profile.name].count)

    def refused_at(self, queue: ModelQueue) -> float:
        """The last time that a request of this model was refused because of its predicted wait; -inf: never.

        The queue is then as long as deadlines allow: a call that takes longer than predicted makes some request late.
        """
        return self._refused_at.get(queue.profile.name, -inf)

    def queued_s(self) -> float:
        """Predicted seconds that the slots need for what waits.

        Models are taken to share their slots, so their times add up: the estimate errs upwards.
        """
        return sum([queue.waiting_s / self._slots_of(queue) for queue in self.queues.waiting()])

    def drain_s(self) -> float | None:
        """Seconds until what waits will have been started, as estimated; None while nothing is measured."""
        total: float | None = None
        for queue in self.queues.waiting():
            if not queue.waiting:
                continue
            cost_s = queue.waiting_s
            if not cost_s:  # it came before anything was measured
                request_s = queue.costs.mean_request_s
                if request_s is None:
                    continue
                cost_s = queue.waiting * request_s
            total = (total or 0.0) + cost_s / self._slots_of(queue)
        return None if total is None else min(total, MAX_RETRY_AFTER_S)
