"""Workers at their port: they join, run what they are given, fall silent, lie, and leave. All in memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import trio
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.harness import (
    SIGNATURE,
    RawPeer,
    Running,
    echo_tensors,
    echoed,
    memory_serving,
    request,
)
from trio.testing import wait_all_tasks_blocked

from shapestream.serving.models import ModelOptions
from shapestream.wire.messages import (
    BatchDone,
    BatchFailed,
    Cancel,
    CancelBatch,
    Execute,
    Failure,
    Goodbye,
    Heartbeat,
    Result,
    Unknown,
    WorkerDraining,
    WorkerHello,
)
from shapestream_engine.layout import Tensors
from shapestream_engine.rules import Rows
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import InputPort, ModelSignature, OutputPort


def done(
    execute: Execute,
    outputs: tuple[Tensors | None, ...] | None = None,
    *,
    busy_us: int = 600,
    preparations: int = 1,
) -> BatchDone:
    """The honest report of the echo model, or one with other outputs."""
    given = tuple(echoed(member.tensors) for member in execute.members) if outputs is None else outputs
    return BatchDone(
        batch=execute.batch,
        run_us=500,
        busy_us=busy_us,
        reallocations=1,
        preparations=preparations,
        calls=(),
        outputs=given,
    )


async def client_and_worker(running: Running) -> tuple[RawPeer, RawPeer]:
    """One of each, introduced."""
    worker = await running.joined()
    client = await running.greeted()
    return client, worker


@virtual_time
async def test_a_worker_runs_what_clients_send() -> None:
    """Execute carries the call's sizes and the requests' own tensors; the result names the worker's slot."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1), request(2, echo_tensors(rows=3)))
        execute = await worker.hear(Execute)
        assert ("echo", 0, (4, 4)) == (execute.model, execute.slot, execute.sizes)
        assert [1, 3] == [member.tensors.layout[0][2][0] for member in execute.members]
        worker.say(done(execute))
        results = [await client.hear(Result), await client.hear(Result)]
        assert [1, 2] == [result.sequence for result in results]
        assert {("w/0", 500, 2, 4)} == {
            (r.timings.worker, r.timings.run_us, r.timings.batch_requests, r.timings.batch_rows)
            for r in results
        }
        statistics = running.server.statistics()
        assert (1, 1, 1, 0) == (
            statistics["batches"],
            statistics["reallocations"],
            statistics["preparations"],
            statistics["prepared_hits"],
        )


@virtual_time
async def test_a_large_tensor_is_relayed_to_the_worker_untouched() -> None:
    """The very buffer that arrived from the client leaves for the worker: no copy in between."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        x = np.arange(262_144, dtype=np.float32).reshape(1, -1)
        scale = np.ones((1,), np.float32)
        tensors = Tensors(
            layout=((0, "f32", (1, 262_144)), (1, "f32", (1,))),
            buffers=(memoryview(x.data).cast("B"), scale.tobytes()),
        )
        client.say(request(1, tensors))
        execute = await worker.hear(Execute)
        relayed = np.frombuffer(execute.members[0].tensors.buffers[0], np.float32)
        assert np.shares_memory(relayed, x)
        worker.say(done(execute))
        result = await client.hear(Result)
        assert np.shares_memory(np.frombuffer(result.tensors.buffers[0], np.float32), x)


@virtual_time
async def test_deadlines_travel_as_the_time_that_remains() -> None:
    """A worker's clock is its own; None in its answer means that the time had passed."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1, remaining_ms=400), request(2))
        execute = await worker.hear(Execute)
        remaining = [member.remaining_ms for member in execute.members]
        assert remaining[0] is not None
        assert 390 <= remaining[0] <= 400
        assert remaining[1] is None
        await trio.sleep(0.3)  # and the way back
        worker.say(done(execute, (None, echoed(execute.members[1].tensors))))
        assert "deadline_exceeded" == (await client.hear(Failure)).code
        assert 2 == (await client.hear(Result)).sequence


@virtual_time
async def test_the_batch_of_a_silent_worker_runs_again_elsewhere() -> None:
    """Silence ends the worker; the client notices nothing but the wait."""
    async with memory_serving() as running:
        client, silent = await running.client_and_worker()
        client.say(request(1))
        await silent.hear(Execute)
        await trio.sleep(2.0)
        other = await running.joined("other")
        execute = await other.hear(Execute)
        other.say(done(execute))
        assert 1 == (await client.hear(Result)).sequence
        assert {"worker: silent": 1} == running.server.statistics()["peers_lost"]


@virtual_time
async def test_heartbeats_keep_a_busy_worker() -> None:
    """A batch may take longer than the silence that ends a worker."""
    async with memory_serving(worker_silence_s=3.0) as running:
        client, worker = await running.client_and_worker()
        client.say(request(1))
        execute = await worker.hear(Execute)
        for _ in range(8):
            await trio.sleep(1.0)
            worker.say(Heartbeat())
            client.say(Heartbeat())
        worker.say(done(execute))
        assert 1 == (await client.hear(Result)).sequence
        await worker.hear(Heartbeat)


