"""The present state of the scheduler: what waits, what runs, and on which slots.

Counters of what ran stand in telemetry/counters.py.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, fields, replace
from typing import Any

from shapestream.scheduling.batches import BatchState
from shapestream.scheduling.ledger import Ledger
from shapestream.scheduling.model_queue import Queues
from shapestream.scheduling.queueing import SUSPECT
from shapestream.scheduling.slots import SlotTable


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelStatistics:
    """The present queue and slots of one model, and the work that it has had."""

    name: str
    queued: int
    queued_s: float
    """Predicted seconds of one slot for what waits; those that came before anything was measured count nothing."""
    queued_s_per_slot: float
    """The same of all models that share slots with this one, divided by the slots of each: until a slot is free."""
    oldest_s: float
    """Seconds since the arrival of the oldest request of those that wait; 0 without any."""
    waited_s: float
    """Seconds that requests have spent in the queue, also those that are still there."""
    slots: int
    free_slots: int
    shapes_seen: int
    """Distinct call shapes that the cost model remembers."""
    predicted_s: float
    """Predicted seconds of the batches that ran and had a prediction."""
    measured_s: float
    """Seconds that these took."""

    def __repr__(self) -> str:
        return f"{self.name}: {self.queued} queued, {self.free_slots} of {self.slots} slots free"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SchedulerStatistics:
    """The present state of the scheduler."""

    queued: int
    """Requests in the queue, to run for the first time or again."""
    queued_bytes: int
    running: int
    """Requests in batches, running or queued behind another, that have not ended."""
    batches: int
    """Batches that run, or are queued behind one that does."""
    slots: int
    free_slots: int
    closing_slots: int
    """Slots that finish what they run and then leave."""
    slots_resting: int
    """Slots that rest because they could not run a batch."""
    slots_reserved: int
    """Idle slots whose worker is reserved for a suspect, or is to be killed."""
    slots_lost: int
    """Slots whose call hangs, and that nothing could end."""
    suspects: int
    """Queued requests that are to run alone in a worker, because one that may have run them died or hung."""
    draining: bool
    models: tuple[ModelStatistics, ...]

    @property
    def idle(self) -> bool:
        """Whether no request is queued and no batch runs."""
        return not (self.queued or self.batches)

    def to_dict(self, names: Container[str]) -> dict[str, Any]:
        """Return the numbers; of the models, those of these names."""
        told = {model.name: model for model in self.models if model.name in names}
        return {**_numbers(self), "models": {name: _numbers(model) for name, model in told.items()}}

    def __repr__(self) -> str:
        return f"{self.running} running, {self.queued} queued"


def _numbers(statistics: SchedulerStatistics | ModelStatistics) -> dict[str, float]:
    columns = {column.name: getattr(statistics, column.name) for column in fields(statistics)}
    return {name: round(value, 6) for name, value in columns.items() if isinstance(value, int | float)}


def _together(older: ModelStatistics, newer: ModelStatistics) -> ModelStatistics:
    """Return the state of two generations of a model, of which the older one is about to go."""
    return replace(
        newer,
        queued=older.queued + newer.queued,
        queued_s=older.queued_s + newer.queued_s,
        queued_s_per_slot=max(older.queued_s_per_slot, newer.queued_s_per_slot),
        oldest_s=max(older.oldest_s, newer.oldest_s),
        waited_s=older.waited_s + newer.waited_s,
        predicted_s=older.predicted_s + newer.predicted_s,
        measured_s=older.measured_s + newer.measured_s,
    )


def statistics_of(ledger: Ledger, queues: Queues, slots: SlotTable, now: float) -> SchedulerStatistics:
    """Return the present state. Wide slots are none of the slots that it counts."""
    admission = ledger.admission
    per_slot_s: dict[int, float] = {}
    # When the oldest waiting request of each model arrived: requests are in the order of admission.
    since: dict[str, float] = {}
    for request in ledger.requests.values():
        if request.state <= SUSPECT:
            since.setdefault(request.model, request.arrived)
    for queue in queues.waiting:
        if (group := id(queue.sharing)) not in per_slot_s:  # one sum for all models that share slots
            per_slot_s[group] = admission.queued_s(queue)
    counted = [slot for slot in slots.slots.values() if not slot.wide]
    models: dict[str, ModelStatistics] = {}
    for key, queue in queues.items():
        own = ModelStatistics(
            name=queue.profile.name,
            queued=queue.waiting,
            queued_s=queue.waiting_s,
            queued_s_per_slot=per_slot_s.get(id(queue.sharing), 0.0),
            oldest_s=now - since.get(key, now),
            waited_s=queue.waits.seconds(now),
            slots=slots.pools[key].count,
            free_slots=len(slots.pools[key].free),
            shapes_seen=queue.costs.shapes,
            predicted_s=queue.predicted_s,
            measured_s=queue.measured_s,
        )
        older = models.get(own.name)
        models[own.name] = own if older is None else _together(older, own)
    return SchedulerStatistics(
        queued=admission.room.requests,
        queued_bytes=admission.room.nbytes,
        running=ledger.running,
        batches=len(slots.batches),
        slots=len(counted),
        free_slots=slots.free_count,
        closing_slots=sum(slot.closing for slot in counted),
        slots_resting=sum(slot.id in slots.resting for slot in counted),
        slots_reserved=sum(slot.idle and not slot.free for slot in counted),
        slots_lost=sum(slot.batch is not None and slot.batch.state is BatchState.STUCK for slot in counted),
        suspects=sum(queue.suspect_count for queue in queues.values()),
        draining=admission.draining,
        models=tuple(models.values()),
    )
