"""How long the way to the server is, by what replies tell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream.client.transit import MAX_GREETING_S, Transit


def test_half_of_the_greeting_is_the_first_guess_and_the_first_reply_replaces_it() -> None:
    """A greeting may have waited for the server's start; a reply says how long the server had the request."""
    transit = Transit()
    transit.greeted(10.0)
    transit.welcomed(10.04)
    assert transit.seconds == pytest.approx(0.02)
    transit.answered(0.5, 100_000)
    assert transit.seconds == pytest.approx(0.2)


def test_a_slow_start_of_the_server_is_not_taken_for_a_long_way() -> None:
    """A welcome that took five seconds says little about the network."""
    transit = Transit()
    transit.greeted(0.0)
    transit.welcomed(5.0)
    assert transit.seconds == MAX_GREETING_S


def test_the_fastest_reply_counts_until_there_is_a_new_connection() -> None:
    """Whatever a slower one lost, the server sees by the client's clock."""
    transit = Transit()
    for elapsed_s in (0.3, 0.1, 0.9):
        transit.answered(elapsed_s, 0)
    assert transit.seconds == pytest.approx(0.05)
    transit.welcomed(0.0)
    transit.answered(0.9, 0)
    assert transit.seconds == pytest.approx(0.45)


def test_a_reply_that_was_given_again_tells_nothing() -> None:
    """Its times are those of another connection: the server seems to have had it for longer than it took."""
    transit = Transit()
    transit.answered(0.1, 40_000)
    transit.answered(0.001, 40_000)
    assert transit.seconds == pytest.approx(0.03)


def test_an_error_corrects_a_guess_that_was_too_high() -> None:
    """Requests that are refused because too little of their deadlines is left bring no result to learn from."""
    transit = Transit()
    transit.greeted(0.0)
    transit.welcomed(5.0)
    transit.refused(0.002)
    assert transit.seconds == pytest.approx(0.001)
    transit.refused(3.0)
    assert transit.seconds == pytest.approx(0.001)


@given(left_s=st.floats(0.0, 1e6), way_s=st.floats(0.0, 1e3))
def test_what_is_left_is_rounded_down_and_is_never_less_than_half(left_s: float, way_s: float) -> None:
    """No estimate, however wrong, takes more than half of a deadline; none adds to it."""
    transit = Transit()
    transit.answered(2 * way_s, 0)
    remaining_ms = transit.remaining_ms(left_s)
    assert int(left_s / 2 * 1000) <= remaining_ms <= left_s * 1000
    assert remaining_ms <= max(left_s - way_s, left_s / 2) * 1000
