"""Batches that are sent to busy slots, and taken back, on real threads and real workers: all are answered, and run once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from tests.entries import RequestEntry, ResultEntry
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.eager import EagerScheduler
from tests.pipeline.serving.echo_model import request
from tests.pipeline.serving.harness import Running, memory_serving, serve_with
from tests.pipeline.serving.raw_peer import RawPeer

from shapestream.scheduling import events
from shapestream.serving.slot_threads import SlotThreads
from shapestream.transport.memory import memory_server
from shapestream.transport.router import RouterSocket
from shapestream.transport.zeromq import BlockingDealer, DealerSocket
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.layout import Tensors
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_workers.worker import Worker

REQUESTS = 300
MOST_WAIT_S = 0.05
"""Seconds for which a call waits for a recall, at most. One in ten waits, so a busy machine has thirty chances."""


@contextmanager
def counting(
    slots: int, scheduler: EagerScheduler, sorted_numbers: int = 20_000
) -> Iterator[tuple[CompiledModel, Counter[int]]]:
    """y = 2 x, and how often it ran with which x. Some take so long that a recall is in time."""
    ran: Counter[int] = Counter()
    numbers = np.random.default_rng(3).random(sorted_numbers)

    def double(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        ran[int(x[0])] += 1
        if x[0] % 10 == 9:
            scheduler.asks_back.wait(MOST_WAIT_S)
            scheduler.asks_back.clear()
        if x[0] % 3 or x[0] % 10 == 9:
            np.sort(numbers)
        doubled: np.ndarray[Any, Any] = x * 2
        return doubled

    model = compile_model(
        ModelSpec(
            name="echo",
            model=double,
            inputs={"x": InputSpec(shape="batch:1..8", element_type="i64")},
            outputs={"y": OutputSpec(shape="batch", element_type="i64")},
        ),
        slots=slots,
    )
    yield model, ran
    model.close()


def number(value: int) -> RequestEntry:
    """The request whose sequence number is its input."""
    tensors = Tensors(layout=((0, "i64", (1,)),), buffers=(np.int64(value).tobytes(),))
    return request(value, tensors)


async def ask_all(client: RawPeer) -> dict[int, ResultEntry]:
    """All requests, a few at a time; each answered once, and with its own answer."""
    results: dict[int, ResultEntry] = {}
    for first in range(0, REQUESTS, 4):
        client.say(*[number(value) for value in range(first, first + 4)])
        while len(results) < first - 16:
            result = await client.hear(ResultEntry)
            assert result.sequence not in results, "answered twice"
            results[result.sequence] = result
    while len(results) < REQUESTS:
        result = await client.hear(ResultEntry)
        assert result.sequence not in results, "answered twice"
        results[result.sequence] = result
    return results


def check_all(results: dict[int, ResultEntry], ran: Counter[int], scheduler: EagerScheduler) -> None:
    """Everything was right, ran once, and both was sent ahead and taken back on the way."""
    for value, result in results.items():
        assert 2 * value == int(np.frombuffer(result.tensors.buffers[0], np.int64)[0])
        times = result.timings
        assert 0 <= times.queue_us
        assert times.queue_us + times.run_us <= times.total_us
    assert set(range(REQUESTS)) == set(ran)
    assert {1} == set(ran.values()), "something ran twice"
    assert {"recalled"} == set(scheduler.codes())
    finished = [event for event in scheduler.log if isinstance(event, events.BatchFinished)]
    assert REQUESTS == len(finished)
    assert all(event.busy_s > 0.0 for event in finished)


@pytest.mark.parametrize("depth", [2, 5])
@real_time
async def test_slots_of_this_process_run_what_was_sent_ahead(scheduler: EagerScheduler, depth: int) -> None:
    """300 requests over two slots, each with one batch or a bundle behind, a third of these recalled at any moment."""
    scheduler.depth = depth
    with counting(2, scheduler) as (model, ran):
        async with memory_serving(SlotThreads(models={"echo": model}, slots=2)) as running:
            client = await running.greeted()
            results = await ask_all(client)
            statistics = running.server.statistics()
        check_all(results, ran, scheduler)
        assert 0 < statistics["batches_recalled"] < statistics["batches_prefetched"]
        assert 0 == statistics["batches_failed"]
        assert REQUESTS == sum(slot["batches"] for slot in statistics["slots"].values())
        assert all(slot["busy_s"] > 0.0 for slot in statistics["slots"].values())


@pytest.mark.parametrize("depth", [2, 5])
@real_time
async def test_workers_run_what_was_sent_ahead(scheduler: EagerScheduler, tmp_path: Path, depth: int) -> None:
    """The same over two real workers, with the wire in between; one of them is drained in the middle."""
    scheduler.depth = depth
    with counting(2, scheduler, 60_000) as (model, ran):
        address = f"ipc://{tmp_path}/workers"
        port = RouterSocket()
        port.bind(address)

        def connect() -> DealerSocket:
            connection = DealerSocket()
            connection.connect(address)
            return connection

        async with trio.open_nursery() as nursery:
            clients = memory_server()
            server = await nursery.start(partial(serve_with(), clients=clients, workers=port))
            running = Running(server, clients, memory_server())
            workers = [
                Worker(
                    name,
                    SlotThreads(
                        models={"echo": model}, slots=1, dial=lambda wake: BlockingDealer(address, wake)
                    ),
                    connect,
                )
                for name in ("a", "b")
            ]
            left = trio.Event()
            nursery.start_soon(workers[1].run)
            nursery.start_soon(_until_left, workers[0], left)
            client = running.client()
            while not running.server.statistics()["models"]:
                await trio.lowlevel.checkpoint()
            await client.open_session()
            nursery.start_soon(_drain_when_busy, workers[0], scheduler)
            results = await ask_all(client)
            await left.wait()
            assert {} == running.server.statistics()["peers_lost"]
            nursery.cancel_scope.cancel()
        check_all(results, ran, scheduler)


async def _until_left(worker: Worker, left: trio.Event) -> None:
    await worker.run()
    left.set()


async def _drain_when_busy(worker: Worker, scheduler: EagerScheduler) -> None:
    """Once a slot has two batches, so that one is behind the other when it hears of it."""
    while not any(len(batches) >= 2 for batches in scheduler.slots.values()):
        await trio.lowlevel.checkpoint()
    worker.drain()
