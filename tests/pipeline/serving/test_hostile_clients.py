"""Well-formed messages that are lies: verbs out of order, foreign names, floods, overdrawn credit. See hostile.py."""

from __future__ import annotations

import pytest
from tests.entries import (
    Cancel,
    Credit,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    ModelRefused,
    OpenModel,
    ResultEntry,
    Unknown,
    Welcome,
)
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.hostile import INVERTED, Hostile, assert_memory_kept, client, some_client, watched
from tests.pipeline.serving.hostile_server import WINDOW_REQUESTS
from tests.pipeline.serving.raw_messages import Frames, assert_served, entry, message
from tests.pipeline.serving.raw_peer import verdict
from tests.pipeline.serving.real_sockets import dialled

pytestmark = pytest.mark.usefixtures("resident_at_first")


BEFORE_HELLO: dict[str, Frames] = {
    "a model": message([11, 0, "scaled"]),
    "a request": message(entry()),
    "a cancellation": message([13, 0, 7]),
    "a question": message([14, 0]),
    "a farewell": message([1, 0]),
    "a heartbeat": message([0, 0]),
}


@pytest.mark.parametrize("name", BEFORE_HELLO)
@real_time
async def test_nothing_comes_before_the_greeting(name: str, server: Hostile) -> None:
    """The sender learns that it is unknown, and may greet on the same connection."""
    async with watched(server) as watch, dialled(server.ipc) as stranger:
        stranger.connection.send_nowait(BEFORE_HELLO[name])
        await stranger.hear(Unknown)
        await stranger.open_session(some_client(), "scaled")
        await assert_served(stranger, 1)
        await watch.done("strangers.clients")


@real_time
async def test_a_request_behind_a_farewell_is_of_a_stranger(server: Hostile) -> None:
    """Entries are carried out in their order; what had not ended is dropped."""
    async with watched(server) as watch, client(server.ipc) as odd:
        odd.connection.send_nowait(message([1, 0], entry()))
        await odd.hear(Unknown)
        await watch.done("strangers.clients")


@real_time
async def test_greetings_without_end_open_one_session(server: Hostile) -> None:
    """A connection has one session at most, however many ids it invents."""
    async with watched(server) as watch, dialled(server.ipc) as odd:
        before = (await watch.honest.statistics())["clients"]
        for _ in range(20):
            odd.connection.send_nowait(message(*[[10, 0, some_client(), "x"] for _ in range(50)]))
        await odd.statistics()
        assert before + 1 == (await watch.honest.statistics())["clients"]
        await watch.done(None)


@real_time
async def test_a_replayed_identity_moves_the_session_and_its_owner_takes_it_back(server: Hostile) -> None:
    """Without keys an id is all that a client has; see docs/security.md. Nobody else is touched."""
    number = some_client()
    async with (
        watched(server) as watch,
        client(server.ipc, number) as owner,
        dialled(server.ipc) as thief,
    ):
        thief.say(Hello(client=number, software="thief"))
        await thief.hear(Welcome)
        owner.say(Heartbeat())
        await owner.hear(Unknown)
        owner.say(Hello(client=number, software="owner"))
        await owner.hear(Welcome)
        await assert_served(owner, 1)
        await watch.done("strangers.clients")


@real_time
async def test_one_client_cannot_cancel_what_another_waits_for(server: Hostile) -> None:
    """Numbers belong to their client: cancelling all of the small ones touches nobody else's."""
    async with watched(server) as watch, client(server.ipc) as odd:
        watch.honest.connection.send_nowait(message(*[entry(sequence=n) for n in range(50)]))
        for _ in range(4):
            odd.say(*[Cancel(sequence=n) for n in range(200)])
        assert list(range(50)) == sorted(
            result.sequence for result in await watch.honest.hear_each(ResultEntry, 50)
        )
        await assert_served(odd, 1)
        await watch.done(None)


@pytest.mark.parametrize("excess", [1, 36, 192])
@real_time
async def test_credit_that_is_overdrawn_is_refused(excess: int, server: Hostile) -> None:
    """In one message: each request has one reply, and what the window had no room for when it was read is told so."""
    async with watched(server) as watch, client(server.ipc) as greedy:
        sent = WINDOW_REQUESTS + excess
        greedy.connection.send_nowait(message(*[entry(sequence=n) for n in range(sent)]))
        replies = await greedy.ends(sent)
        assert set(range(sent)) == {reply.sequence for reply in replies}
        failures = [reply for reply in replies if isinstance(reply, Failure)]
        assert {("overloaded", True)} >= {(failure.code, failure.retryable) for failure in failures}
        assert excess >= len(failures)
        await watch.done("failures.overloaded" if failures else None, len(failures))


