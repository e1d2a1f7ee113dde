"""Who may come in: the reasons for which a request is turned away at once.

The queue is bounded over all models, and its room is divided between clients (queue_room.py). When there is none for a
request, it is refused with `overloaded` and an estimate of when the queue will have drained. Requests that wait to be run
again were admitted before, and are never refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import inf, isfinite
from typing import NamedTuple

from shapestream.scheduling.call_bytes import CallBytes
from shapestream.scheduling.caution import FIRST_CAUTION, Caution
from shapestream.scheduling.cost_model import CostModel
from shapestream.scheduling.deadlines import (
    OPTIMISM,
    PROBE_EVERY,
    ahead_s,
    done_in_s,
    earliest_s,
    waiting_s,
)
from shapestream.scheduling.events import Arrival
from shapestream.scheduling.fairness import MAX_PRIORITY, NOMINAL_S
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.queue_room import QueueRoom
from shapestream.scheduling.records import Request

__all__ = ["MAX_RETRY_AFTER_S", "Admission", "Refusal", "Terms"]

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
    """Seconds of the call in good company, on the most common slot; 0.0 while nothing is measured."""
    promised: bool = False
    """Whether it was estimated to be in time. What was let in for another reason says nothing of estimates."""


class Estimates:
    """The experience with the estimated waits of one model."""

    __slots__ = ("caution", "probes", "saturated_at")

    def __init__(self) -> None:
        self.caution = Caution()
        self.probes = 0
        """Requests whose deadline seemed hopeless though a slot was free."""
        self.saturated_at = -inf
        """Last time that a request was refused because of its predicted wait."""


class Admission:
    """What may come into the queue, and what it costs.

    `room` is how much the queue holds and may hold, `waiting` are the models with waiting requests, and `costs` what they
    cost.
    """

    __slots__ = (
        "_alone_s",
        "_bytes",
        "_estimates",
        "_terms",
        "costs",
        "draining",
        "room",
        "waiting",
    )

    def __init__(
        self,
        room: QueueRoom,
        waiting: Mapping[str, ModelQueue],
        costs: CostModel,
    ) -> None:
        self.room = room
        self.waiting = waiting
        self.costs = costs
        self.draining = False
        self._terms: dict[tuple[str, tuple[int, ...]], Terms | Refusal] = {}
        self._bytes: dict[str, CallBytes] = {}
        """By model."""
        self._estimates: defaultdict[str, Estimates] = defaultdict(Estimates)
        """By model."""
        self._alone_s: dict[tuple[str, tuple[int, ...]], float | None] = {}

    def new_turn(self) -> None:
        """Predictions are looked up once for all that arrive together."""
        self._terms.clear()
        self._alone_s.clear()

    def consider(
        self, arrival: Arrival, queue: ModelQueue | None, clients: Mapping[int, int], now: float
    ) -> Terms | Refusal:
        """What this request for the model of `queue` will cost, or why it must not come in.

        `clients` are those that have unfinished requests, and how many. Raises whatever goes wrong; no book of requests is
        changed here.
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
        call = self._bytes.get(profile.name)
        if call is None:
            call = self._bytes[profile.name] = CallBytes(profile, queue.rounding)
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
            company = self.costs.company_s(arrival.model, shape, rows)
            slots = max(1, queue.slot_count)
            if company is None:
                rough_s = self.costs.rough_s(arrival.model, sizes)
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
        """Refuses what cannot be met, or will hardly be, as far as that is known; see deadlines.py."""
        key = (arrival.model, arrival.sizes)
        if key not in self._alone_s:
            self._alone_s[key] = self.costs.batch_s(arrival.model, arrival.sizes)
        alone_s = self._alone_s[key]
        if alone_s is None or not queue.slot_count:
            return terms
        alone_s *= queue.fastest
        terms = Terms(terms.cost_s, terms.share_s, alone_s, max(alone_s, terms.call_s * queue.fastest))
        left_s = deadline - now
        estimates = self._estimates[arrival.model]
        idle = bool(queue.free) and not queue.waiting
        free_in_s = earliest_s(queue, now)
        if OPTIMISM * (free_in_s + alone_s) >= left_s:
            estimates.probes += idle
            if not idle or estimates.probes % PROBE_EVERY:
                message = (
                    f"the deadline cannot be met: {left_s:.3f} s are left, and it takes about {alone_s:.3f} s"
                )
                return Refusal("deadline_exceeded", message)
        elif not idle:
            return self._with_others(arrival, queue, terms, alone_s, left_s, clients, now)
        return terms._replace(promised=estimates.caution.factor * (free_in_s + alone_s) <= left_s)

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
        """Refuses what would probably wait, and then take, longer than what is left."""
        estimates = self._estimates[arrival.model]
        caution = estimates.caution.factor
        crowded = now - estimates.saturated_at < left_s
        all_s = waiting_s(queue)
        # In time means with the whole call that it will be part of, unless that alone would take most of what is left.
        most_s = terms.call_s - alone_s
        more_s = min(most_s, all_s if crowded else max(0.0, all_s - most_s))
        call_s = min(alone_s + more_s, max(alone_s, left_s / 2))
        if not crowded and caution * (done_in_s(queue, all_s, now) + call_s) <= left_s:
            return terms._replace(promised=True)
        priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, arrival.priority))
        here = len(clients)
        rank = queue.shares.rank(arrival.client, priority, clients, here + (arrival.client not in clients))
        wait_s = done_in_s(queue, ahead_s(queue, rank, here, all_s, crowded=crowded), now)
        promised = caution * (wait_s + call_s) <= left_s
        if promised or not wait_s:
            return terms._replace(promised=promised)
        estimates.saturated_at = now
        message = (
            f"the deadline would pass: {left_s:.3f} s are left, the wait is about {wait_s:.3f} s, "
            f"and then it takes about {call_s:.3f} s"
        )
        if caution > FIRST_CAUTION:
            message += f"; such estimates were too short lately, and count {caution:.2f} times"
        return Refusal("overloaded", message, min(wait_s, MAX_RETRY_AFTER_S))

    def ended_well(self, model: str, requests: int) -> None:
        """Count requests of a model that got their results."""
        self._estimates[model].caution.ended_well(requests)

    def ended_late(self, request: Request, now: float) -> None:
        """Count a request that missed its deadline, which it was estimated to meet."""
        self._estimates[request.queue.profile.name].caution.ended_late(request.arrived, now)

    def saturated_at(self, queue: ModelQueue) -> float:
        """The last time that a request of this model was refused because of its predicted wait; -inf: never.

        The queue is then as long as deadlines allow: whatever takes longer than predicted makes some request late.
        """
        return self._estimates[queue.profile.name].saturated_at

    def queued_s(self) -> float:
        """Predicted seconds that the slots need for what waits.

        Models are taken to share their slots, so their times add up: the estimate errs upwards.
        """
        return sum([queue.cost_s / max(1, queue.slot_count) for queue in self.waiting.values()])

    def drain_s(self) -> float | None:
        """Seconds until what waits will have been started, as estimated; None while nothing is measured."""
        total: float | None = None
        for queue in self.waiting.values():
            if not queue.waiting:
                continue
            cost_s = queue.cost_s
            if not cost_s:  # it came before anything was measured, or waits to be run again
                request_s = self.costs.request_s(queue.profile.name)
                if request_s is None:
                    continue
                cost_s = queue.waiting * request_s
            total = (total or 0.0) + cost_s / max(1, queue.slot_count)
        return None if total is None else min(total, MAX_RETRY_AFTER_S)
