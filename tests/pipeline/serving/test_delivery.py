"""Requests that come again: while the first one runs, after it was answered, after the session ended, with other content."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.entries import (
    Cancel,
    Failure,
    Goodbye,
    ModelOpened,
    OpenModel,
    RequestEntry,
    ResultEntry,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import echo_tensors, model_settings, request
from tests.pipeline.serving.harness import memory_serving, scripted_client
from tests.pipeline.serving.raw_peer import RawPeer, ending, verdict
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

ONCE = {"echo": model_settings(idempotent=False)}
OTHER = echo_tensors(rows=2)


async def answered(client: RawPeer, slots: ScriptedSlots, sequence: int, **fields: Any) -> ResultEntry:
    """One request and its result."""
    client.say(request(sequence, **fields))
    slots.finish(await slots.next_batch())
    return await client.hear(ResultEntry)


@pytest.mark.parametrize(
    "other", [request(1, OTHER), request(1, model=5)], ids=["other shapes", "other model, which is unknown"]
)
@virtual_time
async def test_another_request_under_a_running_number_is_a_conflict(other: RequestEntry) -> None:
    """The second is told so and does not run; the running one is unharmed."""
    async with scripted_client() as (client, slots):
        client.say(request(1))
        batch = await slots.next_batch()
        client.say(other)
        assert (1, "conflict") == ending(await client.hear(Failure))
        slots.finish(batch)
        result = await client.hear(ResultEntry)
        assert (1, echo_tensors().buffers[0]) == (result.sequence, result.tensors.buffers[0])
        assert [] == slots.started
        values = await client.statistics()
        assert values["requests"] == values["results"] + sum(values["failures"].values()) == 2


@virtual_time
async def test_an_answered_request_that_comes_again_gets_the_kept_reply_and_does_not_run() -> None:
    """The same bytes, the same timings; other deadlines and priorities do not make it another request."""
    async with scripted_client() as (client, slots):
        first = await answered(client, slots, 1)
        client.say(request(1, remaining_ms=50, priority=3))
        assert first == await client.hear(ResultEntry)
        assert [] == slots.started
        values = await client.statistics()
        assert (1, 1, 1) == (values["repeated"], values["results"], values["requests"])
        assert 1 == values["kept_replies"]


@virtual_time
async def test_other_shapes_under_an_answered_number_is_a_conflict() -> None:
    """Its reply is not that of the first, and is not made either."""
    async with scripted_client() as (client, slots):
        await answered(client, slots, 1)
        client.say(request(1, OTHER))
        assert (1, "conflict") == ending(await client.hear(Failure))
        assert [] == slots.started


@virtual_time
async def test_replies_that_were_lost_with_a_connection_are_given_on_the_next_one() -> None:
    """Whether the session lived on, or ended since nothing was heard of the client."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        first, second, third = running.client(), running.client(), running.client()
        await first.open_session()
        result = await answered(first, slots, 1)
        await second.open_session()
        second.say(request(1))
        assert result == await second.hear(ResultEntry)
        await trio.sleep(15.0)
        assert 0 == running.server.statistics()["clients"]
        await third.open_session()
        third.say(request(1))
        assert result == await third.hear(ResultEntry)
        assert [] == slots.started


