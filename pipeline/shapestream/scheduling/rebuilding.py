"""New books after a fault: what goes over from the old ones, which disagree.

What is known outside of the books stays: models with their costs, slots, and the batches there, without members. A slot
counts as busy until it reports. All requests end as `internal`: their places in the old books cannot be trusted. The
scheduler opens the new books, and then enters the event at which the fault occurred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from shapestream.scheduling.actions import (
    Action,
    CancelBatch,
    DeliverResults,
    FailRequest,
    ForgetRequest,
    RecallBatch,
)
from shapestream.scheduling.audit import Audit
from shapestream.scheduling.batches import Batch, BatchState
from shapestream.scheduling.events import (
    AuditWanted,
    BatchFailed,
    BatchFinished,
    CostsTold,
    DrainStarted,
    Event,
    ModelAdded,
    ModelRunsAlone,
    ModelUnavailable,
    RequestCancelled,
    RequestsAbandoned,
    RequestsArrived,
    SlotClosing,
    SlotJoined,
    SlotLeft,
    SlotsJoined,
    TimePassed,
)
from shapestream.scheduling.hang_watch import HangWatch
from shapestream.scheduling.ledger import Ledger
from shapestream.scheduling.model_queue import Queues
from shapestream.scheduling.slots import Slot, SlotTable


def has_taken(event: Event, queues: Queues, slots: SlotTable, ledger: Ledger, audit: Audit) -> bool:
    """Tell whether the books show what an event said, where they would be wrong for ever without it."""
    match event:
        case BatchFinished() | BatchFailed():
            return event.batch not in slots.batches
        case SlotJoined():
            return event.slot in slots.slots
        case SlotsJoined():
            return all(joined.slot in slots.slots for joined in event.slots)
        case SlotClosing():
            return event.slot not in slots.slots or slots.slots[event.slot].closing
        case SlotLeft():
            return event.slot not in slots.slots
        case RequestsAbandoned():
            return ledger.requests.keys().isdisjoint(event.ids)
        case ModelAdded():
            return event.model.name in queues
        case ModelUnavailable():
            return event.model not in queues or queues[event.model].unavailable is not None
        case ModelRunsAlone():
            return queues[event.model].alone == event.alone
        case DrainStarted():
            return ledger.admission.draining
        case AuditWanted():
            return audit.active
        case RequestsArrived() | RequestCancelled() | CostsTold() | TimePassed():
            return True  # what was to be withdrawn is answered in its turn, and slots bring their costs
        case _:
            assert_never(event)


def end_all(ledger: Ledger, actions: list[Action]) -> None:
    """End all requests that these actions have not ended. The old ledger only tells which: it stays as it is."""
    ended = {action.request.id for action in actions if isinstance(action, FailRequest | ForgetRequest)}
    for action in actions:
        if isinstance(action, DeliverResults):
            ended.update([request.id for request in action.requests])
    message = "the server lost track of its requests, and ended all of them; see its log"
    for id_ in sorted(ledger.requests.keys() - ended):
        request = ledger.requests[id_]
        actions.append(
            FailRequest(request=request.arrival, code="internal", message=message, batch=request.batch)
        )


def drop_reported(event: Event, slots: SlotTable) -> None:
    """Take a batch or a slot that is over, by this event, out of the old books."""
    match event:
        case BatchFinished() | BatchFailed():
            slots.batches.pop(event.batch, None)
        case SlotLeft():
            slots.slots.pop(event.slot, None)
        case _:
            pass


def keep(
    slot: Slot,
    held: Sequence[Batch],
    slots: SlotTable,
    queues: Queues,
    watch: HangWatch,
    now: float,
    actions: list[Action],
    *,
    closing: bool,
) -> None:
    """Enter a slot in new books, with the batch that it runs and those behind; all are stopped.

    `closing`: it gets no other. The slot is entered so at once: what failed while it closed need not work here.
    """
    slots.join(slot.id, slot.models, slot.prefetch_s, slot.worker.name, slot.peer, closing=closing)
    kept = slots.slots[slot.id]
    for batch in held:
        before = batch.enter_new_books(kept, queues[batch.model])
        if kept.batch is not None:
            slots.queue_behind(kept, batch)
            batch.recall()
            if before is not BatchState.RECALLED:
                actions.append(RecallBatch(batch=batch))
            continue
        slots.start(kept, batch, now)
        batch.go_on_in(before)
        watch.began(batch, now)
        if batch.cancel():
            actions.append(CancelBatch(batch=batch))
    if kept.batch is not None and kept.batch.state is BatchState.CONDEMNED:
        slots.condemn(kept.worker)