@virtual_time
async def test_a_worker_that_leaves_gives_its_batch_back() -> None:
    """Goodbye is as good as silence, only faster; so is the loss of the connection."""
    async with memory_serving() as running:
        client, leaver = await running.client_and_worker()
        client.say(request(1))
        await leaver.hear(Execute)
        leaver.say(Goodbye())
        second = await running.joined("second")
        await second.hear(Execute)
        second.connection.close()
        third = running.worker()
        await trio.sleep(2.0)
        await third.join_as_worker("third")
        execute = await third.hear(Execute)
        third.say(done(execute))
        assert 1 == (await client.hear(Result)).sequence


@virtual_time
async def test_a_draining_worker_gets_nothing_new_and_is_dismissed_when_it_owes_nothing() -> None:
    """Its batch is answered, the next request goes to another worker, no attempt is lost, nobody counts as lost."""
    async with memory_serving() as running:
        client, leaver = await running.client_and_worker()
        client.say(request(1))
        execute = await leaver.hear(Execute)
        client.say(request(2))
        await wait_all_tasks_blocked()
        leaver.say(WorkerDraining())
        leaver.say(done(execute))
        await leaver.hear(Goodbye)
        assert [] == [entry for entry in leaver.heard if isinstance(entry, Execute)]
        assert 1 == (await client.hear(Result)).sequence
        second = await running.joined("second")
        await second.run_next()
        assert 2 == (await client.hear(Result)).sequence
        statistics = running.server.statistics()
        assert ({}, 0, 2) == (
            statistics["peers_lost"],
            statistics["batches_failed"],
            statistics["batches"],
        )


@virtual_time
async def test_a_batch_that_crosses_the_announcement_is_answered_before_the_goodbye() -> None:
    """Two batches run on two slots: the goodbye waits for both, also when one of them fails."""
    async with memory_serving() as running:
        worker, client = running.worker(), running.client()
        await worker.join_as_worker(slots=2)
        await client.open_session()
        for number in range(2):
            client.say(request(number))
            await wait_all_tasks_blocked()
        worker.say(WorkerDraining())
        first, second = await worker.hear(Execute), await worker.hear(Execute)
        worker.say(done(first))
        await wait_all_tasks_blocked()
        with trio.move_on_after(0.5):
            await worker.hear(Goodbye)
            raise AssertionError("dismissed with a batch unanswered")
        worker.say(BatchFailed(batch=second.batch, code="model_error", message="NaN in x"))
        await worker.hear(Goodbye)
        assert "model_error" == (await client.hear(Failure)).code


@virtual_time
async def test_an_idle_worker_that_drains_is_dismissed_at_once() -> None:
    """And may come back: it is known no more."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        worker.say(WorkerDraining())
        await worker.hear(Goodbye)
        worker.say(Heartbeat())
        await worker.hear(Unknown)
        await worker.join_as_worker()
        client.say(request(1))
        await worker.run_next()
        assert 1 == (await client.hear(Result)).sequence


@virtual_time
async def test_a_draining_worker_that_dies_loses_its_batch_like_any_other() -> None:
    """It runs again elsewhere."""
    async with memory_serving() as running:
        client, leaver = await running.client_and_worker()
        client.say(request(1))
        await leaver.hear(Execute)
        leaver.say(WorkerDraining())
        leaver.say(Goodbye())
        second = await running.joined("second")
        await second.run_next()
        assert 1 == (await client.hear(Result)).sequence
        assert {"worker: goodbye": 1} == running.server.statistics()["peers_lost"]


@virtual_time
async def test_a_request_that_loses_three_workers_fails() -> None:
    """It is not tried for ever."""
    async with memory_serving() as running:
        client = running.client()
        await running.worker().join_as_worker("first")
        await client.open_session()
        client.say(request(1))
        for name in ("a", "b", "c"):
            worker = await running.joined(name)
            client.say(Heartbeat())
            with trio.move_on_after(4):
                await worker.hear(Execute)
            client.say(Heartbeat())
            worker.say(Goodbye())
        failure = await client.hear(Failure)
        assert (1, "worker_lost", True) == (failure.sequence, failure.code, failure.retryable)


@virtual_time
async def test_the_idle_slots_of_a_worker_that_leaves_get_none_of_its_batches() -> None:
    """Its slots leave together: a lost batch neither goes to a slot that is gone nor uses up its attempts."""
    async with memory_serving() as running:
        client, leaver = running.client(), running.worker()
        await leaver.join_as_worker("leaver", slots=8)
        await client.open_session()
        client.say(request(1))
        await leaver.hear(Execute)
        leaver.say(Goodbye())
        second = await running.joined("second")
        await second.run_next()
        assert 1 == (await client.hear(Result)).sequence


@virtual_time
async def test_a_late_report_of_a_lost_attempt_changes_nothing() -> None:
    """The worker was given up; when it speaks again it is told to greet, and its result is nobody's."""
    async with memory_serving(worker_silence_s=2.0) as running:
        client, slow = await running.client_and_worker()
        client.say(request(1))
        execute = await slow.hear(Execute)
        await trio.sleep(4.0)
        slow.say(done(execute))
        await slow.hear(Unknown)
        assert 0 == running.server.statistics()["results"]
        await slow.join_as_worker()
        again = await slow.hear(Execute)
        assert again.batch != execute.batch
        slow.say(done(execute), done(again))
        assert 1 == (await client.hear(Result)).sequence
        assert 1 == running.server.statistics()["results"]


