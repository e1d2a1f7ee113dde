"""Where admitted requests wait: a queue per model, in it lanes, in them buckets.

A *lane* holds the requests that may share a batch at all: one model, equal sizes of every dimension that
must not be padded. A *bucket* holds those of a lane with exactly the same sizes (only the number of rows
may differ), first come, first served. The planner cuts batches out of buckets that are near each other.

Ageing is a matter of arithmetic here: a request's priority grows by one for every `AGEING_S` seconds that
it waits. Of two requests the one with the greater sum is, at any moment, the one with the smaller
`arrived - priority * AGEING_S`: its *rank*, which never changes, so nothing is ever sorted again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, merge
from math import prod

from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.lazy_heap import LazyHeap
from shapestream.scheduling.records import QUEUED, RERUN, Request, Slot, State

AGEING_S = 1.0
"""Seconds of waiting that are worth one step of priority."""

MAX_PRIORITY = 32
"""Priorities beyond this, either way, count as this. It bounds the runs of a bucket."""

# A bucket is rebuilt when more of its entries than this, and than the living, are dead.
_FEW_DEAD = 32


def _by_rank(request: Request) -> tuple[float, int]:
    return request.rank, request.order


class Bucket:
    """The waiting requests of one lane with the same sizes, whatever their rows."""

    __slots__ = ("count", "elements", "key", "lane", "rows", "runs", "shape")

    def __init__(self, lane: Lane, shape: tuple[int, ...], elements: int) -> None:
        self.lane = lane
        self.shape = shape
        self.elements = elements
        """Elements of one row, along the dimensions that may be padded."""
        self.key = (elements, shape)
        self.count = 0
        self.rows = 0
        # One run per priority: in each, the order of arrival is the order of rank.
        self.runs: dict[int, deque[Request]] = {}

    def __repr__(self) -> str:
        return f"<bucket {self.shape}: {self.count} requests, {self.rows} rows>"

    def append(self, request: Request) -> None:
        """Adds a request that arrived after all the others."""
        run = self.runs.get(request.priority)
        if run is None:
            run = self.runs[request.priority] = deque()
        run.append(request)
        self.count += 1
        self.rows += request.rows

    def prefix(self, max_rows: int) -> list[Request]:
        """The first requests by rank that have at most `max_rows` rows together. None is passed over.

        Nor are there more than `max_rows` requests, though they had no rows at all.
        """
        taken: list[Request] = []
        rows = 0
        for request in self._in_order():
            if request.state is not QUEUED:
                continue
            rows += request.rows
            if rows > max_rows or len(taken) == max_rows:
                break
            taken.append(request)
        return taken

    def first(self) -> Request:
        """The first request by rank. The bucket must not be empty; dead entries never stay in front."""
        if len(self.runs) > 1:
            return min((run[0] for run in self.runs.values()), key=_by_rank)
        (run,) = self.runs.values()
        return run[0]

    def _in_order(self) -> Iterable[Request]:
        runs = self.runs
        if len(runs) > 1:
            return merge(*runs.values(), key=_by_rank)
        (run,) = runs.values()
        return run

    def drop_dead(self) -> None:
        """Forgets the entries that no longer wait: those in front at once, the rest when they are many."""
        runs = self.runs
        held = 0
        for priority, run in list(runs.items()):
            while run and run[0].state is not QUEUED:
                run.popleft()
            if run:
                held += len(run)
            else:
                del runs[priority]
        if held > 2 * self.count + _FEW_DEAD:
            self.runs = {
                priority: living
                for priority, run in runs.items()
                if (living := deque(request for request in run if request.state is QUEUED))
            }


class Lane:
    """The buckets whose requests may share a batch, sorted by the elements of a row."""

    __slots__ = ("buckets", "key")

    def __init__(self, key: tuple[int, ...]) -> None:
        self.key = key
        self.buckets: list[Bucket] = []

    def __repr__(self) -> str:
        return f"<lane {self.key}: {self.buckets}>"

    def add(self, bucket: Bucket) -> None:
        """Puts a new bucket into its place."""
        insort(self.buckets, bucket, key=_bucket_key)

    def remove(self, bucket: Bucket) -> None:
        """Takes an empty bucket out."""
        del self.buckets[self.position(bucket)]

    def position(self, bucket: Bucket) -> int:
        """Where a bucket of this lane stands."""
        return bisect_left(self.buckets, bucket.key, key=_bucket_key)

    def near(self, bucket: Bucket, reach: int) -> list[Bucket]:
        """The bucket and up to `reach` neighbours on either side, smallest first."""
        at = self.position(bucket)
        return self.buckets[max(0, at - reach) : at + reach + 1]


def _bucket_key(bucket: Bucket) -> tuple[int, tuple[int, ...]]:
    return bucket.key


class ModelQueue:
    """Everything that waits for one model, and the free slots that it may wait for."""

    __slots__ = (
        "buckets",
        "count",
        "delay_s",
        "due",
        "free",
        "full",
        "has_batch",
        "lanes",
        "oldest",
        "padded",
        "profile",
        "rerun_count",
        "reruns",
        "rows",
        "slot_count",
    )

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.has_batch = profile.has_batch
        # A request that runs alone has no company to wait for.
        self.delay_s = profile.max_delay_s if profile.has_batch else 0.0
        self.padded = profile.paddable[1:] if profile.has_batch else profile.paddable
        self.buckets: dict[tuple[int, ...], Bucket] = {}
        self.lanes: dict[tuple[int, ...], Lane] = {}
        self.oldest = LazyHeap(State.QUEUED)
        """By rank; what waits in lanes."""
        self.due = LazyHeap(State.QUEUED)
        """By the end of their delay; filled only where the model has one."""
        self.full: dict[tuple[int, ...], Bucket] = {}
        """The buckets that could fill a batch by themselves; kept only where the model has a delay."""
        self.reruns: list[tuple[float, int, Sequence[Request]]] = []
        self.count = 0
        self.rows = 0
        self.rerun_count = 0
        self.free: dict[int, Slot] = {}
        """The free slots that serve this model, longest free first."""
        self.slot_count = 0

    def __repr__(self) -> str:
        return (
            f"<{self.profile.name}: {self.waiting} waiting, {len(self.free)} of {self.slot_count} slots free>"
        )

    @property
    def waiting(self) -> int:
        """Requests that wait, in lanes or to be run again."""
        return self.count + self.rerun_count

    def add(self, request: Request) -> None:
        """Puts a new request at the end of its bucket."""
        bucket = self.buckets.get(request.shape)
        if bucket is None:
            bucket = self._open_bucket(request.shape)
        request.bucket = bucket
        bucket.append(request)
        self.oldest.push(request.rank, request)
        self.count += 1
        self.rows += request.rows
        if self.delay_s and bucket.rows >= self.profile.max_batch:
            self.full[bucket.shape] = bucket

    def _open_bucket(self, shape: tuple[int, ...]) -> Bucket:
        sizes_and_padded = list(zip(shape, self.padded, strict=True))
        key = tuple(size for size, padded in sizes_and_padded if not padded)
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(key)
        elements = prod(size for size, padded in sizes_and_padded if padded)
        bucket = self.buckets[shape] = Bucket(lane, shape, elements)
        lane.add(bucket)
        return bucket

    def take(self, requests: Sequence[Request], state: State) -> None:
        """Takes requests out of their buckets and into another state: running, or done."""
        touched: dict[tuple[int, ...], Bucket] = {}
        rows = 0
        for request in requests:
            request.state = state
            rows += request.rows
            bucket = request.bucket
            bucket.count -= 1
            bucket.rows -= request.rows
            touched[bucket.shape] = bucket
        self.count -= len(requests)
        self.rows -= rows
        for bucket in touched.values():
            if bucket.count:
                bucket.drop_dead()
                if self.full and bucket.rows < self.profile.max_batch:
                    self.full.pop(bucket.shape, None)
            else:
                self._close_bucket(bucket)
        self.oldest.shrink(self.count)
        self.due.shrink(self.count)

    def _close_bucket(self, bucket: Bucket) -> None:
        del self.buckets[bucket.shape]
        self.full.pop(bucket.shape, None)
        lane = bucket.lane
        lane.remove(bucket)
        if not lane.buckets:
            del self.lanes[lane.key]

    def put_rerun(self, group: Sequence[Request]) -> None:
        """Lets a group wait at the front, to be run again exactly as it is."""
        for request in group:
            request.state = RERUN
        self.rerun_count += len(group)
        heappush(self.reruns, (group[0].rank, group[0].order, group))

    def next_rerun(self) -> list[Request]:
        """What is left of the first group; it stays where it is. There must be one (`rerun_count`)."""
        reruns = self.reruns
        while not (living := [request for request in reruns[0][2] if request.state is RERUN]):
            heappop(reruns)
        return living

    def leave_rerun(self, requests: Sequence[Request], state: State) -> None:
        """Takes requests that were to be run again into another state."""
        for request in requests:
            request.state = state
        self.rerun_count -= len(requests)
        if not self.rerun_count:
            self.reruns.clear()
