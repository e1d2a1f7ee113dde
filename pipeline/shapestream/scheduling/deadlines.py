"""Deadlines: which requests are refused, wait no longer, or end early, because too little time is left.

A deadline is judged four times here:

- on arrival (`Deadlines.consider`): refused if not even an optimistic prediction meets it, or if the predicted wait and
  call, with a margin, take longer than what is left;
- while a model waits for more requests (`wait_until`): not at all if that could cost the deadline;
- while it waits for its turn (`due`): ended when not even the optimistic prediction of its arrival meets it any more;
- in its turn under overload (`comes_too_late`): ended if an efficient batch would take longer than what is left.

Elsewhere, admission.py refuses what is late on arrival, and planner.py cuts a batch smaller rather than make a member late.
A slot leaves expired requests out of its call.

Until costs are measured, only deadlines that have passed refuse or end anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Final, NamedTuple

from shapestream.scheduling.events import Arrival, Overload
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.queueing import RERUN, RUNNING, LazyHeap, Request
from shapestream.scheduling.slots import Slot, SlotPool

SAFETY: Final = 1.4
"""Factor by which estimated waits and calls are multiplied where they are compared with what is left of a deadline.

Batches take longer beside others, predictions err, and later requests may go first. Measured (docs/decisions.md): 1.2 loses
4 % of the goodput where calls vary by 40 %, and 1.0 loses 17 %. A factor learned from late results gained nothing over
1.4, and one client's late results raised it for all."""

OPTIMISM: Final = 0.5
"""Share of the predicted seconds; a deadline that not even this leaves room for cannot be met."""

CALL_OF_LEFT: Final = 0.5
"""Largest part of the time left that a shared call takes: the planner cuts it smaller for a member's deadline."""

WAITED_OF_TIME: Final = 2 / 3
"""Share of its time, from arrival to deadline, that a request has waited at least when it is shed."""

MAX_RETRY_AFTER_S: Final = 60.0
"""No caller is asked to wait longer than this, however slow the model."""


class Refusal(NamedTuple):
    """The reason why a request does not come in."""

    code: str
    message: str
    retry_after_s: float | None = None
    cause: Overload | None = None
    """The bound that was met, where the code is `overloaded`."""


