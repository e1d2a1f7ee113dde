"""The scheduler: events in, actions out. It decides everything about batches and does nothing else.

It stands between ingress (which made requests of entries, valid for their model) and the executors. It
knows no clock, socket, task or tensor: the same events at the same times give the same actions, in the
server, in the simulator and in the tests. docs/scheduling.md describes the policy.
"""

from __future__ import annotations

from typing import assert_never

from shapestream.scheduling.actions import Action, CancelBatch, StartBatch
from shapestream.scheduling.admission import Admission
from shapestream.scheduling.cost_model import CostModel
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
    TimePassed,
)
from shapestream.scheduling.invariants import check
from shapestream.scheduling.ledger import Ledger
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.planner import Cut, cut, fair_share, next_up, together
from shapestream.scheduling.records import RERUN, RUNNING, Batch, Request, Slot
from shapestream.scheduling.recovery import Recovery
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
        story_length: int = 1024,
    ) -> None:
        self._queues: dict[str, ModelQueue] = {}
        # Models with waiting requests; one that no longer has any is dropped at a later look.
        self._waiting: dict[str, ModelQueue] = {}
        self._slots = SlotTable()
        self._batches: dict[int, Batch] = {}
        self._costs = CostModel()
        self._admission = Admission(max_queued_requests, max_queued_bytes, self._waiting, self._costs)
        self._ledger = Ledger(self._admission, Story(story_length))
        self._recovery = Recovery(self._ledger, self._waiting, max_attempts)
        self._now = float("-inf")
        self._next_batch = 1

    # ------------------------------------------------------------ what the caller uses

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes one event and returns what to do about it, in order."""
        self._now = now = max(now, self._now)
        actions: list[Action] = []
        ledger = self._ledger
        while (late := ledger.expired(now)) is not None:
            actions.append(ledger.fail(late, "deadline_exceeded", _too_late(late), now))
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
                self._slots.join(event.slot, event.models, self._queues)
                self._costs.join(event.slot, event.worker, event.costs, event.models)
            case SlotClosing():
                self._slots.close(event.slot)
            case SlotLeft():
                self._slot_left(event, now, actions)
            case ModelAdded():
                self._add_model(event.model)
            case DrainStarted():
                self._admission.draining = True
            case _:
                assert_never(event)
        self._dispatch(now, actions)
        if ledger.unwanted:
            self._cancel_unwanted(actions)
        return actions

    def next_wakeup(self) -> float | None:
        """When `TimePassed` is wanted, if nothing happens before; always later than the last event."""
        first = self._ledger.deadlines.first()
        wakeup = None if first is None else first[0]
        if self._waiting and (back := self._slots.next_return()) is not None:
            wakeup = back if wakeup is None else min(wakeup, back)
        if self._slots.free_count:
            for queue in self._waiting.values():
                if queue.delay_s and queue.free and (due := queue.due.first()) is not None:
                    wakeup = due[0] if wakeup is None else min(wakeup, due[0])
        return wakeup

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not agree with each other. Looks at everything; for tests."""
        check(self._ledger, self._queues, self._waiting, self._slots, self._batches, self._now)

    def story(self, id: int) -> list[tuple[float, str]]:  # noqa: A002 - the name that events use
        """What happened to a recent request, oldest first, as (time, what)."""
        return self._ledger.story.of(id)

    def statistics(self) -> Statistics:
        """Counters and present state."""
        return take_stock(self._ledger, self._queues, self._slots, self._costs, len(self._batches))

    # ------------------------------------------------------------ events

    def _add_model(self, profile: ModelProfile) -> None:
        known = self._queues.get(profile.name)
        if known is None:
            queue = self._queues[profile.name] = ModelQueue(profile)
            self._slots.connect_model(queue)
            self._costs.add_model(profile)
        elif known.profile != profile:
            raise ValueError(f"model {profile.name!r} is here already, with another profile")

    def _admit(self, arrivals: tuple[Arrival, ...], now: float, actions: list[Action]) -> None:
        ledger = self._ledger
        admission = self._admission
        queues = self._queues
        admitted: list[int] = []
        for arrival in arrivals:
            queue = queues.get(arrival.model)
            refusal = admission.refusal(arrival, queue, now)
            if refusal is not None or queue is None:
                assert refusal is not None, "a model that is not known is refused"
                actions.append(ledger.refuse(arrival, refusal, now))
                continue
            request = ledger.admit(arrival, queue, now)
            admitted.append(request.id)
            self._waiting[arrival.model] = queue
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
        call_s = self._costs.call_s(queue.profile.name) or 0.0
        return due if due + call_s < request.deadline else now

    def _batch_finished(self, event: BatchFinished, now: float, actions: list[Action]) -> None:
        batch = self._end_batch(event.batch)
        if batch is None:
            return
        batch.slot.refusals = 0
        ledger = self._ledger
        if event.expired:
            for request in batch.members:
                if request.state is RUNNING and request.id in event.expired:
                    actions.append(ledger.fail(request, "deadline_exceeded", _too_late(request), now))
        else:
            # Without the expired members the call had another shape; then there is nothing to learn.
            self._costs.observe(
                batch.slot.id,
                batch.queue.profile.name,
                batch.sizes,
                event.busy_s,
                event.preparations,
                len(batch.ids),
            )
        ledger.deliver(batch, now, actions)
        batch.release_members()

    def _batch_failed(self, event: BatchFailed, now: float, actions: list[Action]) -> None:
        batch = self._end_batch(event.batch)
        if batch is None:
            return
        if event.code == "unavailable":
            self._rest(batch, now)
        elif event.code != "cancelled":
            batch.slot.refusals = 0
        self._recovery.failed(batch, event, now, actions)

    def _rest(self, batch: Batch, now: float) -> None:
        """Puts a slot aside that could not run its batch, longer each time in a row."""
        slot = batch.slot
        slot.refusals += 1
        if slot.free:
            pause_s = aside_s(slot.refusals, self._costs.call_s(batch.queue.profile.name))
            self._slots.put_aside(slot, now + pause_s)
            self._ledger.story.note(now, batch.ids, "slot {} is put aside for {} s", slot.id, pause_s)

    def _slot_left(self, event: SlotLeft, now: float, actions: list[Action]) -> None:
        batch = self._slots.leave(event.slot)
        self._costs.leave(event.slot)
        if batch is not None:
            del self._batches[batch.id]
            self._recovery.lost(batch, f"slot {event.slot} left", now, actions)

    def _end_batch(self, id: int) -> Batch | None:  # noqa: A002 - the name that events use
        """Frees the slot of a batch; None if the batch is unknown, because its slot had left before."""
        batch = self._batches.pop(id, None)
        if batch is not None:
            self._slots.release(batch.slot)
        return batch

    # ------------------------------------------------------------ decisions

    def _dispatch(self, now: float, actions: list[Action]) -> None:
        """Starts batches until no slot is free or nothing may start: the scheduler is work-conserving."""
        waiting = self._waiting
        while waiting and self._slots.free_count:
            request = next_up(waiting.values(), now)
            if request is None:
                for name in [name for name, queue in waiting.items() if not queue.waiting]:
                    del waiting[name]
                break
            queue = request.queue
            slot = next(iter(queue.free.values()))
            if request.state is RERUN:
                plan = together(queue.take_rerun())
            else:
                plan = cut(request, fair_share(queue, slot))
                queue.take(plan.members, RUNNING)
            actions.append(self._start(queue, slot, plan, now))

    def _start(self, queue: ModelQueue, slot: Slot, plan: Cut, now: float) -> StartBatch:
        batch = Batch(self._next_batch, slot, queue, plan.members, plan.sizes(queue.has_batch))
        self._next_batch += 1
        self._batches[batch.id] = batch
        self._slots.occupy(slot, batch)
        self._ledger.start(batch, plan, now)
        return StartBatch(
            batch=batch.id,
            slot=slot.id,
            model=queue.profile.name,
            requests=batch.ids,
            sizes=batch.sizes,
        )

    def _cancel_unwanted(self, actions: list[Action]) -> None:
        """Cancels the running batches for whose results nobody waits any more; their slots stay busy."""
        for batch in self._ledger.unwanted:
            if batch.id in self._batches:
                actions.append(CancelBatch(batch=batch.id, slot=batch.slot.id))
        self._ledger.unwanted.clear()


def _too_late(request: Request) -> str:
    where = "running" if request.state is RUNNING else "waiting"
    return f"the deadline passed while the request was {where}"
