"""The queue of one model: its requests, in buckets of equal shapes, lanes of compatible ones, and heaps over them.

The states of a request are an enum with a table: by the name of a change, which state follows which. A change that the
table does not list raises KeyError. Only functions of `Request` write its state.

A *lane* holds the requests that may share a batch: one model, equal sizes of every dimension that must not be padded.
A *bucket* holds those of a lane with exactly the same sizes, in the order of their ranks; only the number of rows may
differ. The planner cuts batches out of neighbouring buckets. A *line* holds the requests of one client: `Turns` tells which
line has the turn, and its first request gets a batch.

Requests without elements (some size is 0) have a lane of their own, `EMPTY`. They share no batch with any other, since
nothing backs the sizes that they claim along the other dimensions.

Admission fixes a request's *rank* (fairness.py), its place in its line and its bucket: the smallest goes first. A later
request may have a smaller rank. It is inserted at its place, so nothing is ever sorted again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, islice
from math import inf, prod
from operator import attrgetter
from typing import Final, NamedTuple

from shapestream.scheduling.answers import OVER, Awaited, Returns
from shapestream.scheduling.costs import ModelCosts
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.fairness import ClientShare, FairShares, Flow, GroupRoom, QueueRoom, Rework
from shapestream.scheduling.occupancy import Occupancy


class RequestState(IntEnum):
    """The place of a request. The order matters: `LazyHeap` asks whether a request is still before some state."""

    QUEUED = 0
    """In a bucket, free to be cut into any batch of its lane."""
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
        "arrived",
        "batch",
        "bonus_s",
        "bucket",
        "client",
        "cost_ns",
        "deadline",
        "id",
        "line",
        "losses",
        "nbytes",
        "order",
        "own_shape",
        "place",
        "queue",
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
        id: int,  # noqa: A002 - the name that events and actions use
        client: int,
        queue: ModelQueue,
        rows: int,
        shape: tuple[int, ...],
        nbytes: int,
        deadline: float | None,
        arrived: float,
        rank: float,
        order: int,
        line: ClientFlow,
        bonus_s: float = 0.0,
        cost_ns: int = 0,
        share_s: float = 0.0,
        own_shape: tuple[int, ...] | None = None,
    ) -> None:
        self.id = id
        self.client = client
        self.queue = queue
        self.rows = rows
        self.shape = shape
        """Sizes that it is padded to in any company: see size_steps.py."""
        self.own_shape = shape if own_shape is None else own_shape
        self.nbytes = nbytes
        self.deadline = deadline
        self.arrived = arrived
        self.rank = rank
        self.order = order
        self.place = (rank, order)
        """Its place in its line and in its bucket: the smallest rank goes first, of equals the first that came."""
        self.line = line
        self.bonus_s = bonus_s
        """What its priority is worth in its turn; see fairness.py."""
        self.cost_ns = cost_ns
        """Predicted nanoseconds of one slot, in good company: its part of a batch with as many of its like as pays
        (`Surface.company_s`). Of what runs again, its part of its group's call. 0 while nothing is measured."""
        self.share_s = share_s
        """The same of all slots of its model; nominal while nothing is measured."""
        self.losses = 0
        self.accused = False
        """Whether a process died, or a call hung, that may have run it."""
        self.reworks: tuple[Rework[ClientFlow], ...] = ()
        """What the failed calls that it was in make run again."""
        self.again_from: float | None = None
        """Its turn when it was first to run again, on the scale of virtual time; None before."""
        self.state: RequestState = QUEUED
        self.batch: int | None = None
        """The number of its batch, while it is in one."""

    @property
    def turn(self) -> tuple[float, int]:
        """When it is its client's turn with it, while it is the first of its line, and its order."""
        return self.line.client.start_s - self.bonus_s, self.order

    @property
    def empty(self) -> bool:
        """Whether it has no elements, whatever sizes it claims along the other dimensions."""
        return not self.rows or 0 in self.shape

    def start(self) -> None:
        """Leave the queue with a batch."""
        self.state = _START[self.state]

    def run_again(self) -> None:
        """Wait in a fixed group: in its turn, or in that of its client if it came along as company from behind that."""
        self.state = _RUN_AGAIN[self.state]
        if self.again_from is None:
            self.again_from = min(self.rank, self.line.client.start_s - self.bonus_s)

    def suspect(self) -> None:
        """Wait to be run where nothing else runs."""
        self.state = _SUSPECT[self.state]

    def end(self) -> None:
        """Have the one ending."""
        self.state = _END[self.state]

    def __repr__(self) -> str:
        return f"<request {self.id}: {self.rows} x {self.shape}, {self.state.name.lower()}>"


