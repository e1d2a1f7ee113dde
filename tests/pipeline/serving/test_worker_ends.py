"""How workers end, as far as the server is told: processes of its own, hung ones, and models that nobody serves any more."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.harness import RawPeer, Running, done, memory_serving, request
from trio.testing import MockClock, wait_all_tasks_blocked

from shapestream.serving.models import ModelOptions
from shapestream.serving.process_owner import LastState
from shapestream.wire.messages import (
    BatchDone,
    BatchFailed,
    Cancel,
    CancelBatch,
    Execute,
    Failure,
    Goodbye,
    Heartbeat,
    ModelOpened,
    ModelRefused,
    OpenModel,
    Result,
    WorkerHello,
)


class Owner:
    """Owns the processes that it is told to own, and notes whom it should kill."""

    def __init__(self, *owned: str) -> None:
        self.owned = set(owned)
        self.killed: list[str] = []

    def owns(self, worker: str, pid: int) -> bool:
        """By name; all pids are 1 here."""
        return worker in self.owned

    def kill(self, worker: str, pid: int, reason: str) -> None:
        """Notes it."""
        self.killed.append(worker)


async def beat(*peers: RawPeer) -> None:
    """They live, until the test is over."""
    while True:
        for peer in peers:
            peer.say(Heartbeat())
        await trio.sleep(0.5)


async def hung(running: Running) -> tuple[RawPeer, RawPeer, Execute]:
    """A client, and a worker that does not end its batch, nor says anything when that is cancelled."""
    client, worker = await running.client_and_worker()
    client.say(request(1))
    execute = await worker.hear(Execute)
    return client, worker, execute


@pytest.mark.parametrize("died", [True, False])
@virtual_time
async def test_the_end_of_a_process_is_known_at_once(died: bool) -> None:
    """Its batch runs elsewhere without waiting for its silence; what was known of it is returned."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1))
        await worker.hear(Execute)
        other = await running.joined("other")
        began = trio.current_time()
        assert LastState(busy=True) == await running.server.worker_ended("w", 1, died=died)
        await other.run_next()
        assert 1 == (await client.hear(Result)).sequence
        assert trio.current_time() - began < 0.5
        why = "worker: its process died" if died else "worker: its process ended"
        assert {why: 1} == running.server.statistics()["peers_lost"]


