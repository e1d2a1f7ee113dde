"""The batch former: the members of a batch, and its size.

Nothing here changes a queue; only the plan of a lane is kept. The scheduler asks for the batch of the request that goes
next (`plan_batch`), and takes its members out of the queue itself.

A plan does not name requests. It says from which size to which a batch reaches, and how many of each size it takes. New
requests of a size take the places of those that have gone, so a plan outlives the requests that it was made for. Sizes
unknown to it are taken in where that is cheaper than a call of their own. Later it is made anew, if the budget allows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile, zip_longest
from math import inf, isfinite, prod
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shapestream.scheduling.call_costs import CallCosts, Prediction
from shapestream.scheduling.cost_grid import elements_of, elements_of_many
from shapestream.scheduling.costs import Surface
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.queueing import Bucket, Lane, ModelQueue
from shapestream.scheduling.rounding import ShapeRounding
from shapestream.scheduling.segments import PAIRS, Limits, Window, cut_window
from shapestream.scheduling.state import Request, Slot

SHARE = 0.02
"""Of each batch's predicted seconds, what may be spent on planning."""
LOOP_SHARE = 0.1
"""Of the time that passes, what may be spent on planning: many slots have many batches, one thread plans."""
MOST_S = 0.02
"""What may be saved up: some twenty windows of 256."""
FIRST_S = 0.005
"""What there is before the first batch."""
UNMEASURED_S = 0.01
"""What a batch is taken to last while nothing of its model is measured."""

MOST_CUT_S = 1e-3
"""What one dynamic programme may take; the window is made so small."""

CUT_S = 150e-6
"""Of one dynamic programme, whatever its size."""
REQUEST_S = 2e-6
"""Per request in its window."""
SEGMENT_S = 15e-9
"""Per segment that it looks at, where one dimension is padded: each has the shape of its last request."""
MIXED_CUT_S = 150e-6
MIXED_SEGMENT_S = 120e-9
"""In addition, and instead, where two or three dimensions are padded, and each segment has a shape of its own; with each
two more it takes that much more."""

_SURFACES = 256
"""Surfaces whose costs are remembered. Workers that are alike share theirs, unless what is new to each of them matters."""


def planning_s(requests: int, reach: int, dimensions: int) -> float:
    """Seconds that the optimal cuts of a window take: `requests` in it, `reach` in a segment at most."""
    segments = requests * min(requests, reach)
    if dimensions < 2:
        return CUT_S + requests * REQUEST_S + segments * SEGMENT_S
    return CUT_S + MIXED_CUT_S + requests * REQUEST_S + segments * (dimensions // 2) * MIXED_SEGMENT_S


class PlanningBudget:
    """A scheduler's account of planning: earned by batches, spent on cuts. It keeps what was worked out on costs.

    Planning may take a share of the time of the batches that it plans. It is counted in work, not by a clock, so that the
    same events give the same cuts. The seconds that work is said to take were measured on one core of a 2020s server;
    where they are off, so is the share, by the same factor.
    """

    __slots__ = ("_at", "_costs", "_free_s", "balance_s", "cuts", "share", "spent_s")

    def __init__(self, share: float = SHARE, first_s: float = FIRST_S) -> None:
        self.share = share
        self.balance_s = first_s
        self._at: float | None = None
        self._free_s = MOST_S
        """Of the planning thread's own time, what batches have not earned yet."""
        self.cuts = 0
        """Dynamic programmes that were run."""
        self.spent_s = 0.0
        """Seconds that they are said to have taken."""
        self._costs: dict[tuple[str, int], CallCosts] = {}

    def __repr__(self) -> str:
        return (
            f"<planning: {self.cuts} cuts, {self.spent_s * 1e3:.3g} ms, {self.balance_s * 1e3:.3g} ms left>"
        )

    def earn(self, batch_s: float | None, now: float) -> None:
        """A batch was started; None where it cannot be predicted in seconds."""
        if self._at is not None:
            self._free_s = min(MOST_S, self._free_s + LOOP_SHARE * (now - self._at))
        self._at = now
        earned = min(self._free_s, self.share * (UNMEASURED_S if batch_s is None else batch_s))
        self._free_s -= earned
        self.balance_s = min(MOST_S, self.balance_s + earned)

    def spend(self, seconds: float) -> bool:
        """Whether there was enough, and it is no more than one programme may take; then it is spent."""
        if seconds > self.balance_s or seconds > MOST_CUT_S:
            return False
        self.balance_s -= seconds
        self.spent_s += seconds
        self.cuts += 1
        return True

    def costs(
        self, surface: Prediction, profile: ModelProfile, sizes: ShapeRounding | None = None
    ) -> CallCosts:
        """The costs of a model on a surface, as far as they were worked out before."""
        key = profile.name, id(surface if surface.prepares else surface.kind)
        known = self._costs.get(key)
        # The entry holds on to its surface and so to its kind: nothing else can have their ids.
        if known is None:
            if len(self._costs) >= _SURFACES:
                del self._costs[next(iter(self._costs))]
            known = self._costs[key] = CallCosts(surface, profile, sizes)
        known.renew()
        return known


SAMPLE = 32
"""Busy slots that are looked at, at most; of more, every so many stands for its neighbours."""


class Portion(NamedTuple):
    """What one batch should take at most, where other slots are free or will be soon; None where nothing limits it.

    The work that waits is poured over the slots like water over steps. Free slots are lowest, the others as high as they
    are predicted to be busy. Where the surface comes to rest all would end at the same time, and a slot's share reaches
    from its start to there. It matters when the queue is short; a long one fills the batches of all slots.
    """

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
