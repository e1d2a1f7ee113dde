"""Which slots there are, and which of them are free for which model.

A slot is free unless it runs a batch, is put aside, or closes. It is put aside when it could not run what it was
given (`unavailable`): twice as long each time in a row, so that a broken slot, which fails quickly, does not
eat up the attempts of everybody's requests while sound slots are busy.
"""

from __future__ import annotations

from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.records import Batch, Slot

__all__ = ["SlotTable", "aside_s"]

MIN_ASIDE_S = 0.1
"""The first pause, at least: a slot that recovers at once costs little."""
MAX_ASIDE_S = 30.0
"""No pause is longer, so that a slot whose device came back is found again."""
CALLS_ASIDE = 2.0
"""The first pause in calls of the model: by then another slot has become free and taken what this one refused."""


def aside_s(refusals: int, call_s: float | None) -> float:
    """How long a slot is put aside that has answered so many batches in a row with `unavailable`."""
    first_s = max(MIN_ASIDE_S, CALLS_ASIDE * (call_s or 0.0))
    return float(min(MAX_ASIDE_S, first_s * 2.0 ** min(refusals - 1, 32)))


class SlotTable:
    """The slots. Each free slot stands in the `free` of every model that it serves, longest free first."""

    __slots__ = ("aside", "free_count", "slots")

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.free_count = 0
        self.aside: dict[int, Slot] = {}
        """Those that are put aside; few, if any."""

    def join(self, id: int, models: frozenset[str], queues: dict[str, ModelQueue]) -> None:  # noqa: A002
        """Adds a free slot. Models that are not known yet are connected when they are added."""
        if id in self.slots:
            raise ValueError(f"slot {id} has joined already")
        slot = self.slots[id] = Slot(id, models)
        self.free_count += 1
        for name in sorted(models & queues.keys()):
            self._connect(slot, queues[name])

    def connect_model(self, queue: ModelQueue) -> None:
        """Connects a model that was added after slots that name it had joined."""
        for slot in self.slots.values():
            if queue.profile.name in slot.models and not slot.closing:
                self._connect(slot, queue)

    def _connect(self, slot: Slot, queue: ModelQueue) -> None:
        slot.queues.append(queue)
        queue.slot_count += 1
        if slot.free:
            queue.free[slot.id] = slot

    def leave(self, id: int) -> Batch | None:  # noqa: A002
        """Removes a slot; what it ran is returned. Unknown slots are ignored."""
        slot = self.slots.get(id)
        if slot is None:
            return None
        self.close(id)
        del self.slots[id]
        return slot.batch

    def close(self, id: int) -> None:  # noqa: A002
        """Lets a slot get no more batches; what it runs stays. Unknown slots are ignored."""
        slot = self.slots.get(id)
        if slot is None or slot.closing:
            return
        if slot.free:
            self._hide(slot)
        self.aside.pop(id, None)
        slot.aside_until = None
        slot.closing = True
        for queue in slot.queues:
            queue.slot_count -= 1
        slot.queues.clear()

    def occupy(self, slot: Slot, batch: Batch) -> None:
        """A free slot starts a batch."""
        self._hide(slot)
        slot.batch = batch

    def release(self, slot: Slot) -> None:
        """A slot's batch is over."""
        slot.batch = None
        if slot.free:
            self._show(slot)

    def put_aside(self, slot: Slot, until: float) -> None:
        """Lets a free slot rest until then."""
        self._hide(slot)
        slot.aside_until = until
        self.aside[slot.id] = slot

    def take_back(self, now: float) -> None:
        """Frees the slots that have rested long enough, in the order in which their time came."""
        due = [
            (slot.aside_until, slot)
            for slot in self.aside.values()
            if slot.aside_until is not None and slot.aside_until <= now
        ]
        for _, slot in sorted(due, key=lambda pair: pair[0]):
            del self.aside[slot.id]
            slot.aside_until = None
            self._show(slot)

    def next_return(self) -> float | None:
        """When the first slot has rested long enough."""
        return min(
            (slot.aside_until for slot in self.aside.values() if slot.aside_until is not None), default=None
        )

    def _show(self, slot: Slot) -> None:
        self.free_count += 1
        for queue in slot.queues:
            queue.free[slot.id] = slot

    def _hide(self, slot: Slot) -> None:
        self.free_count -= 1
        for queue in slot.queues:
            del queue.free[slot.id]
