"""Which slots there are, and which of them are free for which model."""

from __future__ import annotations

from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.records import Batch, Slot


class SlotTable:
    """The slots. Each free slot stands in the `free` of every model that it serves, longest free first."""

    __slots__ = ("free_count", "slots")

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.free_count = 0

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
            if queue.profile.name in slot.models:
                self._connect(slot, queue)

    def _connect(self, slot: Slot, queue: ModelQueue) -> None:
        slot.queues.append(queue)
        queue.slot_count += 1
        if slot.batch is None:
            queue.free[slot.id] = slot

    def leave(self, id: int) -> Batch | None:  # noqa: A002
        """Removes a slot; what it ran is returned. Unknown slots are ignored."""
        slot = self.slots.pop(id, None)
        if slot is None:
            return None
        for queue in slot.queues:
            queue.slot_count -= 1
            queue.free.pop(id, None)
        if slot.batch is None:
            self.free_count -= 1
        return slot.batch

    def occupy(self, slot: Slot, batch: Batch) -> None:
        """A free slot starts a batch."""
        slot.batch = batch
        self.free_count -= 1
        for queue in slot.queues:
            del queue.free[slot.id]

    def release(self, slot: Slot) -> None:
        """A slot's batch is over."""
        slot.batch = None
        self.free_count += 1
        for queue in slot.queues:
            queue.free[slot.id] = slot