@real_time
async def test_credit_for_itself_is_none(server: Hostile) -> None:
    """A client may repeat what it was told. More it cannot give itself, nor does less that it was not told bind it."""
    async with watched(server) as watch, client(server.ipc) as greedy:
        greedy.say(
            Credit(window_requests=2**62, window_bytes=2**62), Credit(window_requests=0, window_bytes=0)
        )
        greedy.connection.send_nowait(message(*[entry(sequence=n) for n in range(WINDOW_REQUESTS + 1)]))
        assert (WINDOW_REQUESTS, "overloaded", True) == verdict(await greedy.hear(Failure))
        await greedy.hear_each(ResultEntry, WINDOW_REQUESTS)
        await watch.done("failures.overloaded")


@real_time
async def test_bytes_that_are_overdrawn_are_refused(server: Hostile) -> None:
    """Five requests of 300,000 bytes in one message, where 1 MiB may be unanswered: three are served."""
    async with watched(server) as watch, client(server.ipc) as greedy:
        layout = ((0, "boolean", (1, 300_000)),)
        entries = [
            entry(frames=1, sequence=n, model=INVERTED, layout=layout, inline=(None,)) for n in range(5)
        ]
        greedy.connection.send_nowait(message(*entries, frames=(bytes(300_000),) * 5))
        for sequence in (3, 4):
            assert (sequence, "overloaded", True) == verdict(await greedy.hear(Failure))
        await greedy.hear_each(ResultEntry, 3)
        await watch.done("failures.overloaded", 2)


NAMES = {
    "none": "",
    "of 512 characters": "n" * 512,
    "with a line break and a line of its own": 'x"}\n{"event": "server stopped", "level": "info"}',
    "with the codes of a terminal": "\x1b[2J\x1b[31m\x07\x00",
    "written from right to left": "\u202edelacs\u2028\u2029\ufeff",
    "with the fields of a template": "{0} {name} %s %n ${jndi:ldap://127.0.0.1/x}",
    "up and out": "../../../../etc/passwd",
    "nearly the right one": "scaled\x00",
}


@pytest.mark.parametrize("name", NAMES)
@real_time
async def test_a_name_stays_a_name(name: str, server: Hostile) -> None:
    """As software and as a model: it is answered, the log stays one JSON object per line, and no counter is named so."""
    async with watched(server) as watch, dialled(server.ipc) as odd:
        odd.say(Hello(client=some_client(), software=NAMES[name]))
        await odd.hear(Welcome)
        odd.say(OpenModel(name=NAMES[name]))
        refused = await odd.hear(ModelRefused)
        assert ("invalid", NAMES[name]) == (refused.code, refused.name)
        odd.say(Goodbye())
        await watch.done(None)
        joined = [line for line in server.lines() if line["event"] == "client joined"]
        assert NAMES[name] in {line["software"] for line in joined}
        assert not [line for line in server.lines() if line["event"] == "server stopped"]


@real_time
async def test_labels_do_not_multiply(server: Hostile) -> None:
    """5,000 names of software and models, and no counter more."""
    async with watched(server) as watch, client(server.ipc) as odd:
        before = len(repr(await odd.statistics()))
        for first in range(0, 5_000, 100):
            odd.say(*[OpenModel(name=f"model-{first + n}") for n in range(100)])
            await odd.hear_each(ModelRefused, 100)
        assert len(repr(await odd.statistics())) < before + 200
        await watch.done(None)


@real_time
async def test_a_flood_of_bad_messages_costs_a_count_each(server: Hostile) -> None:
    """4,000 bad entries: the honest client beside is served in between."""
    async with watched(server) as watch, client(server.ipc) as flooding:
        for turn in range(16):
            flooding.connection.send_nowait(message(*[[9_999, 0]] * 250))
            await assert_served(watch.honest, turn)
        await flooding.statistics()
        await watch.done("bad_messages.clients", 4_000)


def test_none_of_this_stays_in_memory(server: Hostile, resident_at_first: int) -> None:
    """The last test of this file: the server is the same process as at first, and about as large."""
    assert_memory_kept(server, resident_at_first)
