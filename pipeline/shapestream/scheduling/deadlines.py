"""Deadlines: what cannot be met is refused or ended at once, and what is urgent takes its own client's next turn.

Everything here is predicted, so it works only where costs are measured. Two thresholds differ on purpose. What is
*hopeless* is told so and never runs: that takes an optimistic prediction. What is *urgent* only moves within its
client's own requests: that takes a cautious one.
"""

from __future__ import annotations

from math import inf
from typing import Final

from shapestream.scheduling.lazy_heap import LazyHeap
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.records import Request
from shapestream.scheduling.slot import Slot

__all__ = [
    "CAUTION",
    "OPTIMISM",
    "PROBE_EVERY",
    "ahead_s",
    "done_in_s",
    "earliest_s",
    "take_turn",
    "waiting_s",
]

OPTIMISM: Final = 0.5
"""Of the predicted seconds; a deadline that not even this share leaves room for cannot be met."""

CAUTION: Final = 1.5
"""Times the predicted seconds: a request that should have started that long before its deadline is urgent."""

PROBE_EVERY: Final = 16
"""Of the requests that seem hopeless though a slot is free, every so many are tried all the same: a prediction that
is wrong, and keeps everything from running, would never be corrected."""

SAMPLE: Final = 64
"""Slots, and waiting requests, that are looked at for an estimate, at most; of more, every so many stands for the others."""


def earliest_s(queue: ModelQueue, now: float) -> float:
    """Seconds until the first slot of the model is predicted to be free; 0.0 if one is, or if none is known."""
    if queue.free:
        return 0.0
    first = queue.ends.first()
    return 0.0 if first is None else max(0.0, first[0] - now)


def done_in_s(queue: ModelQueue, work_s: float, now: float) -> float:
    """Predicted seconds until the slots of a model have done what they were given, and then `work_s` each, on average.

    What waits at a slot behind what that runs, counts. The work is poured over the slots as in division.py.
    """
    if queue.free:
        return work_s
    if queue.slot_count == 1:
        return work_s + sum([_height_s(ends_at, slot, now) for ends_at, _, slot in queue.ends])
    heights = []
    for ends_at, slot, alike in queue.ends.sampled(SAMPLE):
        heights.append((_height_s(ends_at, slot, now), alike))
    heights.sort()
    filled_s = work_s * queue.slot_count
    level_s, below = inf, 0
    for height_s, alike in heights:
        if height_s >= level_s:
            break
        filled_s += alike * height_s
        below += alike
        level_s = filled_s / below
    return level_s if below else work_s


def _height_s(ends_at: float, slot: Slot, now: float) -> float:
    behind = slot.behind
    return max(0.0, ends_at - now) + (behind.predicted_s or 0.0 if behind is not None else 0.0)


def waiting_s(queue: ModelQueue) -> float:
    """Predicted seconds of all that waits for a model's slots, for each of them."""
    return sum([other.cost_s / max(1, other.slot_count) for other in queue.shares.queues])


def ahead_s(queue: ModelQueue, rank: float, clients: int, all_s: float, *, crowded: bool) -> float:
    """What goes before a request of this rank, of `all_s` that waits.

    Virtual time has to reach its rank, and passes at 1/clients of the slots' time. Where it is `crowded` it will: who is
    passed, is passed, whoever that will be. Otherwise what waits altogether is not more than what waits. A newcomer, on
    the other hand, is at the virtual time already, and goes behind the other newcomers: so what has no larger rank counts
    in any case.
    """
    shares = queue.shares
    turn_s = max(0.0, rank - shares.virtual_s) * clients
    if turn_s >= all_s:
        return turn_s if crowded else all_s
    before_s = [
        min(other.cost_s, other.oldest.cost_until(rank, SAMPLE)) / max(1, other.slot_count)
        for other in shares.queues
        if other.count
    ]
    return max(turn_s, sum(before_s))


def take_turn(anchor: Request, urgent: LazyHeap | None, clients: int, now: float) -> Request:
    """Who goes in the turn of `anchor`: itself, or a request of the same client whose deadline cannot wait for its
    own turn.

    The two exchange their turns, so a client cannot buy precedence with short deadlines: it has as many turns as
    without, and only their use changes. Only a request of the same model and priority that is the first of its
    bucket may do that, so nobody overtakes an equal; and each request is passed in this way once.
    """
    if urgent is None or anchor.turn != anchor.rank:
        return anchor
    first = urgent.first()
    if first is None:
        return anchor
    latest, _, request = first
    queue = anchor.queue
    if request is anchor or request.queue is not queue or request.priority != anchor.priority:
        return anchor
    if now + (request.turn - anchor.turn) * clients <= latest:
        return anchor
    head = request.bucket.first()
    if head is anchor or head.client != anchor.client or head.priority != anchor.priority:
        return anchor
    waiting = queue.oldest.first()
    if waiting is None or waiting[2] is not anchor:
        return anchor
    queue.oldest.postpone(head.turn)
    anchor.turn, head.turn = head.turn, anchor.turn
    anchor.tag, head.tag = head.tag, anchor.tag
    return head
