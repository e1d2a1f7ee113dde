"""How long what waits is left to wait, and in which words it ends."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.entries import Heartbeat
from tests.pipeline.client.bench import SETTINGS, SIGNATURE, Bench, refusal, result

from shapestream.client.tickets import AnyTicket, ModelHandle, WelcomeTicket
from shapestream.errors import Cancelled, DeadlineExceeded, Draining, Unavailable


@pytest.mark.parametrize(
    ("connected", "sent", "message"),
    [
        (False, False, "no server answers at test://"),
        (True, False, "it was never sent"),
        (True, True, "did not come in time"),
    ],
)
def test_a_deadline_passes_here_with_or_without_a_server(connected: bool, sent: bool, message: str) -> None:
    """At the deadline the caller gets `deadline_exceeded`, which says what the request waited for."""
    bench = Bench()
    model = bench.open(requests=1)
    if not sent:
        bench.submit(model)
    bench.turn()
    if not connected:
        bench.session.unreadable("garbage", bench.now)
    ticket = bench.submit(model, timeout=0.25)
    bench.turn()
    bench.now += 0.25
    bench.turn()
    assert isinstance(ticket.outcome, DeadlineExceeded)
    assert message in str(ticket.outcome)
    assert bench.finished.count(ticket) == 1


def test_waiting_for_the_first_welcome_ends_with_it_or_as_unavailable() -> None:
    """`connect` waits by a ticket too: True once welcomed, `unavailable` at its deadline, however late that is."""
    bench = Bench()
    early = WelcomeTicket(bench.caller, deadline=bench.now + 3)
    patient = WelcomeTicket(bench.caller)
    bench.session.submit(early)
    bench.session.submit(patient)
    bench.now += 3
    bench.turn()
    assert isinstance(early.outcome, Unavailable)
    assert [] == until(bench, bench.now + 2 * SETTINGS.unavailable_after_s)
    bench.session.connected(bench.now)
    bench.turn()
    bench.welcome()
    bench.turn()
    assert patient.outcome is True


def test_a_request_whose_deadline_passes_while_the_server_is_leaving_says_so() -> None:
    """The caller learns why nothing came."""
    bench = Bench()
    model = bench.open()
    ticket = bench.submit(model, timeout=0.3)
    bench.turn()
    bench.receive(refusal(1, "draining"))
    bench.wait_until_due()
    assert isinstance(ticket.outcome, DeadlineExceeded)
    assert "takes nothing new" in str(ticket.outcome)


def until(bench: Bench, end: float) -> list[tuple[float, AnyTicket]]:
    """What ends until then, each with when it did, by a turn at each wake-up. A server that is there stays there."""
    ended: list[tuple[float, AnyTicket]] = []
    while (due := bench.session.next_wakeup()) <= end:
        bench.now = due
        bench.receive(Heartbeat())
        ended += [(due, ticket) for ticket in bench.turn().finished]
    bench.now = end
    return ended + [(end, ticket) for ticket in bench.turn().finished]


@given(deadlines=st.lists(st.none() | st.floats(0.001, 100.0), max_size=8), lost=st.booleans())
def test_every_wait_ends_when_it_is_due_and_not_before(deadlines: list[float | None], lost: bool) -> None:
    """At its own deadline, or with the others when no server has been there for too long; whoever sleeps misses none."""
    bench = Bench()
    model = ModelHandle("m", SIGNATURE, None) if lost else bench.open(requests=0)
    start = bench.now
    tickets = [bench.submit(model, timeout=deadline) for deadline in deadlines]
    ended = until(bench, start + 200.0)
    for ticket in tickets:
        own = math.inf if ticket.deadline is None else ticket.deadline
        due = min(own, start + SETTINGS.unavailable_after_s if lost else math.inf)
        assert [due][: due < math.inf] == [at for at, other in ended if other is ticket]
    bench.session.close()
    left = [ticket for ticket in tickets if isinstance(ticket.outcome, Cancelled)]
    assert len(left) == sum(deadline is None for deadline in deadlines) * (not lost)


def test_a_server_that_takes_nothing_new_ends_what_waits_and_not_what_it_has() -> None:
    """The one that it refused waits for another server, for so long; the one that it runs may still be answered."""
    bench = Bench()
    model = bench.open()
    runs, refused = bench.submit(model), bench.submit(model)
    bench.turn()
    bench.now += 0.4  # beside the heartbeats' times, at which it would be woken anyway
    bench.receive(refusal(refused.id, "draining"))
    start = bench.now
    assert [(start + 60.0, refused)] == until(bench, start + 1000.0)
    assert isinstance(refused.outcome, Draining)
    bench.receive(result(runs.id))
    assert [runs] == bench.turn().finished


def test_a_request_that_nobody_waits_for_is_not_ended_twice() -> None:
    """It was withdrawn after it was sent: its deadline, and the server's absence, are nobody's news."""
    bench = Bench()
    withdrawn = bench.submit(bench.open(), timeout=3.0)
    bench.turn()
    bench.session.cancel(withdrawn)
    bench.turn()
    bench.session.unreadable("garbage", bench.now)
    assert [] == until(bench, bench.now + 1000.0)
    assert bench.session.next_wakeup() == math.inf


@pytest.mark.parametrize(
    ("refused", "told"), [(True, "it refuses this key"), (False, "last problem: garbage")]
)
def test_the_last_trouble_is_told_with_the_rest(refused: bool, told: str) -> None:
    """The reason why the server did not let this client in, or was given up."""
    bench = Bench()
    if refused:
        bench.session.refused(told)
    else:
        bench.session.unreadable("garbage", bench.now)
    ticket = bench.submit(ModelHandle("m", SIGNATURE, None), timeout=0.25)
    until(bench, bench.now + 0.25)
    assert f"deadline_exceeded: no server answers at test://; {told}" == str(ticket.outcome)
