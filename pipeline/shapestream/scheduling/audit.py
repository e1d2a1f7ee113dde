"""The audit: a request that was answered runs again, alone, while slots idle.

It is a batch without members. So it charges no client, corrects no cost, is not run again, and makes no request a
suspect, however it ends. No batch is queued behind it, and its slot counts as free in predictions. It starts when a slot has
idled for as long as the call is predicted to take, preparation for its shape included: shorter pauses of busy clients are
no time for it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TypeAlias

from shapestream.scheduling.actions import Action, CancelBatch, StartBatch
from shapestream.scheduling.batches import Batch
from shapestream.scheduling.events import AuditKind, AuditWanted, ContractError
from shapestream.scheduling.model_queue import ModelQueue, Queues
from shapestream.scheduling.planner import Cut, alone
from shapestream.scheduling.recovery import Isolation
from shapestream.scheduling.slots import Slot, SlotTable

LOOK_S = 0.1
"""Seconds until an idle slot is looked for again: a busy server has hundreds of events in that time, and none is idle."""
Start: TypeAlias = Callable[[ModelQueue, Slot, Cut, AuditWanted, float], StartBatch]


class Audit:
    """The one audit of a kind that is wanted, or runs."""

    __slots__ = ("_batch", "_isolation", "_queues", "_slots", "_start", "_wanted", "active", "due_at", "kind")

    def __init__(
        self, kind: AuditKind, queues: Queues, slots: SlotTable, isolation: Isolation, start: Start
    ) -> None:
        """`start` runs it on a slot."""
        self.kind = kind
        self._queues = queues
        self._slots = slots
        self._isolation = isolation
        self._start = start
        self._wanted: AuditWanted | None = None
        self._batch: Batch | None = None
        self.due_at = inf
        """When a slot is looked for. Between two looks an event costs nothing."""
        self.active = False
        """True while an audit is wanted or runs; an audit that has ended counts until the next call of `tend`."""

    def want(self, wanted: AuditWanted) -> None:
        """Take what is wanted in place of what was, and has not started. Raises ContractError while one runs."""
        if self.running is not None:
            raise ContractError("an audit is wanted while another runs")
        self._wanted, self.due_at, self.active = wanted, -inf, True

    @property
    def running(self) -> Batch | None:
        """The batch without members, while it has not ended."""
        batch = self._batch
        return batch if batch is not None and batch.id in self._slots.batches else None

    def tend(self, now: float, actions: list[Action], *, draining: bool) -> None:
        """Start what is wanted, or stop what runs, by whether requests wait. Asked after free slots were given work."""
        running = self.running
        if running is not None:
            if (draining or is_in_the_way(running)) and running.cancel():
                actions.append(CancelBatch(batch=running))
            return
        self._batch = None  # or what its slot was sent would stay until the next audit
        wanted = self._wanted
        if wanted is None:
            self.active = False
        elif now >= self.due_at:
            self._look(wanted, now, actions, draining=draining)

    def _look(self, wanted: AuditWanted, now: float, actions: list[Action], *, draining: bool) -> None:
        slot = None if draining else self._idle_slot(wanted)
        if slot is None:
            self.due_at = now + LOOK_S
            if wanted.slots.isdisjoint(self._slots.slots):
                self._wanted, self.due_at = None, inf  # those that might run it are gone
            return
        queue = self._queues[wanted.model]
        rows, shape = (wanted.sizes[0], wanted.sizes[1:]) if queue.has_batch else (1, wanted.sizes)
        cut = alone((), rows, shape, queue.costs.on(slot.id))
        self.due_at = slot.idle_since + cut.seconds
        if self.due_at <= now:
            self._wanted, self.due_at = None, inf
            started = self._start(queue, slot, cut, wanted, now)
            (self._batch,) = started.batches
            actions.append(started)

    def _idle_slot(self, wanted: AuditWanted) -> Slot | None:
        """Return a slot to run it on while no request waits; where a model has several slots, one more of them is free."""
        isolation = self._isolation
        waits = any(queue.waiting for queue in self._queues.waiting)
        if waits or isolation.suspected or isolation.isolated or wanted.model not in self._queues:
            return None
        for slot in self._slots.pools[wanted.model].free.values():
            if slot.id in wanted.slots and all(len(pool.free) > 1 or pool.count == 1 for pool in slot.pools):
                return slot
        return None


def is_in_the_way(audit: Batch) -> bool:
    """Tell whether an audit must leave its slot: the slot closes, its worker is reserved, or a request waits for it."""
    slot: Slot = audit.slot
    return not slot.pools or not slot.worker.open or any(pool.queue.waiting for pool in slot.pools)
