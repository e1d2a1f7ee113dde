"""How a batch is cut: which requests keep the one that must go company, and how many.

Nothing here changes a queue; only the plan of a lane (`lane_plan.py`) is kept. The scheduler asks for the company of the
request that goes next (`plan_batch`), and then takes them out itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, prod

import numpy as np

from shapestream.scheduling.call_costs import CallCosts, Prediction
from shapestream.scheduling.company import planned_company, within_limits
from shapestream.scheduling.lane_plan import BATCH_S, current_plan
from shapestream.scheduling.lanes import Bucket
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.planning_budget import PlanningBudget
from shapestream.scheduling.records import Request, Slot
from shapestream.scheduling.segments import Limits

__all__ = ["Cut", "PlanningBudget", "fair_share", "next_anchor", "next_up", "plan_batch", "together"]


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
    costs = budget.costs(surface, profile)
    rows = profile.max_batch if max_rows is None else min(max_rows, profile.max_batch)
    if not queue.has_batch or anchor.rows >= rows or queue.count == 1:
        return _cut([anchor], costs)
    limits = Limits(
        max_rows=rows,
        max_bytes=profile.max_batch_bytes,
        max_padding_ratio=profile.max_padding_ratio,
        most_s=None if most_s is None else most_s / speed,
    )
    bucket = anchor.bucket
    waiting = float(queue.count) if surface.measured else None
    if len(bucket.lane.buckets) == 1 or bucket.rows >= min(rows, costs.full_rows(bucket.shape)):
        members = bucket.prefix(_equal_rows(bucket, costs, limits, waiting))
    else:
        plan = current_plan(bucket, costs, limits, waiting, budget)
        members = bucket.prefix(rows) if plan is None else planned_company(plan, bucket, costs, limits)
    members = within_limits(members or [anchor], costs, limits, speed, now)
    return _cut(members, costs)


def together(members: Sequence[Request], surface: Prediction) -> Cut:
    """The batch of exactly these requests."""
    return _cut(members, CallCosts(surface, members[0].queue.profile))


def _equal_rows(bucket: Bucket, costs: CallCosts, limits: Limits, waiting: float | None) -> int:
    """How many rows of one shape a batch should have; see segments.py for what is minimised."""
    most = min(limits.max_rows, bucket.rows)
    if most < 2:
        return max(1, most)
    seconds = costs.row_seconds(bucket.shape)[1 : most + 1]
    rows = np.arange(1, most + 1)
    each = (seconds + BATCH_S) * (waiting + 0.5 * rows) / rows if waiting is not None else seconds / rows
    if limits.most_s is not None:
        each = np.where(seconds > limits.most_s, inf, each)
        if not isfinite(each[0]):
            return 1
    # Of equally good ones the most.
    return most - int(each[::-1].argmin())


def _cut(members: Sequence[Request], costs: CallCosts) -> Cut:
    if len(members) == 1:
        rows, shape = members[0].rows, members[0].shape
        real = rows * prod(shape)
    else:
        shape = tuple(map(max, *[request.shape for request in members]))
        rows = sum([request.rows for request in members])
        real = sum([request.rows * prod(request.shape) for request in members])
    call = costs.call(rows, shape)
    costs.started(rows, shape)
    seconds = call.seconds if costs.surface.measured and isfinite(call.seconds) else 0.0
    return Cut(members, rows, call.shape, call.rows * prod(call.shape) - real, seconds, call.rows)


def fair_share(queue: ModelQueue, slot: Slot) -> int:
    """Rows that `slot` should take at most: the rows that it could serve, divided by the model's free slots.

    So that the queue is not emptied into the first of several free slots. A model that waits for company
    (`max_delay_s`) is not divided: it asked for large batches.
    """
    free = len(queue.free)
    if free < 2 or queue.delay_s:
        return queue.profile.max_batch
    waiting = sum(other.rows for other in slot.queues)
    return min(queue.profile.max_batch, -(-waiting // free))


def next_up(queues: Iterable[ModelQueue], now: float) -> Request | None:
    """The request that goes next, of all models that have a free slot; None if all wait, or nothing does.

    What must be run again goes before everything else; then the first by rank.
    """
    best: Request | None = None
    best_key: tuple[bool, float, int] = (True, 0.0, 0)
    for queue in queues:
        if not queue.free:
            continue
        again = queue.rerun_count > 0
        request = queue.next_rerun()[0] if again else next_anchor(queue, now)
        if request is not None:
            key = (not again, request.rank, request.order)
            if best is None or key < best_key:
                best, best_key = request, key
    return best


def next_anchor(queue: ModelQueue, now: float) -> Request | None:
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
            return _first_of_full(queue, first[2])
    return first[2]


def _first_of_full(queue: ModelQueue, first: Request) -> Request | None:
    """A request whose batch would be full: the head of a full bucket, or else `first` with its neighbours."""
    max_batch = queue.profile.max_batch
    if queue.rows < max_batch:
        return None
    if queue.full:
        heads = [bucket.first() for bucket in queue.full.values()]
        return min(heads, key=lambda request: (request.rank, request.order))
    return first if _rows_near(first) >= max_batch else None


def _rows_near(first: Request) -> int:
    """Rows around a request that padding allows in its batch."""
    max_batch = first.queue.profile.max_batch
    lane = first.bucket.lane
    parts = lane.window(first.bucket, 2 * max_batch)
    ratio = first.queue.profile.max_padding_ratio
    least = 1.0 - (0.125 if ratio is None else ratio)
    return max(
        sum([bucket.rows for bucket, _ in parts if least * top.elements <= bucket.elements <= top.elements])
        for top, _ in parts
        if least * top.elements <= first.bucket.elements <= top.elements
    )
