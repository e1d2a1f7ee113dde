"""The scheduler: events in, actions out. It decides everything about batches and does nothing else.

It stands between ingress (which made requests of entries, valid for their model) and the executors. It
knows no clock, socket, task or tensor: the same events at the same times give the same actions, in the
server, in the simulator and in the tests. docs/scheduling.md describes the policy.

Here events change the books; what follows from that, who runs where, is `dispatching.py`'s.
"""

from __future__ import annotations

from typing import assert_never

from shapestream.scheduling.actions import Action, CancelBatch, RecallBatch
from shapestream.scheduling.admission import Admission, Refusal
from shapestream.scheduling.cost_model import CostModel
from shapestream.scheduling.dispatching import Dispatching
from shapestream.scheduling.events import (
    Arrival,
    BatchFailed,
    BatchFinished,
    ClientLeft,
    DrainStarted,
    Event,
    ModelAdded,
    ModelProfile,
    RequestCancelled,
    RequestsArrived,
    SlotClosing,
    SlotJoined,
    SlotLeft,
    SlotsJoined,
    TimePassed,
)
from shapestream.scheduling.invariants import check
from shapestream.scheduling.ledger import Ledger
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.records import RUNNING, Batch, Request
from shapestream.scheduling.recovery import Recovery
from shapestream.scheduling.rounding import ShapeRounding
from shapestream.scheduling.slots import SlotTable, aside_s
from shapestream.scheduling.statistics import Statistics, take_stock
from shapestream.scheduling.story import Story


