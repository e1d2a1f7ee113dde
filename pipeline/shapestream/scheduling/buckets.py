"""The queued requests of one model by their sizes, for the batch former.

A *lane* holds the requests that may share a batch: one model, equal sizes of every dimension that must not be padded.
A *bucket* holds the requests of a lane whose sizes are all equal, ordered by rank; only their rows may differ. The planner
cuts batches out of neighbouring buckets.

Requests without elements (some size is 0) have a lane of their own, `EMPTY`. They share no batch with any other, since
nothing backs the sizes that they claim along the other dimensions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from operator import attrgetter

from shapestream.scheduling.queueing import QUEUED, Request

EMPTY = (-1,)
"""The key of the lane of requests without elements. No size is negative."""

CHUNK = 512
"""Largest piece of a bucket, in requests: an insertion moves no more than these."""

# A bucket is rebuilt when more of its entries than this, and than the living, are dead.
_FEW_DEAD = 32


# Keys that are no calls in Python: with many clients nearly each arrival is inserted somewhere.
_by_place = attrgetter("place")
_by_key = attrgetter("key")


def _last_by_place(chunk: list[Request]) -> tuple[float, int]:
    return chunk[-1].place


class Bucket:
    """The queued requests of one lane with the same sizes, whatever their rows, by rank.

    They are kept in sorted pieces of at most `CHUNK`. A sorted list of sortedcontainers took 3 to 8 % more opcodes per
    decision, because nearly all requests are appended at the end and taken in front.
    """

    __slots__ = (
        "_chunks",
        "_held",
        "count",
        "elements",
        "key",
        "lane",
        "name",
        "rows",
        "shape",
        "single_rows",
    )

    def __init__(self, lane: Lane, shape: tuple[int, ...], elements: int) -> None:
        self.lane = lane
        self.shape = shape
        self.name = (*lane.key, *shape) if lane.key == EMPTY else shape
        """By which its queue knows it."""
        self.elements = elements
        """Elements of one row, along the dimensions that may be padded."""
        self.key = (elements, shape)
        self.count = 0
        self.rows = 0
        self.single_rows = True
        """Whether every request that was ever put here has exactly one row."""
        # Sorted, in sorted pieces, none of them empty. Those that no longer wait are left where they are until
        # they come to the front.
        self._chunks: list[list[Request]] = []
        self._held = 0

    def __repr__(self) -> str:
        return f"<bucket {self.shape}: {self.count} requests, {self.rows} rows>"

    def add(self, request: Request) -> None:
        """Insert a request by rank, after those of equal rank."""
        chunks = self._chunks
        if not chunks:
            chunks.append([request])
        else:
            last = chunks[-1]
            if request.rank < last[-1].rank:
                self._insert(request)
            elif len(last) < CHUNK:
                last.append(request)
            else:
                chunks.append([request])
        self._held += 1
        self.count += 1
        self.rows += request.rows
        if request.rows != 1:
            self.single_rows = False

    def _insert(self, request: Request) -> None:
        chunks = self._chunks
        at = bisect_right(chunks, request.place, key=_last_by_place) if len(chunks) > 1 else 0
        chunk = chunks[at]
        insort(chunk, request, key=_by_place)
        if len(chunk) > CHUNK:
            middle = len(chunk) // 2
            chunks[at : at + 1] = [chunk[:middle], chunk[middle:]]

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
        if count <= 0 or not self._chunks:
            return []
        first = self._chunks[0][:count]
        if len(first) == count and all(request.state is QUEUED for request in first):
            return first
        living = (request for request in self.held() if request.state is QUEUED)
        return list(islice(living, count))

    def first(self) -> Request:
        """Return the first request by rank. The bucket must not be empty; dead entries never stay in front."""
        return self._chunks[0][0]

    def held(self) -> Iterable[Request]:
        """Return all entries by rank, the dead among them included."""
        chunks = self._chunks
        return chunks[0] if len(chunks) == 1 else chain.from_iterable(chunks)

    def drop_dead(self) -> None:
        """Drop the entries that no longer wait: those in front at once, the others when they are many."""
        chunks = self._chunks
        while chunks:
            chunk = chunks[0]
            dead = 0
            for request in chunk:
                if request.state is QUEUED:
                    break
                dead += 1
            self._held -= dead
            if dead < len(chunk):
                if dead:
                    del chunk[:dead]
                break
            del chunks[0]
        if self._held > 2 * self.count + _FEW_DEAD:
            living = [request for request in chain.from_iterable(chunks) if request.state is QUEUED]
            self._chunks = [living[start : start + CHUNK] for start in range(0, len(living), CHUNK)]
            self._held = len(living)


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
        del self.buckets[self.position(bucket)]

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
        smaller = _take(self._walk(range(at - 1, -1, -1)), half)
        wanted = size - sum(count for _, count in smaller)
        larger = _take(self._walk(range(at, len(self.buckets))), wanted)
        missing = wanted - sum(count for _, count in larger)
        if missing > 0 and wanted == size - half:
            smaller = _take(self._walk(range(at - 1, -1, -1)), half + missing)
        smaller.reverse()
        return smaller + larger

    def _walk(self, places: range) -> Iterator[Bucket]:
        return (self.buckets[place] for place in places)


def _take(buckets: Iterable[Bucket], size: int) -> list[tuple[Bucket, int]]:
    taken: list[tuple[Bucket, int]] = []
    for bucket in buckets:
        if size <= 0:
            break
        taken.append((bucket, min(bucket.count, size)))
        size -= bucket.count
    return taken
