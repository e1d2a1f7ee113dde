"""The batch former: which queued requests share a batch, and how large it is.

`plan_batch` is the face. The scheduler names an anchor, the request whose turn it is, and a slot; the answer is a `Cut` that
holds the anchor. Nothing here changes a queue: the scheduler takes the members out of it.

How a batch is cut:

1. Requests of one lane are sorted by the elements of a row. A window of about `WINDOW` of them around the anchor is cut
   into contiguous segments of the least total cost (segments.py). The anchor's segment is the batch. Where the shapes of a
   window are not nested, the anchor gets the nearest requests instead. If all requests of the lane have equal sizes, only
   the number of rows is chosen.
2. A window is cut once per turn of the event loop (`Plan`). Slots that are free in the same turn take its other segments.
3. A batch may be enlarged to try a size whose price is not tested (tries.py).
4. `within_limits` drops members that would pass a limit of a batch or would make another member late.
5. If other slots are or will soon be free, `portion` bounds a batch, so that all slots end at about the same time.

It promises: the anchor is in the batch, alone if need be. Of every bucket the requests with the smallest ranks are taken, so
no request overtakes an equal one of its client. No limit of `SegmentLimits` is passed by a batch of several requests.

It does not look beyond the window. It decides neither whose turn it is (fairness.py does) nor whether to wait for more
requests (answer_waits.py does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite, prod
from typing import NamedTuple, TypeAlias

import numpy as np

from shapestream.scheduling.cost_grid import Sizes, elements_of
from shapestream.scheduling.events import CutReason
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.queueing import CROWDED, Bucket, Lane, Request
from shapestream.scheduling.segments import NEVER, SegmentLimits, Window, are_nested, cut_window, nearest
from shapestream.scheduling.slots import Slot, SlotPool
from shapestream.scheduling.tries import tried_rows
from shapestream.scheduling.worker_class import BATCH_S
from shapestream.scheduling.worker_costs import Call, WorkerCosts

DELAYED = 2.0
"""Requests that a batch delays besides its members, per request that waits: half of these, and all that arrive before
the queue is empty, which cannot be known. Simulated from 60 % load to saturation, with costs of two models: values from 1
to 4 differed little. 0.5, which is right if nothing arrives any more, cost 1 % of the goodput with 64 in flight and 10 % in
mean latency under overload. Minimising the work alone cost 7 % in p99 at 90 % load."""


@dataclass(slots=True)
class Cut:
    """A batch that has not been started. Nothing changes it; making a frozen dataclass takes twice as long."""

    members: Sequence[Request]
    rows: int
    """Of the members."""
    shape: tuple[int, ...]
    """The call's sizes without the batch axis: at least the largest of any member."""
    padding: int = 0
    """Elements that are computed only as padding, filled-up rows included."""
    seconds: float = 0.0
    """Predicted for an average slot of the worker class; 0 where nothing is measured."""
    call_rows: int = 0
    """Rows of the call, filled-up ones included."""
    largest: tuple[int, ...] = ()
    """The largest sizes of its members; empty where nothing was worked out."""
    reason: CutReason = CutReason.COST

    def started(self, costs: WorkerCosts) -> None:
        """Note that the device meets the call's shape. That of a request that an audit runs alone counts under no cap."""
        if costs.rounding is None:
            if (
                costs.worker_class.new.measured and self.shape == self.largest
            ):  # a larger shape was prepared before
                costs.started(self.rows, self.largest)
        elif self.reason is not CutReason.AUDITED:
            costs.started(self.rows, self.largest)
            costs.rounding.start(self.call_rows, self.shape)

    def sizes(self, has_batch: bool) -> tuple[int, ...]:
        """Return the call's size of each of the model's dimensions."""
        return (self.call_rows, *self.shape) if has_batch else self.shape


