"""Bundles: one hand-over to a slot carries several calls, where sharing a call does not pay.

A slot that is handed a batch of one request is handed those with it whose turns are next, each in a batch of its own. Their
order is that of the turns. A call joins if all of these hold:

- It would run alone beside others of its model that are queued, by the planner's cut. The last queued request does not join:
  nothing shows yet that it would run alone.
- No slot of its model is free. It goes to the slot of those with a bundle that is predicted to end first.
- The bundle stays within `most_calls`, and within as many times the seconds of a hand-over (`BATCH_S`).
- It would not wait for company, nor come too late for its deadline.

The first request for which one of these does not hold ends all bundles of the event. Nothing is added to a bundle later: the
next hand-over is the prefetch behind its last call. Batches that share a call are cut as late as ever.

A bundle promises nothing as a whole. Each of its batches has its own report, hang limit and end (slots.py, recovery.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

from shapestream.scheduling.actions import Action
from shapestream.scheduling.batches import Batch
from shapestream.scheduling.call_costs import CallCosts
from shapestream.scheduling.company import Company
from shapestream.scheduling.deadlines import Deadlines
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.planner import Cut, Plan, alone
from shapestream.scheduling.queueing import RERUN, Request
from shapestream.scheduling.slots import BUNDLE, Slot, SlotTable
from shapestream.scheduling.worker_class import BATCH_S

SHARED_BUNDLE = 2
"""Calls of a bundle while several clients ask, if no more of them have requests: what came just before a client's light work
goes first. Simulated beside a flood: its p99 grows by 3 %, with 4 by 23 %, with 16 three times (docs/decisions.md)."""

Handed: TypeAlias = dict[Slot, list[Batch]]
"""The batches that slots are handed by one event."""
Ready: TypeAlias = Callable[[ModelQueue, float], bool]


class Planned(Protocol):
    """The planner, for one slot."""

    def __call__(
        self, anchor: Request, slot: Slot, costs: CallCosts, slowdown: float, now: float, *, tries: bool
    ) -> Cut:
        """Return the batch that a request goes in."""


class Bundles:
    """Completes the hand-overs of an event."""

    __slots__ = ("_company", "_deadlines", "_dispatch", "_next_up", "_plan", "_planned", "_slots")

    def __init__(
        self,
        slots: SlotTable,
        company: Company,
        deadlines: Deadlines,
        plan: Plan,
        next_up: Callable[[Ready, float], Request | None],
        planned: Planned,
        dispatch: Callable[[Request, Slot, float, list[Action], Handed, Cut], None],
    ) -> None:
        """`next_up`: the request whose turn it is. `dispatch` queues its cut behind what its slot has."""
        self._slots = slots
        self._company = company
        self._deadlines = deadlines
        self._plan = plan
        self._next_up = next_up
        self._planned = planned
        self._dispatch = dispatch

    def complete(self, handed: Handed, now: float, actions: list[Action]) -> None:
        """Hand more calls over to the slots that are handed a batch of one request."""
        growing = [slot for slot, batches in handed.items() if _may_grow(slot, batches)]

        def ready(queue: ModelQueue, now: float) -> bool:
            pool = self._slots.pools[queue.profile.name]
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
            pool = self._slots.pools[request.queue.profile.name]
            slot = min([slot for slot in growing if pool in slot.pools], key=lambda slot: slot.free_at(now))
            left_s = most_calls(request.queue) * BATCH_S - _seconds(handed[slot])
            cut = self.alone(request, slot, left_s, now)
            if cut is None or self._company.will_be_awaited(request, slot):
                return
            self._dispatch(request, slot, now, actions, handed, cut)
            if not _may_grow(slot, handed[slot]):
                growing.remove(slot)

    def alone(self, request: Request, slot: Slot, most_s: float, now: float) -> Cut | None:
        """Return the cut of a request that joins a bundle; None if it shares a call, comes too late, or takes longer."""
        queue = request.queue
        try:
            if self._deadlines.comes_too_late(request, slot, now):
                return None
            costs, slowdown = queue.costs.call_costs(slot.id), queue.costs.slowdown(slot.id)
            if queue.alone:
                cut = alone([request], request.rows, request.own_shape, costs)
            else:
                cut = self._planned(request, slot, costs, slowdown, now, tries=False)
        except Exception:  # noqa: BLE001 - what is wrong is reported when its batch is cut
            return None
        if len(cut.members) > 1:
            self._plan.forget(request.bucket.lane)
            return None
        return cut if costs.batch_costs.measured and slowdown * cut.seconds <= most_s else None


def most_calls(queue: ModelQueue) -> int:
    """Return how many calls a bundle has at most: one for each client with requests, if several asked lately."""
    shares = queue.shares
    if shares.room.sharing < 2:
        return BUNDLE
    return min(BUNDLE, max(SHARED_BUNDLE, shares.present))


def _may_grow(slot: Slot, bundle: Sequence[Batch]) -> bool:
    """Tell whether more calls may follow these to their slot: each of them is one request, and they take little time."""
    running = slot.batch
    most = most_calls(bundle[0].queue)
    return (
        running is not None
        and running.prefetch_at is not None
        and len(bundle) < most
        and all(len(batch.members) == 1 and batch.predicted_s is not None for batch in bundle)
        and _seconds(bundle) < most * BATCH_S
    )


def _seconds(batches: Iterable[Batch]) -> float:
    """Return the predicted seconds of batches; those without a prediction count as 0."""
    return sum([batch.predicted_s or 0.0 for batch in batches])
