"""The one record of a batch: it is cut, sent, started, reported and over, and each writes its part here.

The planner cuts a batch; the scheduler makes this record of it and places it on a slot. The action `StartBatch` hands the
record to the caller, which adds what it sent (`sent`) and what came back (`ran`). Until it is over, the table of slots
(slots.py) and the server's record of its slot keep it by number. Observers of its end read it, and may keep a `Run` of it.

The scheduler decides by the first half of the fields alone. What the caller submitted (`arrivals`), what it sent
(`inputs`) and the results (`report`) are opaque to it: it never looks into tensors.

`state` follows BATCH_TABLE: by the name of a change, which state follows which. A change that the table does not list
raises KeyError. A batch that is over is in no state of its own: it keeps the last one, for what asks how it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias

from shapestream.scheduling.events import CutReason
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.queueing import Request
from shapestream_engine.batch import BatchInputs, BatchReport
from shapestream_engine.layout import Tensors

Submitted: TypeAlias = Any
"""An `Arrival`, of whatever class the caller submitted: it is handed back as it came."""


class BatchState(Enum):
    """The progress of a batch. Once it is over it is forgotten, so it keeps its last state for what asks how it ended."""

    CUT = "cut"
    """Decided, not placed yet."""
    BEHIND = "behind"
    """Queued on its slot behind the batch that runs there, or behind others that are queued there."""
    RECALLED = "recalled"
    """The same, and its slot was asked to give it back."""
    RUNNING = "running"
    RETURNING = "returning"
    """It is the one that its slot runs, and the slot was asked to give it back: it may have begun or not."""
    CANCELLED = "cancelled"
    """Its slot was asked to stop it, because no member is wanted any more."""
    HANGING = "hanging"
    """Its slot was asked to stop it, because it has run far longer than others of its model."""
    CONDEMNED = "condemned"
    """It hangs on, and its process is to be ended."""
    STUCK = "stuck"
    """It is still there after that: its members were answered, and its slot is lost."""

    __hash__ = object.__hash__  # an enum's own is a call in Python, and the tables are asked on the hot path


BATCH_TABLE: Final[dict[str, dict[BatchState, BatchState]]] = {
    "begin": {
        BatchState.CUT: BatchState.RUNNING,
        BatchState.BEHIND: BatchState.RUNNING,
        BatchState.RECALLED: BatchState.RETURNING,
    },
    "queue": {BatchState.CUT: BatchState.BEHIND},
    "recall": {BatchState.BEHIND: BatchState.RECALLED, BatchState.RUNNING: BatchState.RETURNING},
    "cancel": {BatchState.RUNNING: BatchState.CANCELLED, BatchState.RETURNING: BatchState.CANCELLED},
    "escalate": {
        BatchState.RUNNING: BatchState.HANGING,
        BatchState.RETURNING: BatchState.HANGING,
        BatchState.CANCELLED: BatchState.HANGING,
        BatchState.HANGING: BatchState.CONDEMNED,
        BatchState.CONDEMNED: BatchState.STUCK,
    },
}
_CUT: Final = BatchState.CUT  # a look-up on an enum costs three times a global
_BEGIN: Final = BATCH_TABLE["begin"]
_QUEUED_BEHIND: Final = (BatchState.BEHIND, BatchState.RECALLED)
_HUNG: Final = (BatchState.HANGING, BatchState.CONDEMNED, BatchState.STUCK)


class Suspicion(Enum):
    """The requests that a batch puts at risk, and what its loss would prove."""

    NONE = "none"
    """An ordinary batch, beside others in its worker."""
    LAST = "last"
    """One request that was lost too often, alone in its worker: any loss there is its own."""
    ACCUSED = "accused"
    """The same of a request that a worker died, or hung, of before: if this one does, too, it is poisoned."""


class CutFacts(NamedTuple):
    """The facts that a batch was cut by, for stories. Nothing is decided by them later."""

    padding: int = 0
    """Elements of the call that are padding, filled-up rows included."""
    predicted_s: float | None = None
    """Seconds on its slot; None while nothing is measured."""
    new_shape: bool = False
    """True where no remembered batch of its model had these sizes."""
    first: int | None = None
    """The request whose turn it was."""
    left: int = 0
    """Requests of its model that stay queued."""
    max_batch: int = 0
    """The most rows of a batch of its model."""
    reason: CutReason = CutReason.COST
    ahead: tuple[int, ...] = ()
    """Parallel to the requests: how many of their model were queued when each arrived."""
    company_s: float = 0.0
    """Seconds that its slot was free, while the request whose turn it was waited for company."""


NO_FACTS: Final = CutFacts()
_NOBODY: Final = frozenset[int]()


class Batch:
    """Requests that run together on a slot, or are queued there behind another batch.

    The scheduler fills in the first half, the caller the second: `sent`, then `ran`, or neither where it is lost.
    """

    __slots__ = (
        "arrivals",
        "began",
        "behind",
        "cancelled",
        "ends_at",
        "facts",
        "hang_at",
        "id",
        "inputs",
        "left_out",
        "members",
        "model",
        "predicted_s",
        "prefetch_at",
        "queue",
        "recalled",
        "report",
        "run_us",
        "sent_at",
        "sizes",
        "slot",
        "started",
        "state",
        "suspicion",
        "wanted",
    )

    started: float
    """Since when it is the batch that its slot runs, as far as the scheduler heard. Set when it is, or is over before."""
    ends_at: float
    """When it is predicted to end; when it started, where nothing is measured. Set with `started`."""
    sent_at: float
    """Set by `sent`."""
    began: float
    """When its slot began with it: when it was sent, until it has run and its report tells more. Set by `sent`."""
    left_out: frozenset[int]
    """The members without results, since their deadlines had passed before it began, by id. Set by `ran`."""

    def __init__(
        self,
        id: int,  # noqa: A002 - the name that events and actions use
        slot: Any,
        queue: ModelQueue,
        members: Sequence[Request],
        sizes: tuple[int, ...],
        predicted_s: float | None = None,
        suspicion: Suspicion = Suspicion.NONE,
    ) -> None:
        self.id = id
        self.slot = slot
        """Its `Slot`. (slots.py imports this file.)"""
        self.queue = queue
        self.model = queue.profile.name
        """The model's name, which its other generations have, too."""
        self.members = members
        """The scheduler's requests. An audit has none."""
        arrivals: list[Submitted] = []
        for request in members:  # no comprehension, see `Dispatcher._start`
            arrivals.append(request.arrival)
        self.arrivals: Sequence[Submitted] = arrivals
        """The same requests as the caller submitted them."""
        self.sizes = sizes
        """The call's size of each of the model's `dimensions`: at least the sum of rows, else at least the largest."""
        self.suspicion = suspicion
        self.facts = NO_FACTS
        self.behind: int | None = None
        """The number of the batch that it was queued right behind; None: its slot was idle."""
        self.state = _CUT
        self.wanted = len(members)
        """Members that have not ended yet. An audit has none from the start."""
        self.predicted_s = predicted_s
        """Seconds of this slot; None while nothing is measured."""
        self.prefetch_at: float | None = None
        """When the next batch should be sent to its slot; None: not before it has ended. Set at the start."""
        self.hang_at = inf
        """When it has run so long that the next step is taken against it; set at the start."""
        self.cancelled = False
        """Whether its slot was asked to stop it."""
        self.recalled = False
        """Whether its slot was asked to give it back."""
        self.inputs: BatchInputs | None = None
        """What its slot was sent. The scheduler does not look into it."""
        self.run_us = 0
        """Microseconds of its calls, once it has run."""
        self.report: BatchReport | None = None
        """Once it has run."""

    def __repr__(self) -> str:
        return f"<batch {self.id} on slot {self.slot.id}: {self.wanted} of {len(self.members)} wanted>"

    @property
    def ids(self) -> tuple[int, ...]:
        """The members by id."""
        return tuple([arrival.id for arrival in self.arrivals])

    @property
    def is_behind(self) -> bool:
        """Whether it is queued behind another batch."""
        return self.state in _QUEUED_BEHIND

    @property
    def hung(self) -> bool:
        """Whether it has run so long that steps are taken against it."""
        return self.state in _HUNG

    # ------------------------------------------------------------ for the scheduler

    def recall(self) -> None:
        """Ask its slot to give it back, before or just as it begins."""
        self.state = BATCH_TABLE["recall"][self.state]
        self.recalled = True

    def cancel(self) -> bool:
        """Ask its slot to stop it, because no member is wanted any more; whether that is new."""
        if self.state not in BATCH_TABLE["cancel"]:
            return False
        self.state = BATCH_TABLE["cancel"][self.state]
        self.cancelled = True
        return True

    def escalate(self) -> None:
        """Take the next step against it, because it hangs. The first one asks its slot to stop it."""
        self.state = BATCH_TABLE["escalate"][self.state]
        self.cancelled = True

    def begin(self) -> None:
        """Become the batch that its slot runs."""
        self.state = _BEGIN[self.state]

    def queue_behind(self) -> None:
        """Become a batch that is queued behind another."""
        self.state = BATCH_TABLE["queue"][self.state]

    # ------------------------------------------------------------ for the caller

    def sent(self, inputs: BatchInputs, now: float) -> None:
        """Note that it leaves for its slot, with these inputs."""
        self.inputs = inputs
        self.sent_at = self.began = now

    def ran(self, report: BatchReport, ended_at: float) -> None:
        """Note that it has run, as this report says, until `ended_at` as far as is known. For a batch that was queued behind
        another, work out when it began."""
        self.report = report
        self.run_us = round(report.run_s * 1e6)
        outputs = report.outputs or ()
        self.left_out = _NOBODY
        if self.inputs is not None and self.inputs.start_before is not None and None in outputs:
            results = zip(self.arrivals, outputs, strict=True)
            self.left_out = frozenset([arrival.id for arrival, result in results if result is None])
        if self.behind is not None:
            # It began when the one before it was done, so before that was heard of; and long enough ago.
            began = ended_at - report.busy_s
            self.began = max(self.sent_at, began if self.is_behind else min(self.started, began))

    def held_s(self, now: float) -> float:
        """Return the seconds that it has held its slot, as far as was heard of it."""
        if self.behind is None:
            return now - self.sent_at
        return 0.0 if self.is_behind else now - self.started

    def outputs_of(self, requests: Sequence[Submitted]) -> Sequence[Tensors | None]:
        """Return the results of these members, in their order, once it has run."""
        outputs = () if self.report is None or self.report.outputs is None else self.report.outputs
        if requests is self.arrivals:
            return outputs
        by_id = dict(zip([arrival.id for arrival in self.arrivals], outputs, strict=True))
        return [by_id[request.id] for request in requests]


class AuditBatch(Batch):
    """A batch without members: an answered request that runs again."""

    __slots__ = ("run",)

    run: Any
    """What the caller knows it by."""