def plan_batch(
    anchor: Request,
    queue: ModelQueue,
    costs: WorkerCosts,
    plan: Plan,
    *,
    starts_at: float,
    slowdown: float = 1.0,
    most_s: float | None = None,
    max_rows: int | None = None,
    tries: bool = False,
) -> Cut:
    """Return the batch of an anchor, which must be the first request of its flow.

    `slowdown`: seconds on the slot / predicted seconds. `most_s`, `max_rows`: the slot's portion, in seconds on the slot and
    in rows. `starts_at`: when the batch is predicted to start; later than now if it is queued behind another. `tries`:
    whether the batch may be a try. Where costs are measured, no member is made late whose deadline could
    be met alone.
    """
    profile = queue.profile
    rows = profile.max_batch if max_rows is None else min(max_rows, profile.max_batch)
    if not queue.has_batch or anchor.rows >= rows or anchor.empty:
        return batch_of([anchor], costs, reason=CutReason.ALONE)
    limits = SegmentLimits(
        max_rows=rows,
        max_bytes=costs.bytes.planned_most,
        max_padding_ratio=profile.max_padding_ratio,
        most_s=None if most_s is None else most_s / slowdown,
    )
    bucket = anchor.bucket
    if bucket.lane.key[-1:] == CROWDED:
        return batch_of([anchor], costs, reason=CutReason.CROWDED)
    delayed = DELAYED * queue.count if costs.worker_class.measured else None
    if len(bucket.lane.buckets) == 1 or bucket.rows >= min(
        rows, costs.worker_class.useful_rows(bucket.shape)[0]
    ):
        members = bucket.prefix_with(anchor, _equal_rows(bucket, costs, limits, delayed), rows)
    else:
        members = plan.take(anchor, costs, limits, delayed)
    if tries and most_s is None and max_rows is None:
        larger = _larger(members, bucket, queue.rows, costs, limits)
        if larger is not None:
            members = larger
            plan.forget(bucket.lane)
    otherwise = CutReason.COST if most_s is None and max_rows is None else CutReason.DIVIDED
    members, reason = within_limits(members, costs, limits, slowdown, starts_at, otherwise)
    # Its own bucket comes first, so if the last is of it, all are. Steps pad members to the sizes of their bucket.
    alike = members[-1].bucket is bucket and queue.costs.steps is None
    return batch_of(members, costs, bucket if alike else None, reason)


def batch_of(
    members: Sequence[Request],
    costs: WorkerCosts,
    bucket: Bucket | None = None,
    reason: CutReason = CutReason.COST,
) -> Cut:
    """Return the batch of exactly these requests. If `bucket` is given, all are in it, and none is padded to its sizes."""
    first = members[0]
    alike = len(members) == 1 or bucket is not None
    if len(members) == 1:
        rows, shape = first.rows, first.shape
    elif bucket is not None:
        rows = len(members) if bucket.single_rows else sum([request.rows for request in members])
        shape = bucket.shape
    else:
        shape = tuple(map(max, zip(*[request.shape for request in members], strict=True)))
        rows = sum([request.rows for request in members])
    call = costs.call(rows, shape)
    call_rows, call_shape, *_ = call
    exact = alike and call_rows == rows and call_shape == first.own_shape
    padding = 0 if exact else _padding(members, call, costs)
    return Cut(members, rows, call_shape, padding, costs.expected_s(call), call_rows, shape, reason)


