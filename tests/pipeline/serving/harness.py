"""What the serving tests share: a peer that speaks raw protocol, slots without threads, a running server."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import trio

from shapestream.serving.batches import Batch, BatchReport, Reports, SlotSource
from shapestream.serving.options import ServerOptions
from shapestream.serving.server import Server, serve
from shapestream.transport.interface import Connection
from shapestream.transport.memory import MemoryServer, memory_server
from shapestream.wire.codec import Role, decode, pack_messages
from shapestream.wire.limits import CLIENT_LIMITS, WORKER_LIMITS
from shapestream.wire.messages import (
    Entry,
    Hello,
    ModelOpened,
    OpenModel,
    Request,
    Welcome,
    WorkerHello,
    WorkerWelcome,
)
from shapestream_engine.cost_table import CostTable
from shapestream_engine.layout import Tensors
from shapestream_engine.rules import Rows
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import InputPort, ModelSignature, OutputPort

E = TypeVar("E")

SIGNATURE = ModelSignature(
    name="echo",
    inputs=(
        InputPort("x", "f32", NamedShape.parse("batch:1..64, n:1..1000000")),
        InputPort("scale", "f32", NamedShape.parse("batch:1..64")),
    ),
    outputs=(OutputPort("y", "f32", NamedShape.parse("batch, n"), Rows()),),
)
"""Two inputs that share the batch dimension."""


def echo_tensors(rows: int = 1, n: int = 4, value: float = 1.0) -> Tensors:
    """The inputs of a valid request for `SIGNATURE`."""
    x = np.full((rows, n), value, np.float32)
    scale = np.ones((rows,), np.float32)
    return Tensors(
        layout=((0, "f32", (rows, n)), (1, "f32", (rows,))),
        buffers=(x.tobytes(), scale.tobytes()),
    )


def echoed(tensors: Tensors) -> Tensors:
    """What the echo model answers: its first input."""
    return Tensors(layout=tensors.layout[:1], buffers=tuple(tensors.buffers[:1]))


def request(sequence: int, tensors: Tensors | None = None, **fields: Any) -> Request:
    """A request for model 0."""
    values: dict[str, Any] = {"model": 0, "remaining_ms": None, "priority": 0, **fields}
    return Request(sequence=sequence, tensors=echo_tensors() if tensors is None else tensors, **values)


class RawPeer:
    """A client, or a worker, that says and hears single entries; it does nothing by itself."""

    def __init__(self, connection: Connection, role: Role = Role.CLIENT) -> None:
        self.connection = connection
        self.role = role
        self.limits = WORKER_LIMITS if role is Role.WORKER else CLIENT_LIMITS
        self.heard: deque[Entry] = deque()

    def say(self, *entries: Entry) -> None:
        """Sends these entries, in as few messages as they fit."""
        for frames in pack_messages(entries, limits=self.limits):
            self.connection.send_nowait(frames)

    async def hear(self, kind: type[E]) -> E:
        """The next entry of this kind; others that came before it stay for later."""
        while True:
            for entry in self.heard:
                if isinstance(entry, kind):
                    self.heard.remove(entry)
                    return entry
            for frames in await self.connection.receive():
                envelope = decode(frames, role=self.role, limits=self.limits)
                assert [] == envelope.bad
                self.heard.extend(envelope.entries)

    async def open_session(self, client: bytes = b"c" * 16, model: str | None = "echo") -> None:
        """Greets, and opens a model if one is named."""
        self.say(Hello(client=client, software="test"))
        await self.hear(Welcome)
        if model is not None:
            self.say(OpenModel(name=model))
            await self.hear(ModelOpened)

    async def join_as_worker(
        self, name: str = "w", slots: int = 1, signature: ModelSignature = SIGNATURE
    ) -> None:
        """Registers as a worker that has one model."""
        models = {signature.name: signature.to_dict()}
        self.say(WorkerHello(worker=name, pid=1, slots=slots, models=models))
        await self.hear(WorkerWelcome)


class ScriptedSlots(SlotSource):
    """Slots without threads: the test sees what was started and says when, and how, it ends."""

    name = "scripted"
    prefetch_s = 0.0005
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
        return _report(batch, **{"outputs": given, "run_s": 0.001, "busy_s": 0.002, **times})

    def fail(self, batch: Batch, code: str = "model_error", message: str = "no") -> None:
        """The batch failed."""
        self.report(_report(batch, code=code, message=message))

    def report(self, *reports: BatchReport) -> None:
        """Hands reports to the server, as a slot's thread would."""
        self._report(reports)


def _report(batch: Batch, **fields: Any) -> BatchReport:
    values: dict[str, Any] = {
        "outputs": None,
        "run_s": 0.0,
        "busy_s": 0.0,
        "code": None,
        "message": "",
        **fields,
    }
    return BatchReport(batch=batch.batch, **{"reallocations": 0, "preparations": 0, **values})


class Running:
    """A server over memory endpoints, with the ways to talk to it."""

    def __init__(self, server: Server, clients: MemoryServer, workers: MemoryServer) -> None:
        self.server = server
        self.clients = clients
        self.workers = workers

    def client(self) -> RawPeer:
        """A new connection of a client."""
        return RawPeer(self.clients.connect())

    def worker(self) -> RawPeer:
        """A new connection of a worker."""
        return RawPeer(self.workers.connect(), Role.WORKER)


@asynccontextmanager
async def memory_serving(local: SlotSource | None = None, **options: Any) -> AsyncIterator[Running]:
    """A server over memory endpoints for the time of the block."""
    clients, workers = memory_server(), memory_server()
    async with trio.open_nursery() as nursery:
        server = await nursery.start(_serve, ServerOptions(**options), local, clients, workers)
        yield Running(server, clients, workers)
        nursery.cancel_scope.cancel()


async def _serve(
    options: ServerOptions,
    local: SlotSource | None,
    clients: MemoryServer,
    workers: MemoryServer,
    task_status: trio.TaskStatus[Server],
) -> None:
    await serve(options, local=local, clients=clients, workers=workers, task_status=task_status)
