"""What a peer's clock says about when its messages were sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream.wire.peers import DRIFT, PeerClock

seconds = st.floats(0.0, 1e5)


def test_a_peer_that_says_nothing_is_taken_to_send_in_no_time() -> None:
    """As it was before there was a `Clock`."""
    assert 7.0 == PeerClock().sent_at(7.0)


def test_time_on_the_way_shows_against_the_fastest_message() -> None:
    """The peer's clock is 1000 s behind; its first message took 0.1 s, its second 2.1 s."""
    clock = PeerClock()
    clock.heard(5_000_000, 1005.1)
    assert 1005.1 == pytest.approx(clock.sent_at(1005.1))
    clock.heard(6_000_000, 1008.1)
    assert 1006.1 == pytest.approx(clock.sent_at(1008.1), abs=DRIFT * 3)


def test_what_was_read_later_in_the_same_turn_was_sent_at_the_same_time() -> None:
    """Messages behind the one that began with the clock count from it."""
    clock = PeerClock()
    clock.heard(1_000_000, 1.0)
    assert 1.0 == clock.sent_at(4.0)


@given(
    difference_s=st.floats(-1e4, 1e4),
    drift=st.floats(-DRIFT / 2, DRIFT / 2),
    gaps_s=st.lists(st.tuples(st.floats(0.001, 100.0), st.floats(0.0, 50.0)), min_size=1, max_size=30),
)
def test_no_message_seems_sent_before_it_was(
    difference_s: float, drift: float, gaps_s: list[tuple[float, float]]
) -> None:
    """Whatever is lost on the way, and though clocks drift: no deadline passes early by more than the drift between two."""
    clock = PeerClock()
    sent_s = 10.0
    read_s = 0.0
    least_s = float("inf")
    for gap_s, transit_s in gaps_s:
        sent_s += gap_s
        read_s = max(read_s, sent_s + transit_s)  # connections keep the order
        least_s = min(least_s, read_s - sent_s)
        shown_s = sent_s * (1 + drift) + difference_s + 2e4
        clock.heard(round(shown_s * 1e6), read_s)
        sent_at = clock.sent_at(read_s)
        assert sent_s - 1e-4 <= sent_at <= read_s
        # It errs by the fastest way, and by what clocks may drift apart meanwhile.
        assert sent_at <= sent_s + least_s + 2 * DRIFT * read_s + 1e-4
