"""Bundles: several calls are queued on a slot, where sharing a call does not pay.

A slot that begins with a batch of one request is handed those behind it whose turns are next, each in a batch of its own.
Their order is that of the turns. A call joins if all of these hold:

- It is no suspect.
- It would run alone beside others of its model that are queued, by the planner's cut. The last queued request does not join:
  nothing shows yet that it would run alone.
- No slot of its model is free. It goes to the slot of those with a bundle that is predicted to end first.
- The bundle has fewer than `most_calls`, and than `LEFT` lets it have of the queue, and takes less than `BUNDLE_S`. A call
  that takes longer joins none.
- It would not wait for others that may share its call, nor come too late for its deadline.

The first request for which one of these does not hold ends all bundles of the event. What the events of a turn decide leaves
in one message, and reports are taken in groups (`HeldReports`). So in one turn half a bundle is answered, and as
many calls join.

Batches that share a call are cut as late as ever, and prefetched one by one (scheduler.py).

A bundle promises nothing as a whole. Each of its batches has its own report, hang limit and end (slots.py, recovery.py).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TypeAlias

from shapestream.scheduling.actions import Action
from shapestream.scheduling.answer_waits import AnswerWaits
from shapestream.scheduling.batches import Batch
from shapestream.scheduling.deadlines import Deadlines
from shapestream.scheduling.model_queue import ModelQueue, Queues
from shapestream.scheduling.planner import Cut, Plan, alone
from shapestream.scheduling.queueing import RERUN, Request
from shapestream.scheduling.slots import BUNDLE, Slot, SlotTable
from shapestream.scheduling.worker_class import BATCH_S
from shapestream.scheduling.worker_costs import WorkerCosts

SHARED_BUNDLE = 4
"""Calls of a bundle while several clients ask, if no more of them have requests. A light request waits for the
bundle in front of it: simulated beside a flood, its p99 is 2.9 times as long with 16 (docs/decisions.md)."""
SEVERAL_S = 1.0
"""Seconds after which a client that asks nothing more does not shorten the bundles of another."""

BUNDLE_S = BUNDLE * BATCH_S
"""Seconds that the calls of a bundle may take, by prediction, when another joins: as many hand-overs as it saves."""
LEFT = 1
"""Requests of a slot's part of the queue that wait for each call of its bundle. They are there for the slot that is free
first, and for others that may share their calls (docs/decisions.md)."""

Handed: TypeAlias = dict[Slot, list[Batch]]
"""The batches that slots are handed by one event."""
Ready: TypeAlias = Callable[[ModelQueue, float], bool]
Planned: TypeAlias = Callable[[Request, ModelQueue, Slot, WorkerCosts, float, float], Cut]
"""Returns the batch that a request goes in, on a slot with these costs and this slowdown, now."""


class Bundles:
    """Decides which calls join the bundles of slots."""

    __slots__ = ("_deadlines", "_dispatch", "_next_up", "_plan", "_planned", "_queues", "_slots", "_waits")

    def __init__(
        self,
        queues: Queues,
        slots: SlotTable,
        waits: AnswerWaits,
        deadlines: Deadlines,
        plan: Plan,
        next_up: Callable[[Ready, float], Request | None],
        planned: Planned,
        dispatch: Callable[[Request, ModelQueue, Slot, float, list[Action], Handed, Cut], None],
    ) -> None:
        """`next_up` names the request whose turn it is; `dispatch` queues its cut behind what its slot has."""
        self._queues = queues
        self._slots = slots
        self._waits = waits
        self._deadlines = deadlines
        self._plan = plan
        self._next_up = next_up
        self._planned = planned
        self._dispatch = dispatch

    def complete(self, handed: Handed, now: float, actions: list[Action]) -> None:
        """Queue more calls on the slots that have begun with a batch of one request in this event."""
        growing = [slot for slot in dict.fromkeys(self._slots.begun) if self._may_grow(slot, now)]
        if not growing:
            return

        queues, pools = self._queues, self._slots.pools

        def ready(queue: ModelQueue, now: float) -> bool:
            pool = pools[queue.name]
            return (
                queue.count > 1
                and not queue.delay_s
                and queue.profile.idempotent
                and not pool.free
                and any(pool in slot.pools for slot in growing)
            )

        while growing:
            request = self._next_up(ready, now)
            if request is None or request.state is RERUN:
                return
            queue, pool = queues[request.model], pools[request.model]
            slot = min([slot for slot in growing if pool in slot.pools], key=lambda slot: slot.free_at(now))
            cut = None if request.arrival.suspect else self.alone(request, queue, slot, now)
            if cut is None or (
                queue.returns.after_s < inf and self._waits.will_be_awaited(request, queue, slot)
            ):
                return
            self._dispatch(request, queue, slot, now, actions, handed, cut)
            if not self._may_grow(slot, now):
                growing.remove(slot)

    def _may_grow(self, slot: Slot, now: float) -> bool:
        """Tell whether more calls may be queued on a slot: what it has is one request each, and little of the queue."""
        running = slot.batch
        if running is None or running.prefetch_at is None:
            return False
        queue = running.queue
        most = most_calls(queue, now)
        calls = 1 + len(slot.behind)
        return (
            calls < most
            and calls * LEFT < queue.count / self._slots.pools[queue.name].serving
            and all(
                len(batch.members) == 1 and batch.predicted_s is not None for batch in (running, *slot.behind)
            )
            and _seconds(slot) < BUNDLE_S
        )

    def alone(self, request: Request, queue: ModelQueue, slot: Slot, now: float) -> Cut | None:
        """Return the cut of a request that joins a bundle; None if it shares a call, comes too late, or takes too long."""
        try:
            deadline = request.arrival.deadline
            if deadline is not None and self._deadlines.comes_too_late(request, deadline, queue, slot, now):
                return None
            costs = queue.costs.on(slot.id)
            slowdown = costs.slowdown
            if queue.alone:
                cut = alone([request], request.rows, request.own_shape, costs)
            else:
                cut = self._planned(request, queue, slot, costs, slowdown, now)
        except Exception:  # noqa: BLE001 - what is wrong is reported when its batch is cut
            return None
        if len(cut.members) > 1:
            self._plan.forget(request.bucket.lane)
            return None
        return cut if costs.worker_class.measured and slowdown * cut.seconds <= BUNDLE_S else None


def most_calls(queue: ModelQueue, now: float) -> int:
    """Return how many calls a bundle has at most: one for each client with requests, if several asked within `SEVERAL_S`."""
    shares = queue.shares
    if now - shares.room.others_at > SEVERAL_S:
        return BUNDLE
    return min(BUNDLE, max(SHARED_BUNDLE, shares.present))


def _seconds(slot: Slot) -> float:
    """Return the predicted seconds of the batches of a slot; those without a prediction count as 0."""
    assert slot.batch is not None
    return (slot.batch.predicted_s or 0.0) + slot.behind_s
