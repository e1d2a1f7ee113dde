"""Reports of a bundle wait for one another: half of it is answered together while the other half runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.entries import Execute, ResultEntry, batch_failed
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.eager import EagerScheduler
from tests.pipeline.serving.echo_model import done, request
from tests.pipeline.serving.harness import Running, memory_serving
from tests.pipeline.serving.raw_peer import RawPeer
from trio.testing import wait_all_tasks_blocked

from shapestream.serving.dispatcher import HOLD_S

SEQUENCES = range(6)


@asynccontextmanager
async def bundled(
    scheduler: EagerScheduler, **fields: Any
) -> AsyncIterator[tuple[Running, RawPeer, RawPeer, list[Execute]]]:
    """A worker of one slot with a bundle of six requests, each of which has these fields."""
    scheduler.depth = len(SEQUENCES)
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(*[request(number, **fields) for number in SEQUENCES])
        yield running, client, worker, await worker.hear_each(Execute, len(SEQUENCES))


async def answers(client: RawPeer) -> list[int]:
    """The sequences of the results that have come by now, without any time passing."""
    await wait_all_tasks_blocked()
    client.take_arrived()
    return [entry.sequence for entry in client.heard if isinstance(entry, ResultEntry)]


@virtual_time
async def test_half_of_a_bundle_is_answered_together(sends_ahead: EagerScheduler) -> None:
    """Nothing is answered while more batches are left than reports wait; the last ones are answered one by one."""
    async with bundled(sends_ahead) as (_, client, worker, bundle):
        answered = []
        for execute in bundle:
            worker.say(done(execute))
            answered.append(len(await answers(client)))
    assert [0, 0, 3, 3, 5, 6] == answered


@virtual_time
async def test_a_report_waits_for_a_bounded_time(sends_ahead: EagerScheduler) -> None:
    """The next call of the slot takes long, or hangs: what has run is answered."""
    async with bundled(sends_ahead) as (_, client, worker, bundle):
        worker.say(done(bundle[0]))
        await wait_all_tasks_blocked()
        reported_at = trio.current_time()
        assert 0 == (await client.hear(ResultEntry)).sequence
        assert pytest.approx(HOLD_S) == trio.current_time() - reported_at


@virtual_time
async def test_a_failure_does_not_wait(sends_ahead: EagerScheduler) -> None:
    """It ends the wait of the others too, since the scheduler may have to act."""
    async with bundled(sends_ahead) as (_, client, worker, bundle):
        began_at = trio.current_time()
        second = batch_failed(bundle[1])
        worker.say(done(bundle[0]), second)
        assert 0 == (await client.hear(ResultEntry)).sequence
        assert began_at == trio.current_time()


@pytest.mark.parametrize(("remaining_ms", "held"), [(round(HOLD_S * 500), False), (60_000, True)])
def test_a_report_whose_deadline_is_near_does_not_wait(
    sends_ahead: EagerScheduler, remaining_ms: int, held: bool
) -> None:
    """It would come too late."""

    @virtual_time
    async def run() -> None:
        async with bundled(sends_ahead, remaining_ms=remaining_ms) as (_, client, worker, bundle):
            worker.say(done(bundle[0]))
            assert ([] if held else [0]) == await answers(client)

    run()


@virtual_time
async def test_what_a_lost_worker_had_reported_is_answered(sends_ahead: EagerScheduler) -> None:
    """It does not run again; the others do, elsewhere, once."""
    async with bundled(sends_ahead) as (running, client, worker, bundle):
        worker.say(done(bundle[0]), done(bundle[1]))
        assert [] == await answers(client)
        worker.close()
        await trio.sleep(5.0)
        other = await running.joined("other")
        again = await other.hear_each(Execute, 4)
        other.say(*[done(execute) for execute in again])
        assert set(SEQUENCES) == set(await client.sequences(6))
        assert 6 == running.server.statistics()["results"]