@virtual_time
async def test_a_cancelled_request_cancels_its_batch_on_the_worker() -> None:
    """The worker may stop early, and answers all the same."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1))
        execute = await worker.hear(Execute)
        client.say(Cancel(sequence=1))
        assert "cancelled" == (await client.hear(Failure)).code
        assert execute.batch == (await worker.hear(CancelBatch)).batch
        worker.say(BatchFailed(batch=execute.batch, code="cancelled", message="asked for"))
        client.say(request(2))
        await worker.run_next()
        assert 2 == (await client.hear(Result)).sequence


@virtual_time
async def test_a_model_error_of_a_worker_reaches_the_client_in_the_engines_words() -> None:
    """Alone in its batch, a refused request is not tried again."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1))
        execute = await worker.hear(Execute)
        worker.say(BatchFailed(batch=execute.batch, code="model_error", message="NaN in x"))
        failure = await client.hear(Failure)
        assert ("model_error", "NaN in x") == (failure.code, failure.message)


LIES: dict[str, Callable[[Tensors], tuple[Tensors | None, ...]]] = {
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


def _tensors(*layout: tuple[int, str, tuple[int, ...]]) -> Tensors:
    sizes = {"f32": 4, "f64": 8}
    buffers = tuple(bytes(int(np.prod(shape)) * sizes[kind]) for _, kind, shape in layout)
    return Tensors(layout=layout, buffers=buffers)


@pytest.mark.parametrize("lie", LIES)
@virtual_time
async def test_a_worker_whose_report_contradicts_the_model_is_cut_off(lie: str) -> None:
    """No client sees any of it; the batch runs again on an honest worker."""
    async with memory_serving() as running:
        client, liar = await running.client_and_worker()
        client.say(request(1), request(2))
        execute = await liar.hear(Execute)
        liar.say(done(execute, LIES[lie](echoed(echo_tensors()))))
        await liar.hear(Goodbye)
        honest = await running.joined("honest")
        for _ in range(2):
            await honest.run_next()
        results = [await client.hear(Result), await client.hear(Result)]
        assert {(1, "honest/0"), (2, "honest/0")} == {(r.sequence, r.timings.worker) for r in results}


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
        client, vandal = await running.client_and_worker()
        client.say(request(1))
        await vandal.hear(Execute)
        vandal.connection.send_nowait([b"\xc1"])
        await vandal.hear(Goodbye)
        honest = await running.joined("honest")
        await honest.run_next()
        assert 1 == (await client.hear(Result)).sequence


@virtual_time
async def test_two_slots_of_a_worker_run_at_the_same_time() -> None:
    """Each slot has one batch; the third request waits for the first slot that is free."""
    async with memory_serving() as running:
        worker, client = running.worker(), running.client()
        await worker.join_as_worker(slots=2)
        await client.open_session()
        for number in range(3):
            client.say(request(number))
            await wait_all_tasks_blocked()
        first, second = await worker.hear(Execute), await worker.hear(Execute)
        assert {0, 1} == {first.slot, second.slot}
        worker.say(done(second))
        third = await worker.hear(Execute)
        assert second.slot == third.slot
        worker.say(done(first), done(third))
        assert {0, 1, 2} == {(await client.hear(Result)).sequence for _ in range(3)}


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("slots", [2, 4])
@virtual_time
async def test_the_busy_slots_of_a_worker_that_leaves_get_none_of_its_batches(
    slots: int, behind: int
) -> None:
    """All overdue, so that any of them could be sent the next batch ahead: all of it waits for another worker instead."""
    async with memory_serving(models={"echo": ModelOptions(max_batch=1)}) as running:
        client, leaver = running.client(), running.worker()
        await leaver.join_as_worker("leaver", slots=slots)
        await client.open_session()
        total = 0
        for _ in range(20):  # so that it is known what a batch costs
            client.say(*[request(total + number) for number in range(slots)])
            executes = [await leaver.hear(Execute) for _ in range(slots)]
            await trio.sleep(0.01)
            leaver.say(*[done(execute, busy_us=10_000, preparations=0) for execute in executes])
            for _ in range(slots):
                await client.hear(Result)
            total += slots
        left = slots * (1 + 2 * behind)
        client.say(*[request(total + number) for number in range(left)])
        for _ in range(slots * (1 + behind)):
            await leaver.hear(Execute)
        await trio.sleep(1.0)
        leaver.say(Goodbye())
        await wait_all_tasks_blocked()
        second = await running.joined("second")
        for _ in range(left):
            await second.run_next(busy_us=10_000, preparations=0)
        results = [await client.hear(Result) for _ in range(left)]
        assert set(range(total, total + left)) == {result.sequence for result in results}