class Deadlines(LazyHeap):
    """The live requests that have a deadline, and the rules by which they end early.

    Their order: while they wait, by when not even an optimistic prediction would start them any more; else by deadline.
    """

    __slots__ = ("_pools", "_refused_at")

    def __init__(self, pools: Mapping[str, SlotPool]) -> None:
        """`pools`: the slots of each model."""
        super().__init__(RUNNING)
        self._pools = pools
        self._refused_at: dict[str, float] = {}
        """By model, the last time that a request was refused because of its predicted wait."""

    # ------------------------------------------------------------ on arrival

    def forget_model(self, model: str) -> None:
        """Forget a model that is gone."""
        self._refused_at.pop(model, None)

    def consider(
        self,
        arrival: Arrival,
        left_s: float,
        queue: ModelQueue,
        batched_call_s: float,
        now: float,
    ) -> Refusal | None:
        """Return why a deadline will not be met, or will hardly be, as far as that is known.

        `left_s`: seconds until the deadline, less what the next stages of its chain take at least. `batched_call_s`: seconds
        of an efficient batch on the most common worker class. Raises any error of a prediction.
        """
        alone_s = self._alone_s(arrival.sizes, queue)
        pools = self._pools
        pool = pools[queue.name]
        if alone_s is None or not pool.count:
            return None
        # A slot is free for it, also beside all that waits: they arrived together, or wait for more.
        idle = sum([other.waiting for other in queue.sharing]) < len(pool.free)
        free_s = pool.free_in_s(0.0, now)[0]
        if OPTIMISM * (free_s + alone_s) >= left_s:
            if idle:
                # It is tried, until its deadline: a prediction that is far too long must not keep all from running.
                return None
            return _hopeless(arrival, left_s, free_s, alone_s)
        if idle or arrival.since is not None:  # a stage of what was admitted is not refused for its wait
            return None
        queued_s = sum([other.cost_s / pools[other.name].serving for other in queue.sharing])
        # A refusal a short while ago shows that the queue is as long as deadlines allow: it will not empty.
        crowded = queued_s > 0.0 and now - self._refused_at.get(arrival.model, -inf) < left_s
        again_s = sum([other.again_s / pools[other.name].serving for other in queue.sharing])
        # What shares its call is queued already, and the planner cuts a call smaller that would take most of the time left.
        call_s = max(alone_s, min(batched_call_s * pool.fastest, alone_s + queued_s, CALL_OF_LEFT * left_s))

        def wait_for_s(before_s: float) -> float:
            """Return the seconds until the slots have done what they hold, reruns, suspects, and this work."""
            return pool.free_in_s((again_s + before_s) * pool.count, now)[0]

        if not crowded and SAFETY * (wait_for_s(queued_s) + call_s) <= left_s:
            return None  # whatever its turn, no more goes before it
        wait_s = wait_for_s(self._before_s(arrival, queue, queued_s, crowded=crowded))
        if not wait_s or SAFETY * (wait_s + call_s) <= left_s:
            return None
        self._refused_at[arrival.model] = now
        message = (
            f"the deadline would pass: {left_s:.3f} s are left{_and_then(arrival)}, the wait is about {wait_s:.3f} s, "
            f"and then it takes about {call_s:.3f} s"
        )
        return Refusal("overloaded", message, min(wait_s, MAX_RETRY_AFTER_S), Overload.DEADLINE)

    def _before_s(
        self,
        arrival: Arrival,
        queue: ModelQueue,
        queued_s: float,
        *,
        crowded: bool,
    ) -> float:
        """Return the predicted seconds of queued work that goes before a request.

        What has a smaller rank goes before in any case, and so does other work until the request's turn. While the queue
        is `crowded`, newcomers take the turns of what is refused, so that may be more than `queued_s`, which is all that is
        queued now.
        """
        rank = queue.shares.forecast(arrival.client, arrival.model, arrival.priority)
        turn_s = queue.shares.turn_s(rank)
        if turn_s >= queued_s:
            return turn_s if crowded else queued_s
        smaller_s = [
            min(other.cost_s / self._pools[other.name].serving, other.turns.share_until(rank))
            for other in queue.sharing
            if other.count
        ]
        return max(turn_s, sum(smaller_s))

    def _alone_s(self, sizes: tuple[int, ...], queue: ModelQueue) -> float | None:
        """Return the predicted seconds of a request alone on the fastest slot; None while nothing is measured."""
        usual_s = queue.costs.batch_s(sizes)
        return None if usual_s is None else usual_s * self._pools[queue.name].fastest

    # ------------------------------------------------------------ while it waits

    def watch(self, request: Request, deadline: float, queue: ModelQueue, then_s: float) -> None:
        """Remember the deadline of an admitted request.

        `then_s`: the least seconds of the next stages of its chain.
        """
        start_by = deadline - then_s - OPTIMISM * (self._alone_s(request.arrival.sizes, queue) or 0.0)
        # What was let in although its prediction is too long is tried until its deadline.
        self.push(start_by if start_by > request.arrived else deadline, request)

    def wait_until(self, arrival: Arrival, queue: ModelQueue, now: float) -> float:
        """Return until when a request may wait for others to share its call."""
        until = now + queue.delay_s if queue.delay_s else queue.waits_until
        if arrival.deadline is None:
            return until
        call_s = queue.costs.batch_s(arrival.sizes) or 0.0
        return until if until + call_s < arrival.deadline else now

    def allow(self, members: Iterable[Request], until: float, call_s: float) -> bool:
        """Tell whether the batch of these requests may start as late as that, and nobody is late by it."""
        return all(request.deadline is None or until + call_s < request.deadline for request in members)

    def due(self, now: float) -> Request | None:
        """Return a request whose deadline has passed, or, while it waits, cannot be met any more; None if there is none."""
        while (first := self.first()) is not None and first[0] <= now:
            request = first[2]
            deadline = request.deadline
            if deadline is None or deadline <= now or request.state is not RUNNING:
                return request
            # It left the queue in time; now its deadline itself counts.
            self.postpone(deadline)
        return None

    def next(self) -> float | None:
        """Return the time to look again; None if no live request has a deadline."""
        first = self.first()
        return None if first is None else first[0]

    # ------------------------------------------------------------ in its turn

    def comes_too_late(
        self, request: Request, deadline: float, queue: ModelQueue, slot: Slot, now: float
    ) -> bool:
        """Tell whether the turn of a request with this deadline comes too late on this slot for an efficient batch.

        Three things must hold. A request of this model was refused for its predicted wait after this one came. This one did
        not run before. When the slot is free, it has waited for two thirds of its time at least. So a request that had
        little time from the start is kept.

        Some request will be late in any case, because the queue took longer than was estimated. A call that is cut so that
        this one is in time makes all behind it later, and they are as near to their deadlines. Then their calls are cut as
        well, and soon the slots run calls of one row. Measured in docs/decisions.md.
        """
        if request.state is RERUN:
            return False
        if self._refused_at.get(queue.name, -inf) < request.arrived:
            return False
        starts_at = slot.free_at(now)
        left_s = deadline - starts_at
        if starts_at - request.arrived < WAITED_OF_TIME * (deadline - request.arrived):
            return False
        costs = queue.costs.on(slot.id)
        prices = costs.worker_class
        if not prices.measured:
            return False
        try:
            if queue.alone:
                call_s = prices.second(request.rows, request.own_shape)
            else:
                _, call_s = prices.batched_share_s(request.rows, request.shape)
        except Exception:  # noqa: BLE001 - what cannot be priced is tried
            return False
        return left_s < call_s * costs.slowdown


def _hopeless(arrival: Arrival, left_s: float, free_s: float, alone_s: float) -> Refusal:
    message = (
        f"the deadline cannot be met: {left_s:.3f} s are left{_and_then(arrival)}, "
        f"a slot is free in about {free_s:.3f} s, and then it takes about {alone_s:.3f} s"
    )
    return Refusal("deadline_exceeded", message)


def _and_then(arrival: Arrival) -> str:
    """Say for which models a part of the time until the deadline is kept."""
    return f" before {', '.join(arrival.then)}" if arrival.then else ""
