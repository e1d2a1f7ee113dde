"""A scheduler that always sends ahead, one request per batch, and takes back on a whim: for the machinery around it.

It decides as badly as is allowed, and makes every case common that the real one makes rare. It plays by the same
rules: at most one batch behind another, an id ends once, nothing is started again before its slot has answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from shapestream.scheduling import events
from shapestream.scheduling.events import (
    Action,
    CancelBatch,
    DeliverResults,
    FailRequest,
    RecallBatch,
    StartBatch,
)
from shapestream.scheduling.scheduler_statistics import SchedulerStatistics


class EagerScheduler:
    """In the place of `Scheduler`; `recall_share` of the batches sent ahead are asked back at the next event."""

    recall_share = 0.3

    def __init__(self, **_: Any) -> None:
        self.random = Random(7)
        self.queue: deque[events.Arrival] = deque()
        self.slots: dict[int, list[int]] = {}
        """Per slot its batches: the one that runs, and the one behind it."""
        self.batches: dict[int, tuple[int, events.Arrival]] = {}
        self.unanswered: set[int] = set()
        """Batches that were asked back or cancelled."""
        self.recalled: set[int] = set()
        """Those of them that were asked back. Nothing is queued behind one: its report could overtake that of the recall."""
        self.gone: set[int] = set()
        """Requests that have ended before their batch did."""
        self.log: list[events.Event | Action] = []
        self.joined: list[events.SlotJoined] = []
        self.closing: set[int] = set()
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
            case events.SlotsJoined():
                self.slots |= {joined.slot: [] for joined in event.slots}
                self.joined.extend(event.slots)
            case events.SlotClosing():
                self.closing.add(event.slot)
            case events.SlotLeft():
                for batch in self.slots.pop(event.slot):
                    self._again(batch)
            case events.BatchFinished():
                request = self._ended(event.batch)
                if request.id in event.expired:
                    actions.append(FailRequest(id=request.id, code="deadline_exceeded", message="late"))
                elif request.id not in self.gone:
                    actions.append(DeliverResults(batch=event.batch, requests=(request.id,)))
            case events.BatchFailed():
                slot = self.batches[event.batch][0]
                self.slots[slot].remove(event.batch)
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

    def _ended(self, batch: int) -> events.Arrival:
        slot, request = self.batches.pop(batch)
        assert self.slots[slot][0] == batch, "a batch overtook the one before it"
        self.slots[slot].remove(batch)
        self.unanswered.discard(batch)
        self.recalled.discard(batch)
        return request

    def _again(self, batch: int) -> None:
        _, request = self.batches.pop(batch)
        self.unanswered.discard(batch)
        self.recalled.discard(batch)
        if request.id not in self.gone:
            self.queue.appendleft(request)

    def _cancel(self, request: int, actions: list[Action]) -> None:
        self.gone.add(request)
        actions.append(FailRequest(id=request, code="cancelled", message="withdrawn"))
        self.queue = deque([waiting for waiting in self.queue if waiting.id != request])
        for batch, (slot, arrival) in self.batches.items():
            if arrival.id == request:
                self.unanswered.add(batch)
                actions.append(CancelBatch(batch=batch, slot=slot))

    def _recall(self, actions: list[Action]) -> None:
        for slot, batches in self.slots.items():
            for batch in batches[1:]:
                if batch not in self.unanswered and self.random.random() < self.recall_share:
                    self.unanswered.add(batch)
                    self.recalled.add(batch)
                    actions.append(RecallBatch(batch=batch, slot=slot))

    def _start(self, actions: list[Action]) -> None:
        for slot, batches in self.slots.items():
            while (
                self.queue
                and len(batches) < 2
                and slot not in self.closing
                and self.recalled.isdisjoint(batches)
            ):
                request = self.queue.popleft()
                self._numbers += 1
                self.batches[self._numbers] = (slot, request)
                actions.append(
                    StartBatch(
                        batch=self._numbers,
                        slot=slot,
                        model=request.model,
                        requests=(request.id,),
                        sizes=request.sizes,
                        behind=batches[0] if batches else None,
                    )
                )
                batches.append(self._numbers)

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
