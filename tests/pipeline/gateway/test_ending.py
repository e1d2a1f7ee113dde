"""When connections of a server end, and when one that leaves has left: times in, decisions out."""

from __future__ import annotations

import signal
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream.web.ending import (
    FIRST_REQUEST_S,
    LEAVE,
    QUIET_S,
    Asked,
    AskedToEnd,
    EndState,
    LameDuck,
    ServerEnd,
)

TIMES = st.floats(min_value=0.0, max_value=1e6)


def test_states_go_one_way() -> None:
    """A server that stops leaves no more, and stops once."""
    end = ServerEnd(idle_s=75.0)
    seen = [end.state]
    for step in (end.leave, lambda: end.stop(10.0), end.leave, lambda: end.stop(20.0)):
        step()
        seen.append(end.state)
    stopping = EndState.STOPPING
    assert [EndState.SERVING, EndState.LEAVING, stopping, stopping, stopping] == seen
    assert 10.0 == end.idle_until(0.0, inf, has_asked=True), "the first stop counts"


@pytest.mark.parametrize(
    ("since", "aged_at", "has_asked", "serving", "stopped_at_100"),
    [
        (0.0, inf, True, 75.0, 75.0),
        (50.0, inf, True, 125.0, 100.0),
        (99.5, inf, True, 174.5, 99.5 + QUIET_S),
        (99.5, inf, False, 174.5, 100.0 + FIRST_REQUEST_S),
        (101.0, inf, False, 176.0, 101.0 + FIRST_REQUEST_S),
        (50.0, 60.0, True, 60.0, 60.0),
        (59.5, 60.0, True, 59.5 + QUIET_S, 59.5 + QUIET_S),
        (70.0, 60.0, True, 70.0 + QUIET_S, 70.0 + QUIET_S),
    ],
)
def test_idle_connections(
    since: float, aged_at: float, has_asked: bool, serving: float, stopped_at_100: float
) -> None:
    """By the time without a request, by age, and by the end of the server."""
    end = ServerEnd(idle_s=75.0)
    assert serving == end.idle_until(since, aged_at, has_asked=has_asked)
    end.leave()
    assert serving == end.idle_until(since, aged_at, has_asked=has_asked)
    end.stop(100.0)
    assert stopped_at_100 == end.idle_until(since, aged_at, has_asked=has_asked)


@given(since=TIMES, aged_at=TIMES | st.just(inf), stopped_at=TIMES, has_asked=st.booleans())
def test_no_connection_is_closed_while_its_peer_is_busy(
    since: float, aged_at: float, stopped_at: float, has_asked: bool
) -> None:
    """Whatever else would end it."""
    end = ServerEnd(idle_s=75.0, max_connection_s=300.0)
    assert since + QUIET_S <= end.idle_until(since, aged_at, has_asked=has_asked)
    end.stop(stopped_at)
    assert since + QUIET_S <= end.idle_until(since, aged_at, has_asked=has_asked)


def test_ages_are_spread_by_a_tenth() -> None:
    """And without a limit there is none."""
    end = ServerEnd(idle_s=75.0, max_connection_s=300.0)
    assert [271.0, 301.0, 330.4] == [pytest.approx(end.aged_at(1.0, chance)) for chance in (0.0, 0.5, 0.99)]
    assert inf == ServerEnd(idle_s=75.0).aged_at(1.0, 0.5)
    assert [True, False] == [end.keeps_open(271.0, now) for now in (270.9, 271.0)]
    end.leave()
    assert not end.keeps_open(271.0, 1.0)


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "alone"])
def test_signals(is_told: bool) -> None:
    """Each row: signals, and what they ask for in the end; the last one of them is ignored where it asks for nothing new."""
    term, interrupt = signal.SIGTERM, signal.SIGINT
    rows: list[tuple[list[int], Asked, Asked]] = [
        ([term], Asked.STOP, Asked.LEAVE),
        ([interrupt], Asked.STOP, Asked.STOP),
        ([LEAVE], Asked.LEAVE, Asked.NOTHING),
        ([LEAVE, LEAVE], Asked.LEAVE, Asked.NOTHING),
        ([LEAVE, term], Asked.STOP, Asked.LEAVE),
        ([term, term], Asked.END_NOW, Asked.END_NOW),
        ([term, LEAVE], Asked.STOP, Asked.LEAVE),
        ([LEAVE, term, term], Asked.END_NOW, Asked.END_NOW),
    ]
    for numbers, told, alone in rows:
        end = AskedToEnd(is_told=is_told)
        before = end.state
        for number in numbers:
            before, asks = end.state, end.take(number)
            assert asks == (end.state is not before)
        assert (told if is_told else alone) is end.state


@pytest.mark.parametrize(
    ("seconds", "now", "empty_since", "by_itself", "told"),
    [
        (10.0, 100.0, -inf, True, True),  # nobody was there
        (10.0, 100.0, 95.0, True, True),  # for half of the time
        (10.0, 100.0, 95.1, False, False),  # callers that connect for each request may be back
        (10.0, 104.0, 99.0, True, True),
        (10.0, 109.9, None, False, False),
        (10.0, 110.0, None, True, False),  # the server's process ends its gateways after its drain
        (10.0, 111.0, -inf, True, False),
        (0.0, 100.0, -inf, True, False),
    ],
)
def test_a_lame_duck(
    seconds: float, now: float, empty_since: float | None, by_itself: bool, told: bool
) -> None:
    """It is over in time, or when nobody is left; its peers over gRPC are sent away in the middle."""
    for ends_by_itself, over in ((True, by_itself), (False, told)):
        lame = LameDuck(began=100.0, seconds=seconds, ends_by_itself=ends_by_itself)
        assert over == lame.is_over(now, empty_since)
        assert 100.0 + seconds / 2 == lame.goaway_at
