"""A request that kills its workers, and batches that hang, as clients and workers see them. All in memory."""

from __future__ import annotations

import pytest
import trio
from structlog.testing import capture_logs
from tests.entries import Execute, Failure, ResultEntry
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import echo_tensors, request
from tests.pipeline.serving.harness import memory_serving, scripted_client
from tests.pipeline.serving.raw_peer import verdict
from tests.pipeline.serving.scripted_slots import ScriptedSlots

from shapestream.serving.workers import LocalWorker
from shapestream_engine.layout import Tensors

LONG_S = 86400.0


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why the server's own slots should have been killed."""
    reasons: list[str] = []
    monkeypatch.setattr(LocalWorker, "kill", lambda worker, reason, now: reasons.append(reason))
    return reasons


def _poison() -> Tensors:
    return echo_tensors(1, 4, 66.0)


@virtual_time
async def test_a_poison_kills_twice_and_is_known_from_then_on() -> None:
    """Its batch-mate is answered, it is `poisoned`, and its like is refused without a worker; anything else runs."""
    async with memory_serving() as running:
        worker, client = await running.joined("w0"), running.client()
        await client.open_session()
        client.say(request(0, _poison()), request(1))
        assert 2 == len((await worker.hear(Execute)).members)
        await running.server.worker_ended("w0", died=True)
        worker = await running.joined("w1")
        assert 1 == len((await worker.hear(Execute)).members)
        with capture_logs() as lines:
            await running.server.worker_ended("w1", died=True)
        assert (0, "poisoned", False) == verdict(await client.hear(Failure))
        assert ["request poisoned"] == [line["event"] for line in lines if line["log_level"] == "error"]
        worker = await running.joined("w2")
        await worker.run_next()
        assert 1 == (await client.hear(ResultEntry)).sequence
        client.say(request(2, _poison()), request(3, echo_tensors(1, 4, 67.0)))
        assert (2, "poisoned", False) == verdict(await client.hear(Failure))
        await worker.run_next()
        assert 3 == (await client.hear(ResultEntry)).sequence
        statistics = running.server.statistics()
        assert (2, 1, 0) == (
            statistics["failures"]["poisoned"],
            statistics["quarantined"],
            statistics["unfinished"],
        )


@virtual_time
async def test_a_batch_that_hangs_is_stopped_and_its_members_run_alone(killed: list[str]) -> None:
    """Where cancelling helps nobody is killed; the one that hangs again is poisoned, the other is answered."""
    async with scripted_client(hang_min_s=1.0, client_silence_s=LONG_S) as (client, slots):
        client.say(request(0, _poison()), request(1))
        hanging = await slots.next_batch()
        await trio.sleep(21.0)
        assert [hanging.batch] == slots.cancelled
        slots.fail(hanging, "cancelled")
        alone = await slots.next_batch()
        assert 1 == len(alone.members)
        await trio.sleep(21.0)
        assert [hanging.batch, alone.batch] == slots.cancelled
        slots.fail(alone, "cancelled")
        assert (0, "poisoned", False) == verdict(await client.hear(Failure))
        slots.finish(await slots.next_batch())
        assert 1 == (await client.hear(ResultEntry)).sequence
        assert [] == killed


@virtual_time
async def test_a_batch_that_cannot_be_stopped_ends_its_process(killed: list[str]) -> None:
    """After the grace its executor is told to kill; where that does nothing, the members are answered all the same."""
    slots = ScriptedSlots(slots=2)
    async with memory_serving(slots, hang_min_s=1.0, hang_grace_s=2.0, client_silence_s=LONG_S) as running:
        client = await running.greeted()
        client.say(request(0, _poison()))
        hanging = await slots.next_batch()
        await trio.sleep(19.0)
        assert ([], []) == (slots.cancelled, killed)
        await trio.sleep(2.0)
        assert ([hanging.batch], []) == (slots.cancelled, killed)
        await trio.sleep(2.0)
        assert 1 == len(killed)
        assert (0, "worker_lost", True) == verdict(await client.hear(Failure))
        client.say(request(1))
        other = await slots.next_batch()
        assert other.slot != hanging.slot
        slots.finish(other)
        assert 1 == (await client.hear(ResultEntry)).sequence
