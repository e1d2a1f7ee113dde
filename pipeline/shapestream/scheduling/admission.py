"""Admission: the reasons to refuse a request at once, and what an admitted one counts for.

The queue is bounded over all models. It is divided between the groups of models that share slots (`fairness.QueueRoom`),
and in these between clients (`fairness.GroupRoom`). Without room, a request is refused as `overloaded`, with an estimate
of when the queue for its slots will have drained. Requests that are to be run again were
admitted before, and are never refused; nor are those whose parent was admitted (`Arrival.since`). A deadline that will
hardly be met refuses a request as well (deadlines.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite

from shapestream.scheduling.deadlines import MAX_RETRY_AFTER_S, Deadlines, Refusal
from shapestream.scheduling.events import Arrival, Overload
from shapestream.scheduling.fairness import NOMINAL_S, QueueRoom
from shapestream.scheduling.model_queue import ModelQueue, Queues
from shapestream.scheduling.queueing import nanoseconds
from shapestream.scheduling.slots import SlotPool

MOST_KNOWN_TERMS = 1024
"""Sizes of requests of one model whose terms are remembered. When there are more, all are forgotten."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The predicted costs of a request."""

    cost_ns: int
    """Predicted slot nanoseconds per request in an efficient batch; 0 while nothing is measured."""
    share_s: float
    """Seconds that are charged to its client: the same, divided by the model's slots; nominal while nothing is measured."""
    call_s: float = 0.0
    """Predicted seconds of such a batch on the most common worker class; 0.0 while nothing is measured."""
    then_s: float = 0.0
    """Seconds that the calls of its chain after this one take at least."""


class _KnownTerms:
    """The terms of a model's requests by their sizes, in one version of its prices and with so many slots."""

    __slots__ = ("by_sizes", "slots", "version")

    def __init__(self, version: int, slots: int) -> None:
        self.version = version
        self.slots = slots
        self.by_sizes: dict[tuple[int, ...], Terms] = {}