@virtual_time
async def test_replies_belong_to_the_client_that_asked() -> None:
    """Another client's request with the same number is another request."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        one, other = await running.greeted(b"1" * 16), await running.greeted(b"2" * 16)
        await answered(one, slots, 1)
        result = await answered(other, slots, 1, tensors=OTHER)
        assert OTHER.buffers[0] == result.tensors.buffers[0]


@virtual_time
async def test_a_failure_is_kept_like_a_result() -> None:
    """`model_error`, `cancelled` and `deadline_exceeded` are terminal replies; none of these requests runs again."""
    async with scripted_client() as (client, slots):
        client.say(request(1))
        slots.fail(await slots.next_batch(), message="no")
        failure = await client.hear(Failure)
        client.say(request(1))
        assert failure == await client.hear(Failure)
        client.say(request(2))
        batch = await slots.next_batch()
        client.say(request(3), Cancel(sequence=3), request(4, remaining_ms=20))
        assert (3, "cancelled") == ending(await client.hear(Failure))
        assert (4, "deadline_exceeded") == ending(await client.hear(Failure))
        client.say(request(3), request(4))
        assert (3, "cancelled") == ending(await client.hear(Failure))
        assert (4, "deadline_exceeded") == ending(await client.hear(Failure))
        slots.finish(batch)
        assert [] == slots.started


@virtual_time
async def test_a_refusal_leaves_the_number_unused() -> None:
    """What was refused for want of room did not run, so the same request may be sent again under its number."""
    async with scripted_client(window_requests=1) as (client, slots):
        client.say(request(1), request(2))
        assert (2, "overloaded") == ending(await client.hear(Failure))
        slots.finish(await slots.next_batch())
        await client.hear(ResultEntry)
        assert 2 == (await answered(client, slots, 2)).sequence


@virtual_time
async def test_a_reply_that_is_no_longer_kept_is_not_made_again() -> None:
    """After its time the number alone is known: `answered`, whatever the payload."""
    async with scripted_client(kept_s=5.0, client_silence_s=1000.0) as (client, slots):
        await answered(client, slots, 1)
        await trio.sleep(7.0)
        client.say(request(1))
        failure = await client.hear(Failure)
        assert (1, "answered", False) == verdict(failure)
        assert 0 == (await client.statistics())["kept_replies"]
        assert 2 == (await answered(client, slots, 2)).sequence


@virtual_time
async def test_a_result_beyond_the_bytes_that_are_kept_is_answered_by_its_number() -> None:
    """The bound holds also for a single reply."""
    async with scripted_client(kept_bytes=2048) as (client, slots):
        await answered(client, slots, 1, tensors=echo_tensors(n=1000))
        client.say(request(1, echo_tensors(n=1000)))
        assert (1, "answered") == ending(await client.hear(Failure))


@virtual_time
async def test_numbers_that_were_never_used_are_free_whatever_their_order() -> None:
    """Only what was answered is known."""
    async with scripted_client() as (client, slots):
        for sequence in (9, 3, 5):
            assert sequence == (await answered(client, slots, sequence)).sequence


@virtual_time
async def test_a_model_whose_requests_may_not_run_twice_says_so() -> None:
    """The client must know it, since after a restart the server does not know what ran."""
    async with memory_serving(ScriptedSlots(), models=ONCE) as running:
        client = await running.greeted(model=None)
        client.say(OpenModel(name="echo"))
        assert (await client.hear(ModelOpened)).signature["idempotent"] is False


@virtual_time
async def test_requests_that_may_not_run_twice_run_alone() -> None:
    """Two that wait together, the second of several rows, take two calls."""
    async with scripted_client(models=ONCE) as (client, slots):
        client.say(request(1), request(2, echo_tensors(rows=3)), request(3))
        for rows in (1, 3, 1):
            batch = await slots.next_batch()
            assert [rows] == [member.layout[0][2][0] for member in batch.members]
            await wait_all_tasks_blocked()
            assert [] == slots.started
            slots.finish(batch)
        assert [1, 2, 3] == await client.sequences(3)


@virtual_time
async def test_what_may_not_run_twice_and_was_lost_is_answered_so_and_never_runs_again() -> None:
    """Neither by a retry of the server, nor when the client sends it again."""
    async with memory_serving(models=ONCE) as running:
        first, second = running.worker(), running.worker()
        await first.join_as_worker("first")
        client = await running.greeted()
        client.say(request(1))
        await wait_all_tasks_blocked()
        await second.join_as_worker("second")
        first.say(Goodbye())
        assert (1, "worker_lost") == ending(await client.hear(Failure))
        client.say(request(1))
        assert (1, "worker_lost") == ending(await client.hear(Failure))
        await wait_all_tasks_blocked()
        assert 0 == (await client.statistics())["batches"]


@virtual_time
async def test_what_may_not_run_twice_and_ran_for_a_client_that_left_does_not_run_again() -> None:
    """Nobody heard the answer, so it cannot be given; what was still queued is free to run."""
    slots = ScriptedSlots()
    async with memory_serving(slots, models=ONCE) as running:
        client, again = running.client(), running.client()
        await client.open_session()
        client.say(request(1), request(2))
        batch = await slots.next_batch()
        client.say(Goodbye())
        await again.open_session()
        again.say(request(1))
        assert (1, "worker_lost") == ending(await again.hear(Failure))
        slots.fail(batch, "cancelled")
        assert 2 == (await answered(again, slots, 2)).sequence


@virtual_time
async def test_what_may_not_run_twice_is_not_handed_back_as_draining_once_it_was_started() -> None:
    """A client would send it to the next server."""
    slots = ScriptedSlots()
    async with memory_serving(slots, models=ONCE, grace_s=1.0) as running:
        client = await running.greeted()
        client.say(request(1), request(2))
        await slots.next_batch()
        running.server.drain()
        assert {(1, "worker_lost"), (2, "draining")} == {ending(await client.hear(Failure)) for _ in range(2)}
