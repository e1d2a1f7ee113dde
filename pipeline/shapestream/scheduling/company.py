"""Who comes along: the members of a plan's segment as they are now, and what is left of them under limits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile, zip_longest
from math import inf
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shapestream.scheduling.call_costs import CallCosts
from shapestream.scheduling.cost_grid import elements_of, elements_of_many
from shapestream.scheduling.lane_plan import LanePlan, PlannedSegment
from shapestream.scheduling.lanes import Bucket
from shapestream.scheduling.records import Request
from shapestream.scheduling.segments import Limits

__all__ = ["planned_company", "within_limits"]

_Number = TypeVar("_Number", np.intp, np.float64)

REACH = 64
"""Sizes on either side that are looked at. It bounds the time where a plan is old and many sizes have come."""


def planned_company(plan: LanePlan, bucket: Bucket, costs: CallCosts, limits: Limits) -> list[Request]:
    """The first of a bucket with the company that the plan has for them, and what has arrived near them since.

    What the plan did not count on comes along where that costs less than alone. If the whole is not worth it any
    more, because much of the segment has gone, the bucket goes by itself.
    """
    segment = plan.segment(bucket)
    if segment is None:
        return bucket.prefix(limits.max_rows)
    most = limits.max_rows
    members = bucket.prefix(most, min(most, plan.allowed(segment, bucket)))
    rows = sum([request.rows for request in members])
    shape = bucket.shape
    seconds = costs.call(rows, shape).seconds
    apart = seconds
    for other in _around(bucket, segment):
        allowed = min(plan.allowed(segment, other), most - len(members))
        more = other.prefix(most - rows, allowed) if allowed > 0 else []
        if not more:
            continue
        more_rows = rows + sum([request.rows for request in more])
        larger = tuple(map(max, shape, other.shape))
        together_s = costs.call(more_rows, larger).seconds
        alone_s = costs.call(more_rows - rows, other.shape).seconds
        if len(more) > segment.counts.get(other.shape, 0) and together_s > seconds + alone_s:
            continue
        members.extend(more)
        rows, shape, seconds = more_rows, larger, together_s
        apart += alone_s
    if seconds > apart:
        return bucket.prefix(limits.max_rows)
    return members


def _around(bucket: Bucket, segment: PlannedSegment) -> list[Bucket]:
    """The neighbours of a bucket within a segment, nearest first, in turn from either side."""
    buckets = bucket.lane.buckets
    at = bucket.lane.position(bucket)
    above = buckets[at + 1 : at + 1 + REACH]
    larger = list(takewhile(lambda other: other.key <= segment.high, above))
    below = reversed(buckets[max(0, at - REACH) : at])
    smaller = list(takewhile(lambda other: other.key >= segment.low, below))
    both = zip_longest(larger, smaller)
    return [other for pair in both for other in pair if other is not None]


def within_limits(
    members: list[Request], costs: CallCosts, limits: Limits, speed: float, now: float
) -> list[Request]:
    """As many of the members as limits and deadlines allow, the first among them; those in danger rather than others.

    Of the members, sorted by size, those from one to another around the first are taken.
    """
    if len(members) < 2:
        return members
    latest_s = _latest_s(members, costs, speed, now)
    if latest_s is None and _legal(members, costs, limits):
        return members
    key = members[0].bucket.key
    # Nearest first, so that of each bucket the first by rank are those that stay.
    smaller = sorted(
        [place for place, request in enumerate(members) if request.bucket.key < key],
        key=lambda place: members[place].bucket.key,
        reverse=True,
    )
    others = sorted(
        [place for place, request in enumerate(members) if not request.bucket.key < key],
        key=lambda place: members[place].bucket.key,
    )
    left, right = _best_run(members, [0, *smaller], others, latest_s, costs, limits)
    return [members[place] for place in (*others[: right + 1], *smaller[:left])]


def _latest_s(
    members: Sequence[Request], costs: CallCosts, speed: float, now: float
) -> NDArray[np.float64] | None:
    """Seconds that the batch may last at most for each member, inf for most; None if it is in time for all."""
    if not costs.surface.measured:
        return None
    deadlines = [request.deadline for request in members if request.deadline is not None]
    if not deadlines or now + _seconds(members, costs) * speed <= min(deadlines):
        return None
    latest_s = []
    for request in members:
        left_s = inf if request.deadline is None else (request.deadline - now) / speed
        # Whoever would be late even alone holds nobody back.
        alone_s = costs.call(request.rows, request.shape).seconds if left_s < inf else 0.0
        latest_s.append(left_s if alone_s <= left_s else inf)
    return np.array(latest_s)


def _legal(members: Sequence[Request], costs: CallCosts, limits: Limits) -> bool:
    shape = tuple(map(max, *[request.shape for request in members]))
    rows = sum([request.rows for request in members])
    if limits.max_bytes is not None and costs.bytes.of_batch(rows, shape) > limits.max_bytes:
        return False
    if limits.most_s is not None and _seconds(members, costs) > limits.most_s:
        return False
    if limits.max_padding_ratio is not None:
        real = sum([request.rows * elements_of(request.shape) for request in members])
        return real >= (1.0 - limits.max_padding_ratio) * rows * elements_of(shape)
    return True


def _seconds(members: Sequence[Request], costs: CallCosts) -> float:
    shape = tuple(map(max, *[request.shape for request in members]))
    return costs.call(sum([request.rows for request in members]), shape).seconds


def _best_run(
    members: Sequence[Request],
    smaller: Sequence[int],
    others: Sequence[int],
    latest_s: NDArray[np.float64] | None,
    costs: CallCosts,
    limits: Limits,
) -> tuple[int, int]:
    """How many of the smaller ones, and the last of the others, that may run together with the anchor.

    Both sequences begin with it. Those runs are best that keep whose deadline is nearest; then those with the most
    rows; of these the quickest.
    """
    rows = np.array([request.rows for request in members], dtype=np.intp)
    shapes = np.array([request.shape for request in members], dtype=np.intp).reshape(len(members), -1)
    real = rows * elements_of_many(list(shapes.T))

    def sums(values: NDArray[_Number]) -> NDArray[_Number]:
        left = np.cumsum(values[smaller]) - values[0]
        total: NDArray[_Number] = left[:, None] + np.cumsum(values[others])
        return total

    largest = np.maximum(
        np.maximum.accumulate(shapes[smaller])[:, None], np.maximum.accumulate(shapes[others])[None]
    )
    run_rows = sums(rows)
    all_rows, all_shapes = run_rows.ravel(), largest.reshape(run_rows.size, shapes.shape[1])
    seconds = costs.seconds(all_rows, all_shapes).reshape(run_rows.shape)
    legal = (run_rows <= limits.max_rows) & np.isfinite(seconds)
    if limits.max_bytes is not None:
        legal &= costs.nbytes(all_rows, all_shapes).reshape(run_rows.shape) <= limits.max_bytes
    if limits.most_s is not None:
        legal &= seconds <= limits.most_s
    if limits.max_padding_ratio is not None:
        computed = (all_rows * elements_of_many(list(all_shapes.T))).reshape(run_rows.shape)
        legal &= sums(real) >= (1.0 - limits.max_padding_ratio) * computed
    score = run_rows.astype(np.float64)
    if latest_s is not None:
        left, right = np.minimum.accumulate(latest_s[smaller]), np.minimum.accumulate(latest_s[others])
        bound_s = np.minimum(left[:, None], right)
        legal &= seconds <= bound_s
        # Rows are whole numbers; whoever is in the greatest danger outweighs all of them.
        score += (bound_s == latest_s.min()) * (1.0 + float(rows.sum()))
    score[~legal] = -1.0
    score[0, 0] = max(score[0, 0], 0.0)
    best = score == score.max()
    place = (
        int(np.where(best, seconds, inf).argmin()) if np.isfinite(seconds[best]).any() else int(best.argmax())
    )
    return place // len(others), place % len(others)
