"""Plain batching, for comparison: batches in arrival order, padded to the longest, or no batches.

`PlainServer` takes the scheduler's events and returns its actions, so the simulator can play the same traffic to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shapestream.scheduling.events import (
    Action,
    Arrival,
    BatchFinished,
    DeliverResults,
    Event,
    FailRequest,
    ModelAdded,
    ModelProfile,
    RequestsArrived,
    SlotJoined,
    StartBatch,
)


class PlainServer:
    """First come, first served, by any free slot, up to `batch` requests in a call.

    Work-conserving: a free slot takes what waits. A batch is closed by the first request that may not be padded to
    share it. Requests whose deadline has passed before they start are thrown out; no others are.
    """

    def __init__(self, batch: int = 1, *, max_queued_requests: int = 1 << 62) -> None:
        self._batch = batch
        self._max_queued = max_queued_requests
        self._models: dict[str, ModelProfile] = {}
        self._free: deque[int] = deque()
        self._queue: deque[Arrival] = deque()
        self._running: dict[int, StartBatch] = {}
        self._next = 1

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event; unknown ones are ignored."""
        actions: list[Action] = []
        match event:
            case RequestsArrived():
                self._admit(event.requests, actions)
            case BatchFinished():
                batch = self._running.pop(event.batch)
                self._free.append(batch.slot)
                actions.append(DeliverResults(batch=batch.batch, requests=batch.requests))
            case SlotJoined():
                self._free.append(event.slot)
            case ModelAdded():
                self._models[event.model.name] = event.model
            case _:
                pass
        while self._free and self._queue:
            self._start(now, actions)
        return actions

    def next_wakeup(self) -> float | None:
        """Return None: a plain server needs no timer."""
        return None

    def check_invariants(self) -> None:
        """Check that no two running batches share a slot."""
        busy = {batch.slot for batch in self._running.values()}
        assert len(busy) == len(self._running)
        assert not busy.intersection(self._free)

    def _admit(self, requests: Sequence[Arrival], actions: list[Action]) -> None:
        for request in requests:
            if len(self._queue) < self._max_queued:
                self._queue.append(request)
            else:
                actions.append(FailRequest(id=request.id, code="overloaded", message="the queue is full"))

    def _start(self, now: float, actions: list[Action]) -> None:
        members: list[Arrival] = []
        rows = 0
        while self._queue and len(members) < self._batch:
            request = self._queue[0]
            if request.deadline is not None and request.deadline <= now:
                self._queue.popleft()
                actions.append(
                    FailRequest(id=request.id, code="deadline_exceeded", message="it waited too long")
                )
                continue
            profile = self._models[request.model]
            own_rows = request.sizes[0] if profile.has_batch else 1
            if members and not _may_join(profile, members[0], request, rows + own_rows):
                break
            members.append(self._queue.popleft())
            rows += own_rows
        if not members:
            return
        profile = self._models[members[0].model]
        sizes = tuple(map(max, zip(*(member.sizes for member in members), strict=True)))
        if profile.has_batch:
            sizes = (rows, *sizes[1:])
        batch = StartBatch(
            batch=self._next,
            slot=self._free.popleft(),
            model=profile.name,
            requests=tuple(member.id for member in members),
            sizes=sizes,
        )
        self._next += 1
        self._running[batch.batch] = batch
        actions.append(batch)


def _may_join(profile: ModelProfile, first: Arrival, request: Arrival, rows: int) -> bool:
    """True if a request may share the call of the first, with the permitted padding."""
    if request.model != first.model or not profile.has_batch or rows > profile.max_batch:
        return False
    dimensions = zip(profile.paddable, first.sizes, request.sizes, strict=True)
    return all(paddable or mine == theirs for paddable, mine, theirs in list(dimensions)[1:])
