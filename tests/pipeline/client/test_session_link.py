"""When a session greets, beats, and gives a connection up; the way to the server, and what it leaves of a deadline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.entries import Heartbeat, Hello, OpenModel, Welcome
from tests.pipeline.client.bench import SETTINGS, Bench

from shapestream.client.session import MAX_GREETING_S, Link
from shapestream.client.tickets import OpenTicket, remaining_ms_on_arrival
from shapestream.wire.peers import MIN_HEARTBEAT_S


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


def greeted(welcomed_after_s: float) -> Link:
    """A link whose server took so long to answer the greeting."""
    link = Link(SETTINGS, 10.0)
    link.connected(10.0)
    assert link.take_hello(10.0)
    link.guess_one_way(10.0 + welcomed_after_s)
    return link


def test_half_of_the_greeting_is_the_first_guess_and_the_first_reply_replaces_it() -> None:
    """A greeting may have waited for the server's start; a reply says how long the server had the request."""
    link = greeted(0.04)
    assert link.one_way_s == pytest.approx(0.02)
    link.answered(0.5, 100_000)
    assert link.one_way_s == pytest.approx(0.2)


def test_a_slow_start_of_the_server_is_not_taken_for_a_long_way() -> None:
    """A welcome that took five seconds says little about the network."""
    assert greeted(5.0).one_way_s == MAX_GREETING_S


def test_the_fastest_reply_counts_until_there_is_a_new_connection() -> None:
    """Whatever a slower one lost, the server sees by the client's clock."""
    link = greeted(0.0)
    for elapsed_s in (0.3, 0.1, 0.9):
        link.answered(elapsed_s, 0)
    assert link.one_way_s == pytest.approx(0.05)
    link.guess_one_way(10.0)
    link.answered(0.9, 0)
    assert link.one_way_s == pytest.approx(0.45)


def test_a_reply_that_was_given_again_tells_nothing() -> None:
    """Its times are those of another connection: the server seems to have had it for longer than it took."""
    link = greeted(0.0)
    link.answered(0.1, 40_000)
    link.answered(0.001, 40_000)
    assert link.one_way_s == pytest.approx(0.03)


def test_an_error_corrects_a_guess_that_was_too_high() -> None:
    """Requests that are refused because too little of their deadlines is left bring no result to learn from."""
    link = greeted(5.0)
    link.refused(0.002)
    assert link.one_way_s == pytest.approx(0.001)
    link.refused(3.0)
    assert link.one_way_s == pytest.approx(0.001)


@given(left_s=st.floats(0.0, 1e6), way_s=st.floats(0.0, 1e3))
def test_what_is_left_is_rounded_down_and_is_never_less_than_half(left_s: float, way_s: float) -> None:
    """No estimate, however wrong, takes more than half of a deadline; none adds to it."""
    remaining_ms = remaining_ms_on_arrival(left_s, way_s)
    assert int(left_s / 2 * 1000) <= remaining_ms <= left_s * 1000
    assert remaining_ms <= max(left_s - way_s, left_s / 2) * 1000
