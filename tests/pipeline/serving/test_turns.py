"""One connection's flood does not make the others wait: turns are bounded, and fresh connections come first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import structlog.testing
import trio
from tests.entries import (
    Cancel,
    Clock,
    Entry,
    Execute,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    OpenModel,
    ResultEntry,
    StatisticsRequest,
    Unknown,
    Welcome,
)
from tests.pipeline.serving.clocks import virtual_time
from tests.pipeline.serving.echo_model import done, request
from tests.pipeline.serving.harness import memory_serving
from tests.pipeline.serving.raw_peer import hello_of
from tests.pipeline.serving.scripted_slots import ScriptedSlots

from shapestream.serving.client_port import MOST_ABANDONED
from shapestream.serving.port_traffic import QUANTUM, TURN
from shapestream.serving.server import Server
from shapestream.transport.memory import memory_server
from shapestream.wire.codec import encode
from shapestream_engine.layout import Buffer

CLIENT = b"c" * 16
FLOODING = b"f" * 16
MESSAGE = 256
"""Entries of a full message."""
MOST_AT_ONCE = 96
"""Replies that a flood may get before an honest client that asks beside it gets its own: those of a few turns."""

Flood = Callable[[int], list[Entry]]

FLOODS: dict[str, Flood] = {
    "repeated numbers": lambda _: [request(0)] * MESSAGE,
    "hellos": lambda _: [Hello(client=FLOODING, software="flood")] * MESSAGE,
    "client ids": lambda turn: [
        Hello(client=(turn * MESSAGE + place + 1).to_bytes(16, "big"), software="flood")
        for place in range(MESSAGE)
    ],
    "unknown models": lambda turn: [request(turn * MESSAGE + place, model=99) for place in range(MESSAGE)],
    "models by name": lambda _: [OpenModel(name="none")] * MESSAGE,
    "statistics": lambda _: [StatisticsRequest()] * MESSAGE,
}


@pytest.mark.parametrize("kind", list(FLOODS))
@virtual_time
async def test_a_request_beside_a_flood_is_answered_after_a_few_turns(kind: str) -> None:
    """Eight full messages wait unread; an honest request that comes behind all of them does not wait for them."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        flooding = await running.greeted(FLOODING)
        flooding.say(request(0))
        slots.finish(await slots.next_batch())
        await flooding.hear(ResultEntry)
        honest = await running.greeted(CLIENT)
        for turn in range(8):
            flooding.say(*FLOODS[kind](turn))
        honest.say(request(1))
        batch = await slots.next_batch()
        flooding.take_arrived()
        assert MOST_AT_ONCE >= len(flooding.heard)
        slots.finish(batch)
        await honest.hear(ResultEntry)
        flooding.take_arrived()
        assert 4 * MOST_AT_ONCE >= len(flooding.heard)


