"""What a client that is asked for its clock tells the server: a clock that stood still, or a message that was slow."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.entries import AsksFirst, Clock, Credit, Failure, Hello, ResultEntry
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import request
from tests.pipeline.serving.harness import memory_serving, scripted_client
from tests.pipeline.serving.raw_peer import RawPeer
from tests.pipeline.serving.scripted_slots import ScriptedSlots

from shapestream.wire.peers import DRIFT, PeerClock

BEGAN_S = 1e6
"""What the client's clock shows at the beginning of the test."""


def clock(behind_s: float = 0.0) -> Clock:
    """What the client's clock shows."""
    return Clock(sent_us=round((BEGAN_S + trio.current_time() - behind_s) * 1e6))


async def refused(client: RawPeer, sequence: int) -> None:
    """This request's deadline had passed on its way, as the server believes: it never waits for it."""
    read_at = trio.current_time()
    failure = await client.hear(Failure)
    assert read_at == trio.current_time()
    assert (sequence, "deadline_exceeded") == (failure.sequence, failure.code)


async def answered(client: RawPeer, slots: ScriptedSlots, sequence: int) -> None:
    """This request runs, and its result comes."""
    slots.finish(await slots.next_batch())
    assert sequence == (await client.hear(ResultEntry)).sequence


@pytest.mark.parametrize("behind_s", [0.3, 5.0, 3600.0])
@virtual_time
async def test_a_clock_that_stood_still_costs_one_request(behind_s: float) -> None:
    """It is believed from when the client has repeated its credit, however long it stood still."""
    async with scripted_client() as (client, slots):
        client.say(clock(), request(1, remaining_ms=250))
        await answered(client, slots, 1)
        client.say(clock(behind_s), request(2, remaining_ms=250))
        await refused(client, 2)
        client.say(await client.hear(Credit), clock(behind_s), request(3, remaining_ms=250))
        await answered(client, slots, 3)


@virtual_time
async def test_a_clock_is_asked_for_where_half_of_a_deadline_seems_lost() -> None:
    """The request runs with what is left; a longer deadline, of which less seems lost, asks for nothing."""
    async with scripted_client() as (client, slots):
        client.say(clock(), request(1, remaining_ms=250))
        await answered(client, slots, 1)
        client.say(clock(0.2), request(2, remaining_ms=1000))
        await answered(client, slots, 2)
        assert not client.has_heard(Credit)
        client.say(clock(0.2), request(3, remaining_ms=250))
        await answered(client, slots, 3)
        assert client.has_heard(Credit)


@virtual_time
async def test_slow_messages_are_not_taken_for_a_clock_that_stood_still() -> None:
    """Between two that were held up the client repeats its credit at once, and its clock shows that it never stood still."""
    async with scripted_client() as (client, slots):
        client.say(clock(), request(1, remaining_ms=250))
        await answered(client, slots, 1)
        client.say(clock(5.0), request(2, remaining_ms=250))
        await refused(client, 2)
        client.say(await client.hear(Credit), clock())
        client.say(clock(5.0), request(3, remaining_ms=250))
        await refused(client, 3)


@virtual_time
async def test_a_client_that_repeats_nothing_is_asked_once_in_a_connection() -> None:
    """Nothing changes for it; when it greets again the question may have been lost, and is asked again."""
    async with scripted_client() as (client, slots):
        client.say(clock(), request(1, remaining_ms=250))
        await answered(client, slots, 1)
        for sequence in (2, 3):
            client.say(clock(5.0), request(sequence, remaining_ms=250))
            await refused(client, sequence)
        await client.hear(Credit)
        assert not client.has_heard(Credit)
        await client.open_session()
        client.say(clock(5.0), request(4, remaining_ms=250))
        await refused(client, 4)
        assert client.has_heard(Credit)


@virtual_time
async def test_the_repetition_of_an_earlier_credit_is_no_answer_to_a_later_one() -> None:
    """It was sent before the question, so what was held up behind it does not seem to be sent just now."""
    slots = ScriptedSlots()
    async with memory_serving(slots, memory=256 << 20, window_bytes=8 << 20) as running:
        client = await running.greeted()
        client.say(AsksFirst(version=1), clock(), request(1, remaining_ms=250))
        await answered(client, slots, 1)
        for number in (1, 2):  # the windows shrink when there are three
            other = running.client()
            other.say(Hello(client=bytes([number]) * 16, software="other"), AsksFirst(version=1))
        news = await client.hear(Credit)
        await trio.sleep(1.0)  # a network holds up all that follows
        client.say(clock(1.0), request(2, remaining_ms=250))
        await refused(client, 2)
        client.say(news, clock(0.9))
        client.say(clock(0.8), request(3, remaining_ms=250))
        await refused(client, 3)
        assert news.window_bytes > (await client.hear(Credit)).window_bytes, "of three clients"


@given(
    pauses_s=st.lists(st.floats(0.0, 100.0), max_size=20),
    ways_s=st.lists(st.floats(0.0, 10.0), min_size=21, max_size=21),
    gap_s=st.floats(0.001, 10.0),
)
def test_after_a_question_no_message_seems_earlier_than_its_answers_round_trip(
    pauses_s: list[float], ways_s: list[float], gap_s: float
) -> None:
    """A clock that stands still before each message, and ways of any length: never late by more, and never early."""
    clock = PeerClock()
    now = behind_s = 0.0
    fastest_s = ways_s[0]
    clock.heard(0, fastest_s)
    for pause_s, way_s in zip(pauses_s, ways_s[1:], strict=False):
        now += gap_s + pause_s
        behind_s += pause_s
        asked_at = now
        assert clock.ask(asked_at)
        sent_at = asked_at + way_s / 2  # the answer is sent when the question has arrived
        now = sent_at + way_s / 2
        assert clock.repeated()
        clock.heard(round((sent_at - behind_s) * 1e6), now)
        fastest_s = max(fastest_s, way_s)
        seems_s = clock.sent_at(now)
        assert asked_at - 1e-5 <= seems_s <= min(now, sent_at + fastest_s) + DRIFT * now + 1e-5
