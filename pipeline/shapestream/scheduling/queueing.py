"""Requests, their states, and the orders in which they wait.

A request is admitted once and ends once. In between it waits in a bucket and in the flow of its client, in a group that runs
again or as a suspect (model_queue.py), or it is in a batch (batches.py).

**By size.** A *lane* holds the requests that may share a batch: one model, equal sizes of every dimension that must not be
padded. A *bucket* holds the requests of a lane whose sizes are all equal, ordered by rank; only their rows may differ. The
planner cuts batches out of neighbouring buckets. Requests without elements (some size is 0) have a lane of their own,
`EMPTY`. They share no batch with any other, since nothing backs the sizes that they claim along the other dimensions. A
suspect that a client names has a lane for itself (`LONE`).

**By turn.** A *flow* holds the queued requests of one client for one model, by rank. The flow with the earliest turn goes
next, with its first request (`Turns`). fairness.py says how a turn is computed, and which promises follow.

The states are an enum with a table: by the name of a change, which state follows which. A change that the table does not
list raises KeyError. Only functions of `Request` write its state.

Admission fixes a request's place in its flow, and its *rank* (fairness.py), by which its bucket is ordered: the smallest
goes first. A later request may have a smaller one. It is inserted there, so nothing is ever sorted again.

The containers here forget a request that changed its state without searching for it. They skip it when it comes to the
front, and drop all such requests once these outnumber the others. So each operation takes logarithmic time, amortised.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from enum import IntEnum
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from operator import attrgetter
from typing import Final

from shapestream.scheduling.events import Arrival
from shapestream.scheduling.fairness import ClientShare, Flow, Rework


class RequestState(IntEnum):
    """The place of a request. The order matters: `LazyHeap` asks whether a request is still before some state."""

    QUEUED = 0
    """In a bucket. Any batch of its lane may take it."""
    RERUN = 1
    """In a fixed group, because its batch failed or was lost."""
    SUSPECT = 2
    """At the front, to be run where nothing else runs: a process died, or hung, that ran it, or it was lost too often."""
    RUNNING = 3
    """In a batch that runs, or is queued behind another."""
    DONE = 4
    """It had its one ending."""

    __hash__ = int.__hash__  # an enum's own is a call in Python, and these are looked up on the hot path


# Looking a member up on an enum costs three times a global; these are compared on the hot path.
QUEUED: Final = RequestState.QUEUED
RERUN: Final = RequestState.RERUN
SUSPECT: Final = RequestState.SUSPECT
RUNNING: Final = RequestState.RUNNING
DONE: Final = RequestState.DONE

REQUEST_TABLE: Final[dict[str, dict[RequestState, RequestState]]] = {
    "start": {QUEUED: RUNNING, RERUN: RUNNING, SUSPECT: RUNNING},
    "run again": {RUNNING: RERUN},
    "suspect": {RUNNING: SUSPECT},
    "end": {QUEUED: DONE, RERUN: DONE, SUSPECT: DONE, RUNNING: DONE},
}
_START, _RUN_AGAIN, _SUSPECT, _END = [
    REQUEST_TABLE[name] for name in ("start", "run again", "suspect", "end")
]


class Request:
    """One admitted request, from admission to its ending."""

    __slots__ = (
        "accused",
        "again_from",
        "ahead",
        "arrival",
        "arrived",
        "bonus_s",
        "bucket",
        "cost_ns",
        "empty",
        "flow",
        "lead_s",
        "losses",
        "model",
        "order",
        "own_shape",
        "rank",
        "reworks",
        "rows",
        "shape",
        "share_s",
        "state",
    )

    bucket: Bucket
    ahead: int
    """Requests of its model that were queued when it arrived."""

    def __init__(
        self,
        arrival: Arrival,
        flow: ClientFlow,
        rank: float,
        order: int,
        now: float,
        has_batch: bool,
        shape: tuple[int, ...] | None = None,
        bonus_s: float = 0.0,
        lead_s: float = 0.0,
        cost_ns: int = 0,
        share_s: float = 0.0,
    ) -> None:
        """`has_batch`: whether its first size is its rows. `shape`: the sizes that it is padded to in any batch
        (size_steps.py); None: its own."""
        self.arrival = arrival
        """The request as the caller submitted it: of whatever class that is."""
        self.model = arrival.model
        sizes = arrival.sizes
        self.rows, self.own_shape = (sizes[0], sizes[1:]) if has_batch else (1, sizes)
        self.shape = self.own_shape if shape is None else shape
        self.empty = 0 in sizes
        """Whether it has no elements, whatever sizes it claims along the other dimensions."""
        self.arrived = now
        self.rank = rank
        """Its place in its bucket: the smallest goes first, of equals the first that came."""
        self.order = order
        self.flow = flow
        self.bonus_s = bonus_s
        """Seconds of virtual time by which its priority makes its turn earlier among its client's models (fairness.py)."""
        self.lead_s = lead_s
        """Seconds of virtual time by which its priority makes its turn earlier among clients."""
        self.cost_ns = cost_ns
        """Predicted slot nanoseconds per request in an efficient batch, or in the call of its group if it runs again.

        0 while nothing is measured."""
        self.share_s = share_s
        """Predicted seconds of all slots of its model; nominal while nothing is measured."""
        self.losses = 0
        self.accused = False
        """Whether a process died, or a call hung, that may have run it."""
        self.reworks: tuple[Rework[ClientFlow], ...] = ()
        """The reworks of the failed calls that it was in."""
        self.again_from: float | None = None
        """Its turn when it was first to run again, on the scale of virtual time; None before."""
        self.state: RequestState = QUEUED

    @property
    def id(self) -> int:
        """The caller's number of it."""
        return self.arrival.id

    @property
    def client(self) -> int:
        """The number of the client whose share of the slots it takes."""
        return self.arrival.client

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.arrival.nbytes

    @property
    def deadline(self) -> float | None:
        """When its result is of no use any more."""
        return self.arrival.deadline

    @property
    def turn(self) -> tuple[float, int]:
        """Its turn on the scale of virtual time while it is the first of its flow, and its order."""
        return self.flow.client.start_s - self.lead_s, self.order

    def start(self) -> None:
        """Leave the queue with a batch."""
        self.state = _START[self.state]

    def run_again(self) -> None:
        """Wait in a fixed group, until its own turn or its client's, whichever is earlier."""
        self.state = _RUN_AGAIN[self.state]
        if self.again_from is None:
            self.again_from = min(self.rank, self.flow.client.start_s - self.lead_s)

    def suspect(self) -> None:
        """Wait to be run where nothing else runs."""
        self.state = _SUSPECT[self.state]

    def end(self) -> None:
        """End, whatever the ending is."""
        self.state = _END[self.state]

    def __repr__(self) -> str:
        return f"<request {self.id}: {self.rows} x {self.shape}, {self.state.name.lower()}>"


