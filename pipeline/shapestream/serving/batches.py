"""A batch on its way to a slot, the report that comes back, and what an executor must offer.

The dispatcher knows executors only by this: the same words serve slots in this process and in a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from shapestream_engine.cost_table import CostTable
from shapestream_engine.layout import Tensors
from shapestream_engine.signature import ModelSignature, RequestShape

__all__ = ["Batch", "BatchReport", "Executor", "InProcessExecutor", "ReportCode", "Reports", "SlotSource"]

ReportCode: TypeAlias = Literal["model_error", "unavailable", "cancelled", "recalled", "internal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests to run in one inference call."""

    batch: int
    slot: int
    """The executor's own number of the slot: 0 .. slots - 1."""
    model: str
    sizes: tuple[int, ...]
    """The call's size of each of the signature's `dimensions`, padding included."""
    members: tuple[Tensors, ...]
    shapes: tuple[RequestShape, ...]
    """Parallel to `members`."""
    start_before: tuple[float | None, ...] | None
    """Parallel to `members`: time of the run's clock (`trio.current_time`) from which on it may not start any more; None if
    none has a deadline. Never as time that is left: a process may be stopped between two looks at a clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What became of a batch. One comes for each batch that was started, unless its slot is lost first."""

    batch: int
    outputs: tuple[Tensors | None, ...] | None
    """Parallel to the members, None for one whose deadline had passed before the start; None on failure."""
    run_s: float
    """Seconds in the inference calls."""
    busy_s: float
    """Seconds of the slot's time: gathering, the calls, copying the results out."""
    reallocations: int
    preparations: int
    """Calls whose shape was new, and had to be prepared for."""
    code: ReportCode | None
    """None if the batch ran: see `shapestream.scheduling.events.BatchFailed` for the others."""
    message: str
    calls: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """How many calls of which sizes it took. Empty: one, of the batch's sizes."""
    slot_ended: bool = False
    """The slot's thread has ended without being asked to: the slot runs nothing more."""


class Executor(Protocol):
    """Some slots, and the way to them. The calls return at once; what cannot be done is reported."""

    @property
    def name(self) -> str:
        """As it appears in timings and logs: `name/slot`."""

    @property
    def slots(self) -> int:
        """How many batches it runs at a time."""

    @property
    def models(self) -> Mapping[str, ModelSignature]:
        """What every one of its slots can run."""

    @property
    def costs(self) -> Mapping[str, CostTable]:
        """What its process has measured of its models' calls, by model."""

    @property
    def digests(self) -> Mapping[str, str]:
        """The sha256 of the files that its models were read from, by model; functions are left out."""

    @property
    def prefetch_s(self) -> float:
        """How long a batch takes from the decision to the slot: so much earlier the next one is worth sending."""

    def start_nowait(self, batch: Batch) -> None:
        """Starts a batch on a free slot, or lets it wait behind the one that runs there: one at most."""

    def recall_nowait(self, batch: int) -> None:
        """Takes a batch back that has not begun; its report still comes, `recalled` or not. Unknown ones are ignored."""

    def cancel_nowait(self, batch: int) -> None:
        """Nobody waits for it any more; its report still comes. Unknown batches are ignored."""

    def kill_nowait(self, reason: str) -> None:
        """One of its slots hangs: ends its process, where it has one of its own. Its leaving is seen as any other."""


Reports: TypeAlias = Callable[[Sequence[BatchReport]], None]


class InProcessExecutor(Executor, Protocol):
    """An executor that the server itself starts and ends."""

    async def aclose(self) -> None:
        """Ends it; takes a bounded time, also when cancelled."""


class SlotSource(Protocol):
    """What a server makes its own slots from. Tests have one without threads."""

    def start(self, report: Reports) -> InProcessExecutor:
        """Called inside trio; `report` is to be called in the event loop."""
