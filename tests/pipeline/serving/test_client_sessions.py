"""Sessions of clients: they begin, have credit, move to another connection, and end; nothing runs twice for that."""

from __future__ import annotations

import io
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import structlog
import trio
import trio.testing
from tests.entries import (
    Cancel,
    Entry,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    OpenModel,
    ResultEntry,
    Unknown,
    Welcome,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import echo_tensors, request
from tests.pipeline.serving.harness import memory_serving, scripted_client
from tests.pipeline.serving.raw_peer import ending
from tests.pipeline.serving.scripted_slots import ScriptedSlots
from trio.testing import wait_all_tasks_blocked

from shapestream.telemetry.logging import configure

CLIENT = b"c" * 16


@virtual_time
async def test_a_peer_without_a_session_is_told_to_greet() -> None:
    """After a server's restart the client learns at its first message that it must start again."""
    async with memory_serving(ScriptedSlots()) as running:
        client = running.client()
        client.say(request(1))
        await client.hear(Unknown)


@virtual_time
async def test_a_client_that_comes_back_on_another_connection_gets_its_answers_there() -> None:
    """The session belongs to the client id, not to the connection."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        first, second = running.client(), running.client()
        await first.open_session()
        first.say(request(1))
        batch = await slots.next_batch()
        await second.open_session()
        slots.finish(batch)
        assert 1 == (await second.hear(ResultEntry)).sequence


@virtual_time
async def test_requests_beyond_the_sessions_credit_are_refused() -> None:
    """Both kinds of credit: requests and bytes; a single request beyond the bytes can never be served."""
    async with scripted_client(window_requests=2, window_bytes=1000) as (client, slots):
        client.say(request(1), request(2), request(3))
        batch = await slots.next_batch()
        assert (3, "overloaded") == ending(await client.hear(Failure))
        slots.finish(batch)
        await client.hear(ResultEntry)
        await client.hear(ResultEntry)
        client.say(request(4, echo_tensors(n=200)), request(5, echo_tensors(n=100)))
        assert (5, "overloaded") == ending(await client.hear(Failure))
        slots.finish(await slots.next_batch())
        assert 4 == (await client.hear(ResultEntry)).sequence
        client.say(request(6, echo_tensors(n=300)))
        assert (6, "too_large") == ending(await client.hear(Failure))


@virtual_time
async def test_a_request_beyond_the_credit_is_counted_by_that_bound() -> None:
    """As those are that the scheduler refuses, so that metrics tell all bounds side by side."""
    async with memory_serving(ScriptedSlots(), window_requests=2) as running:
        client = await running.greeted(b"c" * 16)
        client.say(request(1), request(2), request(3))
        assert (3, "overloaded") == ending(await client.hear(Failure))
        assert {"credit": 1} == +running.server.readings.snapshot().counters.overloaded


@virtual_time
async def test_a_client_that_says_goodbye_has_its_queued_work_dropped() -> None:
    """Its running batch is cancelled, its queued request never starts, others are served."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        leaver, other = await running.greeted(b"l" * 16), await running.greeted(b"o" * 16)
        leaver.say(request(1))
        batch = await slots.next_batch()
        leaver.say(request(2, echo_tensors(n=5)))
        leaver.say(Goodbye())
        other.say(request(1))
        await wait_all_tasks_blocked()
        assert [batch.batch] == slots.cancelled
        slots.fail(batch, "cancelled")
        own = await slots.next_batch()
        assert (1, 4) == own.members[0].layout[0][2]
        slots.finish(own)
        assert 1 == (await other.hear(ResultEntry)).sequence
        assert [] == slots.started


@pytest.mark.parametrize("last", [Goodbye(), Cancel(sequence=1)], ids=["goodbye", "cancel"])
@virtual_time
async def test_what_a_client_said_before_its_connection_broke_is_carried_out(last: Entry) -> None:
    """A turn serves sixteen such entries, and says the answers: that none can be sent shows before the last is read."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        client = await running.greeted()
        client.say(request(1))
        batch = await slots.next_batch()
        client.say(*[OpenModel(name="echo")] * 100)
        client.say(last)
        client.close()
        await wait_all_tasks_blocked()
        assert 1 == running.server.statistics()["peers_lost"]["client: gone"]
        assert [batch.batch] == slots.cancelled


@virtual_time
async def test_a_silent_client_is_given_up_and_an_audible_one_is_kept() -> None:
    """Silence for longer than `client_silence_s` ends a session; a heartbeat is enough to keep it."""
    async with memory_serving(ScriptedSlots(), client_silence_s=3.0) as running:
        silent, audible = await running.greeted(b"s" * 16), await running.greeted(b"a" * 16)
        for _ in range(5):
            await trio.sleep(1.0)
            audible.say(Heartbeat())
        assert 1 == running.server.statistics()["clients"]
        silent.say(request(1))
        await silent.hear(Unknown)
        await audible.hear(Heartbeat)


@virtual_time
async def test_too_many_sessions_are_turned_away() -> None:
    """The table of sessions is bounded; the newcomer hears Goodbye, the others stay."""
    async with memory_serving(ScriptedSlots(), max_clients=1) as running:
        first, second = running.client(), running.client()
        await first.open_session(b"1" * 16)
        second.say(Hello(client=b"2" * 16, software="test"))
        await second.hear(Goodbye)
        first.say(Hello(client=b"1" * 16, software="test"))
        await first.hear(Welcome)


@virtual_time
async def test_a_client_that_does_not_read_is_cut_off_alone() -> None:
    """Its outbox fills, its session ends; its neighbour is served meanwhile."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        deaf, other = running.client(), running.client()
        running.clients.endpoint.capacity_messages = 8
        await deaf.open_session(b"d" * 16)
        await other.open_session(b"o" * 16)
        for number in range(9):
            deaf.say(request(number))
            slots.finish(await slots.next_batch())
        await wait_all_tasks_blocked()
        assert 1 == running.server.statistics()["clients"]
        assert {"client: does not read": 1} == running.server.statistics()["peers_lost"]
        other.say(request(1))
        slots.finish(await slots.next_batch())
        assert 1 == (await other.hear(ResultEntry)).sequence


@virtual_time
async def test_unreadable_bytes_end_that_connection_and_no_other() -> None:
    """The sender hears Goodbye; a client beside it is served on."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        vandal, other = await running.greeted(b"v" * 16), await running.greeted(b"o" * 16)
        vandal.connection.send_nowait([b"\xc1 garbage"])
        await vandal.hear(Goodbye)
        assert 1 == running.server.statistics()["clients"]
        assert {"clients": 1} == running.server.statistics()["bad_messages"]
        other.say(request(1))
        slots.finish(await slots.next_batch())
        assert 1 == (await other.hear(ResultEntry)).sequence


@virtual_time
async def test_a_client_that_comes_back_gets_what_was_finished_and_what_still_runs() -> None:
    """Two requests; one ends while nobody is there, the other after the client is back. Each ran once."""
    slots = ScriptedSlots(slots=2)
    async with memory_serving(slots) as running:
        before = await running.greeted(CLIENT)
        before.say(request(1))
        first = await slots.next_batch()
        before.say(request(2))
        second = await slots.next_batch()
        before.connection.close()
        slots.finish(first)
        await wait_all_tasks_blocked()
        statistics = running.server.statistics()
        assert (1, {"client: gone": 1}) == (statistics["clients"], statistics["peers_lost"])

        after = running.client()
        after.say(Hello(client=CLIENT, software="test"))
        await after.hear(Welcome)
        after.say(OpenModel(name="echo"), request(1), request(2))
        assert 1 == (await after.hear(ResultEntry)).sequence
        slots.finish(second)
        assert 2 == (await after.hear(ResultEntry)).sequence
        statistics = running.server.statistics()
        assert (2, 2, 1, 1) == (
            statistics["batches"],
            statistics["results"],
            statistics["duplicates"],
            statistics["repeated"],
        )


@virtual_time
async def test_a_client_that_does_not_come_back_ends_as_silent() -> None:
    """What it had waiting is dropped then."""
    slots = ScriptedSlots()
    async with memory_serving(slots, client_silence_s=3.0) as running:
        client = await running.greeted(CLIENT)
        client.say(request(1))
        first = await slots.next_batch()
        client.say(request(2))
        await trio.sleep(0.5)
        client.connection.close()
        slots.finish(first)
        second = await slots.next_batch()
        await trio.sleep(5.0)
        assert 0 == running.server.statistics()["clients"]
        slots.finish(second)


@virtual_time
async def test_one_whose_connection_is_gone_makes_room_for_another() -> None:
    """Where there may be no more clients, those that are here come first."""
    async with memory_serving(ScriptedSlots(), max_clients=1, client_silence_s=60.0) as running:
        first = await running.greeted(CLIENT)
        first.connection.close()
        await trio.sleep(5.0)
        assert 1 == running.server.statistics()["clients"]
        await running.client().open_session(bytes(16))
        assert 1 == running.server.statistics()["clients"]


@virtual_time
async def test_a_client_that_comes_and_goes_without_end_does_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hundred lines of each event at once, then some per second: neither event takes from the other."""
    monkeypatch.setattr("shapestream.telemetry.logging.time", SimpleNamespace(monotonic=lambda: 0.0))
    file = io.StringIO()
    async with memory_serving() as running:
        peer = running.client()
        configure(stream=file)
        try:
            for client in range(500):
                peer.say(Hello(client=client.to_bytes(16, "big"), software="test"))
            await wait_all_tasks_blocked()
        finally:
            structlog.reset_defaults()
    shown = [json.loads(line)["event"] for line in file.getvalue().splitlines()]
    assert {"client joined": 200, "client left": 200} == Counter(shown)
