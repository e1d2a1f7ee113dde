"""The queued requests of one model by their sizes, for the batch former.

A *lane* holds the requests that may share a batch: one model, equal sizes of every dimension that must not be padded.
A *bucket* holds the requests of a lane whose sizes are all equal, ordered by rank; only their rows may differ. The planner
cuts batches out of neighbouring buckets.

Requests without elements (some size is 0) have a lane of their own, `EMPTY`. They share no batch with any other, since
nothing backs the sizes that they claim along the other dimensions.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter

from shapestream.scheduling.queueing import QUEUED, Request

EMPTY = (-1,)
"""The key of the lane of requests without elements. No size is negative."""

_FEW_DEAD = 32
"""A bucket drops its dead entries when they are more than this, and more than the living."""

# Keys that are no calls in Python: with many clients nearly each arrival is inserted somewhere.
_by_place = attrgetter("rank", "order")
_by_key = attrgetter("key")


class Bucket:
    """The queued requests of one lane with the same sizes, whatever their rows, by rank."""

    __slots__ = ("count", "elements", "held", "key", "lane", "name", "rows", "shape", "single_rows")

    def __init__(self, name: tuple[int, ...], lane: Lane, shape: tuple[int, ...], elements: int) -> None:
        self.name = name
        """The key under which its queue keeps it."""
        self.lane = lane
        self.shape = shape
        self.elements = elements
        """Elements of one row, along the dimensions that may be padded."""
        self.key = (elements, shape)
        self.count = 0
        self.rows = 0
        self.single_rows = True
        """Whether every request that was ever put here has exactly one row."""
        self.held: list[Request] = []
        """All entries by rank. Requests that no longer wait stay until they come to the front, or until they are many.

        An insertion moves all later entries, which takes 20 us where 100,000 requests wait."""

    def __repr__(self) -> str:
        return f"<bucket {self.shape}: {self.count} requests, {self.rows} rows>"

    def add(self, request: Request) -> None:
        """Insert a request by rank, after those of equal rank."""
        held = self.held
        if held and request.rank < held[-1].rank:
            insort(held, request, key=_by_place)
        else:
            held.append(request)
        self.count += 1
        self.rows += request.rows
        if request.rows != 1:
            self.single_rows = False

    def prefix(self, max_rows: int, max_requests: int | None = None) -> list[Request]:
        """Return the first requests by rank that have at most `max_rows` rows together. None is passed over.

        At most `max_requests` are returned (`max_rows` if None), even if they have no rows.
        """
        most = max_rows if max_requests is None else max_requests
        taken = self.first_requests(min(most, max_rows) if self.single_rows else most)
        if not self.single_rows:
            rows = 0
            for place, request in enumerate(taken):
                rows += request.rows
                if rows > max_rows:
                    return taken[:place]
        return taken

    def prefix_with(self, anchor: Request, max_rows: int, max_requests: int) -> list[Request]:
        """Return the anchor, which is in this bucket, and then the first other requests within the same bounds."""
        if anchor is self.first():
            return self.prefix(max_rows, max_requests) or [anchor]
        others = [request for request in self.first_requests(max_requests) if request is not anchor]
        taken = [anchor]
        rows = anchor.rows
        for request in others[: max_requests - 1]:
            rows += request.rows
            if rows > max_rows:
                break
            taken.append(request)
        return taken

    def first_requests(self, count: int) -> list[Request]:
        """Return the first `count` requests by rank, or all if there are fewer."""
        if count <= 0:
            return []
        first = self.held[:count]
        if all(request.state is QUEUED for request in first):
            return first
        return list(islice((request for request in self.held if request.state is QUEUED), count))

    def first(self) -> Request:
        """Return the first request by rank. The bucket must not be empty; dead entries never stay in front."""
        return self.held[0]

    def drop_dead(self) -> None:
        """Drop the entries that no longer wait: those in front at once, the others when they are many.

        Nothing stays in an empty bucket: its last requests and it would keep each other in memory.
        """
        held = self.held
        if not self.count:
            held.clear()
            return
        dead = 0
        for request in held:
            if request.state is QUEUED:
                break
            dead += 1
        del held[:dead]
        if len(held) > 2 * self.count + _FEW_DEAD:
            self.held = [request for request in held if request.state is QUEUED]


class Lane:
    """The buckets whose requests may share a batch, sorted by the elements of a row."""

    __slots__ = ("buckets", "key")

    def __init__(self, key: tuple[int, ...]) -> None:
        self.key = key
        self.buckets: list[Bucket] = []

    def __repr__(self) -> str:
        return f"<lane {self.key}: {self.buckets}>"

    def add(self, bucket: Bucket) -> None:
        """Insert a new bucket."""
        insort(self.buckets, bucket, key=_by_key)

    def remove(self, bucket: Bucket) -> None:
        """Remove an empty bucket."""
        del self.buckets[bisect_left(self.buckets, bucket.key, key=_by_key)]

    def position(self, bucket: Bucket) -> int:
        """Return the place of a bucket in this lane."""
        return bisect_left(self.buckets, bucket.key, key=_by_key)

    def window(self, bucket: Bucket, size: int) -> list[tuple[Bucket, int]]:
        """Return about `size` requests around the first of `bucket`: buckets, smallest first, and the number of each.

        Half of them are smaller and half are larger, unless one side has fewer. The bucket's own count as
        the larger ones.
        """
        at = self.position(bucket)
        half = size // 2
        smaller = self._take(range(at - 1, -1, -1), half)
        wanted = size - sum(count for _, count in smaller)
        larger = self._take(range(at, len(self.buckets)), wanted)
        missing = wanted - sum(count for _, count in larger)
        if missing > 0 and wanted == size - half:
            smaller = self._take(range(at - 1, -1, -1), half + missing)
        smaller.reverse()
        return smaller + larger

    def _take(self, places: Iterable[int], size: int) -> list[tuple[Bucket, int]]:
        """Return `size` requests of the buckets at these places, one after the other, or all if there are fewer."""
        taken: list[tuple[Bucket, int]] = []
        for place in places:
            if size <= 0:
                break
            bucket = self.buckets[place]
            taken.append((bucket, min(bucket.count, size)))
            size -= bucket.count
        return taken
