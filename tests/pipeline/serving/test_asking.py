"""Clients that ask before they send a large request, and those that do not: whose bytes the server lets in, and when."""

from __future__ import annotations

import pytest
import trio
from tests.entries import (
    Ask,
    AsksFirst,
    Cancel,
    Credit,
    Failure,
    Goodbye,
    GrantBounds,
    Granted,
    Heartbeat,
    Hello,
    ResultEntry,
    Welcome,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import echo_tensors, request
from tests.pipeline.serving.harness import Running, memory_serving
from tests.pipeline.serving.raw_peer import RawPeer, ending
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

from shapestream.serving.grants import UNUSED_S

MIB = 1 << 20
MEMORY = {"memory": 64 * MIB}
"""Of a server that grants 8 MiB, and lets 2 MiB in without a grant."""


def ask(sequence: int, mib: int = 5, remaining_ms: int | None = None) -> Ask:
    """A question for a request; what comes then may be smaller."""
    return Ask(sequence=sequence, nbytes=mib * MIB, remaining_ms=remaining_ms)


async def two(running: Running) -> tuple[RawPeer, RawPeer]:
    """Two clients with open sessions."""
    return await running.greeted(b"a" * 16), await running.greeted(b"b" * 16)


async def granted(peer: RawPeer) -> int:
    """The number of the next request that is granted."""
    return (await peer.hear(Granted)).sequence


async def waits(*peers: RawPeer) -> bool:
    """Whether none of these was granted anything more, with all that they said carried out."""
    for peer in peers:
        await peer.statistics()
    return not any(peer.has_heard(Granted) for peer in peers)


@virtual_time
async def test_a_request_is_granted_when_the_answer_to_an_earlier_one_leaves() -> None:
    """Its bytes count from the grant to the answer: two of five MiB do not fit into eight."""
    slots = ScriptedSlots()
    async with memory_serving(slots, **MEMORY) as running:
        one, other = await two(running)
        one.say(ask(1))
        assert 1 == await granted(one)
        other.say(ask(7))
        assert await waits(other)
        one.say(request(1))
        batch = await slots.next_batch()
        assert await waits(other)
        slots.finish(batch)
        assert 7 == await granted(other)
        assert 1 == (await one.hear(ResultEntry)).sequence


@virtual_time
async def test_small_requests_wait_for_no_grant() -> None:
    """All memory is granted to others, and theirs are served at once."""
    slots = ScriptedSlots()
    async with memory_serving(slots, **MEMORY) as running:
        one, other = await two(running)
        one.say(ask(1, mib=8))
        await granted(one)
        other.say(ask(1), request(2))
        slots.finish(await slots.next_batch())
        assert 2 == (await other.hear(ResultEntry)).sequence
        assert await waits(other)


@virtual_time
async def test_a_client_that_asks_for_a_hundred_does_not_starve_one_that_asks_for_one() -> None:
    """The second client's only question has the second turn."""
    async with memory_serving(ScriptedSlots(), **MEMORY) as running:
        greedy, modest = await two(running)
        greedy.say(*[ask(number) for number in range(100)])
        assert 0 == await granted(greedy)
        modest.say(ask(5))
        assert await waits(modest, greedy)
        greedy.say(Cancel(sequence=0))
        assert 1 == await granted(greedy)
        greedy.say(Cancel(sequence=1))
        assert 5 == await granted(modest)


@virtual_time
async def test_a_client_that_dies_gives_its_grant_back() -> None:
    """Silence ends its session; the memory that it was granted goes to the next one."""
    async with memory_serving(ScriptedSlots(), **MEMORY) as running:
        one, other = await two(running)
        one.say(ask(1))
        await granted(one)
        other.say(ask(1))
        with trio.move_on_after(9.0):
            while True:
                other.say(Heartbeat())
                await trio.sleep(1.0)
        assert await waits(other)
        for _ in range(3):
            other.say(Heartbeat())
            await trio.sleep(1.0)
        assert 1 == await granted(other)


@pytest.mark.parametrize(
    "how", ["goodbye", "connection", "another connection", "refused request", "withdrawn"]
)
@virtual_time
async def test_a_grant_comes_back_however_it_ends(how: str) -> None:
    """Whatever a client does with its grant, the next one gets the memory."""
    async with memory_serving(ScriptedSlots(), **MEMORY) as running:
        one, other = await two(running)
        one.say(ask(1))
        await granted(one)
        other.say(ask(9))
        assert await waits(other)
        match how:
            case "goodbye":
                one.say(Goodbye())
            case "connection":
                one.close()
                await wait_all_tasks_blocked()
                await trio.sleep(1.5)  # the server notices when it sends a heartbeat
            case "another connection":
                again = running.client()
                await again.open_session(b"a" * 16)
            case "refused request":
                one.say(request(1, model=77))
                assert (1, "invalid") == ending(await one.hear(Failure))
            case _:
                one.say(Cancel(sequence=1))
                assert (1, "cancelled") == ending(await one.hear(Failure))
        assert 9 == await granted(other)


@virtual_time
async def test_a_grant_that_is_not_used_comes_back_and_its_request_is_served_all_the_same() -> None:
    """The client lives, and sends late: what fits into the window of those that do not ask is served."""
    slots = ScriptedSlots()
    async with memory_serving(slots, **MEMORY) as running:
        one, other = await two(running)
        one.say(ask(1))
        await granted(one)
        other.say(ask(9))
        for _ in range(round(UNUSED_S) + 8):
            one.say(Heartbeat())
            other.say(Heartbeat())
            await trio.sleep(1.0)
        assert 9 == await granted(other)
        one.say(request(1))
        slots.finish(await slots.next_batch())
        assert 1 == (await one.hear(ResultEntry)).sequence


@virtual_time
async def test_what_can_never_be_granted_is_refused_at_once() -> None:
    """It says what is taken."""
    async with memory_serving(ScriptedSlots(), **MEMORY) as running:
        client = await running.greeted()
        client.say(ask(1, mib=9))
        failure = await client.hear(Failure)
        assert (1, "too_large", False) == (failure.sequence, failure.code, failure.retryable)
        assert f"at most {8 * MIB}" in failure.message


@virtual_time
async def test_a_question_that_waits_until_its_deadline_is_answered() -> None:
    """The first in turn is not refused by a prediction, but its deadline ends it."""
    async with memory_serving(ScriptedSlots(), **MEMORY) as running:
        one, other = await two(running)
        one.say(ask(1))
        await granted(one)
        other.say(ask(9, remaining_ms=2000))
        assert (9, "deadline_exceeded") == ending(await other.hear(Failure))
        one.say(Cancel(sequence=1))
        assert await waits(other)


@virtual_time
async def test_more_questions_than_the_queue_has_places_are_overloaded() -> None:
    """With the time after which to ask again, and counted by their cause."""
    async with memory_serving(ScriptedSlots(), max_queued_requests=4, **MEMORY) as running:
        client = await running.greeted()
        client.say(ask(0))
        assert 0 == await granted(client)
        client.say(ask(1), ask(2), ask(3))
        failure = await client.hear(Failure)
        assert (3, "overloaded", True) == (failure.sequence, failure.code, failure.retryable)
        assert failure.retry_after_ms is not None
        assert 1 == running.server.readings.snapshot().counters.overloaded["memory"]


@virtual_time
async def test_a_draining_server_refuses_what_waits_for_memory_and_what_asks() -> None:
    """They go to another server."""
    async with memory_serving(ScriptedSlots(), **MEMORY) as running:
        client = await running.greeted()
        client.say(ask(1), request(2))
        assert 1 == await granted(client)
        client.say(ask(3))
        assert await waits(client)
        running.server.drain()
        assert (3, "draining") == ending(await client.hear(Failure))
        client.say(ask(4))
        assert (4, "draining") == ending(await client.hear(Failure))


@virtual_time
async def test_a_question_for_a_request_that_the_server_has_is_answered_by_its_reply() -> None:
    """A client that comes back asks again for what it had sent: its bytes need not come twice, nor wait for themselves."""
    slots = ScriptedSlots()
    async with memory_serving(slots, **MEMORY) as running:
        client = await running.greeted()
        client.say(ask(1))
        await granted(client)
        client.say(request(1))
        batch = await slots.next_batch()
        again = running.client()
        await again.open_session()
        again.say(ask(1))
        assert await waits(again)
        slots.finish(batch)
        assert 1 == (await again.hear(ResultEntry)).sequence
        again.say(ask(1))
        assert 1 == (await again.hear(ResultEntry)).sequence


@virtual_time
async def test_a_granted_number_is_new_though_many_higher_ones_were_answered() -> None:
    """More than the kept replies: without the grant the number would count as answered."""
    slots = ScriptedSlots()
    async with memory_serving(slots, window_requests=2, **MEMORY) as running:
        client = await running.greeted()
        client.say(ask(1))
        await granted(client)
        for sequence in range(2, 8):
            client.say(request(sequence))
            slots.finish(await slots.next_batch())
            assert sequence == (await client.hear(ResultEntry)).sequence
        client.say(request(1))
        slots.finish(await slots.next_batch())
        assert 1 == (await client.hear(ResultEntry)).sequence


@virtual_time
async def test_more_than_was_asked_for_is_refused() -> None:
    """A client that asks for less than it sends gains nothing."""
    async with memory_serving(ScriptedSlots(), **MEMORY) as running:
        one, other = await two(running)
        one.say(Ask(sequence=1, nbytes=100, remaining_ms=None))
        await granted(one)
        one.say(request(1, echo_tensors(n=1000)))
        assert (1, "too_large") == ending(await one.hear(Failure))
        other.say(ask(1, mib=8))
        assert 1 == await granted(other)


@virtual_time
async def test_a_client_that_does_not_ask_has_a_window_that_is_cut_to_a_part_of_the_memory() -> None:
    """It learns it in its welcome. A larger request is refused, and it is told that newer clients may send it."""
    slots = ScriptedSlots()
    async with memory_serving(slots, **MEMORY) as running:
        old = running.client()
        old.say(Hello(client=b"o" * 16, software="old"))
        assert 2 * MIB == (await old.hear(Welcome)).window_bytes
        await old.open_session(b"o" * 16)
        assert not old.has_heard(GrantBounds)
        old.say(request(1, echo_tensors(n=400_000)))
        slots.finish(await slots.next_batch())
        assert 1 == (await old.hear(ResultEntry)).sequence
        old.say(request(2, echo_tensors(n=600_000)))
        failure = await old.hear(Failure)
        assert (2, "too_large") == ending(failure)
        assert "asks first" in failure.message


async def newcomer(running: Running, number: int) -> RawPeer:
    """A client that asks first."""
    peer = running.client()
    peer.say(Hello(client=bytes([number]) * 16, software="new"), AsksFirst(version=1))
    bounds = await peer.hear(GrantBounds)
    assert (MIB, 8 * MIB) == (bounds.unasked_bytes, bounds.most_bytes)
    return peer


@virtual_time
async def test_the_windows_of_those_that_ask_first_are_parts_of_one_whole() -> None:
    """Each is told when their number has doubled, and again a heartbeat after some have left; never less than 1 MiB.

    Who has not repeated the last word is told no other one until it has.
    """
    async with memory_serving(ScriptedSlots(), memory=256 * MIB, window_bytes=8 * MIB) as running:
        first = await newcomer(running, 1)
        assert not first.has_heard(Credit), "the welcome said it"
        others = [await newcomer(running, number) for number in range(2, 6)]
        news = await first.hear(Credit)
        assert 4 * MIB == news.window_bytes
        assert not first.has_heard(Credit)
        first.say(news)
        news = await first.hear(Credit)
        assert MIB == news.window_bytes
        assert MIB == (await others[-1].hear(Credit)).window_bytes
        first.say(news)
        for other in others:
            other.say(Goodbye())
        assert 8 * MIB == (await first.hear(Credit)).window_bytes
        assert not first.has_heard(Credit)
