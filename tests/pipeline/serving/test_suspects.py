"""Suspects that clients name, on the server's own slots, as a client sees them. All in memory."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from tests.entries import Failure, RequestEntry, ResultEntry, RunsAlone
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import echo_tensors, request
from tests.pipeline.serving.harness import memory_serving, scripted_client
from tests.pipeline.serving.raw_peer import RawPeer, verdict
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

from shapestream.serving.dispatcher import LONE_RUN_S


def suspect(sequence: int, losses: str = "0", **fields: Any) -> RequestEntry:
    """Return a request that its client names as a suspect."""
    return request(sequence, tags={"suspect": losses}, **fields)


async def begun(slots: ScriptedSlots) -> int:
    """Count the batches that slots have been given by now."""
    await wait_all_tasks_blocked()
    return len(slots.started)


@virtual_time
async def test_a_suspect_runs_alone_once_its_client_has_said_that_it_knows() -> None:
    """Another request waits, also for the other slot, and follows."""
    slots = ScriptedSlots(slots=2)
    async with memory_serving(slots) as running:
        client, other = await running.greeted(), await running.greeted(b"o" * 16)
        client.say(suspect(1))
        assert RunsAlone(sequence=1) == await client.hear(RunsAlone)
        other.say(request(5))
        assert 0 == await begun(slots)
        client.say(RunsAlone(sequence=1))
        alone = await slots.next_batch()
        assert (1, 0) == (len(alone.members), await begun(slots))
        slots.finish(alone)
        assert 1 == (await client.hear(ResultEntry)).sequence
        slots.finish(await slots.next_batch())
        assert 5 == (await other.hear(ResultEntry)).sequence


@virtual_time
async def test_a_word_about_another_request_begins_nothing() -> None:
    """Neither that of another client, nor one about another number, nor one about none."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        client, other = await running.greeted(), await running.greeted(b"o" * 16)
        client.say(suspect(1))
        await client.hear(RunsAlone)
        other.say(RunsAlone(sequence=1))
        client.say(RunsAlone(sequence=2), RunsAlone(sequence=None))
        assert 0 == await begun(slots)


@virtual_time
async def test_a_client_that_does_not_repeat_it_is_asked_once() -> None:
    """The slots do not wait for longer, and its later suspects run as other requests do; those of others wait for a word."""
    slots = ScriptedSlots()
    async with memory_serving(slots, heartbeat_s=0.1) as running:
        client, other = await running.greeted(), await running.greeted(b"o" * 16)
        client.say(suspect(1), suspect(2))
        await client.hear(RunsAlone)
        asked_at = trio.current_time()
        first = await slots.next_batch()
        assert LONE_RUN_S <= trio.current_time() - asked_at
        client.say(suspect(3), suspect(4))
        slots.finish(first)
        await client.hear(ResultEntry)
        assert RunsAlone(sequence=2) == await client.hear(RunsAlone)
        client.say(RunsAlone(sequence=2))
        slots.finish(await slots.next_batch())
        assert 2 == len((await slots.next_batch()).members)
        other.say(suspect(1))
        await trio.sleep(0.5)
        assert 0 == await begun(slots)


@virtual_time
async def test_a_client_that_names_no_suspects_is_never_asked() -> None:
    """As those that were written before: their requests share calls."""
    async with scripted_client() as (client, slots):
        client.say(request(1), request(2))
        batch = await slots.next_batch()
        assert 2 == len(batch.members)
        slots.finish(batch)
        assert [1, 2] == [(await client.hear(ResultEntry)).sequence for _ in range(2)]
        assert [] == [entry for entry in client.heard if isinstance(entry, RunsAlone)]


@virtual_time
async def test_a_suspect_that_was_lost_alone_too_often_is_refused() -> None:
    """It does not run, and an equal request of another client does: nobody is to refuse what others ask."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        client, other = await running.greeted(), await running.greeted(b"o" * 16)
        client.say(suspect(1, "2"))
        assert (1, "poisoned", False) == verdict(await client.hear(Failure))
        other.say(request(1, echo_tensors()))
        slots.finish(await slots.next_batch())
        assert 1 == (await other.hear(ResultEntry)).sequence


@pytest.mark.parametrize("losses", ["", "x", "10", "-1"])
@virtual_time
async def test_losses_are_one_digit(losses: str) -> None:
    """Anything else is `invalid`, and nothing runs."""
    async with scripted_client() as (client, slots):
        client.say(suspect(1, losses))
        assert (1, "invalid", False) == verdict(await client.hear(Failure))
        assert 0 == await begun(slots)


@virtual_time
async def test_the_client_hears_when_its_suspect_runs_no_more_without_a_reply() -> None:
    """The slot was unavailable: until the suspect is next, the end of the server is no loss of it."""
    async with scripted_client() as (client, slots):
        client.say(suspect(1))
        client.say(await client.hear(RunsAlone))
        slots.fail(await slots.next_batch(), "unavailable")
        assert RunsAlone(sequence=None) == await client.hear(RunsAlone)
        assert RunsAlone(sequence=1) == await client.hear(RunsAlone)
        client.say(RunsAlone(sequence=1))
        slots.finish(await slots.next_batch())
        await client.hear(ResultEntry)
        assert [] == [entry for entry in client.heard if isinstance(entry, RunsAlone)]


@virtual_time
async def test_a_suspect_in_a_worker_shares_no_call_and_its_client_is_not_asked() -> None:
    """What ends a worker is found by the server."""
    async with memory_serving() as running:
        worker, client = await running.joined(), await running.greeted()
        client.say(suspect(1), suspect(2), request(3), request(4))
        await _run_all(worker, 3)
        assert [1, 2, 3, 4] == sorted([(await client.hear(ResultEntry)).sequence for _ in range(4)])
        assert [] == [entry for entry in client.heard if isinstance(entry, RunsAlone)]


async def _run_all(worker: RawPeer, batches: int) -> None:
    for _ in range(batches):
        await worker.run_next()


@virtual_time
async def test_the_log_says_that_suspects_have_arrived() -> None:
    """Once for many, with the client."""
    async with scripted_client() as (client, _):
        with capture_logs() as lines:
            client.say(*[suspect(number) for number in range(1, 9)])
            await client.hear(RunsAlone)
        told = [line for line in lines if line["event"] == "suspect arrived"]
        assert [(1, 0)] == [(line["sequence"], line["lost_alone"]) for line in told]