@virtual_time
async def test_the_last_words_of_a_process_are_read_before_it_leaves() -> None:
    """What it had answered does not run again, and is not what it died of."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1))
        execute = await worker.hear(Execute)
        async with trio.open_nursery() as nursery:
            states: list[LastState] = []

            async def end() -> None:
                states.append(await running.server.worker_ended("w", 1, died=True))

            nursery.start_soon(end)
            await trio.sleep(0.01)
            worker.say(done(execute))
            assert 1 == (await client.hear(Result)).sequence
        assert not states[0].busy
        assert states[0].answered_at is not None
        assert [] == list(running.server.statistics()["slots"])


@virtual_time
async def test_the_end_of_a_process_that_is_not_here_changes_nothing() -> None:
    """It has left before, or was never welcomed; one of the same name with another pid is another one."""
    async with memory_serving() as running:
        await running.client_and_worker()
        assert LastState() == await running.server.worker_ended("w", 2, died=True)
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
        worker.connection.close()
        client.say(Cancel(sequence=1), Cancel(sequence=2))
        await client.hear(Failure)
        await wait_all_tasks_blocked()
        assert {} == running.server.statistics()["peers_lost"]
        assert 2 == len(execute.members)
        if tells:
            await running.server.worker_ended("w", 1, died=True)
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
        client, worker, execute = await hung(running)
        nursery.start_soon(beat, client, worker)
        assert execute.batch == (await worker.hear(CancelBatch)).batch
        await trio.sleep(6.0)
        assert ["w"] == owner.killed
        other = await running.joined("other")
        nursery.start_soon(beat, other)
        await running.server.worker_ended("w", 1, died=True)
        await other.run_next()
        assert 1 == (await client.hear(Result)).sequence
        nursery.cancel_scope.cancel()


@virtual_time
async def test_a_worker_that_dialled_in_and_hangs_is_cut_off_and_not_welcomed_again() -> None:
    """Its slot is still held; another one, also under its name but for the pid, is welcome."""
    async with memory_serving() as running, trio.open_nursery() as nursery:
        client, worker, _ = await hung(running)
        nursery.start_soon(beat, client, worker)
        await worker.hear(CancelBatch)
        await worker.hear(Goodbye)
        assert {"worker: hangs": 1} == running.server.statistics()["peers_lost"]
        again = running.worker()
        again.say(WorkerHello(worker="w", pid=1, slots=1, models={}))
        await again.hear(Goodbye)
        fresh = await running.joined("w-2")
        nursery.start_soon(beat, fresh)
        await fresh.run_next()
        assert 1 == (await client.hear(Result)).sequence
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


# ---------------------------------------------------------------- models that nobody serves any more

TWO_MODELS = {"echo": ModelOptions(), "later": ModelOptions()}


@virtual_time
async def test_a_model_whose_workers_were_given_up_is_unavailable_at_once() -> None:
    """What waits for it, what comes, and whoever opens it are told why; other models are not concerned."""
    async with memory_serving(models=TWO_MODELS) as running:
        client, worker = await running.client_and_worker()
        waiter = running.client()
        await waiter.open_session(b"d" * 16, model=None)
        waiter.say(OpenModel(name="later"))
        client.say(request(1))
        await worker.hear(Execute)
        client.say(request(2))
        await wait_all_tasks_blocked()
        running.server.model_given_up("echo", "its workers die")
        await wait_all_tasks_blocked()
        assert {} == running.server.statistics()["unavailable"], "it is served yet"
        worker.say(Goodbye())
        answers = {(await client.hear(Failure)).sequence for _ in range(2)}
        assert {1, 2} == answers
        client.say(request(3), OpenModel(name="echo"))
        failure = await client.hear(Failure)
        assert (3, "unavailable", True) == (failure.sequence, failure.code, failure.retryable)
        assert "its workers die" in failure.message
        assert "unavailable" == (await client.hear(ModelRefused)).code
        assert ["echo"] == list(running.server.statistics()["unavailable"])
        running.server.model_given_up("later", "it never came up")
        refused = await waiter.hear(ModelRefused)
        assert ("later", "unavailable") == (refused.name, refused.code)


@virtual_time
async def test_a_worker_that_dials_in_makes_its_model_available_again() -> None:
    """Whatever was said before."""
    async with memory_serving(models=TWO_MODELS) as running:
        client, worker = await running.client_and_worker()
        worker.say(Goodbye())
        await wait_all_tasks_blocked()
        running.server.model_given_up("echo", "its workers die")
        client.say(request(1))
        assert "unavailable" == (await client.hear(Failure)).code
        other = await running.joined("other")
        client.say(OpenModel(name="echo"), request(2))
        assert "echo" == (await client.hear(ModelOpened)).name
        await other.run_next()
        assert 2 == (await client.hear(Result)).sequence
        assert {} == running.server.statistics()["unavailable"]


# ---------------------------------------------------------------- reports that cannot be true


def told(execute: Execute, **changes: Any) -> BatchDone:
    """An honest report but for some fields."""
    honest = done(execute)
    fields = {name: getattr(honest, name) for name in BatchDone.__slots__}
    return BatchDone(**{**fields, **changes})


LIES: dict[str, Any] = {
    "a batch that it was never sent": lambda execute: [told(execute, batch=execute.batch + 1)],
    "a failure of a batch that it was never sent": lambda execute: [
        BatchFailed(batch=execute.batch + 7, code="model_error", message="")
    ],
    "longer than it was there": lambda execute: [told(execute, busy_us=5_000_000)],
    "calls that took longer than it was there": lambda execute: [told(execute, run_us=5_000_000)],
    "more calls than rows": lambda execute: [told(execute, calls=((3, (1, 4)),))],
    "calls of another model's sizes": lambda execute: [told(execute, calls=((1, (1, 4, 4)),))],
    "more preparations than calls": lambda execute: [told(execute, preparations=2)],
    "more reallocations than tensors": lambda execute: [told(execute, reallocations=4)],
}


@pytest.mark.parametrize("lie", LIES)
@virtual_time
async def test_a_report_that_cannot_be_true_ends_the_worker_and_its_work_is_redone(lie: str) -> None:
    """No client sees any of it."""
    async with memory_serving() as running:
        client, liar = await running.client_and_worker()
        client.say(request(1))
        liar.say(*LIES[lie](await liar.hear(Execute)))
        await liar.hear(Goodbye)
        honest = await running.joined("honest")
        await honest.run_next()
        result = await client.hear(Result)
        assert (1, "honest/0") == (result.sequence, result.timings.worker)
        assert {"worker: sent what cannot be accepted": 1} == running.server.statistics()["peers_lost"]


@virtual_time
async def test_a_batch_that_is_answered_twice_ends_the_worker() -> None:
    """The first answer counts."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1))
        execute = await worker.hear(Execute)
        worker.say(done(execute), done(execute))
        assert 1 == (await client.hear(Result)).sequence
        await worker.hear(Goodbye)
        assert 1 == running.server.statistics()["results"]


@virtual_time
async def test_a_member_that_is_left_out_before_its_deadline_ends_the_worker() -> None:
    """It would cost the request its answer."""
    async with memory_serving() as running:
        client, liar = await running.client_and_worker()
        client.say(request(1, remaining_ms=60_000))
        execute = await liar.hear(Execute)
        liar.say(done(execute, (None,)))
        await liar.hear(Goodbye)
        honest = await running.joined("honest")
        await honest.run_next()
        assert 1 == (await client.hear(Result)).sequence
