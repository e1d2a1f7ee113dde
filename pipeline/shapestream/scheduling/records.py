"""The scheduler's own records: what it remembers of a request and a batch while they live. Those of slots: slot.py.

Events and actions are frozen because they cross a border. These are mutable and slotted because nobody
but the scheduler ever sees them, and because each request pays for every attribute that is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shapestream.scheduling.lanes import Bucket
    from shapestream.scheduling.model_queue import ModelQueue
    from shapestream.scheduling.slot import Slot


class State(IntEnum):
    """Where a request is. The order matters: `LazyHeap` asks whether a request is still before some state."""

    QUEUED = 0
    """In a lane, free to be cut into any batch of it."""
    RERUN = 1
    """Waits at the front, in a group that is fixed, because its batch failed or was lost."""
    SUSPECT = 2
    """Waits at the front, to be run where nothing else runs, because a process died, or hung, that ran it."""
    RUNNING = 3
    DONE = 4
    """It had its one ending."""


# Looking a member up on an enum costs three times a global; these are compared on the hot path.
QUEUED: Final = State.QUEUED
RERUN: Final = State.RERUN
SUSPECT: Final = State.SUSPECT
RUNNING: Final = State.RUNNING
DONE: Final = State.DONE


class Request:
    """One admitted request, from admission to its ending."""

    __slots__ = (
        "arrived",
        "batch",
        "bucket",
        "client",
        "cost_s",
        "deadline",
        "failed_s",
        "id",
        "losses",
        "nbytes",
        "order",
        "priority",
        "promised",
        "queue",
        "rank",
        "rows",
        "shape",
        "share_s",
        "state",
        "tag",
        "turn",
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
        tag: float = 0.0,
        cost_s: float = 0.0,
        share_s: float = 0.0,
        promised: bool = False,
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
        """Its place: the smallest goes first, of equals the first by `order`. See fairness.py."""
        self.turn = rank
        """When it is its turn, on the scale of the ranks: its rank, unless an urgent request of its client took that."""
        self.order = order
        self.tag = tag
        """Its start tag: the rank without the priority."""
        self.cost_s = cost_s
        """Predicted seconds of one slot, in good company; 0.0 while nothing is measured."""
        self.share_s = share_s
        """The same of all slots of its model; nominal while nothing is measured."""
        self.promised = promised
        """Whether it was estimated to meet its deadline when it was admitted."""
        self.losses = 0
        self.failed_s = 0.0
        """Shares of the batches of several that failed with it: all that ran in vain, if it was to blame."""
        self.state = QUEUED
        self.batch = None

    @property
    def empty(self) -> bool:
        """Whether it has no elements, whatever it claims to be along the other dimensions."""
        return not self.rows or 0 in self.shape

    def __repr__(self) -> str:
        return f"<request {self.id}: {self.rows} x {self.shape}, {self.state.name.lower()}>"


class Hang(IntEnum):
    """How far things have come with a batch that runs much longer than its like; see hang_watch.py."""

    NOT = 0
    CANCELLED = 1
    """Its slot was asked to stop it."""
    KILLED = 2
    """It was asked to end the process."""
    GIVEN_UP = 3
    """Not even that helped: its members were answered, and its slot is lost."""


class Batch:
    """What runs on a slot at once, or waits there behind what runs."""

    __slots__ = (
        "accused",
        "alone",
        "cancelled",
        "commit_at",
        "ends_at",
        "guess_s",
        "hang",
        "hang_at",
        "id",
        "ids",
        "members",
        "predicted_s",
        "queue",
        "recalled",
        "sizes",
        "slot",
        "started",
        "wanted",
    )

    def __init__(
        self,
        id: int,  # noqa: A002 - the name that events and actions use
        slot: Slot,
        queue: ModelQueue,
        members: Sequence[Request],
        sizes: tuple[int, ...],
        predicted_s: float | None = None,
    ) -> None:
        self.id = id
        self.slot = slot
        self.queue = queue
        self.members = members
        self.ids = tuple([request.id for request in members])
        self.sizes = sizes
        self.wanted = len(members)
        """Members that somebody still waits for."""
        self.predicted_s = predicted_s
        """Seconds of this slot; None while nothing is measured."""
        self.guess_s = predicted_s or 0.0
        """The same without the bound for sizes beyond all that was measured; for the hang watch alone."""
        self.started: float | None = None
        """Since when it is the one that its slot runs; None while it waits behind another."""
        self.ends_at = 0.0
        """When it is predicted to end; when it started, where nothing is measured. Set at the start."""
        self.commit_at: float | None = None
        """When the next batch should be sent to its slot; None: not before it has ended. Set at the start."""
        self.recalled = False
        """Its slot was asked to give it back."""
        self.alone = False
        """It is one suspect, and nothing else runs in its worker: whatever happens there, it is to blame."""
        self.accused = False
        """And a process died, or hung, before that may have run it: if this one does, too, it is poisoned."""
        self.cancelled = False
        """Its slot was asked to stop it."""
        self.hang = Hang.NOT
        self.hang_at = inf
        """When it has run so long that the next step is taken against it; set at the start."""

    def __repr__(self) -> str:
        return f"<batch {self.id} on slot {self.slot.id}: {self.wanted} of {len(self.ids)} wanted>"

    def release_members(self) -> None:
        """The batch is over. Members point at their batch; this cycle must not be left to the collector."""
        self.members = ()
