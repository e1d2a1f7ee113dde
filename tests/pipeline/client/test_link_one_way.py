"""How long the way to the server is, by what replies tell, and what that leaves of a deadline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline.client.bench import SETTINGS

from shapestream.client.ledger import remaining_ms_on_arrival
from shapestream.client.link import MAX_GREETING_S, Link


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
