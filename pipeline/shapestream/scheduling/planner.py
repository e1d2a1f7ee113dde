"""How a batch is cut: which requests keep the one that must go company, and how many.

Nothing here changes a queue; only the plan of a lane (`lane_plan.py`) is kept. The scheduler asks for the company of the
request that goes next (`plan_batch`), and then takes them out itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, prod

import numpy as np

from shapestream.scheduling.call_costs import CallCosts, Prediction
from shapestream.scheduling.company import planned_company, within_limits
from shapestream.scheduling.lane_plan import BATCH_S, current_plan
from shapestream.scheduling.lanes import Bucket
from shapestream.scheduling.planning_budget import PlanningBudget
from shapestream.scheduling.records import Request
from shapestream.scheduling.segments import Limits

__all__ = ["Cut", "PlanningBudget", "plan_batch", "together", "unplanned"]

DELAYED = 2.0
"""Requests that a batch delays besides its members, per request that waits: half of these, and all that arrive before
the queue is empty, which cannot be known. In simulations (60 % load to saturation, costs of two models) 1 to 4 differed
little, and 2 was among the best throughout; 0.5, which is right if nobody arrives any more, cost 1 % of the goodput with
64 in flight and 10 % in mean latency under overload; work alone, 7 % in p99 at 90 % load."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A batch that has not been started."""

    members: Sequence[Request]
    rows: int
    """Of the members."""
    shape: tuple[int, ...]
    """The call's sizes without the batch axis: at least the largest of any member."""
    padding: int = 0
    """Elements that are computed only as padding, filled-up rows included."""
    seconds: float = 0.0
    """Predicted for an average slot of the surface's kind; 0 where nothing is measured."""
    call_rows: int = 0
    """Rows of the call, filled-up ones included."""

    def sizes(self, has_batch: bool) -> tuple[int, ...]:
        """The call's size of each of the model's dimensions."""
        return (self.call_rows, *self.shape) if has_batch else self.shape


def plan_batch(
    anchor: Request,
    surface: Prediction,
    budget: PlanningBudget,
    *,
    speed: float = 1.0,
    most_s: float | None = None,
    max_rows: int | None = None,
    now: float,
) -> Cut:
    """The batch that the anchor goes in, at least cost: its segment of the optimal cuts of the window around it.

    The anchor must be the first by rank of its bucket. It is always in the batch, alone if need be. From every bucket
    only the first by rank are taken, so nobody overtakes an equal. `most_s`: what the batch should last at most on
    its slot, which takes `speed` times the surface's seconds; `max_rows`: rows that it should have at most. No member
    whose deadline could be met alone is made late: `now + seconds * speed` is not after it, where costs are measured.
    """
    queue = anchor.queue
    profile = queue.profile
    costs = budget.costs(surface, profile, queue.rounding)
    rows = profile.max_batch if max_rows is None else min(max_rows, profile.max_batch)
    if not queue.has_batch or anchor.rows >= rows or queue.count == 1 or anchor.empty:
        return _cut([anchor], costs, anchor.bucket)
    limits = Limits(
        max_rows=rows,
        max_bytes=costs.bytes.planned_most,
        max_padding_ratio=profile.max_padding_ratio,
        most_s=None if most_s is None else most_s / speed,
    )
    bucket = anchor.bucket
    delayed = DELAYED * queue.count if surface.measured else None
    if len(bucket.lane.buckets) == 1 or bucket.rows >= min(rows, costs.full_rows(bucket.shape)):
        members = bucket.prefix(_equal_rows(bucket, costs, limits, delayed), rows)
    else:
        plan = current_plan(bucket, costs, limits, delayed, budget)
        members = bucket.prefix(rows) if plan is None else planned_company(plan, bucket, costs, limits)
    members = within_limits(members or [anchor], costs, limits, speed, now)
    # Its own bucket comes first, so if the last is of it, all are.
    return _cut(members, costs, bucket if members[-1].bucket is bucket else None)


def unplanned(members: Sequence[Request]) -> Cut:
    """The batch of exactly these requests, at their own sizes; nothing is worked out."""
    shape = tuple(map(max, zip(*[request.shape for request in members], strict=True)))
    rows = sum([request.rows for request in members])
    return Cut(members, rows, shape, call_rows=rows)


def together(members: Sequence[Request], surface: Prediction) -> Cut:
    """The batch of exactly these requests."""
    queue = members[0].queue
    return _cut(members, CallCosts(surface, queue.profile, queue.rounding))


def _equal_rows(bucket: Bucket, costs: CallCosts, limits: Limits, delayed: float | None) -> int:
    """How many rows of one shape a batch should have; see segments.py for what is minimised."""
    most = min(limits.max_rows, bucket.rows)
    if most < 2:
        return max(1, most)
    seconds = costs.row_seconds(bucket.shape)[1 : most + 1]
    rows = np.arange(1, most + 1)
    each = (seconds + BATCH_S) * (delayed + 0.5 * rows) / rows if delayed is not None else seconds / rows
    if limits.most_s is not None:
        each = np.where(seconds > limits.most_s, inf, each)
    # Of equally good ones the most; one, if none is allowed.
    best = most - int(each[::-1].argmin())
    return best if isfinite(each[best - 1]) else 1


def _cut(members: Sequence[Request], costs: CallCosts, bucket: Bucket | None = None) -> Cut:
    """A cut of these members, which are all in `bucket` if that is given."""
    if bucket is not None:
        rows = len(members) if bucket.single_rows else sum([request.rows for request in members])
        shape = bucket.shape
        real = rows * prod(shape)
    else:
        shape = tuple(map(max, zip(*[request.shape for request in members], strict=True)))
        rows = sum([request.rows for request in members])
        real = sum([request.rows * prod(request.shape) for request in members])
    call = costs.call(rows, shape)
    costs.started(rows, shape)
    seconds = call.first_s if costs.surface.measured and isfinite(call.seconds) else 0.0
    return Cut(members, rows, call.shape, call.rows * prod(call.shape) - real, seconds, call.rows)
