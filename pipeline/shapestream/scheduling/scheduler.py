"""The scheduler: events in, actions out. It decides everything about batches and does nothing else.

It stands between ingress (which made requests of entries, valid for their model) and the executors. It
knows no clock, socket, task or tensor: the same events at the same times give the same actions, in the
server, in the simulator and in the tests. docs/scheduling.md describes the policy.
"""

from __future__ import annotations

from typing import assert_never

from shapestream.scheduling.actions import Action, CancelBatch, StartBatch
from shapestream.scheduling.admission import Admission, Refusal
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
    SlotJoined,
    SlotLeft,
    TimePassed,
)
from shapestream.scheduling.invariants import check
from shapestream.scheduling.lanes import ModelQueue
from shapestream.scheduling.ledger import Ledger
from shapestream.scheduling.planner import Cut, cut, fair_share, next_up, together
from shapestream.scheduling.records import RERUN, RUNNING, Batch, Request, Slot
from shapestream.scheduling.slots import SlotTable
from shapestream.scheduling.statistics import ModelStatistics, Statistics
from shapestream.scheduling.story import Story

# These blame the slot or the device, not the data: the members are run again, alone.
_LOSSES = frozenset({"unavailable", "worker_lost", "cancelled"})


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
        if max_attempts < 1:
            raise ValueError("a request must be attempted at least once")
        self._max_attempts = max_attempts
        self._admission = Admission(max_queued_requests, max_queued_bytes)
        self._story = Story(story_length)
        self._ledger = Ledger(self._admission, self._story)
        self._costs = CostModel()
        self._slots = SlotTable()
        self._queues: dict[str, ModelQueue] = {}
        # Models with waiting requests; one that no longer has any is dropped at the next look.
        self._waiting: dict[str, ModelQueue] = {}
        self._batches: dict[int, Batch] = {}
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
        return self._story.of(id)

    def statistics(self) -> Statistics:
        """Counters and present state."""
        counters = self._ledger.counters
        return Statistics(
            queued=self._admission.queued_requests,
            queued_bytes=self._admission.queued_bytes,
            running=self._ledger.running,
            batches=len(self._batches),
            slots=len(self._slots.slots),
            free_slots=self._slots.free_count,
            draining=self._admission.draining,
            admitted=counters.admitted,
            delivered=counters.delivered,
            failed=dict(counters.failed),
            forgotten=counters.forgotten,
            batches_started=counters.batches_started,
            rows_started=counters.rows_started,
            padding_ratio=counters.padding_ratio,
            models=tuple(
                ModelStatistics(
                    name=name,
                    queued=queue.waiting,
                    slots=queue.slot_count,
                    free_slots=len(queue.free),
                    call_s=self._costs.call_s(name),
                    shapes_seen=len(self._costs.shapes(name)),
                )
                for name, queue in self._queues.items()
            ),
        )

    # ------------------------------------------------------------ events

    def _add_model(self, profile: ModelProfile) -> None:
        known = self._queues.get(profile.name)
        if known is None:
            queue = self._queues[profile.name] = ModelQueue(profile)
            self._slots.connect_model(queue)
        elif known.profile != profile:
            raise ValueError(f"model {profile.name!r} is here already, with another profile")

    def _admit(self, arrivals: tuple[Arrival, ...], now: float, actions: list[Action]) -> None:
        ledger = self._ledger
        admission = self._admission
        queues = self._queues
        admitted: list[int] = []
        for arrival in arrivals:
            queue = queues.get(arrival.model)
            if queue is None or admission.draining:
                refusal = _draining() if admission.draining else _unknown(arrival.model)
            elif arrival.deadline is not None and arrival.deadline <= now:
                refusal = Refusal("deadline_exceeded", "the deadline had passed on arrival")
            elif not admission.has_room(arrival.nbytes):
                refusal = admission.refusal(arrival.nbytes, self._waiting.values(), self._costs)
            else:
                request = ledger.admit(arrival, queue, now)
                admitted.append(request.id)
                self._waiting[arrival.model] = queue
                if queue.delay_s:
                    queue.due.push(self._due(request, queue, now), request)
                continue
            actions.append(ledger.refuse(arrival, refusal, now))
        if admitted:
            ledger.counters.admitted += len(admitted)
            self._story.note(now, tuple(admitted), "admitted")

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
        ledger = self._ledger
        if event.expired:
            for request in batch.members:
                if request.state is RUNNING and request.id in event.expired:
                    actions.append(ledger.fail(request, "deadline_exceeded", _too_late(request), now))
        else:
            # Without the expired members the call had another shape; then there is nothing to learn.
            self._costs.observe(batch.queue.profile.name, batch.sizes, len(batch.ids), event.run_s)
        ledger.deliver(batch, now, actions)
        batch.release_members()

    def _batch_failed(self, event: BatchFailed, now: float, actions: list[Action]) -> None:
        batch = self._end_batch(event.batch)
        if batch is None:
            return
        if event.code in _LOSSES:
            self._lose(batch, f"{event.code}: {event.message}", now, actions)
            return
        living = [request for request in batch.members if request.state is RUNNING]
        batch.release_members()
        if len(batch.ids) == 1:
            actions.extend(self._ledger.fail(request, event.code, event.message, now) for request in living)
            return
        self._story.note(now, batch.ids, "batch {} failed: {}: {}", batch.id, event.code, event.message)
        middle = (len(living) + 1) // 2
        for half in (living[:middle], living[middle:]):
            if half:
                self._rerun(half)

    def _slot_left(self, event: SlotLeft, now: float, actions: list[Action]) -> None:
        batch = self._slots.leave(event.slot)
        if batch is not None:
            del self._batches[batch.id]
            self._lose(batch, f"slot {event.slot} left", now, actions)

    def _end_batch(self, id: int) -> Batch | None:  # noqa: A002 - the name that events use
        """Frees the slot of a batch; None if the batch is unknown, because its slot had left before."""
        batch = self._batches.pop(id, None)
        if batch is not None:
            self._slots.release(batch.slot)
        return batch

    def _lose(self, batch: Batch, reason: str, now: float, actions: list[Action]) -> None:
        """A batch was lost with its slot: its members run again, each alone, if they have attempts left."""
        self._story.note(now, batch.ids, "batch {} lost: {}", batch.id, reason)
        living = [request for request in batch.members if request.state is RUNNING]
        batch.release_members()
        for request in living:
            request.losses += 1
            if request.losses < self._max_attempts:
                self._rerun([request])
            else:
                message = f"lost with its slot {request.losses} times, at last: {reason}"
                actions.append(self._ledger.fail(request, "worker_lost", message, now))

    def _rerun(self, group: list[Request]) -> None:
        self._ledger.put_back(group)
        queue = group[0].queue
        queue.put_rerun(group)
        self._waiting[queue.profile.name] = queue

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
                plan = together(queue.next_rerun())
                queue.leave_rerun(plan.members, RUNNING)
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


def _unknown(model: str) -> Refusal:
    return Refusal("unavailable", f"no model {model!r} is served here")


def _draining() -> Refusal:
    return Refusal("draining", "the server finishes what it has and takes nothing new")