class Scheduler:
    """Decides which requests run together, where and when.

    Every admitted id ends exactly once, by `DeliverResults`, `FailRequest` or `ForgetRequest`; so does
    every id that is refused, by `FailRequest`. Times given to `handle` must not go backwards; if one does,
    the latest so far is used. Raises ValueError only for events that break the contract of events.py.
    """

    def __init__(
        self,
        max_queued_requests: int,
        max_queued_bytes: int,
        max_attempts: int = 3,
        *,
        max_queued_s: float | None = None,
        story_length: int = 1024,
    ) -> None:
        self._queues: dict[str, ModelQueue] = {}
        self._slots = SlotTable()
        self._costs = CostModel()
        waiting: dict[str, ModelQueue] = {}
        self._admission = Admission(max_queued_requests, max_queued_bytes, max_queued_s, waiting, self._costs)
        self._ledger = Ledger(self._admission, Story(story_length))
        self._recovery = Recovery(self._ledger, waiting, max_attempts)
        self._dispatching = Dispatching(self._ledger, self._slots, self._costs, self._queues, waiting)
        self._now = float("-inf")

    # ------------------------------------------------------------ what the caller uses

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes one event and returns what to do about it, in order."""
        self._now = now = max(now, self._now)
        actions: list[Action] = []
        ledger = self._ledger
        while (late := ledger.expired(now)) is not None:
            actions.append(ledger.fail_late(late, now))
        if self._slots.aside:
            self._slots.take_back(now)
        match event:
            case RequestsArrived():
                self._admit(event.requests, now, actions)
            case BatchFinished():
                self._batch_finished(event, now, actions)
            case TimePassed():
                pass
            case RequestCancelled():
                if (request := ledger.requests.get(event.id)) is not None:
                    actions.append(ledger.fail(request, "cancelled", "withdrawn by its caller", now))
            case ClientLeft():
                actions.extend(ledger.forget_client(event.client, now))
            case BatchFailed():
                self._batch_failed(event, now, actions)
            case SlotJoined():
                self._slot_joined(event)
            case SlotsJoined():
                for joined in event.slots:
                    self._slot_joined(joined)
            case SlotClosing():
                self._slot_closing(event, now, actions)
            case SlotLeft():
                self._slot_left(event, now, actions)
            case ModelAdded():
                self._add_model(event.model)
            case DrainStarted():
                self._admission.draining = True
            case _:
                assert_never(event)
        self._dispatching.run(now, actions)
        if ledger.unwanted:
            self._drop_unwanted(now, actions)
        return actions

    def next_wakeup(self) -> float | None:
        """When `TimePassed` is wanted, if nothing happens before; always later than the last event."""
        expiry = self._ledger.next_expiry()
        wakeup = self._dispatching.next_wakeup()
        if wakeup is None:
            return expiry
        return wakeup if expiry is None else min(wakeup, expiry)

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not agree with each other. Looks at everything; for tests."""
        check(self._ledger, self._queues, self._dispatching, self._slots, self._now)

    def story(self, id: int) -> list[tuple[float, str]]:  # noqa: A002 - the name that events use
        """What happened to a recent request, oldest first, as (time, what)."""
        return self._ledger.story.of(id)

    def statistics(self) -> Statistics:
        """Counters and present state."""
        return take_stock(self._ledger, self._queues, self._slots, self._costs, self._dispatching)

    # ------------------------------------------------------------ models and slots

    def _add_model(self, profile: ModelProfile) -> None:
        known = self._queues.get(profile.name)
        if known is None:
            queue = self._queues[profile.name] = ModelQueue(profile)
            self._costs.add_model(profile)
            if profile.max_shapes is not None:
                queue.rounding = ShapeRounding(
                    profile, lambda rows, shapes: self._costs.surface(profile.name).seconds(rows, shapes)
                )
            self._slots.connect_model(queue)
        elif known.profile != profile:
            raise ValueError(f"model {profile.name!r} is here already, with another profile")

    def _slot_joined(self, event: SlotJoined) -> None:
        self._slots.join(event.slot, event.models, self._queues, event.prefetch_s)
        self._costs.join(event.slot, event.worker, event.costs, event.models)
        slot = self._slots.slots[event.slot]
        for queue in slot.queues:
            if queue.seen:
                self._measure_pace(queue, event.slot, next(reversed(queue.seen)))

    def _measure_pace(self, queue: ModelQueue, slot_id: int, sizes: tuple[int, ...]) -> None:
        """How fast a slot is for a model, beside the most common kind of slot, by a batch of these sizes."""
        slot = self._slots.slots[slot_id]
        here_s = self._costs.batch_s(queue.profile.name, sizes, slot_id)
        usual_s = self._costs.batch_s(queue.profile.name, sizes)
        if here_s and usual_s and not slot.closing:
            self._slots.set_pace(slot, queue, here_s / usual_s)

    def _slot_closing(self, event: SlotClosing, now: float, actions: list[Action]) -> None:
        slot = self._slots.close(event.slot)
        if slot is not None and slot.behind is not None and not slot.behind.recalled:
            actions.append(self._dispatching.recall(slot.behind, now, f"slot {slot.id} closes"))

    def _slot_left(self, event: SlotLeft, now: float, actions: list[Action]) -> None:
        self._costs.leave(event.slot)
        batch, behind = self._slots.leave(event.slot)
        if behind is not None:
            del self._dispatching.batches[behind.id]
            self._recovery.returned(behind, f"slot {event.slot} left before the batch started", now)
        if batch is not None:
            del self._dispatching.batches[batch.id]
            self._recovery.lost(batch, f"slot {event.slot} left", now, actions)

    # ------------------------------------------------------------ requests

    def _admit(self, arrivals: tuple[Arrival, ...], now: float, actions: list[Action]) -> None:
        ledger = self._ledger
        admission = self._admission
        admission.new_turn()
        queues = self._queues
        admitted: list[int] = []
        for arrival in arrivals:
            queue = queues.get(arrival.model)
            terms = admission.consider(arrival, queue, len(ledger.clients), now)
            if isinstance(terms, Refusal) or queue is None:
                assert isinstance(terms, Refusal), "a model that is not known is refused"
                actions.append(ledger.refuse(arrival, terms, now))
                continue
            request = ledger.admit(arrival, queue, terms, now)
            admitted.append(request.id)
            self._dispatching.waiting[arrival.model] = queue
            if queue.delay_s:
                queue.due.push(self._due(request, queue, now), request)
        if admitted:
            ledger.counters.admitted += len(admitted)
            ledger.story.note(now, tuple(admitted), "admitted")

    def _due(self, request: Request, queue: ModelQueue, now: float) -> float:
        """Until when a request may wait for company: not at all if that could cost it its deadline."""
        due = now + queue.delay_s
        if request.deadline is None:
            return due
        call_s = self._costs.batch_s(queue.profile.name, (request.rows, *request.shape)) or 0.0
        return due if due + call_s < request.deadline else now

    def _drop_unwanted(self, now: float, actions: list[Action]) -> None:
        """Stops the batches for whose results nobody waits any more; until they report, their slots keep them."""
        for batch in self._ledger.unwanted:
            if batch.id not in self._dispatching.batches:
                continue
            if batch.started is not None:
                actions.append(CancelBatch(batch=batch.id, slot=batch.slot.id))
            elif not batch.recalled:
                actions.append(self._dispatching.recall(batch, now, "nobody waits for it any more"))
        self._ledger.unwanted.clear()

    # ------------------------------------------------------------ batches

    def _batch_finished(self, event: BatchFinished, now: float, actions: list[Action]) -> None:
        batch = self._end_batch(event.batch, now)
        if batch is None:
            return
        batch.slot.refusals = 0
        ledger = self._ledger
        if event.expired:
            for request in batch.members:
                if request.state is RUNNING and request.id in event.expired:
                    actions.append(ledger.fail_late(request, now))
        elif event.busy_s > 0.0:
            # Without the expired members the call had another shape, and a clock that saw no time pass measured nothing.
            self._learn(batch, event)
        ledger.deliver(batch, now, actions)
        batch.release_members()

    def _learn(self, batch: Batch, event: BatchFinished) -> None:
        slot = batch.slot.id
        name = batch.queue.profile.name
        self._costs.observe(slot, name, batch.sizes, event.busy_s, event.preparations, len(batch.ids))
        self._measure_pace(batch.queue, slot, batch.sizes)

    def _batch_failed(self, event: BatchFailed, now: float, actions: list[Action]) -> None:
        batch = self._end_batch(event.batch, now)
        if batch is None:
            return
        slot = batch.slot
        if event.code == "unavailable":
            slot.refusals += 1
            # What was waiting there has just become the one that runs, or fails in the same way.
            if slot.batch is not None and not slot.batch.recalled:
                slot.batch.recalled = True
                actions.append(RecallBatch(batch=slot.batch.id, slot=slot.id))
        elif event.code not in ("cancelled", "recalled"):
            slot.refusals = 0
        if slot.refusals and slot.free and event.code in ("unavailable", "recalled"):
            self._rest(batch, now)
        self._recovery.failed(batch, event, now, actions)

    def _rest(self, batch: Batch, now: float) -> None:
        """Puts a slot aside that could not run its batch, longer each time in a row."""
        slot = batch.slot
        pause_s = aside_s(slot.refusals, self._costs.call_s(batch.queue.profile.name))
        self._slots.put_aside(slot, now + pause_s)
        self._ledger.story.note(now, batch.ids, "slot {} is put aside for {} s", slot.id, pause_s)

    def _end_batch(self, id: int, now: float) -> Batch | None:  # noqa: A002 - the name that events use
        """Takes a batch off its slot; None if the batch is unknown, because its slot had left before."""
        batch = self._dispatching.batches.pop(id, None)
        if batch is not None:
            successor = self._slots.end(batch, now)
            if successor is not None and not successor.wanted:
                # It began while it was being recalled.
                self._ledger.unwanted.append(successor)
        return batch
