"""Deadlines: what cannot be met is refused or ended at once, and what is urgent takes its own client's next turn.

Everything here is predicted, so it works only where costs are measured. Two thresholds differ on purpose. What is
*hopeless* is told so and never runs: that takes an optimistic prediction. What is *urgent* only moves within its
client's own requests: that takes a cautious one.
"""

from __future__ import annotations

from typing import Final

from shapestream.scheduling.lazy_heap import LazyHeap
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.records import Request

__all__ = ["CAUTION", "OPTIMISM", "PROBE_EVERY", "earliest_s", "expected_wait_s", "take_turn"]

OPTIMISM: Final = 0.5
"""Of the predicted seconds; a deadline that not even this share leaves room for cannot be met."""

CAUTION: Final = 1.5
"""Times the predicted seconds: a request that should have started that long before its deadline is urgent."""

PROBE_EVERY: Final = 16
"""Of the requests that seem hopeless though a slot is free, every so many are tried all the same: a prediction that
is wrong, and keeps everything from running, would never be corrected."""


def earliest_s(queue: ModelQueue, now: float) -> float:
    """Seconds until the first slot of the model is predicted to be free; 0.0 if one is, or if none is known."""
    if queue.free:
        return 0.0
    first = queue.ends.first()
    return 0.0 if first is None else max(0.0, first[0] - now)


def expected_wait_s(queue: ModelQueue, rank: float, clients: int) -> float:
    """Predicted seconds of others' work before a request of this rank, from when a slot is free on.

    Those who arrive later are left aside.

    Virtual time has to reach its rank, and passes at 1/clients of the slots' time; but what waits altogether is not
    more than what waits.
    """
    shares = queue.shares
    turn_s = max(0.0, rank - shares.virtual_s) * clients
    all_s = sum([other.cost_s / max(1, other.slot_count) for other in shares.queues])
    return min(turn_s, all_s)


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
