"""A client's connection breaks: its session and its work stay for a while, and nothing runs twice for that."""

from __future__ import annotations

import trio
import trio.testing
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.harness import ScriptedSlots, memory_serving, request

from shapestream.wire.messages import Hello, OpenModel, Result, Welcome

CLIENT = b"c" * 16


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
        statistics = running.server.statistics()
        assert (1, {"client: gone": 1}) == (statistics["clients"], statistics["peers_lost"])

        after = running.client()
        after.say(Hello(client=CLIENT, software="test"))
        await after.hear(Welcome)
        after.say(OpenModel(name="echo"), request(1), request(2))
        assert 1 == (await after.hear(Result)).sequence
        slots.finish(second)
        assert 2 == (await after.hear(Result)).sequence
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
    async with memory_serving(ScriptedSlots(), max_sessions=1, client_silence_s=60.0) as running:
        first = await running.greeted(CLIENT)
        first.connection.close()
        await trio.sleep(5.0)
        assert 1 == running.server.statistics()["clients"]
        await running.client().open_session(bytes(16))
        assert 1 == running.server.statistics()["clients"]
