"""What slots report: batches that ran, failed, or came back, and slots that leave with what they had."""

from __future__ import annotations

from typing import assert_never

from shapestream.scheduling.actions import Action, CancelBatch, KillSlot, RecallBatch, ReportFault
from shapestream.scheduling.cost_model import CostModel
from shapestream.scheduling.dispatching import Dispatching
from shapestream.scheduling.events import BatchFailed, BatchFinished, SlotLeft
from shapestream.scheduling.hang_watch import HangWatch
from shapestream.scheduling.ledger import Ledger
from shapestream.scheduling.records import RUNNING, Batch, Hang
from shapestream.scheduling.recovery import Recovery
from shapestream.scheduling.slot import Slot
from shapestream.scheduling.slots import SlotTable, aside_s
from shapestream_engine.batch import ErrorCode

__all__ = ["Reports"]


class Reports:
    """Changes the books by what slots report."""

    __slots__ = ("_costs", "_dispatching", "_ledger", "_recovery", "_slots", "_watch")

    def __init__(
        self,
        ledger: Ledger,
        slots: SlotTable,
        costs: CostModel,
        dispatching: Dispatching,
        recovery: Recovery,
        watch: HangWatch,
    ) -> None:
        self._ledger = ledger
        self._slots = slots
        self._costs = costs
        self._dispatching = dispatching
        self._recovery = recovery
        self._watch = watch

    def finished(self, event: BatchFinished, now: float, actions: list[Action]) -> None:
        """A batch ran."""
        batch = self._end(event.batch, now)
        if batch is None:
            return
        batch.slot.refusals = 0
        batch.slot.owes_rest = False
        ledger = self._ledger
        self._watch.observe(batch, event.busy_s)
        if event.expired:
            for request in batch.members:
                if request.state is RUNNING and request.id in event.expired:
                    actions.append(ledger.fail_late(request, now))
        elif event.busy_s > 0.0 and all(batch.sizes):
            # Nothing is learned from a call without the expired members, which had another shape, from one without
            # elements, and from a clock that saw no time pass.
            try:
                self._learn(batch, event)
            except Exception as error:  # noqa: BLE001 - results are delivered, whatever they teach
                actions.append(ReportFault(error=error, about="costs of a batch", requests=batch.ids))
        ledger.deliver(batch, now, actions)
        batch.release_members()

    def _learn(self, batch: Batch, event: BatchFinished) -> None:
        slot = batch.slot
        name = batch.queue.profile.name
        self._costs.observe(slot.id, name, batch.sizes, event.busy_s, event.preparations, len(batch.ids))
        self.measure_pace(slot, name, batch.sizes)

    def measure_pace(self, slot: Slot, model: str, sizes: tuple[int, ...]) -> None:
        """How fast a slot is for a model, beside the most common kind of slot, by a batch of these sizes."""
        queue = next((queue for queue in slot.queues if queue.profile.name == model), None)
        here_s = self._costs.batch_s(model, sizes, slot.id)
        usual_s = self._costs.batch_s(model, sizes)
        if here_s and usual_s and queue is not None:
            self._slots.set_pace(slot, queue, here_s / usual_s)

    def failed(self, event: BatchFailed, now: float, actions: list[Action]) -> None:
        """A batch did not run."""
        batch = self._end(event.batch, now)
        if batch is None:
            return
        slot = batch.slot
        if event.code == ErrorCode.UNAVAILABLE:
            slot.refusals += 1
            slot.owes_rest = True
            # What was waiting there has just become the one that runs, or fails in the same way.
            if (refused := self._slots.expect_back(slot)) is not None:
                actions.append(RecallBatch(batch=refused.id, slot=slot.id))
        elif event.code not in (ErrorCode.CANCELLED, ErrorCode.RECALLED):
            slot.refusals = 0
            slot.owes_rest = False
        if slot.owes_rest and slot.idle:
            slot.owes_rest = False
            self._rest(batch, now)
        self._recovery.failed(batch, event, now, actions)

    def _rest(self, batch: Batch, now: float) -> None:
        """Puts a slot aside that could not run its batch, longer each time in a row."""
        slot = batch.slot
        pause_s = aside_s(slot.refusals, self._costs.call_s(batch.queue.profile.name))
        self._slots.put_aside(slot, now + pause_s)
        self._ledger.story.note(now, batch.ids, "slot {} is put aside for {} s", slot.id, pause_s)

    def slot_left(self, event: SlotLeft, now: float, actions: list[Action]) -> None:
        """A slot is gone: what it ran is lost, what waited there is not.

        Where its process died, what ran there is suspected. Where that was killed because of a batch that hung, only
        that batch is: it would have gone on killing, and the others were in no one's way.
        """
        id = event.slot  # noqa: A001 - as events call it
        slot = self._slots.slots.get(id)
        if slot is None:
            return
        died = event.died and not slot.worker.killed
        self._costs.leave(id)
        batch, behind = self._slots.leave(id)
        if behind is not None:
            del self._dispatching.batches[behind.id]
            if died:
                self._recovery.may_have_begun(behind, f"its worker {slot.worker.name} died", now)
            else:
                self._recovery.returned(behind, f"slot {id} left before the batch started", now)
        if batch is None:
            return
        del self._dispatching.batches[batch.id]
        if batch.hang:
            self._recovery.died(batch, f"it hung, and its worker {slot.worker.name} was ended", now, actions)
        elif died:
            self._recovery.died(batch, f"its worker {slot.worker.name} died", now, actions)
        else:
            self._recovery.lost(batch, f"slot {id} left", now, actions)

    def hang(self, now: float, actions: list[Action]) -> None:
        """Takes the next step against each batch that has run too long."""
        for batch in self._watch.look(self._dispatching.batches.values(), now):
            slot = batch.slot
            assert batch.started is not None  # or it would not have been looked at
            ran_s = now - batch.started
            self._ledger.story.note(
                now, batch.ids, "batch {} hangs: {} after {} s", batch.id, batch.hang.name, ran_s
            )
            match batch.hang:
                case Hang.CANCELLED:
                    if not batch.cancelled:
                        batch.cancelled = True
                        actions.append(CancelBatch(batch=batch.id, slot=slot.id))
                    if (behind := self._slots.send_no_more(slot)) is not None:
                        actions.append(self._dispatching.recall(behind, now, "the batch before it hangs"))
                case Hang.KILLED:
                    self._slots.condemn(slot.worker)
                    reason = f"batch {batch.id} of {batch.queue.profile.name} has run for {ran_s:.1f} s"
                    actions.append(KillSlot(slot=slot.id, reason=reason))
                case Hang.GIVEN_UP:
                    self._slots.give_up(slot)
                    self._recovery.given_up(batch, now, actions)
                case Hang.NOT:
                    raise AssertionError("a batch was looked at too early")
                case _:
                    assert_never(batch.hang)

    def _end(self, id: int, now: float) -> Batch | None:  # noqa: A002 - as events call it
        """Takes a batch off its slot; None if the batch is unknown, because its slot had left before."""
        batch = self._dispatching.batches.pop(id, None)
        if batch is not None:
            successor = self._slots.end(batch, now)
            if successor is not None and not successor.wanted:
                # It began while it was being recalled.
                self._ledger.unwanted.append(successor)
        return batch
