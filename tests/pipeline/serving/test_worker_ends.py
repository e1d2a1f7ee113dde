"""How workers leave: silent, with a goodbye, drained, or in the middle of a batch, which then runs elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from tests.entries import (
    Entry,
    Execute,
    Failure,
    Goodbye,
    Heartbeat,
    ModelOpened,
    OpenModel,
    ResultEntry,
    Unknown,
    WorkerDraining,
    WorkerRefused,
    batch_failed,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import done, model_settings, request
from tests.pipeline.serving.harness import memory_serving
from tests.pipeline.serving.raw_peer import RawPeer, hello_of, verdict
from trio.testing import wait_all_tasks_blocked


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize(
    ("leave", "why"),
    [
        (lambda worker: None, "silent"),
        (RawPeer.close, "gone"),
        (lambda worker: worker.say(Goodbye()), "goodbye"),
        (lambda worker: worker.say(WorkerDraining(), Goodbye()), "goodbye"),
    ],
    ids=["silence", "lost connection", "goodbye", "goodbye while it drains"],
)
@virtual_time
async def test_the_batch_of_a_worker_that_leaves_runs_again_elsewhere(
    leave: Callable[[RawPeer], None], why: str, slots: int
) -> None:
    """The client notices nothing but the wait. Its slots leave together: no idle one of them gets the batch."""
    async with memory_serving() as running:
        leaver, client = await running.joined("leaver", slots), await running.greeted()
        client.say(request(1))
        await leaver.hear(Execute)
        leave(leaver)
        await trio.sleep(2.0)
        await running.assert_redone(client)
        statistics = running.server.statistics()
        assert ({f"worker: {why}": 1}, 0) == (statistics["peers_lost"], statistics["batches_failed"])


@pytest.mark.parametrize(
    ("said", "counted"),
    [([WorkerDraining()], "drained"), ([Goodbye()], "drained"), ([Heartbeat()], "lost")],
    ids=["draining", "goodbye", "silence"],
)
@pytest.mark.parametrize("busy", [False, True])
@virtual_time
async def test_the_end_of_a_worker_that_dialled_in_is_counted(
    busy: bool, said: list[Entry], counted: str
) -> None:
    """A worker that says that it leaves has drained, whether it has a batch or not; a silent one is lost."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        if busy:
            client.say(request(1))
            execute = await worker.hear(Execute)
        worker.say(*said)
        if busy and counted == "drained":
            await wait_all_tasks_blocked()
            worker.say(done(execute))
        await trio.sleep(6.0)
        assert [] == list(running.server.statistics()["slots"])
        assert {counted: 1} == +running.server.readings.snapshot().counters.dialled_in_ends


@virtual_time
async def test_a_batch_whose_worker_cannot_be_reached_goes_to_another_in_the_same_turn() -> None:
    """That the first is gone shows when its batch is sent, after all that the turn had made ready was."""
    async with memory_serving() as running:
        client, first = await running.client_and_worker()
        second = await running.joined("second", slots=3)
        first.close()
        began = trio.current_time()
        for number in range(3):
            client.say(request(number))
            await second.hear(Execute)
        assert trio.current_time() == began
        assert {"worker: gone": 1} == running.server.statistics()["peers_lost"]


@virtual_time
async def test_a_draining_worker_gets_nothing_new_and_is_dismissed_when_it_owes_nothing() -> None:
    """Its batch is answered, the next request goes to another worker, no attempt is lost, nobody counts as lost."""
    async with memory_serving() as running:
        client, leaver, execute = await running.busy_worker()
        client.say(request(2))
        await wait_all_tasks_blocked()
        leaver.say(WorkerDraining())
        leaver.say(done(execute))
        await leaver.hear(Goodbye)
        assert [] == [entry for entry in leaver.heard if isinstance(entry, Execute)]
        assert 1 == (await client.hear(ResultEntry)).sequence
        await running.assert_redone(client, 2)
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
        worker, client = await running.joined(slots=2), await running.greeted()
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
        worker.say(batch_failed(second, "model_error", "NaN in x"))
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
        assert 1 == (await client.hear(ResultEntry)).sequence


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
        assert (1, "worker_lost", True) == verdict(failure)


