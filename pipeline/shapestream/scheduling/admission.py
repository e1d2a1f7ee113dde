"""Who may come in: the bounds of the queue, and the reasons for which a request is turned away at once.

The queue is bounded in requests, in bytes and, if asked, in seconds of predicted work, over all models. When it is
full, new requests are refused with `overloaded` and an estimate of when it will have drained; nothing that was
admitted is ever dropped to make room. Requests that wait to be run again were admitted before, and are never
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shapestream.scheduling.caution import FIRST_CAUTION
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


class Admission:
    """The queue's bounds, and what fills them.

    `waiting` are the models with waiting requests, and `costs` what they cost.
    """

    __slots__ = (
        "_alone_s",
        "_terms",
        "costs",
        "draining",
        "max_queued_bytes",
        "max_queued_requests",
        "max_queued_s",
        "queued_bytes",
        "queued_requests",
        "waiting",
    )

    def __init__(
        self,
        max_queued_requests: int,
        max_queued_bytes: int,
        max_queued_s: float | None,
        waiting: Mapping[str, ModelQueue],
        costs: CostModel,
    ) -> None:
        if max_queued_requests < 1 or max_queued_bytes < 1:
            raise ValueError("the queue must have room for at least one request and one byte")
        if max_queued_s is not None and not max_queued_s > 0.0:
            raise ValueError("the queue must have room for at least some seconds")
        self.max_queued_requests = max_queued_requests
        self.max_queued_bytes = max_queued_bytes
        self.max_queued_s = max_queued_s
        self.waiting = waiting
        self.costs = costs
        self.queued_requests = 0
        self.queued_bytes = 0
        self.draining = False
        self._terms: dict[tuple[str, tuple[int, ...]], Terms] = {}
        self._alone_s: dict[tuple[str, tuple[int, ...]], float | None] = {}

    def new_turn(self) -> None:
        """Predictions are looked up once for all that arrive together."""
        self._terms.clear()
        self._alone_s.clear()

    def consider(
        self, arrival: Arrival, queue: ModelQueue | None, clients: int, now: float
    ) -> Terms | Refusal:
        """What this request for the model of `queue` will cost, or why it must not come in.

        `clients` have unfinished requests.
        """
        if self.draining:
            return Refusal("draining", "the server finishes what it has and takes nothing new")
        if queue is None:
            return Refusal("unavailable", f"no model {arrival.model!r} is served here")
        if arrival.deadline is not None and arrival.deadline <= now:
            return Refusal("deadline_exceeded", "the deadline had passed on arrival")
        if (
            self.queued_requests >= self.max_queued_requests
            or self.queued_bytes + arrival.nbytes > self.max_queued_bytes
        ):
            return self._full(arrival)
        terms = self._terms_of(arrival, queue)
        if self.max_queued_s is not None and terms.cost_s:
            queued_s = self.queued_s()
            # One request may always wait, however long it lasts.
            if queued_s and queued_s + terms.share_s > self.max_queued_s:
                message = f"the queue is full: {queued_s:.3f} of {self.max_queued_s:g} s of predicted work"
                return Refusal("overloaded", message, self.drain_s())
        if arrival.deadline is None:
            return terms
        return self._with_deadline(arrival, arrival.deadline, queue, terms, clients, now)

    def _full(self, arrival: Arrival) -> Refusal:
        if self.queued_requests < self.max_queued_requests and arrival.nbytes > self.max_queued_bytes:
            message = (
                f"the request holds {arrival.nbytes} bytes; the queue takes {self.max_queued_bytes} at most"
            )
            return Refusal("too_large", message)
        message = (
            f"the queue is full: {self.queued_requests} of {self.max_queued_requests} requests, "
            f"{self.queued_bytes} of {self.max_queued_bytes} bytes"
        )
        return Refusal("overloaded", message, self.drain_s())

    def _terms_of(self, arrival: Arrival, queue: ModelQueue) -> Terms:
        sizes = arrival.sizes
        key = (arrival.model, sizes)
        terms = self._terms.get(key)
        if terms is None:
            rows, shape = (sizes[0], sizes[1:]) if queue.has_batch else (1, sizes)
            # Nothing is free of charge, a request without rows neither.
            company = self.costs.company_s(arrival.model, shape, max(1, rows))
            slots = max(1, queue.slot_count)
            if company is None:
                terms = Terms(0.0, NOMINAL_S / slots)
            else:
                cost_s, call_s = company
                terms = Terms(cost_s, cost_s / slots, call_s=call_s)
            self._terms[key] = terms
        return terms

    def _with_deadline(
        self, arrival: Arrival, deadline: float, queue: ModelQueue, terms: Terms, clients: int, now: float
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
        idle = bool(queue.free) and not queue.waiting
        if OPTIMISM * (earliest_s(queue, now) + alone_s) >= left_s:
            queue.probes += idle
            if not idle or queue.probes % PROBE_EVERY:
                message = (
                    f"the deadline cannot be met: {left_s:.3f} s are left, and it takes about {alone_s:.3f} s"
                )
                return Refusal("deadline_exceeded", message)
        elif not idle:
            return self._with_others(arrival, queue, terms, alone_s, left_s, clients, now)
        return terms

    def _with_others(
        self,
        arrival: Arrival,
        queue: ModelQueue,
        terms: Terms,
        alone_s: float,
        left_s: float,
        clients: int,
        now: float,
    ) -> Terms | Refusal:
        """Refuses what would probably wait, and then take, longer than what is left."""
        caution = queue.caution.factor
        crowded = now - queue.brimmed_at < left_s
        all_s = waiting_s(queue)
        # In time means with the whole call that it will be part of, unless that alone would take most of what is left.
        most_s = terms.call_s - alone_s
        more_s = min(most_s, all_s if crowded else max(0.0, all_s - most_s))
        call_s = min(alone_s + more_s, max(alone_s, left_s / 2))
        if not crowded and caution * (done_in_s(queue, all_s, now) + call_s) <= left_s:
            return terms
        priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, arrival.priority))
        rank = queue.shares.rank(arrival.client, priority, clients)
        wait_s = done_in_s(queue, ahead_s(queue, rank, clients, all_s, crowded=crowded), now)
        if not wait_s or caution * (wait_s + call_s) <= left_s:
            return terms
        queue.brimmed_at = now
        message = (
            f"the deadline would pass: {left_s:.3f} s are left, the wait is about {wait_s:.3f} s, "
            f"and then it takes about {call_s:.3f} s"
        )
        if caution > FIRST_CAUTION:
            message += f"; such estimates were too short lately, and count {caution:.2f} times"
        return Refusal("overloaded", message, min(wait_s, MAX_RETRY_AFTER_S))

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