def nanoseconds(seconds: float) -> int:
    """The whole number that sums of seconds are kept in, so that what was added can be taken away again exactly."""
    return round(seconds * 1e9)


def by_rerun(request: Request) -> tuple[float, int]:
    """The key of the order of requests that run again: by their turn, later by what runs again because of them.

    So the parts of a batch that failed wait for what came meanwhile, and those that fail again for those that do not.
    """
    assert request.again_from is not None
    return request.again_from + sum([rework.share_s for rework in request.reworks]), request.order


# Below this many entries nothing is gained by throwing the dead ones out.
_SMALL = 64

SAMPLE = 64
"""Slots, and lines, that are looked at for an estimate, at most; of more, every so many stands for the others."""


class LazyHeap:
    """Requests by (key, order of admission), for as long as their state is `last_live` or before.

    QUEUED: while they wait in a lane; RUNNING: until they end.

    A request that leaves its state is not searched for: it is skipped when it reaches the top, or thrown
    out with all the others once the dead outnumber the living (`shrink`), so that every operation is
    logarithmic, amortised, and memory stays proportional to the living.
    """

    __slots__ = ("_entries", "_last_live")

    def __init__(self, last_live: RequestState) -> None:
        self._entries: list[tuple[float, int, Request]] = []
        self._last_live = last_live

    def __len__(self) -> int:
        """Entries held, the dead included."""
        return len(self._entries)

    def push(self, key: float, request: Request) -> None:
        """Adds a request; its state must be a live one."""
        heappush(self._entries, (key, request.order, request))

    def first(self) -> tuple[float, int, Request] | None:
        """The earliest living entry, left where it is."""
        entries = self._entries
        last_live = self._last_live
        while entries:
            entry = entries[0]
            if entry[2].state <= last_live:
                return entry
            heappop(entries)
        return None

    def postpone(self, key: float) -> None:
        """Gives the first living entry, which must exist, a larger key."""
        entry = self.first()
        assert entry is not None
        heapreplace(self._entries, (key, entry[1], entry[2]))

    def shrink(self, living: int) -> None:
        """Throws the dead out if they outnumber the `living`, or none lives."""
        if not living:
            self._entries.clear()
        elif len(self._entries) > 2 * living + _SMALL:
            last_live = self._last_live
            self._entries = [entry for entry in self._entries if entry[2].state <= last_live]
            heapify(self._entries)

    def living(self) -> list[Request]:
        """Every living request, in no order; for checks only."""
        return [entry[2] for entry in self._entries if entry[2].state <= self._last_live]