def nanoseconds(seconds: float) -> int:
    """Return whole nanoseconds: sums of them are exact, so that a part that was added can be subtracted again."""
    return round(seconds * 1e9)


def by_rerun(request: Request) -> tuple[float, int]:
    """Return the key that orders requests that run again: their turn, plus the rework that they are part of.

    So the parts of a failed batch wait for requests that came meanwhile, and parts that fail again wait for other parts.
    """
    assert request.again_from is not None
    return request.again_from + sum([rework.share_s for rework in request.reworks]), request.order


FEW = 64
"""Entries below which a container does not drop its dead ones: nothing would be gained."""
SAMPLE = 64
"""Largest number of slots or flows that an estimate looks at. Longer lists are sampled at even distances."""


class LazyHeap:
    """A heap of requests by (key, order of admission) whose state is `last_live` or before.

    QUEUED: while they wait in a lane; RUNNING: until they end.

    A request in a later state is dead. It is skipped at the top, or dropped once the dead outnumber the living (`shrink`).
    """

    __slots__ = ("_last_live", "entries")

    def __init__(self, last_live: RequestState) -> None:
        self.entries: list[tuple[float, int, Request]] = []
        """A heap; the dead are included."""
        self._last_live = last_live

    def __len__(self) -> int:
        """Count the entries, the dead included."""
        return len(self.entries)

    def push(self, key: float, request: Request) -> None:
        """Add a request, whose state must be a live one."""
        heappush(self.entries, (key, request.order, request))

    def first(self) -> tuple[float, int, Request] | None:
        """Return the earliest living entry, which stays where it is; None if none lives."""
        entries = self.entries
        last_live = self._last_live
        while entries:
            entry = entries[0]
            if entry[2].state <= last_live:
                return entry
            heappop(entries)
        return None

    def postpone(self, key: float) -> None:
        """Give the first living entry, which must exist, a larger key."""
        entry = self.first()
        assert entry is not None
        heapreplace(self.entries, (key, entry[1], entry[2]))

    def shrink(self, living: int) -> None:
        """Drop the dead if they outnumber the `living`, or none lives."""
        if not living:
            self.entries.clear()
        elif len(self.entries) > 2 * living + FEW:
            last_live = self._last_live
            self.entries = [entry for entry in self.entries if entry[2].state <= last_live]
            heapify(self.entries)

    def living(self) -> list[Request]:
        """Return every living request, in no order; for checks only."""
        return [entry[2] for entry in self.entries if entry[2].state <= self._last_live]