@virtual_time
async def test_each_of_many_floods_waits_for_the_others_and_an_honest_client_for_none() -> None:
    """32 connections have two full messages each unread; an honest request still runs after a few turns."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        honest = await running.greeted(CLIENT)
        floods = [running.client() for _ in range(32)]
        for number, peer in enumerate(floods):
            peer.say(*[Hello(client=bytes([number]) * 16, software="flood")] * (2 * MESSAGE))
        await floods[0].hear(Welcome)
        honest.say(request(1))
        batch = await slots.next_batch()
        for peer in floods:
            peer.take_arrived()
        assert 32 * MESSAGE >= sum([len(peer.heard) for peer in floods])
        slots.finish(batch)
        await honest.hear(ResultEntry)


class EventsOfTurns(trio.abc.Instrument):
    """How many events of a name were logged in each turn of the event loop."""

    def __init__(self, logged: list[Any], name: str = "request arrived") -> None:
        self._logged = logged
        self._name = name
        self._seen = 0
        self.counts: list[int] = []

    def before_io_wait(self, timeout: float) -> None:
        """End a turn."""
        events = sum(self._name == line["event"] for line in self._logged)
        self.counts.append(events - self._seen)
        self._seen = events


@virtual_time
async def test_a_turn_of_the_event_loop_has_one_turn_of_a_port() -> None:
    """Requests that many connections sent at once are admitted in several, half of them of connections that are new."""
    clients, each = 16, 100
    with structlog.testing.capture_logs() as logged:
        async with memory_serving(ScriptedSlots()) as running:
            peers = [await running.greeted(bytes([number + 1]) * 16) for number in range(clients)]
            turns = EventsOfTurns(logged)
            trio.lowlevel.add_instrument(turns)
            for peer in peers:
                peer.say(*[request(number) for number in range(each)])
            await trio.testing.wait_all_tasks_blocked()
            trio.lowlevel.remove_instrument(turns)
    assert clients * each == sum("request arrived" == line["event"] for line in logged)
    assert QUANTUM <= max(turns.counts) <= TURN + QUANTUM


@virtual_time
async def test_who_finds_a_turn_full_is_the_first_of_the_next() -> None:
    """A connection that sends little does not wait behind floods because a turn had room for a part of it only."""
    with structlog.testing.capture_logs() as logged:
        async with memory_serving(ScriptedSlots()) as running:
            honest = [await running.greeted(bytes([number + 1]) * 16) for number in range(3)]
            floods = [running.client() for _ in range(32)]
            for number, peer in enumerate(floods):
                peer.say(*[Hello(client=bytes([64 + number]) * 16, software="flood")] * (2 * MESSAGE))
            await floods[0].hear(Welcome)
            turns = EventsOfTurns(logged)
            trio.lowlevel.add_instrument(turns)
            for peer in honest:
                peer.say(*[request(number) for number in range(QUANTUM * 5 // 8)])
            await trio.testing.wait_all_tasks_blocked()
            trio.lowlevel.remove_instrument(turns)
    arrived = [index for index, count in enumerate(turns.counts) if count]
    assert len(honest) * (QUANTUM * 5 // 8) == sum(turns.counts)
    assert len(honest) >= arrived[-1] - arrived[0] + 1


@virtual_time
async def test_a_turn_ends_few_sessions_with_many_requests() -> None:
    """A goodbye costs a point for each request that it abandons, so that a turn serves one of new connections."""
    clients = 8
    with structlog.testing.capture_logs() as logged:
        async with memory_serving(ScriptedSlots()) as running:
            peers = [await running.greeted(bytes([number + 1]) * 16) for number in range(clients)]
            for peer in peers:
                peer.say(*[request(number) for number in range(2 * QUANTUM)])
            await trio.testing.wait_all_tasks_blocked()
            turns = EventsOfTurns(logged, "client left")
            trio.lowlevel.add_instrument(turns)
            for peer in peers:
                peer.say(Goodbye())
            await trio.testing.wait_all_tasks_blocked()
            trio.lowlevel.remove_instrument(turns)
            assert 0 == running.server.statistics()["clients"]
    assert (clients, 1) == (sum(turns.counts), max(turns.counts))


@virtual_time
async def test_a_heartbeat_ends_few_silent_sessions_with_many_requests() -> None:
    """The others end at the next ones, one after the other."""
    with structlog.testing.capture_logs() as logged:
        async with memory_serving(ScriptedSlots(), client_silence_s=3.0) as running:
            for number in range(4):
                peer = await running.greeted(bytes([number + 1]) * 16)
                peer.say(*[request(sequence) for sequence in range(MOST_ABANDONED)])
            turns = EventsOfTurns(logged, "client left")
            trio.lowlevel.add_instrument(turns)
            await trio.sleep(3.5)
            for _ in range(6):
                await trio.sleep(1.0)
            trio.lowlevel.remove_instrument(turns)
            assert 0 == running.server.statistics()["clients"]
    assert (4, 1) == (sum(turns.counts), max(turns.counts))


class Queued(trio.abc.Instrument):
    """The requests in the server's queue after each turn of the event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.counts: list[int] = []

    def before_io_wait(self, timeout: float) -> None:
        """End a turn."""
        self.counts.append(int(self._server.statistics()["scheduler"]["queued"]))

    @property
    def most_ended(self) -> int:
        """Requests that left the queue in one turn, at most."""
        return max(before - after for before, after in pairwise(self.counts))


