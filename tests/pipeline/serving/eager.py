"""A scheduler that always sends ahead, one request per batch, and takes back on a whim: for the machinery around it.

It decides as badly as is allowed, and makes every case common that the real one makes rare. It plays by the same
rules: a slot is handed new batches when it has one, an id ends once, nothing is started again before its slot has answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from threading import Event
from typing import Any

from shapestream.scheduling import events
from shapestream.scheduling.actions import (
    Action,
    CancelBatch,
    DeliverResults,
    FailRequest,
    RecallBatch,
    StartBatch,
)
from shapestream.scheduling.batches import Batch
from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.fairness import QueueRoom
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.queueing import Request
from shapestream.scheduling.scheduler_statistics import SchedulerStatistics
from shapestream.scheduling.slots import Slot


class EagerScheduler:
    """In the place of `Scheduler`; `recall_share` of the batches sent ahead are asked back at the next event."""

    recall_share = 0.3
    depth = 2
    """Batches of a slot, at most; those beyond two are handed over together."""

    def __init__(self, **_: Any) -> None:
        self.random = Random(7)
        self.queue: deque[events.Arrival] = deque()
        self.slots: dict[int, list[int]] = {}
        """Per slot its batches: the one that runs, and those behind it."""
        self.requests: dict[int, Request] = {}
        """Those that have not ended."""
        self.batch_of: dict[int, Batch] = {}
        """None is told."""
        self.models: dict[str, ModelQueue] = {}
        self.places: dict[int, Slot] = {}
        self.batches: dict[int, Batch] = {}
        self.unanswered: set[int] = set()
        """Batches that were asked back or cancelled."""
        self.recalled: set[int] = set()
        """Those of them that were asked back. Nothing is queued behind one: its report could overtake that of the recall."""
        self.gone: set[int] = set()
        """Requests that have ended before their batch did."""
        self.log: list[events.Event | Action] = []
        self.joined: list[events.SlotJoined] = []
        self.closing: set[int] = set()
        self.asks_back = Event()
        """Set whenever a batch is asked back; for a model that waits for that."""
        self._numbers = 0

    @contextmanager
    def recalling(self) -> Iterator[None]:
        """Whatever is sent ahead meanwhile is asked back; nothing is afterwards."""
        self.recall_share = 1.0
        yield
        self.recall_share = 0.0

    def troubles(self, id: int) -> list[tuple[float, str]]:  # noqa: A002
        """None are remembered."""
        return []

    def codes(self) -> list[str]:
        """Why batches have failed so far."""
        return [event.code for event in self.log if isinstance(event, events.BatchFailed)]

    def handle(self, event: events.Event, now: float) -> list[Action]:
        """Decides."""
        self.log.append(event)
        actions: list[Action] = []
        match event:
            case events.RequestsArrived():
                self.queue.extend(event.requests)
                for arrival in event.requests:
                    queue = self.models[arrival.model]
                    flow = queue.flow_of(arrival.client)
                    self.requests[arrival.id] = Request(
                        arrival, flow, 0.0, arrival.id, now, has_batch=queue.has_batch
                    )
            case events.ModelAdded(model=profile):
                costs = CostModel().add_model(profile)
                self.models[profile.name] = ModelQueue(profile, costs, QueueRoom(1000, 10**9))
            case events.SlotsJoined():
                self.slots |= {joined.slot: [] for joined in event.slots}
                for joined in event.slots:
                    self.places[joined.slot] = Slot(joined.slot, joined.models, peer=joined.peer)
                self.joined.extend(event.slots)
            case events.SlotClosing():
                self.closing.add(event.slot)
            case events.SlotLeft():
                for batch in self.slots.pop(event.slot):
                    self._again(batch)
            case events.BatchFinished():
                batch = self._ended(event.batch, now)
                (request,) = batch.arrivals
                if request.id in event.expired:
                    actions.append(self._fail(request, "deadline_exceeded", "late", batch))
                elif request.id not in self.gone:
                    del self.requests[request.id]
                    actions.append(DeliverResults(batch=batch, requests=batch.arrivals))
            case events.BatchFailed():
                beside = self.slots[self.batches[event.batch].slot.id]
                first = beside[0] == event.batch
                beside.remove(event.batch)
                if first:
                    self._begin_next(beside, now)
                self._again(event.batch)
            case events.RequestCancelled():
                self._cancel(event.id, actions)
            case _:
                pass
        if not isinstance(event, events.BatchFinished | events.BatchFailed):
            self._recall(actions)
        self._start(actions)
        self.log.extend(actions)
        return actions

    def _fail(self, request: events.Arrival, code: str, message: str, batch: Batch | None) -> FailRequest:
        del self.requests[request.id]
        return FailRequest(request=request, code=code, message=message, batch=batch)

    def _begin_next(self, beside: list[int], now: float) -> None:
        if beside and self.batches[beside[0]].is_behind:
            self.batches[beside[0]].begin()
            self.batches[beside[0]].started = now

    def _ended(self, number: int, now: float) -> Batch:
        batch = self.batches.pop(number)
        beside = self.slots[batch.slot.id]
        earlier = beside[: beside.index(number)]
        assert self.recalled.issuperset(earlier), "a batch overtook the one before it"
        beside.remove(number)
        if not earlier:
            self._begin_next(beside, now)
        self.unanswered.discard(number)
        self.recalled.discard(number)
        return batch

    def _again(self, number: int) -> None:
        (request,) = self.batches.pop(number).arrivals
        self.unanswered.discard(number)
        self.recalled.discard(number)
        if request.id not in self.gone:
            self.queue.appendleft(request)

    def _cancel(self, request: int, actions: list[Action]) -> None:
        if request not in self.requests:
            return
        self.gone.add(request)
        self.queue = deque([waiting for waiting in self.queue if waiting.id != request])
        batch = next((one for one in self.batches.values() if one.arrivals[0].id == request), None)
        actions.append(self._fail(self.requests[request].arrival, "cancelled", "withdrawn", batch))
        if batch is not None:
            self.unanswered.add(batch.id)
            batch.cancelled = True
            actions.append(CancelBatch(batch=batch))

    def _recall(self, actions: list[Action]) -> None:
        for batches in self.slots.values():
            for batch in batches[1:]:
                if batch not in self.unanswered and self.random.random() < self.recall_share:
                    self.unanswered.add(batch)
                    self.recalled.add(batch)
                    self.batches[batch].recalled = True
                    self.asks_back.set()
                    actions.append(RecallBatch(batch=self.batches[batch]))

    def _start(self, actions: list[Action]) -> None:
        for slot, batches in self.slots.items():
            handed: list[Batch] = []
            most = self.depth if len(batches) < 2 else 0
            while (
                self.queue
                and len(batches) < most
                and slot not in self.closing
                and self.recalled.isdisjoint(batches)
            ):
                request = self.queue.popleft()
                self._numbers += 1
                batch = Batch(
                    self._numbers,
                    self.places[slot],
                    self.models[request.model],
                    [self.requests[request.id]],
                    request.sizes,
                )
                if batches:
                    batch.behind = batches[-1]
                    batch.queue_behind()
                else:
                    batch.begin()
                self.batches[batch.id] = batch
                handed.append(batch)
                batches.append(self._numbers)
            if handed:
                actions.append(StartBatch(batches=tuple(handed)))

    def next_wakeup(self) -> float | None:
        """Never."""
        return None

    def statistics(self, now: float | None = None) -> SchedulerStatistics:
        """What the server reports of it."""
        return SchedulerStatistics(
            queued=len(self.queue),
            queued_bytes=sum(arrival.nbytes for arrival in self.queue),
            running=len(self.batches),
            batches=len(self.batches),
            slots=len(self.slots),
            free_slots=sum(not batches for batches in self.slots.values()),
            closing_slots=len(self.closing),
            slots_resting=0,
            slots_reserved=0,
            slots_lost=0,
            suspects=0,
            draining=False,
            models=(),
        )

    def check_invariants(self) -> None:
        """Nothing that is not asserted on the way."""
