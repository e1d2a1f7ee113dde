"""How processes of workers end, as far as the server is told: they die, hang, or stay silent."""

from __future__ import annotations

import pytest
import trio
from tests.entries import (
    Cancel,
    CancelBatchEntry,
    Execute,
    Failure,
    Goodbye,
    Heartbeat,
    ResultEntry,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import done, request
from tests.pipeline.serving.harness import Owner, memory_serving
from tests.pipeline.serving.raw_peer import RawPeer, hello_of
from trio.testing import MockClock, wait_all_tasks_blocked

from shapestream.serving.worker_port import LastState


async def beat(*peers: RawPeer) -> None:
    """They live, until the test is over."""
    while True:
        for peer in peers:
            peer.say(Heartbeat())
        await trio.sleep(0.5)


@pytest.mark.parametrize("died", [True, False])
@virtual_time
async def test_the_end_of_a_process_is_known_at_once(died: bool) -> None:
    """Its batch runs elsewhere without waiting for its silence; what was known of it is returned."""
    async with memory_serving() as running:
        client, _, _ = await running.busy_worker()
        other = await running.joined("other")
        began = trio.current_time()
        assert LastState(busy=True) == await running.server.worker_ended("w", died=died)
        await other.run_next()
        assert 1 == (await client.hear(ResultEntry)).sequence
        assert trio.current_time() - began < 0.5
        why = "worker: its process died" if died else "worker: its process ended"
        assert {why: 1} == running.server.statistics()["peers_lost"]


@virtual_time
async def test_the_last_words_of_a_process_are_read_before_it_leaves() -> None:
    """What it had answered does not run again, and is not what it died of."""
    async with memory_serving() as running:
        client, worker, execute = await running.busy_worker()
        async with trio.open_nursery() as nursery:
            states: list[LastState] = []

            async def end() -> None:
                states.append(await running.server.worker_ended("w", died=True))

            nursery.start_soon(end)
            await trio.sleep(0.01)
            worker.say(done(execute))
            assert 1 == (await client.hear(ResultEntry)).sequence
        assert not states[0].busy
        assert states[0].answered_at is not None
        assert [] == list(running.server.statistics()["slots"])


@virtual_time
async def test_the_end_of_a_process_that_is_not_here_changes_nothing() -> None:
    """It has left before, or was never welcomed. Another one, of the same pid, stays."""
    async with memory_serving() as running:
        await running.client_and_worker()
        assert LastState() == await running.server.worker_ended("other", died=True)
        assert ["w/0"] == list(running.server.statistics()["slots"])


@pytest.mark.parametrize("tells", [True, False])
@virtual_time
async def test_a_process_of_our_own_that_cannot_be_reached_is_waited_for(tells: bool) -> None:
    """How it ended says whether its batch is to blame; if nothing is heard of it, its connection broke."""
    async with memory_serving() as running:
        running.server.own_processes(Owner("w"))
        client, worker = await running.client_and_worker()
        client.say(request(1), request(2))
        execute = await worker.hear(Execute)
        worker.close()
        client.say(Cancel(sequence=1), Cancel(sequence=2))
        await client.hear(Failure)
        await wait_all_tasks_blocked()
        assert {} == running.server.statistics()["peers_lost"]
        assert 2 == len(execute.members)
        if tells:
            await running.server.worker_ended("w", died=True)
        else:
            await trio.sleep(3.0)
        why = "worker: its process died" if tells else "worker: gone"
        assert {why: 1} == running.server.statistics()["peers_lost"]


@virtual_time
async def test_a_process_of_our_own_that_hangs_is_killed() -> None:
    """First its batch is cancelled; its slots get nothing more, and its end is told like any other."""
    owner = Owner("w")
    async with memory_serving() as running, trio.open_nursery() as nursery:
        running.server.own_processes(owner)
        client, worker, execute = await running.busy_worker()
        nursery.start_soon(beat, client, worker)
        assert execute.batch == (await worker.hear(CancelBatchEntry)).batch
        await trio.sleep(6.0)
        assert ["w"] == owner.killed
        other = await running.joined("other")
        nursery.start_soon(beat, other)
        await running.server.worker_ended("w", died=True)
        await other.run_next()
        assert 1 == (await client.hear(ResultEntry)).sequence
        nursery.cancel_scope.cancel()


@virtual_time
async def test_a_worker_that_dialled_in_and_hangs_is_cut_off_and_not_welcomed_again() -> None:
    """Its slot is still held; a process that was started since, of the same pid, is welcome."""
    async with memory_serving() as running, trio.open_nursery() as nursery:
        client, worker, _ = await running.busy_worker()
        nursery.start_soon(beat, client, worker)
        await worker.hear(CancelBatchEntry)
        await worker.hear(Goodbye)
        assert {"worker: hangs": 1} == running.server.statistics()["peers_lost"]
        again = running.worker()
        again.say(hello_of())
        await again.hear(Goodbye)
        fresh = await running.joined("w-2")
        nursery.start_soon(beat, fresh)
        await fresh.run_next()
        assert 1 == (await client.hear(ResultEntry)).sequence
        nursery.cancel_scope.cancel()


@virtual_time
async def test_a_process_of_our_own_that_stays_silent_is_killed() -> None:
    """It is lost after one silence, and may come back; after ten it is replaced. One that came back is left alone."""
    owner = Owner("w", "back")
    async with memory_serving(worker_silence_s=2.0) as running:
        running.server.own_processes(owner)
        await running.worker().join_as_worker("w")
        back = await running.joined("back")
        await trio.sleep(10.0)
        assert [] == list(running.server.statistics()["slots"])
        assert [] == owner.killed
        await back.join_as_worker("back")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beat, back)
            await trio.sleep(30.0)
            nursery.cancel_scope.cancel()
        assert ["w"] == owner.killed


@virtual_time
async def test_a_server_that_stood_still_reads_before_it_calls_anybody_silent() -> None:
    """Stopped for a minute, say: what the worker said meanwhile is there."""
    async with memory_serving() as running:
        _, worker = await running.client_and_worker()
        await wait_all_tasks_blocked()
        worker.say(Heartbeat())
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        clock.jump(60.0)
        await trio.sleep(1.0)
        assert ["w/0"] == list(running.server.statistics()["slots"])
