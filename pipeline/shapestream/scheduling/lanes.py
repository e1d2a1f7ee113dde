"""Where admitted requests wait: a queue per model (`model_queue.py`), in it lanes, in them buckets.

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
from collections.abc import Iterable
from heapq import merge

from shapestream.scheduling.records import QUEUED, Request

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
