"""How much of the queue one slot should take, when others are free too, or will be soon.

The work that waits is poured over the slots like water over steps: the free ones are lowest, the others as high as
they are predicted to be busy, and it fills the lowest first. Where the surface comes to rest all would end at the
same time, and a slot's share reaches from its start to there. It matters when the queue is short; a long one fills
everybody's batches.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from shapestream.scheduling.costs import Surface
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.records import Request
from shapestream.scheduling.slot import Slot

__all__ = ["ALL", "Portion", "portion", "water_level"]

SAMPLE = 32
"""Busy slots that are looked at, at most; of more, every so many stands for its neighbours."""


class Portion(NamedTuple):
    """What one batch should take at most; None where nothing limits it."""

    most_s: float | None = None
    """Seconds on its slot."""
    max_rows: int | None = None


ALL = Portion()


def portion(
    queue: ModelQueue, slot: Slot, anchor: Request, surface: Surface, speed: float, now: float
) -> Portion:
    """What a batch with `anchor` should take at most, on `slot`.

    At least as long as an even part of the rows takes, in calls of the anchor's shape: the cost of a request in
    good company is less than what a small batch pays for it, so by seconds alone the last slot would be left with
    too much. While nothing is measured, the even part is all that can be said. A model that waits for company
    (`max_delay_s`) is not divided: it asked for large batches.
    """
    max_batch = queue.profile.max_batch
    if queue.slot_count < 2 or queue.delay_s or not queue.has_batch:
        return ALL
    rows = sum([max(other.rows, other.count) for other in slot.queues])
    if rows >= queue.slot_count * max_batch:
        return ALL
    share_s = 0.0
    slots = len(queue.free)
    if surface.measured:
        level_s, slots = water_level(queue, sum([other.cost_s for other in slot.queues]), now)
        start_s = 0.0 if slot.batch is None else max(0.0, slot.batch.ends_at - now)
        share_s = level_s - start_s
    if slots < 2:
        return ALL
    even = max(1, -(-rows // slots))
    if even >= max_batch:
        return ALL
    if not surface.measured:
        return Portion(max_rows=even)
    return Portion(most_s=max(share_s, speed * surface.second(even, anchor.shape)))


def water_level(queue: ModelQueue, work_s: float, now: float) -> tuple[float, int]:
    """In how many seconds all that waits would be done, and over how many slots it spreads until then."""
    slots = len(queue.free)
    filled_s = work_s
    level_s = work_s / slots if slots else inf
    for ends_at, _, alike in queue.ends.sampled(SAMPLE):
        busy_s = max(0.0, ends_at - now)
        if busy_s >= level_s:
            break
        filled_s += alike * busy_s
        slots += alike
        level_s = filled_s / slots
    return level_s, slots