EMPTY = (-1,)
"""The key of the lane of requests without elements. No size is negative."""
MOST_GROUPS = 64
"""Groups of one model, by common inputs, that have lanes at a time. Clients choose these values, and each lane takes time of
the planner's; requests of further groups run alone."""
CROWDED = (-2,)
"""The end of the key of the lane of requests that run alone because there are as many groups. No digest is negative."""

LONE = -3
"""The first number of the key of a suspect's own lane; its order follows."""

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
        for request in first:
            if request.state is not QUEUED:
                break
        else:
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


class ClientFlow(Flow):
    """The queued requests of one client for one model, by rank."""

    __slots__ = ("listed", "requests")

    def __init__(self, client: ClientShare[ClientFlow], name: str) -> None:
        super().__init__(client, name)
        self.requests = LazyHeap(QUEUED)
        self.listed: tuple[float, int] | None = None
        """The turn under which `Turns` lists it; None while it is not listed."""

    def __repr__(self) -> str:
        return f"<flow: {self.queued} requests>"

    def first(self) -> Request:
        """Return its first request; there must be one (`queued`)."""
        first = self.requests.first()
        assert first is not None
        return first[2]


class Turns:
    """The flows of one model that hold requests, by turn: a heap.

    The charge for a batch makes the turns of its members' clients later. A flow is listed under its new turn when it reaches
    the top, and at once where a turn becomes earlier (`put`).
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[float, int], ClientFlow]] = []

    def __len__(self) -> int:
        """Count the entries, the dead included."""
        return len(self._entries)

    def put(self, flow: ClientFlow, first: Request) -> None:
        """List a flow, of which this is the first request, if it is not listed or its turn has become earlier."""
        turn = flow.client.start_s - first.lead_s, first.order  # `Request.turn`
        if flow.listed is None or turn < flow.listed:
            flow.listed = turn
            heappush(self._entries, (turn, flow))

    def first(self) -> Request | None:
        """Return the first request of the flow that has the turn; None if no flow holds any."""
        entries = self._entries
        while entries:
            turn, flow = entries[0]
            if turn != flow.listed:
                heappop(entries)  # the flow is listed under an earlier turn
            elif not flow.queued:
                heappop(entries)
                flow.listed = None
            else:
                entry = flow.requests.first()
                assert entry is not None
                first = entry[2]
                own = flow.client.start_s - first.lead_s, first.order  # `Request.turn`
                if own == turn:
                    return first
                flow.listed = own
                heapreplace(entries, (own, flow))
        return None

    def shrink(self, living: int) -> None:
        """Drop the dead entries if they outnumber the `living` requests, or none lives."""
        entries = self._entries
        if living and len(entries) <= 2 * living + FEW:
            return
        for _, flow in entries:
            flow.listed = None
        if not living:
            entries.clear()
            return
        self._entries = []
        for flow in dict.fromkeys([flow for _, flow in entries]):
            if flow.queued:
                self.put(flow, flow.first())

    def share_until(self, rank: float) -> float:
        """Return the predicted seconds of all slots of the queued requests that go before a request of this rank.

        Looks at `SAMPLE` flows, evenly spaced, if there are more; each of them stands for as many as were left out.
        """
        every = -(-len(self._entries) // SAMPLE) or 1
        seen_s = 0.0
        for _, flow in self._entries[::every]:
            if not flow.queued:
                continue
            request = flow.first()
            ahead_s = rank - request.turn[0]
            if ahead_s >= 0.0:  # what begins before that rank goes first as a whole
                seen_s += min(flow.queued_s, ahead_s + request.share_s)
        return every * seen_s

    def flows(self) -> Collection[ClientFlow]:
        """Return the flows that hold requests, in no order; for checks only."""
        return [flow for flow in dict.fromkeys([flow for _, flow in self._entries]) if flow.queued]


class Occupancy:
    """Seconds that everything has spent in one place: requests in a queue, slots in work.

    Let T be the sum of the times at which things left, less the sum of those at which they entered. If n things are there,
    all things together have spent T + n * now seconds. So nothing is looked at one by one, and a thing that is still there
    counts from its entry on. The rate of these seconds is the mean number of things in the place (Little's law). All times
    are by the same clock, and kept in whole nanoseconds: the sums are large, and what is left of them is small.
    """

    __slots__ = ("_ns", "present")

    def __init__(self) -> None:
        self.present = 0
        """Things that are there."""
        self._ns = 0

    def enter(self, count: int, now: float) -> None:
        """Note that `count` things have entered."""
        self.present += count
        self._ns -= count * round(now * 1e9)

    def leave(self, count: int, now: float) -> None:
        """Note that `count` things have left."""
        self.present -= count
        self._ns += count * round(now * 1e9)

    def seconds(self, now: float) -> float:
        """Return the seconds spent there until now, also by things that are still there. They never become less."""
        still_ns = self.present * round(now * 1e9) if self.present else 0
        return (self._ns + still_ns) / 1e9