class Arrivals:
    """The waiting requests of one model in the order of their admission, so that the oldest is known.

    Requests that wait no longer are skipped in front, and thrown out once they outnumber the others.
    """

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        """Requests held, those that wait no longer included."""
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Add the newest request."""
        self._requests.append(request)

    def add_again(self, request: Request) -> None:
        """Put a request that waits again in its place, unless it is still there."""
        place = bisect_left(self._requests, request.order, key=_by_order)
        if place == len(self._requests) or self._requests[place] is not request:
            self._requests.insert(place, request)

    def oldest(self) -> Request | None:
        """The request that was admitted first of all that wait; None if none does."""
        gone = next((place for place, one in enumerate(self._requests) if one.state <= SUSPECT), len(self))
        del self._requests[:gone]
        return self._requests[0] if self._requests else None

    def shrink(self, waiting: int) -> None:
        """Throw out what waits no longer if it outnumbers what does, so many requests, or none waits."""
        if not waiting:
            self._requests.clear()
        elif len(self._requests) > 2 * waiting + _SMALL:
            self._requests = self.waiting()

    def waiting(self) -> list[Request]:
        """Every request that waits."""
        return [request for request in self._requests if request.state <= SUSPECT]


class ClientFlow(Flow):
    """The queued requests of one client for one model, by rank."""

    __slots__ = ("listed", "queue", "requests")

    def __init__(self, client: ClientShare[ClientFlow], queue: ModelQueue) -> None:
        super().__init__(client)
        self.queue = queue
        self.requests = LazyHeap(QUEUED)
        self.listed: tuple[float, int] | None = None
        """The turn under which `Turns` lists it; None where it is not listed."""

    def __repr__(self) -> str:
        return f"<line of {self.queue.profile.name}: {self.queued} requests>"

    def first(self) -> Request:
        """Its first request; there must be one (`queued`)."""
        first = self.requests.first()
        assert first is not None
        return first[2]


class Turns:
    """The lines of one model that hold requests, by turn: a heap.

    The charge for a batch makes the turns of its members' clients later. A line is listed under its new turn when it reaches
    the top, and at once where a turn becomes earlier (`put`).
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[float, int], ClientFlow]] = []

    def __len__(self) -> int:
        """Entries held, the dead included."""
        return len(self._entries)

    def put(self, line: ClientFlow, first: Request) -> None:
        """List a line, of which this is the first request, if it is not listed or its turn has become earlier."""
        turn = first.turn
        if line.listed is None or turn < line.listed:
            line.listed = turn
            heappush(self._entries, (turn, line))

    def first(self) -> Request | None:
        """The first request of the line that has the turn; None if no line holds any."""
        entries = self._entries
        while entries:
            turn, line = entries[0]
            if turn is not line.listed:
                heappop(entries)  # the line is listed under an earlier turn
            elif not line.queued:
                heappop(entries)
                line.listed = None
            else:
                first = line.requests.first()
                assert first is not None
                own = first[2].turn
                if own == turn:
                    return first[2]
                line.listed = own
                heapreplace(entries, (own, line))
        return None

    def shrink(self, living: int) -> None:
        """Throws the dead out if they outnumber the `living` requests, or none lives."""
        if not living or len(self._entries) > 2 * living + _SMALL:
            entries, self._entries = self._entries, []
            for _, line in entries:
                line.listed = None
            for line in dict.fromkeys([line for _, line in entries]) if living else ():
                if line.queued:
                    self.put(line, line.first())

    def share_until(self, rank: float) -> float:
        """Predicted seconds of all slots of the queued requests that go before a request of this rank.

        Looks at `SAMPLE` lines, evenly spaced, if there are more; each of them stands for as many as were left out.
        """
        every = -(-len(self._entries) // SAMPLE) or 1
        seen_s = 0.0
        for _, line in self._entries[::every]:
            if not line.queued:
                continue
            request = line.first()
            ahead_s = rank - request.turn[0]
            if ahead_s >= 0.0:  # what begins before that rank goes first as a whole
                seen_s += min(line.queued_s, ahead_s + request.share_s)
        return every * seen_s

    def lines(self) -> Collection[ClientFlow]:
        """The lines that hold requests, in no order; for checks only."""
        return [line for line in dict.fromkeys([line for _, line in self._entries]) if line.queued]


EMPTY = (-1,)
"""The key of the lane of requests without elements. No size is negative."""

CHUNK = 512
"""Requests per piece of a bucket, at most: an insertion anywhere moves no more than that."""

# A bucket is rebuilt when more of its entries than this, and than the living, are dead.
_FEW_DEAD = 32


_by_order = attrgetter("order")
_by_place = attrgetter("place")
"""A key that is no call in Python: with many clients nearly each arrival is inserted somewhere."""


def _by_turn(request: Request) -> tuple[float, int]:
    return request.turn


def _last_by_place(chunk: list[Request]) -> tuple[float, int]:
    return chunk[-1].place


class Bucket:
    """The waiting requests of one lane with the same sizes, whatever their rows, by rank."""

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
        """Puts a request in its place by rank; after its equals."""
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
        """The first requests by rank that have at most `max_rows` rows together. None is passed over.

        Nor are there more than `max_requests` (`max_rows` if None), though they had no rows at all.
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
        """The same, behind the anchor, which is one of this bucket."""
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
        """The first `count` requests by rank, or all there are."""
        if count <= 0 or not self._chunks:
            return []
        first = self._chunks[0][:count]
        if len(first) == count and all(request.state is QUEUED for request in first):
            return first
        living = (request for request in self.held() if request.state is QUEUED)
        return list(islice(living, count))

    def first(self) -> Request:
        """The first request by rank. The bucket must not be empty; dead entries never stay in front."""
        return self._chunks[0][0]

    def held(self) -> Iterable[Request]:
        """Everything that is held, by rank, the dead that are still among the living included."""
        chunks = self._chunks
        return chunks[0] if len(chunks) == 1 else chain.from_iterable(chunks)

    def drop_dead(self) -> None:
        """Forgets the entries that no longer wait: those in front at once, the rest when they are many."""
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
        """Puts a new bucket into its place."""
        insort(self.buckets, bucket, key=_bucket_key)

    def remove(self, bucket: Bucket) -> None:
        """Takes an empty bucket out."""
        del self.buckets[self.position(bucket)]

    def position(self, bucket: Bucket) -> int:
        """Where a bucket of this lane stands."""
        return bisect_left(self.buckets, bucket.key, key=_bucket_key)

    def window(self, bucket: Bucket, size: int) -> list[tuple[Bucket, int]]:
        """About `size` requests around the first of `bucket`: buckets, smallest first, with how many of each.

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


def _bucket_key(bucket: Bucket) -> tuple[int, tuple[int, ...]]:
    return bucket.key


MOST_COUNTED = 512
"""Buckets that are counted by size, at most, in about 1 ms; of more, every so many stands for the others."""


class QueuedSizes(NamedTuple):
    """The queue of one model, by sizes of its requests."""

    waiting: int
    """Requests in the queue, also those that run again."""
    dimensions: tuple[str, ...]
    """The dynamic dimensions that `cells` tell apart: none, one, or the two with the largest spread. Rows are none."""
    cells: Mapping[tuple[int, ...], int]
    """Requests by the `size_bin` of each of these dimensions."""


def size_bin(size: int) -> int:
    """The lower end of the bin of a size. Bins begin at 0, 1, 2, 3, 4, 6, 8, 12, …: two for each power of two."""
    if size < 4:
        return size
    power = 1 << (size.bit_length() - 1)
    return power + (power >> 1) if size & (power >> 1) else power


MAX_SEEN = 1024
"""Sizes of batches that are remembered to tell new ones. When another comes, the one that was met first goes."""


class ModelQueue:
    """Everything that waits for one model."""

    __slots__ = (
        "_again_ns",
        "_cost_ns",
        "alone",
        "arrivals",
        "awaited",
        "buckets",
        "costs",
        "count",
        "delay_s",
        "due",
        "full",
        "has_batch",
        "lanes",
        "measured_s",
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
        "waits",
    )

    def __init__(self, profile: ModelProfile, costs: ModelCosts, room: QueueRoom) -> None:
        """`room`: of all models."""
        self.profile = profile
        self.costs = costs
        """The costs of its batches."""
        self.has_batch = profile.has_batch
        # A request that runs alone has no company to wait for.
        self.delay_s = profile.max_delay_s if profile.has_batch else 0.0
        self.padded = profile.paddable[1:] if profile.has_batch else profile.paddable
        self.buckets: dict[tuple[int, ...], Bucket] = {}
        self.lanes: dict[tuple[int, ...], Lane] = {}
        self.turns = Turns()
        """The lines with what waits in lanes."""
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
        self.shares: FairShares[ClientFlow] = FairShares(self._first_start_s, GroupRoom(room))
        self.count = 0
        self.rows = 0
        # Whole numbers: seconds that differ by many orders would leave their rounding errors behind.
        self._cost_ns = 0
        self._again_ns = 0
        self.rerun_count = 0
        self.suspect_count = 0
        self.alone = False
        """True where each request runs alone, at its own sizes, because results differed in company."""
        self.unavailable: str | None = None
        """Why no slot will come for this model; None while one may."""
        self.seen: dict[tuple[int, ...], None] = {}
        """The sizes of recent batches."""
        self.predicted_s = 0.0
        """Predicted seconds of all batches that ran and had a prediction."""
        self.measured_s = 0.0
        """Seconds that these took."""
        self.arrivals = Arrivals()
        """Everything that waits, also what is to run again; what left is thrown out later."""
        self.waits = Occupancy()
        """The same, counted in seconds; the ledger tells what comes and goes."""

    def __repr__(self) -> str:
        return f"<{self.profile.name}: {self.waiting} waiting>"

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
        """Until when what is queued may wait for company; -inf where it does not."""
        if self.delay_s:
            due = self.due.first()
            return -inf if due is None else due[0]
        awaited = self.awaited
        return -inf if awaited is None or self.rows >= awaited.rows else awaited.until

    def await_no_longer(self) -> None:
        """End the wait for requests that follow answers."""
        if self.awaited is not None:
            self.awaited = OVER

    def anew(self, room: QueueRoom, now: float) -> ModelQueue:
        """An empty queue of the same model, with what is known of it."""
        queue = ModelQueue(self.profile, self.costs, room)
        queue.alone, queue.unavailable, queue.seen = self.alone, self.unavailable, self.seen
        queue.predicted_s, queue.measured_s = self.predicted_s, self.measured_s
        queue.waits = Occupancy(self.waits.seconds(now))
        return queue

    def _first_start_s(self) -> float | None:
        """The account of the first client in the lines of the models that share slots; None if there is none."""
        firsts = [first for queue in self.sharing if (first := queue.turns.first())]
        return min(firsts, key=_by_turn).line.client.start_s if firsts else None

    def line_of(self, number: int) -> ClientFlow:
        """The line of a client, a new one if need be."""
        client = self.shares.client(number)
        name = self.profile.name
        line = client.lines.get(name)
        if line is None:
            line = client.lines[name] = ClientFlow(client, self)
        return line

    def share_slots(self, other: ModelQueue) -> None:
        """Divide slots with another model from now on: a slot joined that serves both."""
        if self.shares is other.shares:
            return
        self.shares.absorb(other.shares)
        self.sharing.extend(other.sharing)
        for queue in other.sharing:
            queue.shares, queue.sharing = self.shares, self.sharing

    def add(self, request: Request) -> None:
        """Puts a new request, which its line has stamped, into its bucket and its line."""
        name = (*EMPTY, *request.shape) if request.empty else request.shape
        bucket = self.buckets.get(name)
        if bucket is None:
            bucket = self.buckets[name] = self._open_bucket(request)
        request.bucket = bucket
        bucket.add(request)
        self.arrivals.add(request)
        line = request.line
        line.queued_bytes += request.nbytes
        line.requests.push(request.rank, request)
        if line.queued == 1:
            self.turns.put(line, request)
        elif line.has_priorities:
            self.turns.put(line, line.first())
        self.count += 1
        self.rows += request.rows
        self.returns.arrived(request.rows, request.arrived)
        self._cost_ns += request.cost_ns
        if self.delay_s and bucket.rows >= self.profile.max_batch:
            self.full[bucket.name] = bucket

    def _open_bucket(self, request: Request) -> Bucket:
        shape = request.shape
        sizes_and_padded = list(zip(shape, self.padded, strict=True))
        key = EMPTY if request.empty else tuple([size for size, padded in sizes_and_padded if not padded])
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(key)
        elements = prod([size for size, padded in sizes_and_padded if padded])
        bucket = Bucket(lane, shape, elements)
        lane.add(bucket)
        return bucket

    def take(self, anchor: Request, requests: Sequence[Request], share_s: float | None = None) -> None:
        """Take requests out of their buckets, to run in the turn of one of them, and charge their clients.

        `share_s`: predicted seconds of all slots of their call. Each pays its part: what it would cost in good company, by
        what all of them would. None: just that, because the call has no prediction.
        """
        for request in requests:
            request.start()
        company_s = self._remove(requests)
        total_s = sum(company_s.values())
        if share_s is None:
            share_s = total_s
        self.shares.begin(anchor.line, anchor.bonus_s, share_s)
        part = share_s / total_s if total_s else 0.0
        self.shares.charge(company_s, part)

    def drop(self, request: Request) -> None:
        """End a request that waits, wherever it does."""
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

    def leave(self, count: int, now: float) -> None:
        """Count the waits of so many requests that were taken out, to run, or have ended."""
        self.waits.leave(count, now)
        self.arrivals.shrink(self.waits.present)

    def _remove(self, requests: Sequence[Request]) -> dict[ClientFlow, float]:
        """Take requests out of buckets and lines. By line, their predicted seconds of all slots in good company."""
        left: dict[ClientFlow, float] = {}
        touched: dict[Bucket, None] = {}
        rows = cost_ns = 0
        for request in requests:
            rows += request.rows
            cost_ns += request.cost_ns
            line = request.line
            line.queued -= 1
            line.queued_bytes -= request.nbytes
            left[line] = left.get(line, 0.0) + request.share_s
            bucket = request.bucket
            bucket.count -= 1
            bucket.rows -= request.rows
            touched[bucket] = None
        self.count -= len(requests)
        self.rows -= rows
        self._cost_ns -= cost_ns
        for line, share_s in left.items():
            line.requests.shrink(line.queued)
            if not line.queued:
                line.run_empty()
                continue
            line.queued_s -= share_s
            if line.has_priorities:
                self.turns.put(line, line.first())
        for bucket in touched:
            bucket.drop_dead()  # also of an empty bucket: its last requests and it would keep each other in memory
            if bucket.count:
                if self.full and bucket.rows < self.profile.max_batch:
                    self.full.pop(bucket.name, None)
            else:
                self._close_bucket(bucket)
        self.turns.shrink(self.count)
        if self.delay_s:
            self.due.shrink(self.count)
        return left

    def _close_bucket(self, bucket: Bucket) -> None:
        del self.buckets[bucket.name]
        self.full.pop(bucket.name, None)
        lane = bucket.lane
        lane.remove(bucket)
        if not lane.buckets:
            del self.lanes[lane.key]

    def meet(self, sizes: tuple[int, ...]) -> bool:
        """Remember a batch's sizes. Whether they are new, as far as remembered."""
        seen = self.seen
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
        """Let a group wait for its first `by_rerun`, to run again as it is, in a call of so many predicted seconds."""
        for request in group:
            request.run_again()
            request.cost_ns = nanoseconds(seconds / len(group))
            self._again_ns += request.cost_ns
        self.rerun_count += len(group)
        heappush(self.reruns, (*min(map(by_rerun, group)), group))

    def next_rerun(self) -> list[Request]:
        """The requests left of the first group, which stays where it is. There must be one (`rerun_count`)."""
        reruns = self.reruns
        while not (living := [request for request in reruns[0][2] if request.state is RERUN]):
            heappop(reruns)
        return living

    def take_rerun(self) -> list[Request]:
        """Take the first group out, to run; only its first where all run alone, or a call would not hold them any more.

        The group must not stay: its members may come back in other groups.
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
        """Tell whether a call holds these within its bytes: their sizes may be rounded up further than before."""
        call = self.costs.call_bytes
        if call.most is None or self.costs.rounding is None:
            return True
        shape = tuple(map(max, zip(*[request.shape for request in members], strict=True)))
        return call.of_batch(sum([request.rows for request in members]), shape) <= call.most

    def _again_less(self, requests: Sequence[Request]) -> None:
        """Count the seconds of these no longer."""
        self._again_ns -= sum([request.cost_ns for request in requests])
        if not self.rerun_count:
            self.reruns.clear()
        if not self.suspect_count:
            self.suspects.clear()

    def put_suspect(self, request: Request, seconds: float) -> None:
        """Let a request wait at the front, to run for so many predicted seconds where nothing else runs."""
        request.suspect()
        request.cost_ns = nanoseconds(seconds)
        self._again_ns += request.cost_ns
        self.suspect_count += 1
        heappush(self.suspects, (request.rank, request.order, request))

    def next_suspect(self) -> Request | None:
        """The first suspect, left where it is; None if there is none."""
        suspects = self.suspects
        while suspects and suspects[0][2].state is not SUSPECT:
            heappop(suspects)
        return suspects[0][2] if suspects else None

    def take_suspect(self) -> Request:
        """Take the first suspect out, to run; there must be one (`suspect_count`)."""
        request = self.next_suspect()
        assert request is not None
        heappop(self.suspects)
        request.start()
        self.suspect_count -= 1
        self._again_less((request,))
        return request


class Queues(dict[str, ModelQueue]):
    """The queue of each model by name, and those in which requests wait."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[str, ModelQueue] = {}

    def wait(self, queue: ModelQueue) -> None:
        """Note that a request waits in this queue."""
        self._waiting[queue.profile.name] = queue

    def waiting(self) -> Collection[ModelQueue]:
        """The queues in which requests wait; and those that have run empty since `forget_empty`."""
        return self._waiting.values()

    def forget_empty(self) -> None:
        """Look no more at queues that have run empty, until a request waits there again."""
        for name in [name for name, queue in self._waiting.items() if not queue.waiting]:
            del self._waiting[name]
