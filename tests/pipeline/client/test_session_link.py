"""When a session greets, beats, and gives a connection up, with the time as an argument."""

from __future__ import annotations

import pytest
from tests.pipeline.client.bench import SETTINGS, Bench

from shapestream.client.link import MIN_HEARTBEAT_S
from shapestream.client.tickets import OpenTicket
from shapestream.wire.messages import Heartbeat, Hello, OpenModel, Welcome


def test_heartbeats_only_when_nothing_else_was_sent() -> None:
    """Any traffic is a sign of life, so a busy client sends no heartbeats."""
    bench = Bench()
    model = bench.open()
    bench.now += 0.6
    bench.submit(model)
    bench.turn()
    bench.now += 0.6
    assert bench.sent() == []
    bench.now += 0.4
    assert bench.sent() == [Heartbeat()]


def test_who_stood_still_reads_before_it_calls_the_server_silent() -> None:
    """A process that was stopped finds the server's heartbeats behind its own late look at the clock."""
    bench = Bench()
    bench.open()
    bench.now += 3 * SETTINGS.silence_s
    assert not bench.turn().reconnect
    assert bench.now < bench.session.next_wakeup() < bench.now + 1.0
    bench.receive(Heartbeat())
    bench.turn()
    bench.now += 1.0
    assert not bench.turn().reconnect


def test_a_server_that_said_nothing_while_its_client_stood_still_is_silent() -> None:
    """Half a second later, when nothing was there to be read."""
    bench = Bench()
    bench.open()
    bench.now += 3 * SETTINGS.silence_s
    bench.turn()
    assert bench.wait_until_due().reconnect


def test_an_unanswered_greeting_is_repeated_on_new_connections_ever_more_patiently() -> None:
    """1, 2, 4, 8, then every `silence_s` seconds."""
    bench = Bench()
    waits = []
    for _ in range(6):
        bench.session.connected(bench.now)
        before = bench.now
        assert not bench.turn().reconnect
        assert bench.wait_until_due().reconnect
        waits.append(bench.now - before)
    assert waits == [1, 2, 4, 8, 10, 10]


def test_greets_first_and_sends_nothing_before_the_welcome() -> None:
    """A new connection sends `Hello` once, and only that until it is answered."""
    bench = Bench()
    bench.session.submit(OpenTicket(bench.caller, name="m"))
    assert bench.sent() == []
    bench.session.connected(bench.now)
    assert bench.sent() == [Hello(client=bytes(16), software="test")]
    assert bench.sent() == []
    bench.welcome()
    assert bench.sent() == [OpenModel(name="m")]


@pytest.mark.parametrize("heartbeat_ms", [0, 1])
def test_a_server_that_wants_heartbeats_without_pause_gets_them_with_one(heartbeat_ms: int) -> None:
    """Or the client would do nothing else: each turn would ask for the next one at once."""
    bench = Bench()
    bench.session.connected(bench.now)
    bench.turn()
    bench.receive(Welcome(epoch=b"a", window_requests=8, window_bytes=100, heartbeat_ms=heartbeat_ms))
    bench.turn()
    start = bench.now
    beats = [bench.wait_until_due().entries for _ in range(20)]
    assert [[Heartbeat()]] * 20 == beats
    assert bench.now - start >= 20 * MIN_HEARTBEAT_S - 1e-9
