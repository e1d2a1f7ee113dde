"""Prefetch and recall: from the decision to the slot, and from its report to the answer."""

from __future__ import annotations

import pytest
import trio
from tests.entries import (
    Cancel,
    CancelBatchEntry,
    Execute,
    Failure,
    RecallBatchEntry,
    ResultEntry,
    WorkerDraining,
    batch_failed,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.eager import EagerScheduler
from tests.pipeline.serving.echo_model import done, request
from tests.pipeline.serving.harness import memory_serving, scripted_client
from tests.pipeline.serving.raw_peer import RawPeer, ending
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

from shapestream.scheduling import events
from shapestream.serving.workers import LOCAL_PREFETCH_S, REMOTE_PREFETCH_S
from shapestream_engine.batch import BatchInputs


async def one_behind_the_other(client: RawPeer, slots: ScriptedSlots) -> tuple[BatchInputs, BatchInputs]:
    """Two requests: the batch that runs, and the one that was sent ahead."""
    client.say(request(1), request(2))
    return await slots.next_batch(), await slots.next_batch()


@virtual_time
async def test_a_worker_gets_one_batch_more_than_it_runs(sends_ahead: EagerScheduler) -> None:
    """`Execute` goes out at once; `RecallBatchEntry` asks it back, and both possible answers are good ones."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(*[request(number) for number in range(3)])
        first, second = await worker.hear_each(Execute, 2)
        assert first.slot == second.slot
        await wait_all_tasks_blocked()
        assert not worker.has_heard(Execute)
        with sends_ahead.recalling():
            client.say(request(3))
            assert second.batch == (await worker.hear(RecallBatchEntry)).batch
        worker.say(done(first), done(second))  # it had begun
        third, fourth = await worker.hear_each(Execute, 2)
        with sends_ahead.recalling():
            client.say(request(4))
            assert fourth.batch == (await worker.hear(RecallBatchEntry)).batch
        worker.say(batch_failed(fourth, "recalled", "as asked"))
        again = await worker.hear(Execute)
        assert again.batch not in (first.batch, second.batch, third.batch, fourth.batch)
        worker.say(done(third), done(again))
        await worker.run_next()
        assert [0, 1, 2, 3, 4] == sorted(await client.sequences(5))
        statistics = running.server.statistics()
        assert (1, 0) == (statistics["batches_recalled"], statistics["batches_failed"])


@virtual_time
async def test_a_worker_that_gives_back_what_nobody_asked_for_is_no_excuse(
    sends_ahead: EagerScheduler,
) -> None:
    """`recalled` costs no attempt, so it is believed only of batches that were asked back."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1))
        execute = await worker.hear(Execute)
        worker.say(batch_failed(execute, "recalled", "I would rather not"))
        await worker.hear(Execute)
        assert ["internal"] == sends_ahead.codes()


@pytest.mark.usefixtures("sends_ahead")
@virtual_time
async def test_a_worker_that_is_lost_gives_both_its_batches_back() -> None:
    """The one that ran and the one behind it run again elsewhere, once; a late report of either is nobody's."""
    async with memory_serving() as running:
        client, lost = await running.client_and_worker()
        client.say(request(0), request(1))
        old = await lost.hear_each(Execute, 2)
        lost.close()
        await trio.sleep(5.0)
        other = await running.joined("other")
        new = await other.hear_each(Execute, 2)
        assert {execute.batch for execute in old}.isdisjoint(execute.batch for execute in new)
        other.say(*[done(execute) for execute in old], *[done(execute) for execute in new])
        assert {0, 1} == set(await client.sequences(2))
        assert 2 == running.server.statistics()["results"]


@pytest.mark.usefixtures("sends_ahead")
@virtual_time
async def test_a_draining_worker_is_dismissed_after_both_its_batches() -> None:
    """What waits behind the running one was sent, and is answered."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(0), request(1))
        first, second = await worker.hear_each(Execute, 2)
        worker.say(WorkerDraining(), done(first))
        assert 0 == (await client.hear(ResultEntry)).sequence
        assert {} == running.server.statistics()["peers_lost"]
        worker.say(done(second))
        assert 1 == (await client.hear(ResultEntry)).sequence


@pytest.mark.usefixtures("sends_ahead")
@virtual_time
async def test_what_waits_behind_a_batch_is_handed_back_at_the_end_of_the_grace() -> None:
    """Both are answered `draining`, once; whatever their slot says afterwards is nobody's."""
    slots = ScriptedSlots()
    async with memory_serving(slots, grace_s=1.0) as running:
        client = await running.greeted()
        first, second = await one_behind_the_other(client, slots)
        running.server.drain()
        assert {(1, "draining"), (2, "draining")} == set(map(ending, await client.hear_each(Failure, 2)))
        slots.report(slots.ran(first), slots.ran(second))
        assert 0 == running.server.statistics()["results"]


@pytest.mark.usefixtures("sends_ahead")
@virtual_time
async def test_a_cancellation_reaches_the_worker_while_the_batch_waits() -> None:
    """By its number; the answer of the slot is awaited before anything else is sent there."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1), request(2), request(3))
        first, second = await worker.hear_each(Execute, 2)
        client.say(Cancel(sequence=2))
        assert second.batch == (await worker.hear(CancelBatchEntry)).batch
        worker.say(batch_failed(second, "cancelled", "taken back"))
        third = await worker.hear(Execute)
        worker.say(done(first), done(third))
        assert {1, 3} == set(await client.sequences(2))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.usefixtures("sends_ahead")
@virtual_time
async def test_the_time_behind_another_batch_is_time_in_the_queue(fails: bool) -> None:
    """Sent at 0 s; its slot was free at 2 s, however the batch before it ended; it ran and was reported at 3 s."""
    async with scripted_client() as (client, slots):
        first, second = await one_behind_the_other(client, slots)
        await trio.sleep(2.0)
        if fails:
            slots.fail(first)
        else:
            slots.finish(first, busy_s=2.0, run_s=1.5)
            times = (await client.hear(ResultEntry)).timings
            assert (0, 1_500_000, 2_000_000) == (times.queue_us, times.run_us, times.total_us)
        await trio.sleep(1.0)
        slots.finish(second, busy_s=0.75, run_s=0.5)
        result = await client.hear(ResultEntry)
        times = result.timings
        assert (2, 2_000_000, 500_000, 3_000_000) == (
            result.sequence,
            times.queue_us,
            times.run_us,
            times.total_us,
        )
        if fails:
            slots.finish(await slots.next_batch())
            assert 1 == (await client.hear(ResultEntry)).sequence


@pytest.mark.usefixtures("sends_ahead")
@virtual_time
async def test_two_batches_that_are_reported_together_have_honest_times() -> None:
    """Nothing was heard between them, so the second one's own time tells when it began."""
    async with scripted_client() as (client, slots):
        first, second = await one_behind_the_other(client, slots)
        await trio.sleep(2.0)
        slots.report(slots.ran(first, busy_s=1.0, run_s=1.0), slots.ran(second, busy_s=0.75, run_s=0.5))
        one, two = (result.timings for result in await client.hear_each(ResultEntry, 2))
        assert (0, 2_000_000) == (one.queue_us, one.total_us)
        assert (1_250_000, 500_000, 2_000_000) == (two.queue_us, two.run_us, two.total_us)


@virtual_time
async def test_the_batches_of_a_bundle_that_are_reported_together_have_honest_times(
    sends_ahead: EagerScheduler,
) -> None:
    """Each began when the one before it was done, whenever that was heard of."""
    sends_ahead.depth = 3
    async with scripted_client() as (client, slots):
        client.say(request(1), request(2), request(3))
        first, second, third = [await slots.next_batch() for _ in range(3)]
        await trio.sleep(3.0)
        ran = [slots.ran(batch, busy_s=1.0, run_s=1.0) for batch in (first, second, third)]
        slots.report(*ran)
        timings = [result.timings for result in await client.hear_each(ResultEntry, 3)]
        assert [0, 1_000_000, 2_000_000] == [one.queue_us for one in timings]


@virtual_time
async def test_the_scheduler_hears_how_long_the_way_to_each_slot_is(scheduler: EagerScheduler) -> None:
    """Longer to a worker than within the process; and nothing of it where prefetch is switched off."""
    async with memory_serving(ScriptedSlots()) as running:
        await running.worker().join_as_worker("w", slots=2)
    far = [("local", LOCAL_PREFETCH_S), ("w", REMOTE_PREFETCH_S), ("w", REMOTE_PREFETCH_S)]
    assert far == [(slot.worker, slot.prefetch_s) for slot in scheduler.joined]
    together = [event for event in scheduler.log if isinstance(event, events.SlotsJoined)]
    assert [1, 2] == [len(event.slots) for event in together]
    scheduler.joined.clear()
    async with memory_serving(ScriptedSlots(), prefetch=False):
        pass
    assert [None] == [slot.prefetch_s for slot in scheduler.joined]


@virtual_time
async def test_a_slot_is_busy_from_its_first_batch_until_it_has_none(sends_ahead: EagerScheduler) -> None:
    """Also across a batch that was queued behind; a batch that runs counts while it runs."""
    async with memory_serving() as running:

        def busy_s() -> float:
            return running.server.readings.snapshot().slots_busy_s

        client, worker = await running.client_and_worker()
        await trio.sleep(0.1)
        assert 0.0 == busy_s()
        client.say(request(0), request(1))
        first, second = await worker.hear_each(Execute, 2)
        await trio.sleep(0.25)
        worker.say(done(first))
        await client.sequences(1)
        await trio.sleep(0.25)
        assert 0.5 == pytest.approx(busy_s())
        worker.say(done(second))
        await client.sequences(1)
        await trio.sleep(0.5)
        assert 0.5 == pytest.approx(busy_s())
        client.say(request(2))
        await worker.hear(Execute)
        await trio.sleep(0.25)
        assert 0.75 == pytest.approx(busy_s())
