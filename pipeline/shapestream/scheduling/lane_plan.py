"""The plan of one lane: where it is cut, kept from one batch to the next.

A plan does not name requests. It says from which size to which a batch reaches, and how many of each size it takes.
Whoever leaves is simply no longer there, and who arrives at a size takes the place of one who has gone: started
segments fill up again, so that a plan is good for longer than the requests that it was made for. Sizes that it does not
know are taken in where that is cheaper than alone. After enough of that it is made anew, if the budget allows.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from shapestream.scheduling.call_costs import CallCosts
from shapestream.scheduling.lanes import Bucket, Lane
from shapestream.scheduling.planning_budget import PlanningBudget, planning_s
from shapestream.scheduling.segments import PAIRS, Limits, Window, cut_window

if TYPE_CHECKING:
    from shapestream.scheduling.model_queue import ModelQueue

__all__ = ["WINDOWS", "LanePlan", "PlannedSegment", "current_plan", "make_plan"]

WINDOWS = (256, 128, 64, 32, 16)
"""Requests that are planned at once; the most that can be afforded, and no more than wait. The largest only where that is
the whole lane: in simulations of longer queues, 64 gave the same goodput as 256."""
LARGEST_REACH = 128
"""Requests in a segment, at most, however large `max_batch` is. Equal shapes are not bound by it."""
RENEW = 4
"""A plan is made anew when more than one in so many of its requests have gone and others have come."""
_PLANS = 1024
"""Lanes of a model whose plans are kept."""
BATCH_S = 1e-3
"""What a batch costs its slot besides its own time: the hand-over. It decides between cuts that are otherwise equal."""

Key = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PlannedSegment:
    """From one size to another, both included. The sizes at its ends may belong to its neighbours too."""

    low: Key
    high: Key
    counts: dict[tuple[int, ...], int]
    """By shape, how many were there when it was planned."""


@dataclass(frozen=True, slots=True)
class LanePlan:
    """The segments of one window, in order."""

    segments: list[PlannedSegment]
    highs: list[Key]
    counts: dict[tuple[int, ...], int]
    """By shape, over all segments."""
    requests: int
    arrivals: int
    """Of the lane, when it was made. A lane that becomes empty ends; the next of its name begins at 0."""
    version: tuple[int, int]
    cut_off: tuple[bool, bool]
    """Whether the lane went on beyond the window's smallest, and largest, requests; there it is cut by accident."""

    def outdated(self, lane: Lane, bucket: Bucket, version: tuple[int, int]) -> bool:
        """Whether it should be made anew to serve a bucket."""
        return (
            (lane.arrivals - self.arrivals) * RENEW > self.requests
            or lane.arrivals < self.arrivals
            or self.version != version
            or bucket.shape not in self.counts
            or (self.cut_off[0] and bucket.key <= self.highs[0])
            or (self.cut_off[1] and bucket.key >= self.segments[-1].low)
        )

    def segment(self, bucket: Bucket) -> PlannedSegment | None:
        """The first segment that this size falls into; None if it lies between two, or beyond them."""
        at = bisect_left(self.highs, bucket.key)
        if at == len(self.segments) or bucket.key < self.segments[at].low:
            return None
        return self.segments[at]

    def allowed(self, segment: PlannedSegment, bucket: Bucket) -> int:
        """How many requests of a bucket the segment may take: those that no other segment has a claim to."""
        shape = bucket.shape
        if segment.low < bucket.key < segment.high:
            return bucket.count
        claimed = self.counts.get(shape, 0) - segment.counts.get(shape, 0)
        return bucket.count - max(0, min(claimed, bucket.count - segment.counts.get(shape, 0)))


def current_plan(
    bucket: Bucket, costs: CallCosts, limits: Limits, delayed: float | None, budget: PlanningBudget
) -> LanePlan | None:
    """The plan of the bucket's lane, made anew if that is due and can be afforded; None if there is none at all."""
    lane = bucket.lane
    plan = costs.plans.get(lane.key)
    version = costs.version
    if plan is not None and not plan.outdated(lane, bucket, version):
        return plan
    reach = min(limits.max_rows, LARGEST_REACH)
    dimensions = len(bucket.shape) - len(lane.key)
    present = _at_least(lane, bucket.first().queue)
    # A plan of the whole lane serves every batch; one of a part serves few besides the next.
    sizes = WINDOWS if present <= WINDOWS[0] else WINDOWS[1:]
    for wanted in sorted({min(size, present, PAIRS // reach) for size in sizes}, reverse=True):
        if budget.spend(planning_s(wanted, reach, dimensions)):
            plan = make_plan(bucket, wanted, costs, limits, delayed)
            if len(costs.plans) >= _PLANS:
                costs.plans.clear()
            costs.plans[lane.key] = plan
            break
    return plan


def _at_least(lane: Lane, queue: ModelQueue) -> int:
    """The requests of a lane, if they are fewer than the largest window."""
    if len(queue.lanes) == 1:
        return queue.count
    return sum([bucket.count for bucket in islice(lane.buckets, WINDOWS[0])])


def make_plan(bucket: Bucket, size: int, costs: CallCosts, limits: Limits, delayed: float | None) -> LanePlan:
    """The optimal cuts of the `size` requests around a bucket."""
    parts = bucket.lane.window(bucket, size)
    window = _window(parts, limits)
    measured = costs.surface.measured
    ends = cut_window(
        window,
        costs,
        limits,
        delayed=delayed,
        batch_s=BATCH_S if measured else 0.0,
    )
    segments = _segments(parts, ends)
    return LanePlan(
        segments=segments,
        highs=[segment.high for segment in segments],
        counts={part.shape: count for part, count in parts},
        requests=len(window),
        arrivals=bucket.lane.arrivals,
        version=costs.version,
        cut_off=(_cut_off(bucket.lane.buckets[0], parts[0]), _cut_off(bucket.lane.buckets[-1], parts[-1])),
    )


def _segments(parts: list[tuple[Bucket, int]], ends: list[int]) -> list[PlannedSegment]:
    """The segments that end before these requests of the window."""
    segments = []
    remaining = iter(parts)
    part, left = next(remaining)
    start = 0
    for end in ends:
        wanted = end - start
        if not left:
            part, left = next(remaining)
        low = part.key
        counts = {}
        while wanted > left:
            counts[part.shape] = left
            wanted -= left
            part, left = next(remaining)
        counts[part.shape] = wanted
        left -= wanted
        segments.append(PlannedSegment(low, part.key, counts))
        start = end
    return segments


def _cut_off(outermost: Bucket, part: tuple[Bucket, int]) -> bool:
    return part[0] is not outermost or part[1] < outermost.count


def _window(parts: list[tuple[Bucket, int]], limits: Limits) -> Window:
    counts = [count for _, count in parts]
    shapes = np.repeat(np.array([bucket.shape for bucket, _ in parts], dtype=np.intp), counts, axis=0)
    if all(bucket.single_rows for bucket, _ in parts):
        return Window(rows=np.ones(len(shapes), dtype=np.intp), shapes=shapes)
    requests = [request for bucket, count in parts for request in bucket.first_requests(count)]
    return Window(
        rows=np.array([request.rows for request in requests], dtype=np.intp),
        shapes=shapes,
    )
