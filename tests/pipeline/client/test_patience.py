"""How long what waits is left to wait, and in which words it ends."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline.client.bench import SETTINGS, SIGNATURE, TENSORS, Bench, Caller, refusal

from shapestream.client.ledger import Ledger
from shapestream.client.link import Link
from shapestream.client.patience import Patience
from shapestream.client.tickets import AnyTicket, ModelHandle, RequestTicket, WelcomeTicket
from shapestream.client.transit import Transit
from shapestream.errors import DeadlineExceeded, Draining, Unavailable
from shapestream.wire.messages import Heartbeat


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


class Waits:
    """A link, a ledger, and what patience makes of them."""

    def __init__(self) -> None:
        self.link = Link(SETTINGS, 0.0)
        self.ledger = Ledger()
        self.patience = Patience(
            server="test://",
            link=self.link,
            ledger=self.ledger,
            unavailable_after_s=SETTINGS.unavailable_after_s,
        )
        self.model = ModelHandle("m", SIGNATURE, 7)

    def request(self, deadline: float | None = None) -> RequestTicket:
        """One that waits to be sent."""
        ticket = RequestTicket(Caller(), deadline=deadline, model=self.model, tensors=TENSORS, nbytes=16)
        self.ledger.add(ticket)
        return ticket

    def until(self, now: float) -> list[tuple[float, AnyTicket]]:
        """What ends until then, each with when it did, by taking a turn whenever patience asks for one, and then."""
        ended: list[tuple[float, AnyTicket]] = []
        while (due := self.patience.next_wakeup()) <= now:
            self.patience.end_waits(due)
            ended += [(due, ticket) for ticket in self.ledger.take_finished()]
        self.patience.end_waits(now)
        return ended + [(now, ticket) for ticket in self.ledger.take_finished()]


@given(deadlines=st.lists(st.none() | st.floats(0.0, 100.0), max_size=8), lost=st.booleans())
def test_every_wait_ends_when_it_is_due_and_not_before(deadlines: list[float | None], lost: bool) -> None:
    """At its own deadline, or with the others when no server has been there for too long; whoever sleeps misses none."""
    waits = Waits()
    if not lost:
        waits.link.welcomed(1.0)
    tickets = [waits.request(deadline) for deadline in deadlines]
    ended = waits.until(200.0)
    for ticket in tickets:
        own = math.inf if ticket.deadline is None else ticket.deadline
        due = min(own, SETTINGS.unavailable_after_s if lost else math.inf)
        assert [due][: due < math.inf] == [at for at, other in ended if other is ticket]
    assert waits.patience.next_wakeup() == math.inf
    assert len(waits.ledger.waiting()) == sum(deadline is None for deadline in deadlines) * (not lost)


def test_a_server_that_takes_nothing_new_ends_what_waits_and_not_what_it_has() -> None:
    """The one that it refused waits for another server, for so long; the one that it runs may still be answered."""
    waits = Waits()
    waits.link.welcomed(1.0)
    waits.ledger.window_requests, waits.ledger.window_bytes, waits.ledger.largest_bytes = 2, 100, 100
    runs, refused = waits.request(), waits.request()
    assert 2 == len(waits.ledger.take_sendable(0.0, Transit()))
    assert waits.ledger.hold(refused.id, 5.0)
    assert [(65.0, refused)] == waits.until(1000.0)
    assert isinstance(refused.outcome, Draining)
    assert [runs] == waits.ledger.may_have_run()


def test_a_request_that_nobody_waits_for_is_not_ended_twice() -> None:
    """It was withdrawn after it was sent: its deadline, and the server's absence, are nobody's news."""
    waits = Waits()
    waits.ledger.window_requests, waits.ledger.window_bytes, waits.ledger.largest_bytes = 2, 100, 100
    withdrawn = waits.request(deadline=3.0)
    waits.ledger.take_sendable(0.0, Transit())
    assert waits.ledger.abandon(withdrawn)
    assert [] == waits.until(1000.0)
    assert {} == waits.ledger.tickets


def test_the_last_trouble_is_told_with_the_rest() -> None:
    """Why the server did not let this client in, for instance."""
    waits = Waits()
    waits.patience.trouble = "; it refuses this key"
    ticket = waits.request(deadline=1.0)
    waits.until(1.0)
    assert "deadline_exceeded: no server answers at test://; it refuses this key" == str(ticket.outcome)