@virtual_time
async def test_a_late_report_of_a_lost_attempt_changes_nothing() -> None:
    """The worker was given up; when it speaks again it is told to greet, and its result is nobody's."""
    async with memory_serving(worker_silence_s=2.0) as running:
        client, slow, execute = await running.busy_worker()
        await trio.sleep(4.0)
        slow.say(done(execute))
        await slow.hear(Unknown)
        assert 0 == running.server.statistics()["results"]
        await slow.join_as_worker()
        again = await slow.hear(Execute)
        assert again.batch != execute.batch
        slow.say(done(execute), done(again))
        assert 1 == (await client.hear(ResultEntry)).sequence
        assert 1 == running.server.statistics()["results"]


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("slots", [2, 4])
@virtual_time
async def test_the_busy_slots_of_a_worker_that_leaves_get_none_of_its_batches(
    slots: int, behind: int
) -> None:
    """All overdue, so that any of them could be sent the next batch ahead: all of it waits for another worker instead."""
    async with memory_serving(models={"echo": model_settings(max_batch=1)}) as running:
        leaver, client = await running.joined("leaver", slots=slots), await running.greeted()
        total = 0
        for _ in range(20):  # so that it is known what a batch costs
            client.say(*[request(total + number) for number in range(slots)])
            executes = [await leaver.hear(Execute) for _ in range(slots)]
            await trio.sleep(0.01)
            leaver.say(*[done(execute, busy_us=10_000, preparations=0) for execute in executes])
            await client.hear_each(ResultEntry, slots)
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
        results = [await client.hear(ResultEntry) for _ in range(left)]
        assert set(range(total, total + left)) == {result.sequence for result in results}


@virtual_time
async def test_a_worker_that_answers_and_leaves_at_once_takes_nothing_that_waits_along() -> None:
    """What waited was not sent to it, so nothing of it is lost: not even what may not run twice."""
    async with memory_serving(models={"echo": model_settings(idempotent=False)}) as running:
        client, worker = await running.client_and_worker()
        client.say(request(1), request(2))
        worker.say(done(await worker.hear(Execute)), Goodbye())
        assert 1 == (await client.hear(ResultEntry)).sequence
        await running.assert_redone(client, 2)


@pytest.mark.parametrize(
    "models", [{}, {"echo": model_settings(max_batch=8)}], ids=["unnamed", "named as idempotent"]
)
@virtual_time
async def test_what_a_workers_own_file_forbids_to_run_twice_runs_once(models: dict[str, Any]) -> None:
    """The server's file may say nothing of it, or the contrary: the model's requests run alone, and are not tried again."""
    async with memory_serving(models=models) as running:
        first, second = [await running.joined(name, once=("echo",)) for name in ("first", "second")]
        client = await running.greeted(model=None)
        client.say(OpenModel(name="echo"))
        assert (await client.hear(ModelOpened)).signature["idempotent"] is False
        client.say(request(1), request(2), request(3))
        assert 1 == len((await first.hear(Execute)).members)
        first.close()
        assert (1, "worker_lost", True) == verdict(await client.hear(Failure))
        assert [1, 1] == [len((await second.run_next()).members) for _ in range(2)]
        assert [2, 3] == await client.sequences(2)


@virtual_time
async def test_a_worker_with_another_engine_or_version_is_refused_until_files_are_read_again() -> None:
    """One that says nothing of its engine, too; the first after a reload says what is served from then on."""
    async with memory_serving() as running:
        await running.joined("first", engines={"echo": "openvino openvino==2026.4.1"})
        await running.joined("like it", engines={"echo": "openvino openvino==2026.4.1"})
        for engines in ({"echo": "openvino openvino==2026.4.2"}, {"echo": "onnxruntime"}, {}):
            late = running.worker()
            late.say(hello_of(engines=engines))
            refused = await late.hear(WorkerRefused)
            assert "echo" == refused.model
            assert "and openvino openvino==2026.4.1 is served (install the same version" in refused.message
        assert 3 == running.server.statistics()["peers_lost"]["worker: other engine"]
        running.server.serve_files({})
        await running.joined("newer", engines={"echo": "openvino openvino==2026.4.2"})


@virtual_time
async def test_a_worker_that_forbids_what_the_server_promises_is_refused() -> None:
    """Requests of the model may have run twice by then; one that says nothing of it may join either way."""
    async with memory_serving() as running:
        await running.joined()
        late = running.worker()
        late.say(hello_of(once=("echo",)))
        await late.hear(Goodbye)
    async with memory_serving() as running:
        await running.joined("strict", once=("echo",))
        await running.joined("lax")
