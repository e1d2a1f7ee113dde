"""What the scheduler cannot work out: a coded failure of one request, one line of the log, and a server that goes on."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from structlog.testing import capture_logs
from tests.entries import Failure, Heartbeat, RequestEntry, ResultEntry, Unknown
from tests.pipeline.serving.clocks import real_time, virtual_time
from tests.pipeline.serving.echo_model import echo_tensors, request
from tests.pipeline.serving.harness import Running, memory_serving, serve_with
from tests.pipeline.serving.raw_peer import hello_of
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

import shapestream.serving.server
from shapestream.scheduling import Scheduler, events
from shapestream.scheduling.actions import Action, FailRequest, ReportFault
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.serving.slot_threads import SlotThreads, ThreadEnded
from shapestream.slices import at_once
from shapestream.telemetry.metrics import read_metrics
from shapestream.transport.memory import memory_server
from shapestream.transport.router import RouterSocket
from shapestream.transport.zeromq import BlockingDealer, DealerSocket
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.layout import Tensors
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_workers.worker import Worker

UNLUCKY = (1, 13)


class Faulty(Scheduler):
    """Works out nothing about requests of one shape."""

    def handle(self, event: events.Event, now: float) -> list[Action]:
        """As ever, but for these."""
        if not isinstance(event, events.RequestsArrived):
            return super().handle(event, now)
        unlucky = [arrival for arrival in event.requests if arrival.sizes == UNLUCKY]
        others = tuple([arrival for arrival in event.requests if arrival.sizes != UNLUCKY])
        actions = super().handle(events.RequestsArrived(requests=others), now)
        for arrival in unlucky:
            error = OverflowError("int too large to convert to float")
            actions.append(ReportFault(error=error, about="terms of a request", requests=(arrival.id,)))
            actions.append(FailRequest(request=arrival, code="internal", message="see the server's log"))
        return actions


@virtual_time
async def test_a_fault_is_one_line_and_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours of the same turn are answered, the counter moves, and the line carries the traceback."""

    def made(**options: Any) -> Scheduler:
        return Faulty(**options)

    monkeypatch.setattr(shapestream.serving.server, "Scheduler", made)
    with capture_logs() as lines:
        async with memory_serving() as running:
            client, worker = await running.client_and_worker()
            client.say(request(1), request(2, echo_tensors(1, 13)), request(3))
            failure = await client.hear(Failure)
            assert (2, "internal") == (failure.sequence, failure.code)
            await worker.run_next()
            assert [1, 3] == [result.sequence for result in await client.hear_each(ResultEntry, 2)]
            client.say(request(4))
            await worker.run_next()
            assert 4 == (await client.hear(ResultEntry)).sequence
            assert 1 == (await client.statistics())["faults"]
    (line,) = [line for line in lines if line["event"] == "scheduler fault"]
    assert ("error", "terms of a request", OverflowError) == (
        line["log_level"],
        line["about"],
        type(line["exc_info"]),
    )


@pytest.mark.parametrize("served_s", [0.0, 2.0])
@virtual_time
async def test_after_a_defect_a_worker_greets_anew(monkeypatch: pytest.MonkeyPatch, served_s: float) -> None:
    """The request that was being started is answered `internal`, the log has the error, and the next one is answered.

    A worker that has only just joined is told so with its next heartbeat: the defect may come back whenever slots join.
    """
    take = ModelQueue.take

    def broken(queue: ModelQueue, anchor: Any, members: Any, share_s: float | None) -> None:
        monkeypatch.setattr(ModelQueue, "take", take)
        members[0].start()
        raise OverflowError("in the midst of a start")

    with capture_logs() as lines:
        async with memory_serving() as running:
            client, worker = await running.client_and_worker()
            await trio.sleep(served_s)
            monkeypatch.setattr(ModelQueue, "take", broken)
            client.say(request(1))
            failure = await client.hear(Failure)
            assert (1, "internal") == (failure.sequence, failure.code)
            client.say(request(2))
            if not served_s:
                worker.say(Heartbeat())
            await worker.hear(Unknown)
            await worker.greet_as_worker(hello_of())
            await worker.run_next()
            assert 2 == (await client.hear(ResultEntry)).sequence
            told = await client.statistics()
            assert (1, {"worker: is to greet anew": 1}) == (told["faults"], told["peers_lost"])
    assert [OverflowError] == [type(line["exc_info"]) for line in lines if line["event"] == "scheduler fault"]