def _padding(members: Sequence[Request], call: Call, costs: WorkerCosts) -> int:
    """Return the elements of a call that are padding. Strings weigh as much as the longest, as in the call."""
    part = costs.padded_part
    own = prod(part(call.shape))
    padding = call.rows * own - sum([request.rows * prod(part(request.own_shape)) for request in members])
    return padding * (prod(call.shape) // own) if costs.profile.strings and own else padding


def alone(members: Sequence[Request], rows: int, shape: tuple[int, ...], costs: WorkerCosts) -> Cut:
    """Return the batch of one request, or of an audit, at exactly these sizes, whatever cap there is on call shapes."""
    seconds = costs.expected_s(costs.exact_call(rows, shape))
    return Cut(members, rows, shape, 0, seconds, rows, shape, CutReason.AUDITED)


def unplanned(members: Sequence[Request]) -> Cut:
    """Return the batch of exactly these requests, at their own sizes, without prices."""
    shape = tuple(map(max, zip(*[request.own_shape for request in members], strict=True)))
    rows = sum([request.rows for request in members])
    return Cut(members, rows, shape, call_rows=rows, reason=CutReason.UNPLANNED)


class Portion(NamedTuple):
    """Upper limits of one batch while other slots are free or will be soon; None: no limit.

    All slots should end at the same time (`SlotPool.free_in_s`). A slot's portion lasts from its start until then. It
    matters while the queue is short; a long queue fills the batches of all slots.
    """

    most_s: float | None = None
    """Predicted seconds on its slot."""
    max_rows: int | None = None


ALL = Portion()


def portion(
    pool: SlotPool, slot: Slot, anchor: Request, costs: WorkerCosts, slowdown: float, now: float
) -> Portion:
    """Return the upper limits of a batch with `anchor` on `slot`.

    The portion lasts at least as long as a call of the anchor's shape with an even part of the rows. The queue's predicted
    seconds are those of efficient batches, and smaller batches take more per request. With limits by these seconds alone,
    the first slots would take too little, and the last one would be left with the remainder. While nothing is measured,
    the even part is the only limit. The queue of a model with `max_delay_s` is not divided: it asks for large batches.
    """
    queue = pool.queue
    max_batch = queue.profile.max_batch
    if pool.count < 2 or queue.delay_s or not queue.has_batch:
        return ALL
    rows = sum([max(other.queue.rows, other.queue.count) for other in slot.pools])
    if rows >= pool.count * max_batch:
        return ALL
    portion_s = 0.0
    slots = len(pool.free)
    if costs.worker_class.measured:
        level_s, slots = pool.free_in_s(sum([other.queue.cost_s for other in slot.pools]), now)
        portion_s = level_s - (slot.free_at(now) - now)
    if slots < 2:
        return ALL
    even = max(1, -(-rows // slots))
    if even >= max_batch:
        return ALL
    if not costs.worker_class.measured:
        return Portion(max_rows=even)
    return Portion(most_s=max(portion_s, slowdown * costs.worker_class.second(even, anchor.shape)))


WINDOW = 32
"""Requests in a window. Windows of 64 gave no more goodput in ten simulated loads (docs/decisions.md)."""
MOST_WINDOW = 128
"""Largest window, where efficient batches have more rows than `WINDOW`. Cutting 128 requests takes 0.75 ms."""

Segment: TypeAlias = dict[Bucket, int]
"""One batch of the optimal cuts: how many of the first requests of each bucket it takes."""


class Plan:
    """The cuts of one turn of the event loop: segments that no slot has taken yet, by lane.

    A window is cut once. Its segments go to the slots that are free in the same turn, and nothing arrives in between. A
    request that limits left out of its batch, or that lies beyond the window, has a window of its own; the next turn plans
    anew.
    """

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left: dict[Lane, list[Segment]] = {}

    def forget(self, lane: Lane) -> None:
        """Forget the segments of a lane: some of their requests run in a batch that is none of them."""
        self.left.pop(lane, None)

    def begin_turn(self) -> None:
        """Forget the segments of the last turn."""
        self.left.clear()

    def take(
        self, anchor: Request, costs: WorkerCosts, limits: SegmentLimits, delayed: float | None
    ) -> list[Request]:
        """Return the segment of an anchor, which no other slot gets: the anchor, its bucket's requests, then the others."""
        bucket = anchor.bucket
        left = self.left.get(bucket.lane, [])
        if not any(bucket in segment for segment in left):
            left = self.left[bucket.lane] = _optimal_segments(bucket, costs, limits, delayed)
        segment = next(segment for segment in left if bucket in segment)
        left.remove(segment)
        members = bucket.prefix_with(anchor, limits.max_rows, segment[bucket])
        rows = sum([request.rows for request in members])
        buckets = list(segment)
        at = buckets.index(bucket)
        # Neighbours stay together, so that halves of the batch, if it fails, are near in size.
        for other in (*buckets[at + 1 :], *reversed(buckets[:at])):
            more = other.prefix(limits.max_rows - rows, segment[other])
            members.extend(more)
            rows += sum([request.rows for request in more])
        return members


def _optimal_segments(
    bucket: Bucket, costs: WorkerCosts, limits: SegmentLimits, delayed: float | None
) -> list[Segment]:
    """Return the optimal cuts of the window around a bucket, or the batch of its first request."""
    _, close_rows = costs.worker_class.useful_rows(bucket.shape)
    size = max(WINDOW, min(MOST_WINDOW, close_rows))
    parts = bucket.lane.window(bucket, size)
    shapes = np.array([own.shape for own, _ in parts], np.intp)
    if delayed is not None and not are_nested(shapes):
        return [_nearest(bucket, size, costs, limits, delayed)]
    batch_s = BATCH_S if costs.worker_class.measured else 0.0
    if bucket.count == 1 and costs.worker_class.grows and _runs_alone(bucket, parts, costs, batch_s):
        return [{bucket: 1}]
    ends = cut_window(_window(parts), costs, limits, delayed=delayed, batch_s=batch_s)
    return _segments(parts, ends)


def _nearest(bucket: Bucket, size: int, costs: WorkerCosts, limits: SegmentLimits, delayed: float) -> Segment:
    """Return the batch of the first request of a bucket, of twice a window: what is nearest may be far by elements."""
    first = bucket.first()
    parts = bucket.lane.window(bucket, min(2 * size, MOST_WINDOW))
    others = [
        request for own, count in parts for request in own.first_requests(count) if request is not first
    ]
    requests = [first, *others]
    window = Window(
        rows=np.array([request.rows for request in requests], np.intp),
        shapes=np.array([request.shape for request in requests], np.intp),
    )
    cost_s = np.array([request.cost_ns for request in requests]) / 1e9
    if not cost_s.all():  # some came before anything was measured
        cost_s = np.minimum(costs.seconds(window.rows, window.shapes), NEVER)
    places = nearest(window, cost_s, costs, limits, delayed=delayed, batch_s=BATCH_S)
    return Counter([bucket, *[requests[place].bucket for place in places]])


def _runs_alone(bucket: Bucket, parts: list[tuple[Bucket, int]], costs: WorkerCosts, batch_s: float) -> bool:
    """Tell whether the only request of a bucket would cost more with each single other request than both alone.

    No programme is needed then: where seconds are linear in rows and size, more requests together save no more than a
    pair.
    """
    rows, shape = bucket.rows, bucket.shape
    second = costs.worker_class.second
    own_s = costs.call(rows, shape).seconds + batch_s
    others = [other.shape for other, _ in parts if other is not bucket]
    at = next(place for place, (other, _) in enumerate(parts) if other is bucket)
    # Mostly a neighbour shows that sharing pays, and nothing more is looked at.
    for near in others[max(0, at - 1) : at + 1]:
        if second(rows + 1, tuple(map(max, near, shape))) <= own_s + second(1, near):
            return False
    larger = np.maximum(np.array(others, dtype=np.intp).reshape(len(others), -1), shape)
    alone_s = own_s + np.array([second(1, other) for other in others])
    return bool((costs.seconds(np.full(len(others), rows + 1), larger) > alone_s).all())


def _segments(parts: list[tuple[Bucket, int]], ends: list[int]) -> list[Segment]:
    """Return the segments that end before these requests of the window."""
    buckets = [bucket for bucket, count in parts for _ in range(count)]
    return [Counter(buckets[start:end]) for start, end in pairwise([0, *ends])]


def _window(parts: list[tuple[Bucket, int]]) -> Window:
    counts = [count for _, count in parts]
    shapes = np.repeat(np.array([bucket.shape for bucket, _ in parts], dtype=np.intp), counts, axis=0)
    if all(bucket.single_rows for bucket, _ in parts):
        return Window(rows=np.ones(len(shapes), dtype=np.intp), shapes=shapes)
    requests = [request for bucket, count in parts for request in bucket.first_requests(count)]
    return Window(rows=np.array([request.rows for request in requests], dtype=np.intp), shapes=shapes)


def within_limits(
    members: list[Request],
    costs: WorkerCosts,
    limits: SegmentLimits,
    slowdown: float,
    starts_at: float,
    otherwise: CutReason,
) -> tuple[list[Request], CutReason]:
    """Return the longest beginning of these members that limits and deadlines allow, and why it holds no more.

    The first member always stays. The reason is `otherwise` where all stay.
    """
    reason = otherwise
    for count in range(len(members), 1, -1):
        kept = members[:count]
        rows = sum([request.rows for request in kept])
        shape = tuple(map(max, *[request.shape for request in kept]))
        if not _legal(kept, rows, shape, costs, limits):
            cause = CutReason.LIMIT
        elif not _in_time(kept, rows, shape, costs, slowdown, starts_at):
            cause = CutReason.DEADLINE
        else:
            return kept, reason
        if reason is otherwise:
            reason = cause
    return members[:1], reason


def _in_time(
    members: Sequence[Request], rows: int, shape: Sizes, costs: WorkerCosts, slowdown: float, starts_at: float
) -> bool:
    """Tell whether the batch ends before all deadlines that its members could meet alone."""
    if not costs.worker_class.measured:
        return True
    ends_at = 0.0
    for request in members:
        deadline = request.arrival.deadline
        if deadline is not None:
            ends_at = ends_at or starts_at + costs.call(rows, shape).seconds * slowdown
            alone_s = costs.call(request.rows, request.shape).seconds * slowdown
            if starts_at + alone_s <= deadline < ends_at:
                return False
    return True


def _legal(
    members: Sequence[Request], rows: int, shape: Sizes, costs: WorkerCosts, limits: SegmentLimits
) -> bool:
    """Tell whether a batch of these members, with so many rows and this shape, passes no limit."""
    if limits.max_bytes is not None and costs.bytes.of_batch(rows, shape) > limits.max_bytes:
        return False
    if limits.most_s is not None and costs.call(rows, shape).seconds > limits.most_s:
        return False
    if limits.max_padding_ratio is not None:
        part = costs.padded_part
        real = sum([request.rows * elements_of(part(request.shape)) for request in members])
        return real >= (1.0 - limits.max_padding_ratio) * rows * elements_of(part(shape))
    return True


def _equal_rows(bucket: Bucket, costs: WorkerCosts, limits: SegmentLimits, delayed: float | None) -> int:
    """Return the number of rows that a batch of one shape should have; segments.py says what is minimised."""
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


def _larger(
    members: list[Request], bucket: Bucket, queued_rows: int, costs: WorkerCosts, limits: SegmentLimits
) -> list[Request] | None:
    """Return the members of a try in the place of these; None where none is due, or too few requests wait."""
    if len(bucket.lane.buckets) == 1 and bucket.count == len(members):
        return None  # nothing else may share the call, as with shapes that never come again
    rows = sum([request.rows for request in members])
    shape = tuple(map(max, bucket.shape, *[request.shape for request in members]))
    # A call whose rows are filled up may as well hold requests there.
    call = costs.call(tried_rows(rows, limits.max_rows), shape)
    most = min(limits.max_rows, call.rows)
    if most <= rows or queued_rows < most:
        return None
    prices = costs.worker_class
    if not prices.is_try_due(prices.calls(call.rows, call.shape)):
        return None
    chosen = {request.id for request in members}
    room = most - rows
    added: list[Request] = []
    for other, count in bucket.lane.window(bucket, most):
        for request in other.first_requests(count):
            if request.id in chosen:
                continue
            if request.rows > room:
                break
            added.append(request)
            room -= request.rows
    if 2 * room > most - rows:
        return None
    added_rows = most - rows - room
    added_shape = tuple(map(max, bucket.shape, *[request.shape for request in added]))
    together = costs.call(rows + added_rows, tuple(map(max, shape, added_shape)))
    apart_s = costs.call(rows, shape).seconds + BATCH_S
    apart_s += added_rows / rows * (costs.call(rows, added_shape).seconds + BATCH_S)
    apart = rows * elements_of(shape) + added_rows * elements_of(added_shape)
    padded = together.rows * elements_of(together.shape) / max(1.0, apart)
    excess_s = together.seconds + BATCH_S - apart_s
    if not prices.is_try_due(prices.calls(together.rows, together.shape), excess_s, padded):
        return None
    prices.tries.began()
    return sorted([*members, *added], key=lambda request: request.bucket is not bucket)
