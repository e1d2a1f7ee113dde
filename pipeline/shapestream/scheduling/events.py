"""Events: the only inputs of `Scheduler.handle`. Its outputs are the actions (actions.py).

Events hold ids, shapes and times. Times are seconds of one monotonic clock that the caller chooses. Request ids are
integers that the caller never uses twice. The scheduler reads nothing of an `Arrival` but the fields that stand here: the
caller may submit a class of its own, with tensors, and gets the same objects back in actions. `SlotJoined.peer` likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, TypeAlias

from shapestream_engine.batch import ErrorCode
from shapestream_engine.cost_table import CostTable
from shapestream_engine.layout import value


class ContractError(ValueError):
    """The caller broke the contract of these events: an id was used twice, or a name for two things."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBytes:
    """Bytes of one input of a call: `nbytes` times the call's size along each of `axes`, which number dimensions."""

    nbytes: int
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The facts of a model that decisions depend on."""

    name: str
    generation: int = 1
    """Number of the model among those that have had its name; a reload may make another one."""
    dimensions: tuple[str, ...]
    """Its dynamic dimensions, `batch` first where it has a batch axis."""
    has_batch: bool
    """Without a batch axis each request runs alone."""
    paddable: tuple[bool, ...]
    """Parallel to `dimensions`: may requests be padded along this one to share a batch?"""
    max_batch: int
    """Rows in one call, at most. A larger single request runs alone."""
    max_delay_s: float = 0.0
    """Seconds that a free slot may wait for more requests; 0: as answer_waits.py says."""
    max_padding_ratio: float | None = None
    """Elements computed only as padding / elements computed, at most, when requests are padded together.
    None: as much as measured costs make worth it."""
    inputs: tuple[InputBytes, ...] = ()
    """The inputs of its calls. Empty: unknown, and no call is too large."""
    max_batch_bytes: int | None = None
    """Bytes of the inputs of one call, padding and filled rows included, at most. A larger request runs alone in a call of
    its own sizes; one whose smallest call would be filled up beyond this is refused. None: any."""
    bounds: tuple[int | None, ...] = ()
    """Parallel to `dimensions`: the largest size that the model takes, where it says one. Empty: it says none."""
    row_calls: tuple[tuple[int, ...], ...] | None = None
    """Where only some numbers of rows are allowed: the rows of each call that a batch takes, by its rows, from 0
    to `max_batch`. None: one call, of just as many. Other allowed sizes need no place here: requests arrive rounded."""
    free_sizes: bool = False
    """Whether a call may have any sizes within the bounds, rows apart. Then requests may be rounded up to shapes that come
    again; otherwise a strategy names the sizes."""
    max_shapes: int | None = None
    """Distinct call shapes that the devices may be given, at most; the scheduler then rounds shapes up. None: any."""
    fills_rows: bool = False
    """Whether rows may be rounded too, by copies of a row. If not, each number of rows has `max_shapes` for itself."""
    strings: tuple[int, ...] = ()
    """Numbers of the dimensions that are mean bytes of strings: a call has the largest, but nothing is added to reach it."""
    static_shapes: tuple[tuple[int, ...], ...] = ()
    """Call shapes that have a static model of their own beside the dynamic one; usually faster."""
    hang_after_s: float | None = None
    """Seconds after which a running batch is taken to hang; `inf`: never. None: by what its batches usually take."""
    idempotent: bool = True
    """Whether a request may run twice. If not, each runs alone in its call and is started once: a lost one is answered
    `worker_lost`. None is prefetched: a batch queued on a lost slot may have run."""

    def __post_init__(self) -> None:
        if not self.idempotent and self.has_batch and self.max_batch != 1:
            raise ValueError(
                f"model {self.name!r} is not idempotent, so its requests run alone: max_batch must be 1"
            )

    @property
    def key(self) -> str:
        """The name that events use: two generations of a model may have requests at the same time."""
        return self.name if self.generation == 1 else f"{self.name}~{self.generation}"

    def shape_of_tensors(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of a call with 1 in place of mean bytes: a device that met them knows the call's tensors."""
        if not self.strings:
            return sizes
        return tuple([1 if number in self.strings else size for number, size in enumerate(sizes)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnavailable:
    """No slot will come for this model: its queued requests are answered `unavailable`. The caller sends no more.

    Running batches go on, on slots that close. Requests that come back from them are answered in the same way, unless a
    slot has joined all the same.
    """

    model: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAdded:
    """A model can be asked for from now on."""

    model: ModelProfile
    like: str | None = None
    """The model whose slots and costs it shares, since only decisions about its batches differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRemoved:
    """A model is asked for no more, and has no request and no batch. Nothing is kept of it."""

    model: str


@value
class Arrival:
    """One request that is valid for its model's signature. The scheduler admits or refuses it."""

    id: int
    client: int
    """Whose share of the slots it takes: all that have the same number here divide one."""
    model: str
    sizes: tuple[int, ...]
    """Its size of each of the model's `dimensions`."""
    nbytes: int
    deadline: float | None = None
    priority: int = 0
    """Higher goes first."""
    since: float | None = None
    """When its parent arrived, a request of a chain that has been admitted: so it is never refused for lack of room, and
    goes before younger requests of its client. None: it has no parent."""
    then: tuple[str, ...] = ()
    """The models that its chain asks after this one, one after the other."""
    suspect: bool = False
    """Its client had it at a server that vanished: it shares no call, and where slots are in the server's process, nothing
    else runs there meanwhile."""
    group: int | None = None
    """Digest of the inputs that the requests of a call have in common: only equal ones share a batch. None: its model has no
    such inputs."""
    submitted: int = 1
    """Requests that were submitted as one thing, this one included: the texts of one call, the rows of a chain's stage."""


@value
class RequestsArrived:
    """Everything that arrived in one turn of the event loop, in order."""

    requests: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """The caller withdrew a request. Unknown and finished ids are ignored."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsAbandoned:
    """The client of these requests is gone: queued ones are dropped without an answer, running ones are not delivered.

    Unknown and finished ids are ignored.
    """

    ids: tuple[int, ...]
    """In the order in which they arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsTold:
    """A worker whose slots will join has measured these costs of a model: to take them in takes milliseconds per model."""

    model: str
    costs: CostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotJoined:
    """A slot can run batches of these models."""

    slot: int
    models: frozenset[str]
    worker: str = ""
    """The process that the slot belongs to: slots of one process are equally fast. "": a process of its own."""
    costs: Mapping[str, CostTable] = field(default_factory=dict)
    """What its process has measured, by model."""
    prefetch_s: float | None = None
    """Seconds of the way from the decision to the slot. While all slots are busy, the next batch is sent that long, and a
    margin (`slots.PREFETCH_MARGIN`), before the running one is predicted to end. None: no prefetch."""
    wide: bool = False
    """Whether it is the wide slot of its process, which lone requests are given (wide_slots.py): it uses the threads of all
    others, and counts in nothing. Its `costs` are its own. No process has two; one whose others have left gets nothing."""
    in_server: bool = False
    """Whether its process is the one that runs this scheduler: a call that ends it ends the books, too."""
    peer: Any = field(default=None, compare=False)
    """The caller's own object for this slot: `Slot.peer` hands it back, and the scheduler never looks into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsJoined:
    """Several slots at once, so that the queue is divided over all of them instead of emptied into the first."""

    slots: tuple[SlotJoined, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotClosing:
    """A slot is about to leave: it finishes the batch that it runs and gets no other. `SlotLeft` follows.

    Unknown slots are ignored, and so is saying it again.
    """

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLeft:
    """A slot is gone; its batches run again elsewhere.

    Where several leave together, all of them close before: "elsewhere" is any slot that has not closed.
    """

    slot: int
    died: bool = False
    """True if the process died, or was killed because it hung: a request that it ran may be to blame. A broken connection or
    a silent worker says nothing about the requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoneRunKnown:
    """The client of this suspect knows that it is about to run alone (`TellLoneRun`). Other ids are ignored."""

    id: int


@value
class BatchFinished:
    """A batch ran. `expired` are members that were left out: their deadline had passed before the start."""

    batch: int
    busy_s: float
    """Seconds of the slot's time: gathering, the calls, copying the results out."""
    expired: frozenset[int] = frozenset()
    preparations: int = 0
    """Calls whose shape was new to the device: `busy_s` contains what it took to prepare for them."""
    followed: bool = False
    """Another event of the same time comes next, with the requests that follow from its results. No batch starts before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFailed:
    """A batch did not run, and runs again in halves until the culprit is alone, except with these codes.

    `unavailable` blames the slot, which rests for a while. `cancelled`: it was stopped. `recalled`: it was taken back before
    its start.
    """

    batch: int
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted:
    """Admit no more requests; finish those that are here."""


class AuditKind(Enum):
    """The reason to run an answered request again. One of each may run at a time: neither waits for the other."""

    AUDIT = "audit"
    """Its answer is judged."""
    SHADOW = "shadow"
    """A version that answers nobody is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditWanted:
    """Run an answered request again, alone, while slots are idle.

    It starts as a batch without members, or never. One that has not started is replaced by the next of its kind; none of its
    kind may come while one runs.
    """

    kind: AuditKind = AuditKind.AUDIT
    run: Any = None
    """What the caller knows it by. The scheduler does not look into it."""

    model: str
    sizes: tuple[int, ...]
    """The request's size of each of the model's `dimensions`, rounded up only as the model's strategy asks."""
    slots: frozenset[int]
    """The slots that may run it: those of the process that answered the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunsAlone:
    """A model stops sharing calls (`alone`), so that each request runs by itself at its own sizes; or shares them again."""

    model: str
    alone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """The time has come that `next_wakeup()` named."""


Event: TypeAlias = (
    ModelAdded
    | ModelRemoved
    | ModelUnavailable
    | RequestsArrived
    | RequestCancelled
    | RequestsAbandoned
    | CostsTold
    | SlotJoined
    | SlotsJoined
    | SlotClosing
    | SlotLeft
    | LoneRunKnown
    | BatchFinished
    | BatchFailed
    | DrainStarted
    | AuditWanted
    | ModelRunsAlone
    | TimePassed
)


class CutReason(Enum):
    """The reason why a batch holds no more requests, where others are queued and it has room for more rows."""

    COST = "other queued requests are cheaper apart, or later"
    ALONE = (
        "the request shares no batch: its model has no batch axis, it fills a batch, or it has no elements"
    )
    CROWDED = "it runs alone, because requests with 64 other values of its common inputs wait"
    DIVIDED = "the queue is divided between slots that are free, or soon will be"
    LIMIT = "a limit of bytes or padding allows no more"
    DEADLINE = "a member's deadline allows no more"
    RERUN = "its requests ran before, in a batch that failed or was lost"
    SUSPECT = "it runs alone in its worker, because it may have killed one or a server, or was lost too often"
    AUDITED = "an audit found that results differ in shared batches, so requests run alone"
    UNPLANNED = "its cost could not be worked out; the server's log tells of the defect"


class Overload(StrEnum):
    """The bounds by which a request is refused as `overloaded`, by their names in metrics."""

    QUEUE = "queue"
    """The requests or bytes of the queue, or of the part of it that the model's slots have."""
    CLIENT_SHARE = "client_share"
    """A client's share of the queue."""
    MODEL_SHARE = "model_share"
    """The part of that which is for one of the models that the client asks."""
    DEADLINE = "deadline"
    """The request's own deadline, which the queue would let pass."""
    CREDIT = "credit"
    """The credit of its client, or of its key: refused before the scheduler sees it."""
    MEMORY = "memory"
    """The memory for large requests: refused before it was sent."""
