"""The queue of one model: what waits for it, in buckets, in turns, to run again, and as suspects.

The planner takes a batch from the buckets for the request whose turn it is (both queueing.py). Requests of a batch that
failed wait in fixed groups (`reruns`), suspects by themselves. Every change keeps the counts and the predicted seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice
from math import inf, prod
from operator import attrgetter
from typing import NamedTuple

from shapestream.scheduling.costs import ModelCosts
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.fairness import FairShares, GroupRoom, QueueRoom
from shapestream.scheduling.queueing import (
    CROWDED,
    EMPTY,
    LONE,
    MOST_GROUPS,
    QUEUED,
    RERUN,
    SUSPECT,
    Bucket,
    ClientFlow,
    Lane,
    LazyHeap,
    Occupancy,
    Request,
    Turns,
    by_rerun,
    nanoseconds,
)
from shapestream.versions import parted


class AnsweredBatch(NamedTuple):
    """The batch that a slot has just answered."""

    model: str
    at: float
    ran_s: float
    """Seconds that it held the slot."""
    rows: int
    """Of the requests that were answered."""
    shape: tuple[int, ...]
    """Of its call, without the batch axis."""
    arrived_rows: int
    """`Returns.arrived_rows` at that time."""


class Awaited(NamedTuple):
    """The wait of a model's free slots for requests that follow answers."""

    until: float
    rows: int
    """Queued rows that end the wait."""


OVER = Awaited(-inf, 0)


class Returns:
    """Measures how soon a model receives half as many rows as it has just answered."""

    __slots__ = ("_watched", "after_s", "arrived_rows")

    def __init__(self) -> None:
        self.arrived_rows = 0
        """Rows of all requests that ever arrived."""
        self.after_s = inf
        """Seconds from the answers that were watched last until then; inf if it took longer than they were watched."""
        self._watched: tuple[float, float, float] | None = None
        """Time of the answers, end of the watch, and the `arrived_rows` at which half have returned."""

    def answered(self, rows: int, now: float, watched_s: float) -> None:
        """Watch arrivals for `watched_s` seconds after an answer, unless earlier answers still are watched."""
        if self._watched is not None:
            if now <= self._watched[1]:
                return
            self.after_s = inf
        self._watched = now, now + watched_s, self.arrived_rows + rows / 2

    def arrived(self, rows: int, now: float) -> None:
        """Count rows that arrive."""
        self.arrived_rows += rows
        if self._watched is not None and self.arrived_rows >= self._watched[2]:
            at, until, _ = self._watched
            self.after_s = now - at if now <= until else inf
            self._watched = None


MOST_COUNTED = 512
"""Largest number of buckets that are counted by size, in about 1 ms. Longer lists are sampled at even distances."""


class QueuedSizes(NamedTuple):
    """The queue of one model, by sizes of its requests."""

    waiting: int
    """Requests in the queue, also those that run again."""
    dimensions: tuple[str, ...]
    """The dynamic dimensions that `cells` tell apart: none, one, or the two with the largest spread. Rows are none."""
    cells: Mapping[tuple[int, ...], int]
    """Requests by the `size_bin` of each of these dimensions."""


def size_bin(size: int) -> int:
    """Return the lower end of the bin of a size. Bins begin at 0, 1, 2, 3, 4, 6, 8, 12, …: two for each power of two."""
    if size < 4:
        return size
    power = 1 << (size.bit_length() - 1)
    return power + (power >> 1) if size & (power >> 1) else power


MAX_SEEN = 1024
"""Sizes of batches that are remembered, to tell new ones. When there are more, the oldest is forgotten."""


