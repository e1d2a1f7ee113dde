"""Workers are half-trusted: what cannot be true ends the one that said it, no client sees it, and its work is redone."""

from __future__ import annotations

import pytest
import trio
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import SIGNATURE, done, request
from tests.pipeline.serving.harness import memory_serving
from tests.pipeline.serving.raw_peer import ending

from shapestream.wire.messages import WORKER_PROTOCOL, Execute, Failure, Goodbye, Result, WorkerHello
from shapestream_engine.ports import InputPort, OutputPort, Rows
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature


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
        second.say(
            WorkerHello(
                protocol=WORKER_PROTOCOL, worker="second", pid=2, slots=1, models={"echo": other.to_dict()}
            )
        )
        await second.hear(Goodbye)
        assert ["first/0"] == list(running.server.statistics()["slots"])


@pytest.mark.parametrize("slots", [0, 1025, 2**62])
@virtual_time
async def test_a_worker_with_an_absurd_number_of_slots_is_refused(slots: int) -> None:
    """A number from outside must not decide how much the server allocates."""
    async with memory_serving() as running:
        worker = running.worker()
        models = {"echo": SIGNATURE.to_dict()}
        worker.say(WorkerHello(protocol=WORKER_PROTOCOL, worker="w", pid=1, slots=slots, models=models))
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
