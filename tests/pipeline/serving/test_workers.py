"""Workers at their port: they join, run what they are given, and answer. All in memory."""

from __future__ import annotations

import numpy as np
import trio
from tests.entries import (
    Cancel,
    CancelBatchEntry,
    Execute,
    Failure,
    Heartbeat,
    ResultEntry,
    batch_failed,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import done, echo_tensors, echoed, request
from tests.pipeline.serving.harness import memory_serving
from trio.testing import wait_all_tasks_blocked

from shapestream_engine.layout import Tensors


@virtual_time
async def test_a_worker_runs_what_clients_send() -> None:
    """Execute carries the call's sizes and the requests' own tensors; the result names the worker's slot."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1), request(2, echo_tensors(rows=3)))
        execute = await worker.hear(Execute)
        assert ("echo", 0, (4, 4)) == (execute.model, execute.slot, execute.sizes)
        assert [1, 3] == [member.layout[0][2][0] for member in execute.members]
        await trio.sleep(0.001)  # of the virtual clock: no batch takes longer than it was there
        worker.say(done(execute))
        results = [await client.hear(ResultEntry), await client.hear(ResultEntry)]
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
        relayed = np.frombuffer(execute.members[0].buffers[0], np.float32)
        assert np.shares_memory(relayed, x)
        worker.say(done(execute))
        result = await client.hear(ResultEntry)
        assert np.shares_memory(np.frombuffer(result.tensors.buffers[0], np.float32), x)


@virtual_time
async def test_deadlines_travel_beside_the_time_of_sending() -> None:
    """Both by the server's clock; None in the worker's answer means that the time had passed."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        await trio.sleep(0.5)
        client.say(request(1, remaining_ms=400), request(2))
        execute = await worker.hear(Execute)
        deadlines = execute.start_before
        assert deadlines is not None
        assert deadlines[0] is not None
        assert 390_000 <= round(deadlines[0] * 1e6) - execute.sent_us <= 400_000
        assert deadlines[1] is None
        await trio.sleep(0.3)  # and the way back
        worker.say(done(execute, (None, echoed(execute.members[1]))))
        assert "deadline_exceeded" == (await client.hear(Failure)).code
        assert 2 == (await client.hear(ResultEntry)).sequence


@virtual_time
async def test_heartbeats_keep_a_busy_worker() -> None:
    """A batch may take longer than the silence that ends a worker."""
    async with memory_serving(worker_silence_s=3.0) as running:
        client, worker, execute = await running.busy_worker()
        for _ in range(8):
            await trio.sleep(1.0)
            worker.say(Heartbeat())
            client.say(Heartbeat())
        worker.say(done(execute))
        assert 1 == (await client.hear(ResultEntry)).sequence
        await worker.hear(Heartbeat)


@virtual_time
async def test_two_slots_of_a_worker_run_at_the_same_time() -> None:
    """Each slot has one batch; the third request waits for the first slot that is free."""
    async with memory_serving() as running:
        worker, client = await running.joined(slots=2), await running.greeted()
        for number in range(3):
            client.say(request(number))
            await wait_all_tasks_blocked()
        first, second = await worker.hear(Execute), await worker.hear(Execute)
        assert {0, 1} == {first.slot, second.slot}
        worker.say(done(second))
        third = await worker.hear(Execute)
        assert second.slot == third.slot
        worker.say(done(first), done(third))
        assert {0, 1, 2} == set(await client.sequences(3))


@virtual_time
async def test_a_cancelled_request_cancels_its_batch_on_the_worker() -> None:
    """The worker may stop early, and answers all the same."""
    async with memory_serving() as running:
        client, worker, execute = await running.busy_worker()
        client.say(Cancel(sequence=1))
        assert "cancelled" == (await client.hear(Failure)).code
        assert execute.batch == (await worker.hear(CancelBatchEntry)).batch
        worker.say(batch_failed(execute, "cancelled", "asked for"))
        client.say(request(2))
        await worker.run_next()
        assert 2 == (await client.hear(ResultEntry)).sequence


@virtual_time
async def test_a_model_error_of_a_worker_reaches_the_client_in_the_engines_words() -> None:
    """Alone in its batch, a refused request is not tried again."""
    async with memory_serving() as running:
        client, worker, execute = await running.busy_worker()
        worker.say(batch_failed(execute, "model_error", "NaN in x"))
        failure = await client.hear(Failure)
        assert ("model_error", "NaN in x") == (failure.code, failure.message)


@virtual_time
async def test_the_latest_deadline_that_a_client_can_write_is_none_that_a_worker_cannot_read() -> None:
    """Seconds are floats: without a bound the milliseconds of it would be one more than the protocol has."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1, remaining_ms=2**63 - 1))
        await worker.run_next()
        assert 1 == (await client.hear(ResultEntry)).sequence


@virtual_time
async def test_times_are_clipped_to_the_time_since_the_batch_was_sent() -> None:
    """A clock that runs fast, or counts in another unit, is no reason to end a worker; nobody is told what cannot be."""
    async with memory_serving() as running:
        client, worker, execute = await running.busy_worker()
        await trio.sleep(0.5)
        worker.say(done(execute, run_us=7_000_000, busy_us=36_000_000_000))
        timings = (await client.hear(ResultEntry)).timings
        assert (500_000, 500_000) == (timings.run_us, timings.total_us)
        statistics = running.server.statistics()
        assert {"w/0": {"batches": 1, "busy_s": 0.5}} == statistics["slots"]
        assert {} == statistics["peers_lost"]
