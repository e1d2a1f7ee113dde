"""Batches that are sent to busy slots, and taken back: from the decision to the slot, and from its report to the answer."""

from __future__ import annotations

import trio
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.eager import EagerScheduler
from tests.pipeline.serving.harness import (
    ScriptedSlots,
    done,
    ending,
    memory_serving,
    request,
    scripted_client,
)
from trio.testing import wait_all_tasks_blocked

from shapestream.scheduling import events
from shapestream.serving.local_executor import LOCAL_PREFETCH_S
from shapestream.serving.remote_executor import REMOTE_PREFETCH_S
from shapestream.wire.messages import (
    BatchFailed,
    Cancel,
    CancelBatch,
    Execute,
    Failure,
    RecallBatch,
    Result,
    WorkerDraining,
)


@virtual_time
async def test_a_worker_gets_one_batch_more_than_it_runs(scheduler: EagerScheduler) -> None:
    """`Execute` goes out at once; `RecallBatch` asks it back, and both possible answers are good ones."""
    scheduler.recall_share = 0.0
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(*[request(number) for number in range(3)])
        first, second = await worker.hear(Execute), await worker.hear(Execute)
        assert first.slot == second.slot
        await wait_all_tasks_blocked()
        assert not [entry for entry in worker.heard if isinstance(entry, Execute)]
        scheduler.recall_share = 1.0
        client.say(request(3))
        assert second.batch == (await worker.hear(RecallBatch)).batch
        scheduler.recall_share = 0.0
        worker.say(done(first), done(second))  # it had begun
        third, fourth = await worker.hear(Execute), await worker.hear(Execute)
        scheduler.recall_share = 1.0
        client.say(request(4))
        assert fourth.batch == (await worker.hear(RecallBatch)).batch
        scheduler.recall_share = 0.0
        worker.say(BatchFailed(batch=fourth.batch, code="recalled", message="as asked"))
        again = await worker.hear(Execute)
        assert again.batch not in (first.batch, second.batch, third.batch, fourth.batch)
        worker.say(done(third), done(again))
        await worker.run_next()
        assert [0, 1, 2, 3, 4] == sorted([(await client.hear(Result)).sequence for _ in range(5)])
        statistics = running.server.statistics()
        assert (1, 0) == (statistics["batches_recalled"], statistics["batches_failed"])


@virtual_time
async def test_a_worker_that_gives_back_what_nobody_asked_for_is_no_excuse(scheduler: EagerScheduler) -> None:
    """`recalled` costs no attempt, so it is believed only of batches that were asked back."""
    scheduler.recall_share = 0.0
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1))
        execute = await worker.hear(Execute)
        worker.say(BatchFailed(batch=execute.batch, code="recalled", message="I would rather not"))
        await worker.hear(Execute)
        failed = [event for event in scheduler.log if isinstance(event, events.BatchFailed)]
        assert ["internal"] == [event.code for event in failed]


@virtual_time
async def test_a_worker_that_is_lost_gives_both_its_batches_back(scheduler: EagerScheduler) -> None:
    """The one that ran and the one behind it run again elsewhere, once; a late report of either is nobody's."""
    scheduler.recall_share = 0.0
    async with memory_serving() as running:
        client, lost = await running.client_and_worker()
        client.say(request(0), request(1))
        old = [await lost.hear(Execute), await lost.hear(Execute)]
        lost.connection.close()
        await trio.sleep(5.0)
        other = await running.joined("other")
        new = [await other.hear(Execute), await other.hear(Execute)]
        assert {execute.batch for execute in old}.isdisjoint(execute.batch for execute in new)
        other.say(*[done(execute) for execute in old], *[done(execute) for execute in new])
        assert {0, 1} == {(await client.hear(Result)).sequence for _ in range(2)}
        assert 2 == running.server.statistics()["results"]


@virtual_time
async def test_a_draining_worker_is_dismissed_after_both_its_batches(scheduler: EagerScheduler) -> None:
    """What waits behind the running one was sent, and is answered."""
    scheduler.recall_share = 0.0
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(0), request(1))
        first, second = await worker.hear(Execute), await worker.hear(Execute)
        worker.say(WorkerDraining(), done(first))
        assert 0 == (await client.hear(Result)).sequence
        assert {} == running.server.statistics()["peers_lost"]
        worker.say(done(second))
        assert 1 == (await client.hear(Result)).sequence


@virtual_time
async def test_what_waits_behind_a_batch_is_handed_back_at_the_end_of_the_grace(
    scheduler: EagerScheduler,
) -> None:
    """Both are answered `draining`, once; whatever their slot says afterwards is nobody's."""
    scheduler.recall_share = 0.0
    slots = ScriptedSlots()
    async with memory_serving(slots, grace_s=1.0) as running:
        client = await running.greeted()
        client.say(request(1), request(2))
        first, second = await slots.next_batch(), await slots.next_batch()
        running.server.drain()
        failures = [await client.hear(Failure), await client.hear(Failure)]
        assert {(1, "draining"), (2, "draining")} == set(map(ending, failures))
        slots.report(slots.ran(first), slots.ran(second))
        assert 0 == running.server.statistics()["results"]


