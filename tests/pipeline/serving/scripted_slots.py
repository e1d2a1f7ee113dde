"""Slots without threads: the test sees what was started and says when, and how, it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio
from tests.entries import Execute, Role, SlotHello
from tests.pipeline.serving.batches import report_of
from tests.pipeline.serving.echo_model import SIGNATURE, echoed

from shapestream.serving.slot_threads import News, SlotSession, entry_of_report, frames_of
from shapestream.transport.interface import PeerSocket
from shapestream.transport.memory import MemoryConnection, memory_server
from shapestream.wire.codec import Codec, codec_of, decode, encode
from shapestream.wire.limits import WORKER_LIMITS
from shapestream_engine.batch import BatchInputs, BatchReport, ErrorCode
from shapestream_engine.cost_table import CostTable
from shapestream_engine.layout import Tensors
from shapestream_engine.signature import ModelSignature


class ScriptedSlots:
    """Slots of a server's own process: each has its connection, and the test says what they report there."""

    digests: Mapping[str, str] = {}
    tolerances: Mapping[str, Mapping[str, Any]] = {}
    engines: Mapping[str, str] = {}
    costs: Mapping[str, CostTable] = {}
    wide_costs: Mapping[str, CostTable] = {}
    occupied = False

    def __init__(self, signature: ModelSignature = SIGNATURE, slots: int = 1) -> None:
        self.slots = slots
        self.models: Mapping[str, ModelSignature] = {signature.name: signature}
        self.cancelled: list[int] = []
        self.recalled: list[int] = []
        self.closed = False
        self._started: list[BatchInputs] = []
        self._connections: list[MemoryConnection] = []
        self._session = 0
        self._slot_of: dict[int, int] = {}

    def listen(self) -> tuple[PeerSocket, Codec]:
        """The port that they dial, in memory, and its codec."""
        self._port = memory_server()
        return self._port, codec_of(Role.SERVER_OF_WORKERS)

    def start(self, tell: Callable[[News], None]) -> None:
        """The server takes them."""
        self.tell = tell

    def begin(self, session: SlotSession) -> None:
        """Each greets."""
        self._session = session.number
        for slot in range(self.slots):
            connection = self._port.connect()
            connection.send_nowait(encode([SlotHello(token=session.token, slot=slot)], limits=WORKER_LIMITS))
            self._connections.append(connection)

    def hang_up(self, slot: int) -> None:
        """The connection of this slot ends; nothing is told of it."""
        self._connections[slot].close()
        self._connections[slot] = self._port.connect()

    def end(self) -> None:
        """Each lets go of its connection, and drops the batches that it has not run."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._started.clear()

    def withdraw(self, slot: int, batch: int, code: ErrorCode) -> None:
        """Notes what is wanted."""
        (self.cancelled if code is ErrorCode.CANCELLED else self.recalled).append(batch)

    def set_clock(self, difference_s: float) -> None:
        """One clock is enough here."""
        assert difference_s == 0.0

    async def aclose(self) -> None:
        """Notes the end."""
        self.closed = True

    @property
    def started(self) -> list[BatchInputs]:
        """The batches that have arrived and were not taken yet."""
        for connection in self._connections:
            for frames in connection.receive_nowait():
                self._take(frames)
        return self._started

    def _take(self, frames: Sequence[object]) -> None:
        for entry in decode(frames, role=Role.WORKER, limits=WORKER_LIMITS).entries:  # type: ignore[arg-type]
            assert isinstance(entry, Execute)
            self._started.append(entry)

    async def next_batch(self) -> BatchInputs:
        """The next batch that was not taken yet."""
        while not self.started:
            async with trio.open_nursery() as nursery:
                for connection in self._connections:
                    nursery.start_soon(self._receive, connection, nursery.cancel_scope)
        return self._started.pop(0)

    async def _receive(self, connection: MemoryConnection, scope: trio.CancelScope) -> None:
        for frames in await connection.receive():
            self._take(frames)
        scope.cancel()

    def finish(
        self, batch: BatchInputs, outputs: Sequence[Tensors | None] | None = None, **times: float
    ) -> None:
        """The batch ran; each member gets its first input back unless `outputs` says otherwise."""
        self.report(self.ran(batch, outputs, **times))

    def ran(
        self, batch: BatchInputs, outputs: Sequence[Tensors | None] | None = None, **times: float
    ) -> BatchReport:
        """The report of that, for several in one turn."""
        given = tuple(echoed(member) for member in batch.members) if outputs is None else tuple(outputs)
        self._slot_of[batch.batch] = batch.slot
        return report_of(batch, **{"outputs": given, "run_s": 0.001, "busy_s": 0.002, **times})

    def fail(self, batch: BatchInputs, code: str = "model_error", message: str = "no") -> None:
        """The batch failed."""
        self._slot_of[batch.batch] = batch.slot
        self.report(report_of(batch, code=code, message=message))

    def report(self, *reports: BatchReport) -> None:
        """Sends reports to the server, each from the batch's slot."""
        for report in reports:
            frames = frames_of(entry_of_report(report, session=self._session), codec_of(Role.WORKER))
            self._connections[self._slot_of[report.batch]].send_nowait(frames)
