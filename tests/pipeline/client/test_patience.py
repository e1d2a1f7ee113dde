"""How long what waits is left to wait, and in which words it ends."""

from __future__ import annotations

import pytest
from tests.pipeline.client.bench import SETTINGS, Bench, refusal

from shapestream.client.tickets import (
    WelcomeTicket,
)
from shapestream.errors import (
    DeadlineExceeded,
    Draining,
    Unavailable,
)
from shapestream.wire.messages import (
    Heartbeat,
)


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


def test_with_no_server_for_long_everything_fails_as_unavailable_and_later_calls_fail_at_once() -> None:
    """After `unavailable_after_s` nothing waits any longer; a retry may help, so the error says so."""
    bench = Bench()
    model = bench.open()
    bench.session.unreadable("garbage", bench.now)
    ticket = bench.submit(model)
    start = bench.now
    while ticket.outcome is None:
        if bench.wait_until_due().reconnect:
            bench.session.connected(bench.now)
    assert bench.now == start + SETTINGS.unavailable_after_s
    assert isinstance(ticket.outcome, Unavailable)
    assert "last problem: garbage" in str(ticket.outcome)
    later = bench.submit(model)
    bench.turn()
    assert isinstance(later.outcome, Unavailable)


def test_waiting_for_the_first_welcome_ends_with_it_or_as_unavailable() -> None:
    """`connect` waits by a ticket too: True once welcomed, `unavailable` at its deadline."""
    bench = Bench()
    early = WelcomeTicket(bench.caller, deadline=bench.now + 3)
    patient = WelcomeTicket(bench.caller)
    bench.session.submit(early)
    bench.session.submit(patient)
    bench.now += 3
    bench.turn()
    assert isinstance(early.outcome, Unavailable)
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


def test_a_server_that_leaves_for_ever_is_not_waited_for_for_ever() -> None:
    """Without a deadline, `unavailable_after_s` bounds the wait; then the caller gets `draining` after all."""
    bench = Bench()
    model = bench.open()
    ticket = bench.submit(model)
    bench.turn()
    bench.receive(refusal(1, "draining"))
    for _ in range(70):
        bench.now += 1.0
        bench.receive(Heartbeat())
        bench.turn()
    assert isinstance(ticket.outcome, Draining)