@virtual_time
async def test_a_goodbye_of_a_client_with_many_requests_is_served_in_parts() -> None:
    """Each takes a turn and is paid for, so another client's request comes between; then the session ends."""
    slots = ScriptedSlots()
    with structlog.testing.capture_logs() as logged:
        async with memory_serving(slots, max_queued_requests=4 * MOST_ABANDONED) as running:
            peer, other = await running.greeted(), await running.greeted(FLOODING)
            peer.say(*[request(number) for number in range(4 * MOST_ABANDONED)])
            await trio.testing.wait_all_tasks_blocked()
            queued = Queued(running.server)
            trio.lowlevel.add_instrument(queued)
            peer.say(Goodbye())
            other.say(request(1))
            await trio.testing.wait_all_tasks_blocked()
            trio.lowlevel.remove_instrument(queued)
            assert 1 == running.server.statistics()["clients"]
            slots.finish(await slots.next_batch())
            slots.finish(await slots.next_batch())
            await other.hear(ResultEntry)
            assert 0 == running.server.statistics()["scheduler"]["queued"]
    assert MOST_ABANDONED >= queued.most_ended
    (left,) = [line for line in logged if line["event"] == "client left"]
    assert ("goodbye", 4 * MOST_ABANDONED) == (left["why"], left["unfinished"])


@pytest.mark.parametrize("how", ["it stays away", "it speaks again", "it greets again", "it comes back"])
@virtual_time
async def test_a_silent_session_with_many_requests_ends_in_parts(how: str) -> None:
    """Also if its client is heard of meanwhile: it is told so, sends all of them again, and each is answered once."""
    slots = ScriptedSlots()
    async with memory_serving(slots, client_silence_s=3.0) as running:
        peer = await running.greeted()
        asked = [request(number) for number in range(1024)]
        peer.say(*asked)
        queued = Queued(running.server)
        trio.lowlevel.add_instrument(queued)
        await trio.sleep(4.5)
        assert 0 < running.server.statistics()["scheduler"]["queued"] < 1023
        match how:
            case "it speaks again":
                while not any(isinstance(entry, Unknown) for entry in peer.heard):
                    peer.say(Heartbeat())
                    await trio.sleep(1.0)
                    peer.take_arrived()
            case "it comes back":
                peer = running.client()
            case "it stays away":
                await trio.sleep(5.0)
        if how == "it stays away":
            assert (0, 0) == (
                running.server.statistics()["clients"],
                running.server.statistics()["scheduler"]["queued"],
            )
        trio.lowlevel.remove_instrument(queued)
        assert MOST_ABANDONED >= queued.most_ended
        peer.heard.clear()
        await peer.open_session(CLIENT, "echo")
        peer.say(*asked)
        answered: list[int] = []
        while len(answered) < 1024:
            with trio.move_on_after(0.5):
                slots.finish(await slots.next_batch())
            peer.say(Heartbeat())
            peer.take_arrived()
            answered = [entry.sequence for entry in peer.heard if isinstance(entry, ResultEntry)]
        assert list(range(1024)) == sorted(answered)


@virtual_time
async def test_every_entry_of_a_flood_within_the_bounds_is_answered() -> None:
    """Nothing is dropped: 2,048 refused requests have 2,048 replies."""
    async with memory_serving(ScriptedSlots()) as running:
        peer = await running.greeted(CLIENT)
        peer.say(*[request(number, model=99) for number in range(8 * MESSAGE)])
        failures = await peer.hear_each(Failure, 8 * MESSAGE)
        assert list(range(8 * MESSAGE)) == [failure.sequence for failure in failures]


@virtual_time
async def test_a_connection_that_sends_far_beyond_its_credit_unread_is_ended() -> None:
    """More than 4,096 entries beyond the window wait unread: goodbye, one line of the log, others are served."""
    slots = ScriptedSlots()
    async with memory_serving(slots, window_requests=64) as running:
        honest = await running.greeted(CLIENT)
        flooding = await running.greeted(FLOODING)
        with structlog.testing.capture_logs() as lines:
            for _ in range(40):
                flooding.say(*[Cancel(sequence=0)] * MESSAGE)
            await flooding.hear(Goodbye)
        said = [line["why"] for line in lines if line["event"] == "message refused"]
        assert 1 == len(said)
        assert "beyond its credit" in said[0]
        honest.say(request(1))
        slots.finish(await slots.next_batch())
        await honest.hear(ResultEntry)
        assert 1 == running.server.statistics()["clients"]