@virtual_time
async def test_after_a_defect_the_servers_own_slots_greet_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they ran is answered `internal`; they are ready again at once."""
    take, slots = ModelQueue.take, ScriptedSlots(slots=2)

    def broken(queue: ModelQueue, anchor: Any, members: Any, share_s: float | None) -> None:
        monkeypatch.setattr(ModelQueue, "take", take)
        raise OverflowError("in the midst of a start")

    async with memory_serving(slots) as running:
        client = await running.greeted()
        client.say(request(1))
        await slots.next_batch()
        monkeypatch.setattr(ModelQueue, "take", broken)
        client.say(request(2))
        failures = await client.hear_each(Failure, 2)
        assert [(1, "internal"), (2, "internal")] == [(one.sequence, one.code) for one in failures]
        client.say(request(3))
        slots.finish(await slots.next_batch())
        assert 3 == (await client.hear(ResultEntry)).sequence
        assert [] == running.server.readings.not_ready()


@virtual_time
async def test_own_slots_one_of_whose_threads_has_ended_cannot_greet_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log says so; they would wait for that one for ever."""
    add, slots = ModelQueue.add, ScriptedSlots(slots=2)

    def broken(*_: Any) -> None:
        monkeypatch.setattr(ModelQueue, "add", add)
        raise OverflowError("in the midst of an arrival")

    with capture_logs() as lines:
        async with memory_serving(slots) as running:
            client = await running.greeted()
            slots.tell(ThreadEnded(session=1, slot=0, batch=None))
            monkeypatch.setattr(ModelQueue, "add", broken)
            client.say(request(1))
            await client.hear(Failure)
            await wait_all_tasks_blocked()
            assert ["no slot for model 'echo'"] == running.server.readings.not_ready("echo")
    (line,) = [line for line in lines if line["event"] == "own slots end"]
    assert "they cannot all greet anew, since the thread of one has ended" == line["why"]


@asynccontextmanager
async def own_slots(model: CompiledModel, folder: Path) -> AsyncIterator[Running]:
    """A server whose own slot serves this model."""
    async with memory_serving(SlotThreads(models={"echo": model})) as running:
        yield running


@asynccontextmanager
async def a_worker(model: CompiledModel, folder: Path) -> AsyncIterator[Running]:
    """A server and a worker, with the wire in between."""
    address = f"ipc://{folder}/workers"
    port, clients = RouterSocket(), memory_server()
    port.bind(address)

    def connect() -> DealerSocket:
        connection = DealerSocket()
        connection.connect(address)
        return connection

    slots = SlotThreads(models={"echo": model}, dial=lambda wake: BlockingDealer(address, wake))
    async with trio.open_nursery() as nursery:
        server = await nursery.start(partial(serve_with(), clients=clients, workers=port))
        nursery.start_soon(Worker("w", slots, connect).run)
        while server.readings.not_ready():
            await trio.lowlevel.checkpoint()
        yield Running(server, clients, memory_server())
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("served_by", [own_slots, a_worker])
@real_time
async def test_a_call_that_runs_while_the_scheduler_starts_over_ends_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, served_by: Any
) -> None:
    """Its report is dropped, then its slot greets anew; the next request is answered there."""
    add, began, may_end = ModelQueue.add, threading.Event(), threading.Event()
    ran: list[int] = []

    def double(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        ran.append(int(x[0]))
        began.set()
        assert may_end.wait(60.0)
        doubled: np.ndarray[Any, Any] = x * 2
        return doubled

    def broken(*_: Any) -> None:
        monkeypatch.setattr(ModelQueue, "add", add)
        raise OverflowError("in the midst of an arrival")

    def number(value: int) -> RequestEntry:
        return request(value, Tensors(layout=((0, "i64", (1,)),), buffers=(np.int64(value).tobytes(),)))

    model = compile_model(
        ModelSpec(
            name="echo",
            model=double,
            inputs={"x": InputSpec(shape="batch:1..8", element_type="i64")},
            outputs={"y": OutputSpec(shape="batch", element_type="i64")},
        ),
        slots=1,
    )
    async with served_by(model, tmp_path) as running:
        client = await running.greeted()
        client.say(number(1))
        assert await trio.to_thread.run_sync(began.wait, 60.0)
        monkeypatch.setattr(ModelQueue, "add", broken)
        client.say(number(2))
        failures = await client.hear_each(Failure, 2)
        assert [(1, "internal"), (2, "internal")] == [(one.sequence, one.code) for one in failures]
        client.say(number(3))
        may_end.set()
        assert 3 == (await client.hear(ResultEntry)).sequence
    model.close()
    assert [1, 3] == ran


@virtual_time
async def test_failed_batches_count_the_time_that_they_held_their_slot() -> None:
    """A batch that fails after two seconds shows in the metric and in the last minute, by model."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        client = await running.greeted()
        client.say(request(1))
        batch = await slots.next_batch()
        await trio.sleep(2.0)
        slots.fail(batch)
        await client.hear(Failure)
        samples = {
            metric.name: found for metric, found in at_once(read_metrics(running.server.readings.snapshot()))
        }
        assert [(("echo",), 2.0)] == samples["shapestream_batches_failed_seconds_total"]
        told = await client.statistics()
        assert 2_000_000 == told["last_minute"]["models"]["echo"]["failed_us"]
