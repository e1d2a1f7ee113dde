"""Workers are half-trusted: what cannot be true ends the one that said it, no client sees it, and its work is redone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import trio
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.harness import (
    SIGNATURE,
    done,
    echo_tensors,
    echoed,
    ending,
    memory_serving,
    request,
)

from shapestream.wire.messages import BatchFailed, Entry, Execute, Failure, Goodbye, Result, WorkerHello
from shapestream_engine.layout import Tensors
from shapestream_engine.ports import Rows
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import InputPort, ModelSignature, OutputPort


def _tensors(*layout: tuple[int, str, tuple[int, ...]]) -> Tensors:
    sizes = {"f32": 4, "f64": 8}
    buffers = tuple(bytes(int(np.prod(shape)) * sizes[kind]) for _, kind, shape in layout)
    return Tensors(layout=layout, buffers=buffers)


CONTRADICTIONS: dict[str, Callable[[Tensors], tuple[Tensors | None, ...]]] = {
    "one result too few": lambda good: (good,),
    "one result too many": lambda good: (good, good, good),
    "no result without a deadline": lambda good: (good, None),
    "another number of rows": lambda good: (good, _tensors((0, "f32", (2, 4)))),
    "another size of a named dimension": lambda good: (good, _tensors((0, "f32", (1, 5)))),
    "another rank": lambda good: (good, _tensors((0, "f32", (4,)))),
    "another element type": lambda good: (good, _tensors((0, "f64", (1, 4)))),
    "another port": lambda good: (good, _tensors((1, "f32", (1, 4)))),
    "an output too many": lambda good: (good, _tensors((0, "f32", (1, 4)), (1, "f32", (1, 4)))),
    "an output too few": lambda good: (good, _tensors()),
}


@pytest.mark.parametrize("lie", CONTRADICTIONS)
@virtual_time
async def test_a_worker_whose_report_contradicts_the_model_is_cut_off(lie: str) -> None:
    """No client sees any of it; the batch runs again on an honest worker."""
    async with memory_serving() as running:
        client, liar = await running.client_and_worker()
        client.say(request(1), request(2))
        execute = await liar.hear(Execute)
        liar.say(done(execute, CONTRADICTIONS[lie](echoed(echo_tensors()))))
        await liar.hear(Goodbye)
        honest = await running.joined("honest")
        for _ in range(2):
            await honest.run_next()
        results = await client.hear_each(Result, 2)
        assert {(1, "honest/0"), (2, "honest/0")} == {(r.sequence, r.timings.worker) for r in results}


IMPOSSIBLE: dict[str, Callable[[Execute], Entry]] = {
    "a batch that it was never sent": lambda execute: done(execute, batch=execute.batch + 1),
    "a failure of a batch that it was never sent": lambda execute: BatchFailed(
        batch=execute.batch + 7, code="model_error", message=""
    ),
    "more calls than rows": lambda execute: done(execute, calls=((3, (1, 4)),)),
    "calls of another model's sizes": lambda execute: done(execute, calls=((1, (1, 4, 4)),)),
    "more preparations than calls": lambda execute: done(execute, preparations=2),
    "more reallocations than tensors": lambda execute: done(execute, reallocations=4),
}


@pytest.mark.parametrize("lie", IMPOSSIBLE)
@virtual_time
async def test_a_report_that_cannot_be_true_ends_the_worker_and_its_work_is_redone(lie: str) -> None:
    """No client sees any of it."""
    async with memory_serving() as running:
        client, liar, execute = await running.busy_worker()
        liar.say(IMPOSSIBLE[lie](execute))
        await liar.hear(Goodbye)
        await running.assert_redone(client)
        assert {"worker: sent what cannot be accepted": 1} == running.server.statistics()["peers_lost"]


@virtual_time
async def test_a_batch_that_is_answered_twice_ends_the_worker() -> None:
    """The first answer counts."""
    async with memory_serving() as running:
        client, worker, execute = await running.busy_worker()
        worker.say(done(execute), done(execute))
        assert 1 == (await client.hear(Result)).sequence
        await worker.hear(Goodbye)
        assert 1 == running.server.statistics()["results"]


@virtual_time
async def test_times_are_clipped_to_the_time_since_the_batch_was_sent() -> None:
    """A clock that runs fast, or counts in another unit, is no reason to end a worker; nobody is told what cannot be."""
    async with memory_serving() as running:
        client, worker, execute = await running.busy_worker()
        await trio.sleep(0.5)
        worker.say(done(execute, run_us=7_000_000, busy_us=36_000_000_000))
        timings = (await client.hear(Result)).timings
        assert (500_000, 500_000) == (timings.run_us, timings.total_us)
        statistics = running.server.statistics()
        assert {"w/0": {"batches": 1, "busy_s": 0.5}} == statistics["slots"]
        assert {} == statistics["peers_lost"]


@virtual_time
async def test_a_member_that_is_left_out_counts_as_late_by_the_workers_own_clock() -> None:
    """Clocks differ, so the server does not judge; only a member that has a deadline may be left out."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1, remaining_ms=60_000))
        worker.say(done(await worker.hear(Execute), (None,)))
        assert (1, "deadline_exceeded") == ending(await client.hear(Failure))


@virtual_time
async def test_a_worker_with_another_signature_of_a_known_model_is_refused() -> None:
    """Two workers that mean different things by one name would give answers that nobody can tell apart."""
    other = ModelSignature(
        name="echo",
        inputs=(InputPort("x", "i64", NamedShape.parse("batch:1..64")),),
        outputs=(OutputPort("y", "i64", NamedShape.parse("batch"), Rows()),),
    )
    async with memory_serving() as running:
        await running.worker().join_as_worker("first")
        second = running.worker()
        second.say(WorkerHello(worker="second", pid=2, slots=1, models={"echo": other.to_dict()}))
        await second.hear(Goodbye)
        assert ["first/0"] == list(running.server.statistics()["slots"])


@pytest.mark.parametrize("slots", [0, 1025, 2**62])
@virtual_time
async def test_a_worker_with_an_absurd_number_of_slots_is_refused(slots: int) -> None:
    """A number from outside must not decide how much the server allocates."""
    async with memory_serving() as running:
        worker = running.worker()
        models = {"echo": SIGNATURE.to_dict()}
        worker.say(WorkerHello(worker="w", pid=1, slots=slots, models=models))
        await worker.hear(Goodbye)
        assert {} == running.server.statistics()["slots"]


@virtual_time
async def test_a_worker_that_sends_garbage_is_cut_off_and_its_batch_runs_elsewhere() -> None:
    """Half-trusted: unreadable bytes end the worker, not the server."""
    async with memory_serving() as running:
        client, vandal, _ = await running.busy_worker()
        vandal.connection.send_nowait([b"\xc1"])
        await vandal.hear(Goodbye)
        await running.assert_redone(client)