SMALL: dict[str, list[Buffer]] = {
    "empty": [b"\x92\x01\x90"],
    "empty, of a longer form": [b"\x92\x01\xdc\x00\x00"],
    "one clock": encode([Clock(sent_us=1)]),
    "one heartbeat": encode([Heartbeat()]),
    "many empty parts": [b"\x92\x01\x91\x93\x63\xcd\x03\xe8\x00"] + [b""] * 1000,
}


@pytest.mark.parametrize("kind", list(SMALL))
@pytest.mark.parametrize("connections", [1, 4])
@virtual_time
async def test_messages_that_cost_little_are_counted_as_well(kind: str, connections: int) -> None:
    """They are read faster than they are served, so a flood of them is found beyond its credit, and ended."""
    async with memory_serving(ScriptedSlots(), window_requests=64) as running:
        floods = [await running.greeted(bytes([number]) * 16) for number in range(connections)]
        for _ in range(2_000):
            for peer in floods:
                with suppress(trio.WouldBlock):
                    for _ in range(MESSAGE):
                        peer.connection.send_nowait(SMALL[kind])
            await trio.lowlevel.checkpoint()
        for peer in floods:
            peer.take_arrived()
        assert [Goodbye()] * connections == [peer.heard[-1] for peer in floods]
        await running.greeted(CLIENT)
        assert 1 == running.server.statistics()["clients"]


@virtual_time
async def test_what_arrived_in_time_is_served_in_its_order() -> None:
    """A cancel that follows its request in the same backlog finds it; a goodbye comes last."""
    slots = ScriptedSlots()
    async with memory_serving(slots) as running:
        peer = await running.greeted(CLIENT)
        peer.say(request(0))
        await slots.next_batch()
        entries: list[Entry] = []
        for number in range(1, 200):
            entries += [request(number), Cancel(sequence=number)]
        peer.say(*entries)
        failures = await peer.hear_each(Failure, 199)
        assert [(number, "cancelled") for number in range(1, 200)] == [
            (failure.sequence, failure.code) for failure in failures
        ]


@virtual_time
async def test_silence_is_judged_only_when_the_port_was_read_empty() -> None:
    """A socket says whether the last receive took everything; a burst of more than it takes at once leaves some."""
    server = memory_server()
    connection = server.connect()
    assert server.drained
    for _ in range(300):
        connection.send_nowait([b"x"])
    assert 256 == len(server.receive_nowait())
    assert not server.drained
    assert 44 == len(server.receive_nowait())
    assert server.drained


@virtual_time
async def test_a_worker_that_greets_without_end_keeps_nobody_waiting() -> None:
    """100 greetings of 256 slots wait unread: an honest worker's report is served after a few of them."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        client.say(request(1))
        execute = await worker.hear(Execute)
        greeting = hello_of(worker="greeter", slots=256)
        greeter = running.worker()
        greeter.say(*[greeting] * 100)
        worker.say(done(execute))
        await client.hear(ResultEntry)
        greeter.take_arrived()
        assert 8 >= len(greeter.heard)


@virtual_time
async def test_workers_with_the_most_slots_come_and_go_and_the_rest_serve_on() -> None:
    """20 workers of 256 slots join and leave; what is left is the one that stays."""
    async with memory_serving() as running:
        client, worker = await running.client_and_worker()
        others = [running.worker() for _ in range(20)]
        for number, other in enumerate(others):
            await other.join_as_worker(f"many-{number}", slots=256)
        assert 20 * 256 + 1 == running.server.statistics()["slots_in_all"]
        for other in others:
            other.say(Goodbye())
        client.say(request(1))
        worker.say(done(await worker.hear(Execute)))
        await client.hear(ResultEntry)
        assert 1 == (await client.statistics())["slots_in_all"]


@virtual_time
async def test_slots_that_join_without_end_are_refused_until_time_has_passed() -> None:
    """8,192 slots may join at once; then a worker is told goodbye, and may come a moment later."""
    async with memory_serving() as running:
        greeting = hello_of(worker="greeter", slots=256)
        greeter = running.worker()
        greeter.say(*[greeting] * 33)
        await greeter.hear(Goodbye)
        assert 0 == running.server.statistics()["slots_in_all"]
        await trio.sleep(5.0)
        await running.joined("later")
        assert 1 == running.server.statistics()["slots_in_all"]