class ModelQueue:
    """The queued requests of one model."""

    __slots__ = (
        "_again_ns",
        "_cost_ns",
        "_equal_axes",
        "_padded_axes",
        "alone",
        "awaited",
        "bare_name",
        "buckets",
        "costs",
        "count",
        "delay_s",
        "due",
        "full",
        "groups",
        "has_batch",
        "lanes",
        "measured_s",
        "name",
        "padded",
        "predicted_s",
        "profile",
        "rerun_count",
        "reruns",
        "returns",
        "rows",
        "seen",
        "shares",
        "sharing",
        "suspect_count",
        "suspects",
        "turns",
        "unavailable",
        "unfinished",
        "waits",
    )

    def __init__(self, profile: ModelProfile, costs: ModelCosts, room: QueueRoom) -> None:
        """`room`: of all models."""
        self.profile = profile
        self.name = profile.key
        self.bare_name, _ = parted(profile.name)
        """Without version and generation: shares and room count by it."""
        self.costs = costs
        """The costs of its batches."""
        self.has_batch = profile.has_batch
        # A request that runs alone waits for no others.
        self.delay_s = profile.max_delay_s if profile.has_batch else 0.0
        self.padded = profile.paddable[1:] if profile.has_batch else profile.paddable
        self._padded_axes = [axis for axis, padded in enumerate(self.padded) if padded]
        self._equal_axes = [axis for axis, padded in enumerate(self.padded) if not padded]
        """Those along which requests that share a batch have equal sizes."""
        self.buckets: dict[tuple[int, ...], Bucket] = {}
        """What waits in lanes, by size."""
        self.lanes: dict[tuple[int, ...], Lane] = {}
        """The lanes with these buckets, by the sizes that may not be padded, and the group."""
        self.groups: Counter[int] = Counter()
        """The groups that have lanes, and the number of buckets of each."""
        self.turns = Turns()
        """The flows with what waits in lanes."""
        self.due = LazyHeap(QUEUED)
        """By the end of their delay; filled only where the model has one."""
        self.returns = Returns()
        """How soon requests follow answers."""
        self.awaited: Awaited | None = None
        """The wait for requests that follow answers, over or not, since a batch started last."""
        self.full: dict[tuple[int, ...], Bucket] = {}
        """The buckets that could fill a batch by themselves; kept only where the model has a delay."""
        self.reruns: list[tuple[float, int, Sequence[Request]]] = []
        self.suspects: list[tuple[float, int, Request]] = []
        self.sharing = [self]
        """The queues of all models that share slots with this one, directly or through others; one list for all of them."""
        self.shares: FairShares[ClientFlow] = FairShares(self._first_start_s, GroupRoom(room, self.bare_name))
        self.count = self.rows = 0
        # Whole numbers: seconds that differ by many orders would leave their rounding errors behind.
        self._cost_ns = self._again_ns = 0
        self.rerun_count = self.suspect_count = 0
        self.unfinished = 0
        """Requests that have not ended, those in batches included; the ledger counts them."""
        self.alone = False
        """Whether each request runs alone, at its own sizes, because results differed in shared batches."""
        self.unavailable: str | None = None
        """The reason that no slot will come for this model; None while one may."""
        self.seen: dict[tuple[int, ...], None] = {}
        """The sizes of recent batches."""
        self.predicted_s = 0.0
        """Predicted seconds of all batches that ran and had a prediction."""
        self.measured_s = 0.0
        """Seconds that these took."""
        self.waits = Occupancy()
        """The seconds that they waited; the ledger reports arrivals."""

    def __repr__(self) -> str:
        return f"<{self.name}: {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        """Requests that wait, in lanes, to be run again, or to be run alone."""
        return self.count + self.rerun_count + self.suspect_count

    @property
    def startable(self) -> int:
        """Those of them that any slot may be given."""
        return self.count + self.rerun_count

    @property
    def cost_s(self) -> float:
        """Predicted slot seconds of what waits in lanes."""
        return self._cost_ns / 1e9

    @property
    def again_s(self) -> float:
        """Predicted slot seconds of what waits to be run again, or to be run alone."""
        return self._again_ns / 1e9

    @property
    def waiting_s(self) -> float:
        """Predicted slot seconds of all that waits."""
        return self.cost_s + self.again_s

    @property
    def waits_until(self) -> float:
        """The time until which queued requests may wait for others; -inf if they do not wait."""
        if self.delay_s:
            due = self.due.first()
            return -inf if due is None else due[0]
        awaited = self.awaited
        return -inf if awaited is None or self.rows >= awaited.rows else awaited.until

    def await_no_longer(self) -> None:
        """End the wait for requests that follow answers."""
        if self.awaited is not None:
            self.awaited = OVER

    def _first_start_s(self) -> float | None:
        """Return the account of the client whose turn is first, of all models that share slots; None if none waits."""
        firsts = [first for queue in self.sharing if (first := queue.first())]
        return min(firsts, key=attrgetter("turn")).flow.client.start_s if firsts else None

    def flow_of(self, number: int) -> ClientFlow:
        """Return the flow of a client, and open one if there is none."""
        client = self.shares.client(number)
        flow = client.flows.get(self.name)
        if flow is None:
            flow = client.flows[self.name] = ClientFlow(client, self.bare_name)
        return flow

    def share_slots(self, other: ModelQueue) -> None:
        """Merge the shares with those of another model, because a slot joined that serves both."""
        if self.shares is other.shares:
            return
        self.shares.absorb(other.shares)
        self.sharing.extend(other.sharing)
        for queue in other.sharing:
            queue.shares, queue.sharing = self.shares, self.sharing

    def end(self) -> None:
        """Leave the shares and what they know of this model. It has no request."""
        self.shares.forget_model(self.name, self.bare_name)
        self.sharing.remove(self)
        if not self.sharing:
            self.shares.room.end()

    def add(self, request: Request, place: float) -> None:
        """Queue a new request, which `FairShares.stamp` has counted, and given this place in its flow."""
        flow = request.flow
        self._list(request)
        flow.requests.push(place, request)
        if flow.queued == 1:
            self.turns.put(flow, request)
        elif flow.has_priorities:
            self.turns.put(flow, flow.first())
        flow.queued_bytes += request.arrival.nbytes
        self.count += 1
        self.rows += request.rows
        self.returns.arrived(request.rows, request.arrived)
        self._cost_ns += request.cost_ns

    def first(self) -> Request | None:
        """Return the first request of the flow that has the turn; None if nothing waits in lanes."""
        return self.turns.first()

    def _list(self, request: Request) -> None:
        name = (*EMPTY, *request.shape) if request.empty else request.shape
        if request.arrival.suspect:
            name = (LONE, request.order)
        elif (group := request.arrival.group) is not None and not request.empty:
            has_room = group in self.groups or len(self.groups) < MOST_GROUPS
            name = (*name, group) if has_room else (*name, *CROWDED)
        bucket = self.buckets.get(name)
        if bucket is None:
            bucket = self.buckets[name] = self._open_bucket(name, request)
        request.bucket = bucket
        bucket.add(request)
        if self.delay_s and bucket.rows >= self.profile.max_batch:
            self.full[bucket.name] = bucket

    def _open_bucket(self, name: tuple[int, ...], request: Request) -> Bucket:
        shape = request.shape
        key: tuple[int, ...] = ()
        elements = prod(shape)
        if self._equal_axes:
            key = tuple([shape[axis] for axis in self._equal_axes])
            elements = prod([shape[axis] for axis in self._padded_axes])
        if request.arrival.suspect:
            key = name
        elif request.empty:
            key = EMPTY
        elif request.arrival.group is not None:
            key = (*key, name[-1])
            if name[-1:] != CROWDED:
                self.groups[name[-1]] += 1
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(key)
        bucket = Bucket(name, lane, shape, elements)
        lane.add(bucket)
        return bucket

    def take(self, anchor: Request, requests: Sequence[Request], share_s: float | None = None) -> None:
        """Take requests out of their buckets, to run in the turn of one of them, and charge their clients.

        `share_s`: predicted seconds of all slots of their call. Each client pays in proportion to
        what its requests would cost in efficient batches. None: exactly that, because the call has no prediction.
        """
        for request in requests:
            request.start()
        self.shares.start(anchor.flow, anchor.bonus_s, anchor.lead_s, self._remove(requests), share_s)

    def drop(self, request: Request) -> None:
        """End a waiting request, in whichever state it waits."""
        state = request.state
        request.end()
        if state is QUEUED:
            self._remove((request,))
        elif state is RERUN:
            self.rerun_count -= 1
            self._again_less((request,))
        else:
            self.suspect_count -= 1
            self._again_less((request,))

    def leave(self, count: int, nbytes: int, now: float) -> None:
        """Count the end of `count` waits: requests of so many bytes that were taken out to run, or have ended."""
        self.waits.leave(count, now)
        self.shares.room.leave(count, nbytes)

    def _remove(self, requests: Sequence[Request]) -> dict[ClientFlow, float]:
        """Take requests out of buckets and flows. Return their predicted seconds of all slots, by flow."""
        left: dict[ClientFlow, float] = {}
        touched: dict[Bucket, None] = {}
        rows = cost_ns = 0
        for request in requests:
            bucket = request.bucket
            bucket.count -= 1
            bucket.rows -= request.rows
            touched[bucket] = None
            rows += request.rows
            cost_ns += request.cost_ns
            flow = request.flow
            flow.queued -= 1
            flow.queued_bytes -= request.arrival.nbytes
            left[flow] = left.get(flow, 0.0) + request.share_s
        self.count -= len(requests)
        self.rows -= rows
        self._cost_ns -= cost_ns
        for bucket in touched:
            bucket.drop_dead()
            if not bucket.count:
                self._close_bucket(bucket)
            elif self.full and bucket.rows < self.profile.max_batch:
                self.full.pop(bucket.name, None)
        self.turns.shrink(self.count)
        for flow, share_s in left.items():
            flow.requests.shrink(flow.queued)
            if not flow.queued:
                flow.run_empty()
                continue
            flow.queued_s -= share_s
            if flow.has_priorities:
                self.turns.put(flow, flow.first())
        if self.delay_s:
            self.due.shrink(self.count)
        return left

    def _close_bucket(self, bucket: Bucket) -> None:
        del self.buckets[bucket.name]
        if self.full:
            self.full.pop(bucket.name, None)
        lane = bucket.lane
        lane.remove(bucket)
        key = lane.key
        if (
            self.groups
            and key not in (EMPTY, CROWDED)
            and key[0] != LONE
            and (group := key[-1]) in self.groups
        ):
            self.groups[group] -= 1
            if not self.groups[group]:
                del self.groups[group]
        if not lane.buckets:
            del self.lanes[lane.key]

    def meet(self, sizes: tuple[int, ...]) -> bool:
        """Remember a batch's sizes, mean bytes of strings apart. Return whether they are new, as far as remembered."""
        seen = self.seen
        if self.profile.strings:
            sizes = self.profile.shape_of_tensors(sizes)
        if sizes in seen:
            return False
        if len(seen) >= MAX_SEEN:
            del seen[next(iter(seen))]
        seen[sizes] = None
        return True

    def sizes_waiting(self) -> QueuedSizes:
        """Count the requests in lanes by size."""
        buckets = self.buckets
        every = -(-len(buckets) // MOST_COUNTED) or 1
        counted = [
            (bucket.shape, every * bucket.count) for bucket in islice(buckets.values(), 0, None, every)
        ]
        names = self.profile.dimensions[1 if self.has_batch else 0 :]
        axes = tuple(range(len(names)))
        if len(axes) > 2:
            ends = [(max(sizes), min(sizes)) for sizes in zip(*[shape for shape, _ in counted], strict=True)]
            by_spread = sorted(axes, key=lambda axis: -ends[axis][0] / (ends[axis][1] or 1)) if ends else axes
            axes = tuple(sorted(by_spread[:2]))
        cells: Counter[tuple[int, ...]] = Counter()
        for shape, count in counted:
            cells[tuple([size_bin(shape[axis]) for axis in axes])] += count
        return QueuedSizes(self.waiting, tuple([names[axis] for axis in axes]), cells)

    def put_rerun(self, group: Sequence[Request], seconds: float) -> None:
        """Queue a group that runs again as one call of `seconds`, in the order of `by_rerun`."""
        for request in group:
            request.run_again()
            request.cost_ns = nanoseconds(seconds / len(group))
            self._again_ns += request.cost_ns
        self.rerun_count += len(group)
        heappush(self.reruns, (*min(map(by_rerun, group)), group))

    def next_rerun(self) -> list[Request]:
        """Return the remaining requests of the first group, without taking it out. There must be one (`rerun_count`)."""
        reruns = self.reruns
        while not (living := [request for request in reruns[0][2] if request.state is RERUN]):
            heappop(reruns)
        return living

    def take_rerun(self) -> list[Request]:
        """Take out the first group, to run it. Only its first request is taken if all run alone, or if no call holds all.

        The entry is removed, because its members may come back in other groups.
        """
        living = self.next_rerun()
        heappop(self.reruns)
        if len(living) > 1 and (self.alone or not self._fit(living)):
            heappush(self.reruns, (*min(map(by_rerun, living[1:])), living[1:]))
            living = living[:1]
        for request in living:
            request.start()
        self.rerun_count -= len(living)
        self._again_less(living)
        return living

    def _fit(self, members: Sequence[Request]) -> bool:
        """Tell whether one call may hold these: their sizes may be rounded up further than before."""
        call = self.costs.call_bytes
        if call.most is None or self.costs.rounding is None:
            return True
        shape = tuple(map(max, zip(*[request.shape for request in members], strict=True)))
        return call.of_batch(sum([request.rows for request in members]), shape) <= call.most

    def _again_less(self, requests: Sequence[Request]) -> None:
        """Subtract the seconds of these requests."""
        self._again_ns -= sum([request.cost_ns for request in requests])
        if not self.rerun_count:
            self.reruns.clear()
        if not self.suspect_count:
            self.suspects.clear()

    def put_suspect(self, request: Request, seconds: float) -> None:
        """Queue a suspect at the front, to run for `seconds` where nothing else runs."""
        request.suspect()
        request.cost_ns = nanoseconds(seconds)
        self._again_ns += request.cost_ns
        self.suspect_count += 1
        heappush(self.suspects, (request.rank, request.order, request))

    def next_suspect(self) -> Request | None:
        """Return the first suspect, without taking it out; None if there is none."""
        suspects = self.suspects
        while suspects and suspects[0][2].state is not SUSPECT:
            heappop(suspects)
        return suspects[0][2] if suspects else None

    def take_suspect(self) -> Request:
        """Take out the first suspect, to run it; there must be one (`suspect_count`)."""
        request = self.next_suspect()
        assert request is not None
        heappop(self.suspects)
        request.start()
        self.suspect_count -= 1
        self._again_less((request,))
        return request


class Queues(dict[str, ModelQueue]):
    """The queue of each model by name, and those in which requests wait."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[ModelQueue, None] = {}
        """The queues in which requests wait, and those that ran empty since `forget_empty`; each request adds its own."""

    def forget_empty(self) -> None:
        """Forget the queues that have run empty, until a request waits there again."""
        for queue in [*self.waiting]:
            if not (queue.count or queue.rerun_count or queue.suspect_count):
                del self.waiting[queue]
