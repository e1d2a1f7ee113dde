"""Plain batching, for comparison: batches in arrival order, padded to the longest, or no batches.

`PlainServer` takes the scheduler's events and returns its actions, so the simulator can play the same traffic to it.
"""

from __future__ import annotations

from collections import deque

from shapestream.scheduling.actions import Action, DeliverResults, FailRequest, StartBatch
from shapestream.scheduling.batches import Batch
from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import (
    Arrival,
    BatchFinished,
    Event,
    ModelAdded,
    RequestsArrived,
    SlotJoined,
)
from shapestream.scheduling.fairness import QueueRoom
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.slots import Slot


class PlainServer:
    """First come, first served, by any free slot, up to `batch` requests in a call.

    Work-conserving: a free slot takes what waits. A batch is closed by the first request that may not be padded to
    share it. Requests whose deadline has passed before they start fail; no others do.
    """

    def __init__(self, batch: int = 1, *, max_queued_requests: int = 1 << 62) -> None:
        self._batch = batch
        self._max_queued = max_queued_requests
        self._models: dict[str, ModelQueue] = {}
        """Of these only the profiles are used: a batch names its model by them."""
        self._free: deque[Slot] = deque()
        self._queue: deque[Arrival] = deque()
        self._running: dict[int, Batch] = {}
        self._started = 0

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event; unknown ones are ignored."""
        actions: list[Action] = []
        match event:
            case RequestsArrived():
                room = self._max_queued - len(self._queue)
                self._queue += event.requests[:room]
                actions += [
                    FailRequest(request=request, code="overloaded", message="the queue is full")
                    for request in event.requests[room:]
                ]
            case BatchFinished():
                batch = self._running.pop(event.batch)
                self._free.append(batch.slot)
                actions.append(DeliverResults(batch=batch, requests=batch.arrivals))
            case SlotJoined() if not event.wide:
                self._free.append(Slot(event.slot, event.models))
            case ModelAdded():
                costs = CostModel().add_model(event.model)
                self._models[event.model.name] = ModelQueue(event.model, costs, QueueRoom(1, 1))
            case _:
                pass
        while self._free and (members := self._next_members(now, actions)):
            self._start(members, actions)
        return actions

    def next_wakeup(self) -> float | None:
        """Return None: a plain server needs no timer."""
        return None

    def _next_members(self, now: float, actions: list[Action]) -> list[Arrival]:
        """Take the requests of the next batch from the queue; those that waited too long are failed."""
        members: list[Arrival] = []
        while self._queue and len(members) < self._batch:
            request = self._queue[0]
            if request.deadline is not None and request.deadline <= now:
                actions.append(
                    FailRequest(request=request, code="deadline_exceeded", message="it waited too long")
                )
            elif self._may_join(members, request):
                members.append(request)
            else:
                break
            self._queue.popleft()
        return members

    def _may_join(self, members: list[Arrival], request: Arrival) -> bool:
        """Tell whether a request may share the call of these, with the permitted padding."""
        if not members:
            return True
        profile, first = self._models[request.model].profile, members[0]
        if request.model != first.model or not profile.has_batch:
            return False
        if sum(member.sizes[0] for member in [*members, request]) > profile.max_batch:
            return False
        dimensions = zip(profile.paddable[1:], first.sizes[1:], request.sizes[1:], strict=True)
        return all(paddable or mine == theirs for paddable, mine, theirs in dimensions)

    def _start(self, members: list[Arrival], actions: list[Action]) -> None:
        sizes = tuple(map(max, zip(*(member.sizes for member in members), strict=True)))
        if len(members) > 1:
            sizes = (sum(member.sizes[0] for member in members), *sizes[1:])
        self._started += 1
        batch = Batch(self._started, self._free.popleft(), self._models[members[0].model], (), sizes)
        batch.arrivals = members
        self._running[batch.id] = batch
        actions.append(StartBatch(batches=(batch,)))
