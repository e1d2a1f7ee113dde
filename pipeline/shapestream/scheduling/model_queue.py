"""Everything that waits for one model: its lanes, its orders, and what must be run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from math import prod

from shapestream.scheduling.agenda import Agenda
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.fairness import FairShares
from shapestream.scheduling.lanes import EMPTY, Bucket, Lane
from shapestream.scheduling.lazy_heap import LazyHeap
from shapestream.scheduling.records import DONE, RERUN, RUNNING, SUSPECT, Request, State
from shapestream.scheduling.rounding import ShapeRounding
from shapestream.scheduling.slot import Slot

MAX_SEEN = 1024
"""Sizes of batches that are remembered to tell new ones. When another comes, the one that was met first goes."""


class ModelQueue:
    """Everything that waits for one model, and the free slots that it may wait for."""

    __slots__ = (
        "_fastest",
        "_paces",
        "ahead",
        "buckets",
        "commits",
        "cost_s",
        "count",
        "delay_s",
        "due",
        "ends",
        "free",
        "full",
        "has_batch",
        "lanes",
        "oldest",
        "padded",
        "profile",
        "recalling",
        "rerun_count",
        "reruns",
        "rounding",
        "rows",
        "seen",
        "shares",
        "slot_count",
        "suspect_count",
        "suspects",
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
        self.suspects: list[tuple[float, int, Request, bool]] = []
        self.shares = FairShares(self)
        self.rounding: ShapeRounding | None = None
        """What call shapes are rounded up to, where the model has a cap on them; the scheduler sets it."""
        self.count = 0
        self.rows = 0
        self.cost_s = 0.0
        """Predicted slot seconds of what waits in lanes."""
        self.rerun_count = 0
        self.suspect_count = 0
        self.free: dict[int, Slot] = {}
        """The free slots that serve this model, longest free first."""
        self.slot_count = 0
        self._paces: Counter[float] = Counter()
        """How many of its slots have each pace: seconds there / seconds on the most common kind."""
        self._fastest: float | None = None
        """The smallest pace; None where it must be looked for."""
        self.ends = Agenda()
        """The busy slots that serve this model, by when they are predicted to become free."""
        self.commits = Agenda()
        """Those of them that take a batch ahead and have none, by when it should be sent."""
        self.ahead = Agenda()
        """The slots where a batch of this model waits behind another, by when it is predicted to start; not the
        recalled ones."""
        self.recalling = 0
        """Batches of this model that were recalled, of which nothing was heard yet."""
        self.seen: dict[tuple[int, ...], None] = {}
        """The sizes of recent batches."""

    def __repr__(self) -> str:
        return (
            f"<{self.profile.name}: {self.waiting} waiting, {len(self.free)} of {self.slot_count} slots free>"
        )

    @property
    def fastest(self) -> float:
        """The smallest pace of its slots; 1.0 where it has none."""
        if self._fastest is None:
            self._fastest = min(self._paces, default=1.0)
        return self._fastest

    def add_pace(self, pace: float) -> None:
        """Count a slot with this pace."""
        self._paces[pace] += 1
        if self._fastest is not None and pace < self._fastest:
            self._fastest = pace

    def remove_pace(self, pace: float) -> None:
        """Count it no longer. Slots leave by the thousand, so the smallest of the others is looked for when it is needed."""
        self._paces[pace] -= 1
        if not self._paces[pace]:
            del self._paces[pace]
            if pace == self._fastest:
                self._fastest = None

    @property
    def waiting(self) -> int:
        """Requests that wait, in lanes, to be run again, or to be run alone."""
        return self.count + self.rerun_count + self.suspect_count

    @property
    def startable(self) -> int:
        """Those of them that any slot may be given."""
        return self.count + self.rerun_count

    def add(self, request: Request) -> None:
        """Puts a new request into its bucket."""
        name = (*EMPTY, *request.shape) if request.empty else request.shape
        bucket = self.buckets.get(name)
        if bucket is None:
            bucket = self.buckets[name] = self._open_bucket(request)
        request.bucket = bucket
        bucket.add(request)
        self.oldest.push(request.rank, request)
        self.count += 1
        self.rows += request.rows
        self.cost_s += request.cost_s
        if self.delay_s and bucket.rows >= self.profile.max_batch:
            self.full[bucket.name] = bucket

    def _open_bucket(self, request: Request) -> Bucket:
        shape = request.shape
        sizes_and_padded = list(zip(shape, self.padded, strict=True))
        key = EMPTY if request.empty else tuple(size for size, padded in sizes_and_padded if not padded)
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(key)
        elements = prod(size for size, padded in sizes_and_padded if padded)
        bucket = Bucket(lane, shape, elements)
        lane.add(bucket)
        return bucket

    def take(self, requests: Sequence[Request], state: State) -> None:
        """Takes requests out of their buckets and into another state: running, or done."""
        touched: dict[tuple[int, ...], Bucket] = {}
        rows = 0
        cost_s = 0.0
        for request in requests:
            request.state = state
            rows += request.rows
            cost_s += request.cost_s
            bucket = request.bucket
            bucket.count -= 1
            bucket.rows -= request.rows
            touched[bucket.name] = bucket
        self.count -= len(requests)
        self.rows -= rows
        # Sums of floats drift; nothing is exactly nothing.
        self.cost_s = max(0.0, self.cost_s - cost_s) if self.count else 0.0
        for bucket in touched.values():
            if bucket.count:
                bucket.drop_dead()
                if self.full and bucket.rows < self.profile.max_batch:
                    self.full.pop(bucket.name, None)
            else:
                self._close_bucket(bucket)
        self.oldest.shrink(self.count)
        self.due.shrink(self.count)

    def _close_bucket(self, bucket: Bucket) -> None:
        del self.buckets[bucket.name]
        self.full.pop(bucket.name, None)
        lane = bucket.lane
        lane.remove(bucket)
        if not lane.buckets:
            del self.lanes[lane.key]

    def meet(self, sizes: tuple[int, ...]) -> bool:
        """Remembers a batch's sizes; whether they are new, as far as remembered."""
        seen = self.seen
        if sizes in seen:
            return False
        if len(seen) >= MAX_SEEN:
            del seen[next(iter(seen))]
        seen[sizes] = None
        return True

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

    def take_rerun(self) -> list[Request]:
        """Takes the first group out, to run. It must not stay: its members may come back in other groups."""
        living = self.next_rerun()
        heappop(self.reruns)
        for request in living:
            request.state = RUNNING
        self.rerun_count -= len(living)
        return living

    def drop_rerun(self, request: Request) -> None:
        """Takes one request that was to be run again out, for good."""
        request.state = DONE
        self.rerun_count -= 1
        if not self.rerun_count:
            self.reruns.clear()

    def put_suspect(self, request: Request, *, accused: bool) -> None:
        """Lets a request wait at the front, to be run where nothing else runs; `accused` is remembered with it."""
        request.state = SUSPECT
        self.suspect_count += 1
        heappush(self.suspects, (request.rank, request.order, request, accused))

    def next_suspect(self) -> Request | None:
        """The first of those, left where it is."""
        suspects = self.suspects
        while suspects and suspects[0][2].state is not SUSPECT:
            heappop(suspects)
        return suspects[0][2] if suspects else None

    def take_suspect(self) -> tuple[Request, bool]:
        """Takes the first of those out, to run, and whether it is accused; there must be one (`suspect_count`)."""
        assert self.next_suspect() is not None
        _, _, request, accused = heappop(self.suspects)
        request.state = RUNNING
        self.suspect_count -= 1
        return request, accused

    def drop_suspect(self, request: Request) -> None:
        """Takes one of them out, for good."""
        request.state = DONE
        self.suspect_count -= 1
        self.next_suspect()