class Admission:
    """Decides which requests come into the queue, and prices them.

    `room`: the content of the queue, and its bounds.
    """

    __slots__ = ("_deadlines", "_known", "_pools", "_queues", "draining", "room")

    def __init__(
        self, room: QueueRoom, deadlines: Deadlines, queues: Queues, pools: Mapping[str, SlotPool]
    ) -> None:
        self.room = room
        self._queues = queues
        self._pools = pools
        self._deadlines = deadlines
        self.draining = False
        self._known: dict[str, _KnownTerms] = {}
        """By model: where many equal requests are refused, their terms would take half of the time."""

    def forget_model(self, model: str) -> None:
        """Forget the terms of a model that is gone."""
        self._known.pop(model, None)
        self._deadlines.forget_model(model)

    def consider(self, arrival: Arrival, queue: ModelQueue | None, now: float) -> Terms | Refusal:
        """Return the costs of a request for the model of `queue`, or the reason to refuse it.

        Raises any error of a prediction. The queue is not changed.
        """
        if self.draining and arrival.since is None:
            return Refusal("draining", "the server finishes what it has and takes nothing new")
        if queue is None:
            return Refusal("unavailable", f"no model {arrival.model!r} is served here")
        if arrival.deadline is not None and arrival.deadline <= now:
            return Refusal("deadline_exceeded", "the deadline had passed on arrival")
        whole = self.room
        room = queue.shares.room
        room.ask(arrival.client, queue.bare_name, now)
        if arrival.since is not None:  # its parent was admitted, with room for it
            terms = self._terms_of(arrival, queue)
            if isinstance(terms, Refusal) or arrival.deadline is None:
                return terms
            return self._in_time(arrival, queue, terms, now)
        if whole.requests >= whole.max_requests or whole.nbytes + arrival.nbytes > whole.max_bytes:
            return self._full(arrival, queue)
        parts = 1 if whole.groups == 1 else room.parts
        if parts > 1 and room.is_full(arrival.nbytes, parts):
            return self._part_full(queue, parts)
        client = queue.shares.known(arrival.client) if room.sharing > 1 or room.several else None
        if client is not None and room.exceeds(client, arrival.nbytes, parts):
            return self._above_share(queue)
        terms = self._terms_of(arrival, queue)
        if isinstance(terms, Refusal):
            return terms
        if client is not None and arrival.client in room.several:
            models = room.models(arrival.client)
            flows = [flow for flow in client.flows.values() if flow.name == queue.bare_name]
            if room.exceeds_part(flows, models, arrival.nbytes, parts):
                return self._overloaded(
                    queue,
                    Overload.MODEL_SHARE,
                    f"this client has its share of the queue for this model, of {models} that it asks, "
                    f"and what is left is kept for the others",
                )
        return terms if arrival.deadline is None else self._in_time(arrival, queue, terms, now)

    def _in_time(self, arrival: Arrival, queue: ModelQueue, terms: Terms, now: float) -> Terms | Refusal:
        """Return the terms of a request with a deadline, or the reason why it will not be met."""
        assert arrival.deadline is not None
        if arrival.then:
            terms = replace(terms, then_s=sum([self._least_s(model) for model in arrival.then]))
        left_s = arrival.deadline - terms.then_s - now
        return self._deadlines.consider(arrival, left_s, queue, terms.call_s, now) or terms

    def _least_s(self, model: str) -> float:
        """Return the least seconds of a call of a model: a bound that no client's requests raise."""
        queue = self._queues.get(model)
        return 0.0 if queue is None else queue.costs.least_s * self._pools[model].fastest

    def _full(self, arrival: Arrival, queue: ModelQueue) -> Refusal:
        room = self.room
        if room.requests < room.max_requests and arrival.nbytes > room.max_bytes:
            message = f"the request holds {arrival.nbytes} bytes; the queue takes {room.max_bytes} at most"
            return Refusal("too_large", message)
        return self._overloaded(
            queue,
            Overload.QUEUE,
            f"the queue is full: {room.requests} of {room.max_requests} requests, "
            f"{room.nbytes} of {room.max_bytes} bytes",
        )

    def _part_full(self, queue: ModelQueue, parts: int) -> Refusal:
        room = queue.shares.room
        return self._overloaded(
            queue,
            Overload.QUEUE,
            f"the queue for the slots of this model is full: {room.requests} requests, {room.nbytes} bytes; "
            f"it has 1/{parts} of {self.room.max_requests} requests and {self.room.max_bytes} bytes, "
            f"and what is left is kept for models on other slots",
        )

    def _above_share(self, queue: ModelQueue) -> Refusal:
        return self._overloaded(
            queue,
            Overload.CLIENT_SHARE,
            f"this client has its share of the queue, which {queue.shares.room.sharing} clients divide, "
            f"and what is left is kept for the others",
        )

    def _overloaded(self, queue: ModelQueue, cause: Overload, message: str) -> Refusal:
        return Refusal("overloaded", message, self.drain_s(queue), cause)

    def too_large(self, queue: ModelQueue, rows: int, shape: tuple[int, ...]) -> Refusal | None:
        """Return a refusal if padding would make the request's call larger than a call may be; its own sizes may be larger.

        A request without elements could claim any size without sending a byte, and its outputs might be as large. So its
        sizes of 0 count as 1, and its rows are bounded by those of a batch.
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
        nbytes = call.of_batch(rows, shape)
        if empty:
            nbytes = max(nbytes, call.of_batch(max(1, rows), tuple([max(1, size) for size in shape])))
        if nbytes <= call.most or (not empty and nbytes <= call.of_call(rows, shape)):
            return None
        message = (
            f"the smallest call that can run this request holds {nbytes} bytes of input, padding included, and calls of "
            f"model {profile.name!r} hold {call.most} at most; send fewer or smaller rows, or raise max_batch_bytes"
        )
        return Refusal("too_large", message)

    def _terms_of(self, arrival: Arrival, queue: ModelQueue) -> Terms | Refusal:
        prices = queue.costs.on().worker_class
        known = self._known.get(arrival.model)
        slots = self._pools[queue.name].count
        if known is None or known.version != prices.version or known.slots != slots:
            known = self._known[arrival.model] = _KnownTerms(prices.version, slots)
        terms = known.by_sizes.get(arrival.sizes)
        if terms is not None and not queue.alone:
            return terms
        new = self._new_terms(arrival.sizes, queue)
        if isinstance(new, Terms) and new.cost_ns and not queue.alone:
            if len(known.by_sizes) >= MOST_KNOWN_TERMS:
                known.by_sizes.clear()
            known.by_sizes[arrival.sizes] = new
        return new

    def _new_terms(self, sizes: tuple[int, ...], queue: ModelQueue) -> Terms | Refusal:
        if len(sizes) != len(queue.profile.dimensions) or min(sizes, default=0) < 0:
            raise ValueError(f"{sizes} are no sizes of {', '.join(queue.profile.dimensions)}")
        rows, shape = (sizes[0], sizes[1:]) if queue.has_batch else (1, sizes)
        if (refusal := self.too_large(queue, rows, shape)) is not None:
            return refusal
        alone_s = queue.costs.batch_s(sizes) if queue.alone else None
        serving = self._pools[queue.name].serving
        priced = queue.costs.batched_share_s(sizes) if alone_s is None else (alone_s, alone_s)
        if priced is None:
            rough_s = queue.costs.rough_s(sizes)
            return Terms(0, (NOMINAL_S if rough_s is None else rough_s) / serving)
        cost_s, call_s = priced
        if not (isfinite(1e9 * cost_s) and isfinite(call_s)):  # sums of costs are kept in nanoseconds
            raise ArithmeticError(f"a request of sizes {sizes} cannot be priced")
        return Terms(nanoseconds(cost_s), cost_s / serving, call_s=call_s)

    def queued_s(self, queue: ModelQueue) -> float:
        """Return the seconds that slots need for the queues of a model and of all models that share slots with it.

        The models are assumed to share all their slots, so their times add up. The estimate errs upwards.
        """
        return sum([other.waiting_s / self._pools[other.name].serving for other in queue.sharing])

    def drain_s(self, queue: ModelQueue) -> float | None:
        """Return the seconds until the queues for the slots of a model have been started; None while nothing is measured."""
        total: float | None = None
        for other in queue.sharing:
            if not other.waiting:
                continue
            cost_s = other.waiting_s
            if not cost_s:  # it came before anything was measured
                request_s = other.costs.mean_request_s
                if request_s is None:
                    continue
                cost_s = other.waiting * request_s
            total = (total or 0.0) + cost_s / self._pools[other.name].serving
        return None if total is None else min(total, MAX_RETRY_AFTER_S)
