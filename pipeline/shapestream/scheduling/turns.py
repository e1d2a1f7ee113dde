"""Whose turn it is: the request that goes next, and on which slot.

Nothing here changes a queue. Which company the request gets is the planner's question, and how much of it this
slot should take is `division.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.records import Request
from shapestream.scheduling.slot import Slot

__all__ = ["faster_first", "next_anchor", "next_up"]

LOOK = 8
"""Free slots that are compared by their speed, at most."""

FASTER = 0.9
"""A slot is preferred for its speed if it takes less than this part of the time of one that has been free longer."""


def next_up(
    queues: Iterable[ModelQueue],
    now: float,
    ready: Callable[[ModelQueue, float], bool],
    full: Callable[[Request], bool],
) -> Request | None:
    """The request that goes next, of all models that are `ready`; None if all wait, or nothing does.

    What must be run again goes before everything else; then the first by rank. `full` tells whether the
    company of a request would fill a batch.
    """
    best: Request | None = None
    best_key: tuple[bool, float, int] = (True, 0.0, 0)
    for queue in queues:
        if not ready(queue, now):
            continue
        again = queue.rerun_count > 0
        request = queue.next_rerun()[0] if again else next_anchor(queue, now, full)
        if request is not None:
            key = (not again, request.turn, request.order)
            if best is None or key < best_key:
                best, best_key = request, key
    return best


def next_anchor(queue: ModelQueue, now: float, full: Callable[[Request], bool]) -> Request | None:
    """The request of this model that goes next, or None while all of them may wait for company.

    Without a delay that is the first by rank. With one, nothing goes until some request's delay has ended
    or a batch would be full.
    """
    first = queue.oldest.first()
    if first is None:
        return None
    if queue.delay_s:
        due = queue.due.first()
        if due is None or due[0] > now:
            return _first_of_full(queue, first[2], full)
    return first[2]


def _first_of_full(queue: ModelQueue, first: Request, full: Callable[[Request], bool]) -> Request | None:
    """A request whose batch would be full: the head of a full bucket, or else `first` with its neighbours."""
    if queue.rows < queue.profile.max_batch:
        return None
    if queue.full:
        heads = [bucket.first() for bucket in queue.full.values()]
        return min(heads, key=lambda request: (request.rank, request.order))
    return first if full(first) else None


def faster_first(queue: ModelQueue) -> Slot:
    """The free slot that should work: the one that has been free longest, unless one of the next few is clearly
    faster.

    A slow slot is never left idle for the sake of a fast one that will be free soon: the scheduler is
    work-conserving.
    """
    slots = iter(queue.free.values())
    best = next(slots)
    if len(queue.free) > 1:
        name = queue.profile.name
        best_pace = best.paces.get(name, 1.0)
        for slot in islice(slots, LOOK - 1):
            pace = slot.paces.get(name, 1.0)
            if pace < FASTER * best_pace:
                best, best_pace = slot, pace
    return best
