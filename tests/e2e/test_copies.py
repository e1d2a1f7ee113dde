"""How often the bytes of a large tensor are copied on their way from a client, through the server, to a worker's model.

Client, server and worker run in one process here, over real sockets, so that objects can be compared and memory
be watched. libzmq's own way through the kernel is not ours to count.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import shapestream
from shapestream.serving import slot_threads
from shapestream.serving.server import serve
from shapestream.settings import ServerSettings
from shapestream.transport.router import RouterSocket
from shapestream.transport.zeromq import BlockingDealer, DealerSocket
from shapestream_engine.batch import BatchInputs, BatchReport
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.slot import Runner
from shapestream_workers.worker import Worker

pytestmark = pytest.mark.e2e

SHAPE = (1, 512, 512)
NBYTES = 1024 * 1024


def large(frames: Sequence[Any]) -> list[Any]:
    """The frames that hold a tensor of ours."""
    return [frame for frame in frames if memoryview(frame).nbytes == NBYTES]


class Seen:
    """Frame objects, and the most memory that was in use when the model was called."""

    def __init__(self) -> None:
        self.from_client: list[Any] = []
        self.to_worker: list[Any] = []
        self.at_worker: list[Any] = []
        self.at_slot: list[Any] = []
        self.peak_bytes: list[int] = []
        self.addresses: list[int] = []

    def model(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Sums; and looks at how much memory it took to get here."""
        self.peak_bytes.append(tracemalloc.get_traced_memory()[1])
        self.addresses.append(x.ctypes.data)
        return x.sum(axis=(1, 2), dtype=np.float64).astype(np.float32)


class ClientsPort(RouterSocket):
    """Remembers the large frames that came."""

    seen: Seen

    def receive_nowait(self) -> list[tuple[bytes, list[Any]]]:
        """As the original."""
        messages = super().receive_nowait()
        for _, frames in messages:
            self.seen.from_client += large(frames)
        return messages


class WorkersPort(RouterSocket):
    """Remembers the large frames that went."""

    seen: Seen

    def send_nowait(self, peer: bytes, frames: Sequence[Any]) -> None:
        """As the original."""
        self.seen.to_worker += large(frames)
        super().send_nowait(peer, frames)


class SlotConnection(BlockingDealer):
    """Remembers the large frames that came."""

    seen: Seen

    def receive(self, timeout_s: float | None = None) -> list[Any] | None:
        """As the original."""
        frames = super().receive(timeout_s)
        self.seen.at_worker += large(frames or ())
        return frames


class WatchedRunner(Runner):
    """Remembers what it is given to gather."""

    seen: Seen

    def run(self, batch: BatchInputs, ahead_s: float = 0.0) -> BatchReport | None:
        """As the original."""
        for member in batch.members:
            self.seen.at_slot += large(member.buffers)
        return super().run(batch, ahead_s)


def test_a_large_tensor_is_relayed_untouched_and_gathered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The received frame is the sent one at the server, and the gathered one at the worker; the one copy is the gather."""
    seen = Seen()
    for kind in (ClientsPort, WorkersPort, SlotConnection, WatchedRunner):
        kind.seen = seen
    monkeypatch.setattr(slot_threads, "Runner", WatchedRunner)
    spec = ModelSpec(
        name="m",
        model=seen.model,
        inputs={"x": InputSpec(shape="batch:1..4, height:1..512, width:1..512", element_type="f32")},
        outputs={"y": OutputSpec(shape="batch", element_type="f32")},
    )
    clients, workers = f"ipc://{tmp_path}/c.sock", f"ipc://{tmp_path}/w.sock"

    def connect() -> DealerSocket:
        connection = DealerSocket()
        connection.connect(workers)
        return connection

    async def main() -> None:
        clients_port, workers_port = ClientsPort(), WorkersPort()
        clients_port.bind(clients)
        workers_port.bind(workers)
        slots = slot_threads.SlotThreads(
            models={"m": compile_model(spec)}, dial=partial(SlotConnection, workers)
        )
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                await nursery.start(
                    partial(serve, ServerSettings(), clients=clients_port, workers=workers_port)
                )
                ready = trio.Event()
                nursery.start_soon(Worker("w", slots, connect, ready=ready.set).run)
                await ready.wait()
                async with shapestream.connect(clients) as client:
                    for value in (1, 2, 3):
                        array = np.full(SHAPE, value, np.float32)
                        tracemalloc.start()
                        try:
                            result = await client.infer("m", {"x": array})
                        finally:
                            tracemalloc.stop()
                        assert [value * 512.0 * 512.0] == result["y"].tolist()
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert 3 == len(seen.from_client) == len(seen.to_worker) == len(seen.at_worker) == len(seen.at_slot)
    assert all(came is went for came, went in zip(seen.from_client, seen.to_worker, strict=True))
    assert all(came is gathered for came, gathered in zip(seen.at_worker, seen.at_slot, strict=True))
    # Gathered into the same reserved input tensor each time, and nothing as large was allocated on the way there. (What
    # else this process does, such as importing what a line of its log needs, it does not do three times.)
    assert 1 == len(set(seen.addresses))
    assert min(seen.peak_bytes) < NBYTES // 2
