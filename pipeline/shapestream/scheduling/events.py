"""What happened: the only inputs of `Scheduler.handle`. Ids, shapes and times; never a tensor or a socket.

Times are seconds of one monotonic clock that the caller chooses; request ids are integers that the caller
never uses twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """What the scheduler must know of a model."""

    name: str
    dimensions: tuple[str, ...]
    """Its dynamic dimensions, `batch` first where it has a batch axis."""
    has_batch: bool
    """Without a batch axis each request runs alone."""
    paddable: tuple[bool, ...]
    """Parallel to `dimensions`: may requests be padded along this one to share a batch?"""
    max_batch: int
    """Rows in one call, at most. A larger single request runs alone where `max_sizes` allows it."""
    max_delay_s: float = 0.0
    """How long a free slot may wait for company; 0 is work-conserving."""
    max_padding_ratio: float = 0.125
    """Elements computed only as padding / elements computed, at most, when requests are padded together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAdded:
    """A model can be asked for from now on."""

    model: ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One admitted request, valid for its model's signature."""

    id: int
    client: int
    model: str
    sizes: tuple[int, ...]
    """Its size of each of the model's `dimensions`."""
    nbytes: int
    deadline: float | None = None
    priority: int = 0
    """Higher goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsArrived:
    """Everything that arrived in one turn of the event loop, in order."""

    requests: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """Its caller withdrew it. Unknown and finished ids are ignored."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLeft:
    """A client is gone: its queued requests are dropped without an answer, running ones are not delivered."""

    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotJoined:
    """A slot can run batches of these models."""

    slot: int
    models: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotClosing:
    """A slot is about to leave: it finishes what it runs and gets nothing new. `SlotLeft` follows.

    Unknown slots are ignored, and so is saying it again.
    """

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLeft:
    """A slot is gone, for good; what it ran is run again elsewhere.

    Where several leave together, the idle ones go first: "elsewhere" is any slot that has not left yet.
    """

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFinished:
    """A batch ran. `expired` are members that were left out: their deadline had passed before the start."""

    batch: int
    run_s: float
    expired: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFailed:
    """A batch did not run. With code `model_error` halves are tried until the culprit is alone.

    `unavailable` blames the slot, which is put aside for a while.
    """

    batch: int
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted:
    """Take nothing new; finish what is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """`next_wakeup()` has come."""


Event: TypeAlias = (
    ModelAdded
    | RequestsArrived
    | RequestCancelled
    | ClientLeft
    | SlotJoined
    | SlotClosing
    | SlotLeft
    | BatchFinished
    | BatchFailed
    | DrainStarted
    | TimePassed
)
