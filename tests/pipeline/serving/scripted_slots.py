"""Slots without threads: the test sees what was started and says when, and how, it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trio
from tests.pipeline.serving.batches import report_of
from tests.pipeline.serving.echo_model import SIGNATURE, echoed

from shapestream.serving.executor import Reports, SlotSource
from shapestream_engine.batch import Batch, BatchReport
from shapestream_engine.cost_table import CostTable
from shapestream_engine.layout import Tensors
from shapestream_engine.signature import ModelSignature


class ScriptedSlots(SlotSource):
    """Slots without threads: the test sees what was started and says when, and how, it ends."""

    name = "scripted"
    prefetch_s = 0.0005
    digests: Mapping[str, str] = {}
    costs: Mapping[str, CostTable] = {}

    def __init__(self, signature: ModelSignature = SIGNATURE, slots: int = 1) -> None:
        self.slots = slots
        self.models: Mapping[str, ModelSignature] = {signature.name: signature}
        self.started: list[Batch] = []
        self.cancelled: list[int] = []
        self.recalled: list[int] = []
        self.killed: list[str] = []
        self.closed = False
        self._report: Reports = lambda reports: None
        self._arrival = trio.Event()

    def start(self, report: Reports) -> ScriptedSlots:
        """The server takes it."""
        self._report = report
        return self

    def start_nowait(self, batch: Batch) -> None:
        """Notes the batch."""
        self.started.append(batch)
        self._arrival.set()
        self._arrival = trio.Event()

    def cancel_nowait(self, batch: int) -> None:
        """Notes the cancellation."""
        self.cancelled.append(batch)

    def recall_nowait(self, batch: int) -> None:
        """Notes that it is wanted back."""
        self.recalled.append(batch)

    def kill_nowait(self, reason: str) -> None:
        """Notes why."""
        self.killed.append(reason)

    async def aclose(self) -> None:
        """Notes the end."""
        self.closed = True

    async def next_batch(self) -> Batch:
        """The next batch that was not taken yet."""
        while not self.started:
            await self._arrival.wait()
        return self.started.pop(0)

    def finish(self, batch: Batch, outputs: Sequence[Tensors | None] | None = None, **times: float) -> None:
        """The batch ran; each member gets its first input back unless `outputs` says otherwise."""
        self.report(self.ran(batch, outputs, **times))

    def ran(
        self, batch: Batch, outputs: Sequence[Tensors | None] | None = None, **times: float
    ) -> BatchReport:
        """The report of that, for several in one turn."""
        given = tuple(echoed(member) for member in batch.members) if outputs is None else tuple(outputs)
        return report_of(batch, **{"outputs": given, "run_s": 0.001, "busy_s": 0.002, **times})

    def fail(self, batch: Batch, code: str = "model_error", message: str = "no") -> None:
        """The batch failed."""
        self.report(report_of(batch, code=code, message=message))

    def report(self, *reports: BatchReport) -> None:
        """Hands reports to the server, as a slot's thread would."""
        self._report(reports)
