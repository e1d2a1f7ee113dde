"""Requests, their states, and the orders in which they are kept.

A request is admitted once and ends once. In between it waits in a bucket (buckets.py) and in the flow of its client
(turns.py), in a group that runs again or as a suspect (model_queue.py), or it is in a batch (batches.py).

The states are an enum with a table: by the name of a change, which state follows which. A change that the table does not
list raises KeyError. Only functions of `Request` write its state.

Admission fixes a request's *rank* (fairness.py), its place in its flow and its bucket: the smallest goes first. A later
request may have a smaller rank. It is inserted at its place, so nothing is ever sorted again.

The containers here forget a request that changed its state without searching for it. They skip it when it comes to the
front, and drop all such requests once these outnumber the others. So each operation takes logarithmic time, amortised.
"""

from __future__ import annotations

from enum import IntEnum
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Final

from shapestream.scheduling.events import Arrival
from shapestream.scheduling.fairness import Rework

if TYPE_CHECKING:  # a request knows where it waits
    from shapestream.scheduling.batches import Batch
    from shapestream.scheduling.buckets import Bucket
    from shapestream.scheduling.model_queue import ModelQueue
    from shapestream.scheduling.turns import ClientFlow


class RequestState(IntEnum):
    """The place of a request. The order matters: `LazyHeap` asks whether a request is still before some state."""

    QUEUED = 0
    """In a bucket. Any batch of its lane (buckets.py) may take it."""
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
        "batch",
        "bonus_s",
        "bucket",
        "cost_ns",
        "empty",
        "flow",
        "losses",
        "order",
        "own_shape",
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
        arrival: Arrival,
        queue: ModelQueue,
        flow: ClientFlow,
        rank: float,
        order: int,
        now: float,
        shape: tuple[int, ...] | None = None,
        bonus_s: float = 0.0,
        cost_ns: int = 0,
        share_s: float = 0.0,
    ) -> None:
        """`shape`: the sizes that it is padded to in any batch (size_steps.py); None: its own."""
        self.arrival = arrival
        """The request as the caller submitted it: of whatever class that is."""
        self.queue = queue
        sizes = arrival.sizes
        if queue.has_batch:
            self.rows = sizes[0]
            self.own_shape = sizes[1:]
        else:
            self.rows, self.own_shape = 1, sizes
        self.shape = self.own_shape if shape is None else shape
        self.empty = 0 in sizes
        """Whether it has no elements, whatever sizes it claims along the other dimensions."""
        self.arrived = now
        self.rank = rank
        """Its place in its flow and in its bucket: the smallest goes first, of equals the first that came."""
        self.order = order
        self.flow = flow
        self.bonus_s = bonus_s
        """Seconds of virtual time by which its priority makes its turn earlier; see fairness.py."""
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
        self.batch: Batch | None = None
        """Its batch, while it is in one."""

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
        return self.flow.client.start_s - self.bonus_s, self.order

    def start(self) -> None:
        """Leave the queue with a batch."""
        self.state = _START[self.state]

    def run_again(self) -> None:
        """Wait in a fixed group, until its own turn or its client's, whichever is earlier."""
        self.state = _RUN_AGAIN[self.state]
        if self.again_from is None:
            self.again_from = min(self.rank, self.flow.client.start_s - self.bonus_s)

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
