"""The scheduler: events in, actions out. It decides everything about batches and does nothing else.

It stands between the clients' port (which made requests of entries, valid for their model) and the executors. It
knows no clock, socket, task or tensor: the same events at the same times give the same actions, in the
server, in the simulator and in the tests. docs/scheduling.md describes the policy.

Events change the books, here and in `reports.py`; what follows from that, who runs where, is `dispatching.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import assert_never

from shapestream.scheduling.actions import Action, CancelBatch, FailRequest, ReportFault
from shapestream.scheduling.admission import Admission, Refusal
from shapestream.scheduling.cost_kind import NOTHING_LEARNED
from shapestream.scheduling.cost_model import CostModel
from shapestream.scheduling.dispatching import Dispatching
from shapestream.scheduling.events import (
    Arrival,
    BatchFailed,
    BatchFinished,
    ContractError,
    DrainStarted,
    Event,
    ModelAdded,
    ModelGivenUp,
    ModelProfile,
    RequestCancelled,
    RequestsAbandoned,
    RequestsArrived,
    SlotClosing,
    SlotJoined,
    SlotLeft,
    SlotsJoined,
    TimePassed,
)
from shapestream.scheduling.hang_watch import HangLimits, HangWatch
from shapestream.scheduling.invariants import check
from shapestream.scheduling.ledger import Ledger
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.queue_room import QueueRoom
from shapestream.scheduling.records import RUNNING
from shapestream.scheduling.recovery import Recovery
from shapestream.scheduling.reports import Reports
from shapestream.scheduling.rounding import ShapeRounding
from shapestream.scheduling.slot import Slot
from shapestream.scheduling.slots import SlotTable
from shapestream.scheduling.statistics import Statistics, take_stock
from shapestream.scheduling.story import Story
from shapestream_engine.learned_costs import LearnedCosts


class Scheduler:
    """Decides which requests run together, where and when.

    Every admitted id ends exactly once, by `DeliverResults`, `FailRequest` or `ForgetRequest`; so does
    every id that is refused, by `FailRequest`. Times given to `handle` must not go backwards; if one does,
    the latest so far is used. Raises ContractError only for events that break the contract of events.py.

    No other error leaves `handle` as long as the books agree with each other: what could not be worked out is a
    `ReportFault`, and a request that it is about fails alone, as `internal`.
    """

    def __init__(
        self,
        max_queued_requests: int,
        max_queued_bytes: int,
        max_attempts: int = 3,
        *,
        max_queued_s: float | None = None,
        story_length: int = 1024,
        hangs: HangLimits | None = None,
        learned: Mapping[str, LearnedCosts] = NOTHING_LEARNED,
    ) -> None:
        """`hangs`: when a batch hangs; None: never. `learned`: what an earlier one's `learned_costs` said, by table."""
        self._queues: dict[str, ModelQueue] = {}
        self._watch = HangWatch(hangs)
        self._slots = SlotTable(self._watch)
        self._costs = CostModel(learned)
        waiting: dict[str, ModelQueue] = {}
        room = QueueRoom(max_queued_requests, max_queued_bytes, max_queued_s)
        self._admission = Admission(room, waiting, self._costs)
        self._ledger = Ledger(self._admission, Story(story_length))
        self._dispatching = Dispatching(self._ledger, self._slots, self._costs, self._queues, waiting)
        recovery = Recovery(self._ledger, waiting, max_attempts, self._dispatching.isolation)
        self._reports = Reports(
            self._ledger, self._slots, self._costs, self._dispatching, recovery, self._watch
        )
        self._now = float("-inf")

    # ------------------------------------------------------------ what the caller uses

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes one event and returns what to do about it, in order."""
        self._now = now = max(now, self._now)
        actions: list[Action] = []
        agree = True
        for step in (self._take, self._follow):
            try:
                step(event, now, actions)
            except ContractError:
                raise
            except Exception as error:  # noqa: BLE001 - the edge where a defect becomes a line of the log
                agree = False
                actions.append(ReportFault(error=error, about=type(event).__name__))
        if not agree:
            if isinstance(event, RequestsArrived):
                self._refuse_unanswered(event.requests, now, actions)
            self.check_invariants()  # what does not agree any more must not go on
        return actions

    def _take(self, event: Event, now: float, actions: list[Action]) -> None:
        """Changes the books by an event."""
        ledger = self._ledger
        while (late := ledger.deadlines.due(now)) is not None:
            actions.append(ledger.fail_late(late, now))
        if self._slots.aside:
            self._slots.take_back(now)
        match event:
            case RequestsArrived():
                self._admit(event.requests, now, actions)
            case BatchFinished():
                self._reports.finished(event, now, actions)
            case TimePassed():
                pass
            case RequestCancelled():
                if (request := ledger.requests.get(event.id)) is not None:
                    actions.append(ledger.fail(request, "cancelled", "withdrawn by its caller", now))
            case RequestsAbandoned():
                actions.extend(ledger.abandon(event.ids, now))
            case BatchFailed():
                self._reports.failed(event, now, actions)
            case SlotJoined():
                self._slots_joined((event,), actions)
            case SlotsJoined():
                self._slots_joined(event.slots, actions)
            case SlotClosing():
                self._slot_closing(event, now, actions)
            case SlotLeft():
                self._reports.slot_left(event, now, actions)
            case ModelAdded():
                self._add_model(event.model)
            case ModelGivenUp():
                for request in list(ledger.requests.values()):
                    if request.queue.profile.name == event.model and request.state is not RUNNING:
                        actions.append(ledger.fail(request, "unavailable", event.message, now))
            case DrainStarted():
                self._admission.draining = True
            case _:
                assert_never(event)

    def _follow(self, event: Event, now: float, actions: list[Action]) -> None:
        """Does what follows from the books."""
        if self._watch.next_look <= now:
            self._reports.hang(now, actions)
        self._dispatching.run(now, actions)
        if self._ledger.unwanted:
            self._drop_unwanted(now, actions)

    def next_wakeup(self) -> float | None:
        """When `TimePassed` is wanted, if nothing happens before; always later than the last event."""
        first = self._watch.next_look
        if (expiry := self._ledger.deadlines.next()) is not None:
            first = min(first, expiry)
        if (wakeup := self._dispatching.next_wakeup()) is not None:
            first = min(first, wakeup)
        return first if first < inf else None

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not agree with each other. Looks at everything; for tests."""
        check(self._ledger, self._queues, self._dispatching, self._slots, self._now)

    def story(self, id: int) -> list[tuple[float, str]]:  # noqa: A002 - the name that events use
        """What happened to a recent request, oldest first, as (time, what)."""
        return self._ledger.story.of(id)

    def statistics(self) -> Statistics:
        """Counters and present state."""
        return take_stock(self._ledger, self._queues, self._slots, self._costs, self._dispatching)

    def learned_costs(self, saved_at: float) -> list[LearnedCosts]:
        """What traffic made of the measured costs, for the next scheduler; `saved_at`: now, in seconds since the epoch."""
        return self._costs.learned(saved_at)

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
            raise ContractError(f"model {profile.name!r} is here already, with another profile")

    def _slots_joined(self, events: Sequence[SlotJoined], actions: list[Action]) -> None:
        first_of: dict[str, Slot] = {}
        for event in events:
            self._slots.join(event.slot, event.models, self._queues, event.prefetch_s, event.worker)
            slot = self._slots.slots[event.slot]
            alike = first_of.setdefault(event.worker or f"slot {event.slot}", slot)
            try:
                self._costs.join(event.slot, event.worker, event.costs, event.models)
                for queue in slot.queues:
                    name = queue.profile.name
                    if slot is not alike:  # slots of one worker are equally fast
                        self._slots.set_pace(slot, queue, alike.paces.get(name, 1.0))
                    elif queue.seen:
                        self._reports.measure_pace(slot, name, next(reversed(queue.seen)))
            except Exception as error:  # noqa: BLE001 - the slot serves without what it has measured
                actions.append(ReportFault(error=error, about="costs of a slot"))

    def _slot_closing(self, event: SlotClosing, now: float, actions: list[Action]) -> None:
        slot = self._slots.close(event.slot)
        if slot is not None and slot.behind is not None and not slot.behind.recalled:
            actions.append(self._dispatching.recall(slot.behind, now, f"slot {slot.id} closes"))

    # ------------------------------------------------------------ requests

    def _admit(self, arrivals: tuple[Arrival, ...], now: float, actions: list[Action]) -> None:
        ledger = self._ledger
        admission = self._admission
        admission.new_turn()
        queues = self._queues
        admitted: list[int] = []
        for arrival in arrivals:
            queue = queues.get(arrival.model)
            due = now
            try:
                # All that may fail comes before any book is changed.
                terms = admission.consider(arrival, queue, ledger.clients, now)
                if queue is not None and not isinstance(terms, Refusal):
                    if queue.delay_s:
                        due = self._due(arrival, queue, now)
                    if queue.rounding is not None and 0 not in arrival.sizes:
                        queue.rounding.observe(arrival.sizes)
            except Exception as error:  # noqa: BLE001 - one arrival fails alone
                terms = Refusal("internal", "the server cannot work out how to run this request; see its log")
                actions.append(ReportFault(error=error, about="terms of a request", requests=(arrival.id,)))
            if isinstance(terms, Refusal) or queue is None:
                assert isinstance(terms, Refusal), "a model that is not known is refused"
                actions.append(ledger.refuse(arrival, terms, now))
                continue
            request = ledger.admit(arrival, queue, terms, now)
            admitted.append(request.id)
            self._dispatching.waiting[arrival.model] = queue
            if queue.delay_s:
                queue.due.push(due, request)
        if admitted:
            ledger.counters.admitted += len(admitted)
            ledger.story.note(now, tuple(admitted), "admitted")

    def _refuse_unanswered(self, arrivals: tuple[Arrival, ...], now: float, actions: list[Action]) -> None:
        """Fails those of an event that went wrong that came neither in nor out."""
        answered = {action.id for action in actions if isinstance(action, FailRequest)}
        refusal = Refusal("internal", "the server failed while it took this request in; see its log")
        for arrival in arrivals:
            if arrival.id not in answered and arrival.id not in self._ledger.requests:
                actions.append(self._ledger.refuse(arrival, refusal, now))

    def _due(self, arrival: Arrival, queue: ModelQueue, now: float) -> float:
        """Until when a request may wait for company: not at all if that could cost it its deadline."""
        due = now + queue.delay_s
        if arrival.deadline is None:
            return due
        call_s = self._costs.batch_s(queue.profile.name, arrival.sizes) or 0.0
        return due if due + call_s < arrival.deadline else now

    def _drop_unwanted(self, now: float, actions: list[Action]) -> None:
        """Stops the batches for whose results nobody waits any more; until they report, their slots keep them."""
        # The same batch twice: its last member was late in the very event that let it begin.
        for batch in dict.fromkeys(self._ledger.unwanted):
            if batch.id not in self._dispatching.batches:
                continue
            if batch.started is not None:
                if batch.cancelled:
                    continue
                batch.cancelled = True
                actions.append(CancelBatch(batch=batch.id, slot=batch.slot.id))
            elif not batch.recalled:
                actions.append(self._dispatching.recall(batch, now, "nobody waits for it any more"))
        self._ledger.unwanted.clear()
