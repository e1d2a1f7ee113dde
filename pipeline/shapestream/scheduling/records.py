"""The scheduler's own records: what it remembers of a request, a batch and a slot while they live.

Events and actions are frozen because they cross a border. These are mutable and slotted because nobody
but the scheduler ever sees them, and because each request pays for every attribute that is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shapestream.scheduling.lanes import Bucket
    from shapestream.scheduling.model_queue import ModelQueue


class State(IntEnum):
    """Where a request is. The order matters: `LazyHeap` asks whether a request is still before some state."""

    QUEUED = 0
    """In a lane, free to be cut into any batch of it."""
    RERUN = 1
    """Waits at the front, in a group that is fixed, because its batch failed or was lost."""
    RUNNING = 2
    DONE = 3
    """It had its one ending."""


# Looking a member up on an enum costs three times a global; these are compared on the hot path.
QUEUED: Final = State.QUEUED
RERUN: Final = State.RERUN
RUNNING: Final = State.RUNNING
DONE: Final = State.DONE


class Request:
    """One admitted request, from admission to its ending."""

    __slots__ = (
        "arrived",
        "batch",
        "bucket",
        "client",
        "deadline",
        "id",
        "losses",
        "nbytes",
        "order",
        "priority",
        "queue",
        "rank",
        "rows",
        "shape",
        "state",
    )

    batch: Batch | None
    bucket: Bucket

    def __init__(
        self,
        id: int,  # noqa: A002 - the name that events and actions use
        client: int,
        queue: ModelQueue,
        rows: int,
        shape: tuple[int, ...],
        nbytes: int,
        deadline: float | None,
        priority: int,
        arrived: float,
        rank: float,
        order: int,
    ) -> None:
        self.id = id
        self.client = client
        self.queue = queue
        self.rows = rows
        self.shape = shape
        self.nbytes = nbytes
        self.deadline = deadline
        self.priority = priority
        self.arrived = arrived
        self.rank = rank
        self.order = order
        self.losses = 0
        self.state = QUEUED
        self.batch = None

    def __repr__(self) -> str:
        return f"<request {self.id}: {self.rows} x {self.shape}, {self.state.name.lower()}>"


class Batch:
    """One call that runs on a slot."""

    __slots__ = ("id", "ids", "members", "queue", "sizes", "slot", "wanted")

    def __init__(
        self,
        id: int,  # noqa: A002 - the name that events and actions use
        slot: Slot,
        queue: ModelQueue,
        members: Sequence[Request],
        sizes: tuple[int, ...],
    ) -> None:
        self.id = id
        self.slot = slot
        self.queue = queue
        self.members = members
        self.ids = tuple([request.id for request in members])
        self.sizes = sizes
        self.wanted = len(members)
        """Members that somebody still waits for."""

    def __repr__(self) -> str:
        return f"<batch {self.id} on slot {self.slot.id}: {self.wanted} of {len(self.ids)} wanted>"

    def release_members(self) -> None:
        """The batch is over. Members point at their batch; this cycle must not be left to the collector."""
        self.members = ()


class Slot:
    """A place where one batch at a time runs."""

    __slots__ = ("aside_until", "batch", "closing", "id", "models", "queues", "refusals")

    def __init__(self, id: int, models: frozenset[str]) -> None:  # noqa: A002 - the name that events use
        self.id = id
        self.models = models
        self.queues: list[ModelQueue] = []
        """The queues of those of its models that have been added so far."""
        self.batch: Batch | None = None
        self.closing = False
        """It leaves when its batch is over; `queues` is empty by then."""
        self.aside_until: float | None = None
        """It gets nothing until then, since it could not run what it got."""
        self.refusals = 0
        """Batches in a row that it answered with `unavailable`."""

    def __repr__(self) -> str:
        idle = "closing" if self.closing else "free" if self.aside_until is None else "aside"
        return f"<slot {self.id}: {self.batch or idle}>"

    @property
    def free(self) -> bool:
        """Whether it may be given a batch."""
        return self.batch is None and not self.closing and self.aside_until is None
