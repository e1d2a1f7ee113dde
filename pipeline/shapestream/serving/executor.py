"""The interface of an executor: some slots, in this process or in a worker, and the way to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from shapestream_engine.batch import Batch, BatchReport
from shapestream_engine.cost_table import CostTable
from shapestream_engine.signature import ModelSignature

__all__ = ["Executor", "InProcessExecutor", "Reports", "SlotSource"]


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