@virtual_time
async def test_a_batch_that_fails_leaves_the_one_behind_it_alone(scheduler: EagerScheduler) -> None:
    """The slot is as good as new: what waits there begins, and its time in the queue ends with the failure."""
    scheduler.recall_share = 0.0
    async with scripted_client() as (client, slots):
        client.say(request(1), request(2))
        first, second = await slots.next_batch(), await slots.next_batch()
        await trio.sleep(1.0)
        slots.fail(first)
        await trio.sleep(1.0)
        slots.finish(second, busy_s=0.5, run_s=0.5)
        result = await client.hear(Result)
        assert (2, 1_000_000, 2_000_000) == (
            result.sequence,
            result.timings.queue_us,
            result.timings.total_us,
        )
        slots.finish(await slots.next_batch())
        assert 1 == (await client.hear(Result)).sequence


@virtual_time
async def test_cancelling_what_waits_behind_a_batch(scheduler: EagerScheduler) -> None:
    """Its client is answered at once, its slot is told, and the batch before it goes on."""
    scheduler.recall_share = 0.0
    async with scripted_client() as (client, slots):
        client.say(request(1), request(2))
        first, second = await slots.next_batch(), await slots.next_batch()
        client.say(Cancel(sequence=2))
        assert (2, "cancelled") == ending(await client.hear(Failure))
        assert [second.batch] == slots.cancelled
        slots.fail(second, "cancelled")
        slots.finish(first)
        assert 1 == (await client.hear(Result)).sequence


@virtual_time
async def test_a_cancellation_reaches_the_worker_while_the_batch_waits(scheduler: EagerScheduler) -> None:
    """By its number; the answer of the slot is awaited before anything else is sent there."""
    scheduler.recall_share = 0.0
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1), request(2), request(3))
        first, second = await worker.hear(Execute), await worker.hear(Execute)
        client.say(Cancel(sequence=2))
        assert second.batch == (await worker.hear(CancelBatch)).batch
        worker.say(BatchFailed(batch=second.batch, code="cancelled", message="taken back"))
        third = await worker.hear(Execute)
        worker.say(done(first), done(third))
        assert {1, 3} == {(await client.hear(Result)).sequence for _ in range(2)}


@virtual_time
async def test_the_time_behind_another_batch_is_time_in_the_queue(scheduler: EagerScheduler) -> None:
    """Sent at 0 s; its slot was free at 2 s; it ran for half a second and was reported at 3 s."""
    scheduler.recall_share = 0.0
    async with scripted_client() as (client, slots):
        client.say(request(1), request(2))
        first, second = await slots.next_batch(), await slots.next_batch()
        await trio.sleep(2.0)
        slots.finish(first, busy_s=2.0, run_s=1.5)
        await trio.sleep(1.0)
        slots.finish(second, busy_s=0.75, run_s=0.5)
        one, two = (await client.hear(Result)).timings, (await client.hear(Result)).timings
        assert (0, 1_500_000, 2_000_000) == (one.queue_us, one.run_us, one.total_us)
        assert (2_000_000, 500_000, 3_000_000) == (two.queue_us, two.run_us, two.total_us)


@virtual_time
async def test_two_batches_that_are_reported_together_have_honest_times(scheduler: EagerScheduler) -> None:
    """Nothing was heard between them, so the second one's own time tells when it began."""
    scheduler.recall_share = 0.0
    async with scripted_client() as (client, slots):
        client.say(request(1), request(2))
        first, second = await slots.next_batch(), await slots.next_batch()
        await trio.sleep(2.0)
        slots.report(slots.ran(first, busy_s=1.0, run_s=1.0), slots.ran(second, busy_s=0.75, run_s=0.5))
        one, two = (await client.hear(Result)).timings, (await client.hear(Result)).timings
        assert (0, 2_000_000) == (one.queue_us, one.total_us)
        assert (1_250_000, 500_000, 2_000_000) == (two.queue_us, two.run_us, two.total_us)


@virtual_time
async def test_the_scheduler_hears_how_long_the_way_to_each_slot_is(scheduler: EagerScheduler) -> None:
    """Longer to a worker than within the process; and nothing of it where prefetch is switched off."""
    async with memory_serving(ScriptedSlots()) as running:
        await running.worker().join_as_worker("w", slots=2)
    far = [("scripted", LOCAL_PREFETCH_S), ("w", REMOTE_PREFETCH_S), ("w", REMOTE_PREFETCH_S)]
    assert far == [(slot.worker, slot.prefetch_s) for slot in scheduler.joined]
    together = [event for event in scheduler.log if isinstance(event, events.SlotsJoined)]
    assert [1, 2] == [len(event.slots) for event in together]
    scheduler.joined.clear()
    async with memory_serving(ScriptedSlots(), prefetch=False):
        pass
    assert [None] == [slot.prefetch_s for slot in scheduler.joined]
