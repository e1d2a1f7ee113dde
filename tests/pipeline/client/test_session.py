"""The requests of a session: what it sends, what it hands back, and when, with the time as an argument."""

from __future__ import annotations

import pytest
from tests.entries import Cancel, Credit, Goodbye, ModelOpened, RequestEntry, Unknown, failure_of
from tests.held import held
from tests.pipeline.client.bench import SIGNATURE, Bench, Caller, result, sequences

from shapestream.client.tickets import ModelHandle, OpenTicket
from shapestream.errors import Cancelled, DeadlineExceeded, TooLarge


def test_a_model_that_a_new_server_still_loads_holds_up_no_other() -> None:
    """Its requests wait for it; those of a model that is there pass them, and it keeps its own order."""
    bench = Bench()
    slow = bench.open()
    ticket = OpenTicket(bench.caller, name="quick")
    bench.session.submit(ticket)
    bench.turn()
    bench.receive(ModelOpened(name="quick", number=8, signature={"name": "quick"}))
    bench.turn()
    quick = ticket.outcome
    assert isinstance(quick, ModelHandle)
    for model in (slow, quick, slow, quick):
        bench.submit(model)
    assert [1, 2, 3, 4] == sequences(bench.sent())
    bench.receive(Unknown())
    bench.turn()
    bench.welcome(epoch=b"b")
    bench.receive(ModelOpened(name="quick", number=0, signature={"name": "quick"}))
    assert [2, 4] == sequences(bench.sent())
    bench.receive(ModelOpened(name="m", number=1, signature=SIGNATURE))
    assert [1, 3] == sequences(bench.sent())


@pytest.mark.parametrize(("requests", "nbytes"), [(2, 1000), (100, 33)])
def test_requests_beyond_the_window_wait_in_order(requests: int, nbytes: int) -> None:
    """Whether requests or bytes run out, the third request goes when the first is answered."""
    bench = Bench()
    model = bench.open(requests=requests, nbytes=nbytes)
    for _ in range(4):
        bench.submit(model)
    assert sequences(bench.sent()) == [1, 2]
    assert bench.sent() == []
    bench.receive(result(2))
    assert sequences(bench.sent()) == [3]
    bench.receive(failure_of(1, "overloaded", "", retryable=True, retry_after_ms=20))
    assert sequences(bench.sent()) == [4]


def test_a_window_that_shrinks_makes_no_request_too_large() -> None:
    """One that the server would have taken at first goes when no other bytes are out."""
    bench = Bench()
    model = bench.open(nbytes=100)
    bench.receive(Credit(window_requests=3, window_bytes=10))
    bench.submit(model, nbytes=8)
    bench.submit(model, nbytes=90)
    assert sequences(bench.sent()) == [1]
    bench.receive(result(1))
    assert sequences(bench.sent()) == [2]


def test_credit_is_repeated_ahead_of_what_it_lets_out() -> None:
    """The server learns from when on the client keeps to it."""
    bench = Bench()
    model = bench.open(requests=1)
    for _ in range(2):
        bench.submit(model)
    bench.sent()
    credit = Credit(window_requests=2, window_bytes=1 << 20)
    bench.receive(credit)
    told, *rest = bench.sent()
    assert told == credit
    assert sequences(rest) == [2]


def test_of_credit_that_came_while_nothing_could_be_sent_the_last_is_repeated() -> None:
    """A server that tells of more and more, and reads nothing, fills no memory here."""
    bench = Bench()
    bench.open()
    for requests in range(1000):
        bench.receive(Credit(window_requests=requests, window_bytes=100))
        bench.turn(may_send=False)
    assert [Credit(window_requests=999, window_bytes=100)] == bench.sent()
    assert [] == bench.sent()


def test_a_request_that_can_never_fit_the_window_fails_and_holds_up_nobody() -> None:
    """More bytes than the whole window are `too_large`, at once."""
    bench = Bench()
    model = bench.open(nbytes=100)
    big = bench.submit(model, nbytes=101)
    bench.submit(model)
    assert sequences(bench.sent()) == [2]
    bench.turn()
    assert isinstance(big.outcome, TooLarge)
    assert bench.finished[-1] is big


def test_withdrawing_an_owner_withdraws_its_tickets_only() -> None:
    """A stream that is left withdraws what is its own, sent or not."""
    bench = Bench()
    model = bench.open(requests=2)
    stranger = bench.submit(model)
    bench.caller = Caller()
    bench.submit(model)
    bench.submit(model)
    bench.turn()
    bench.session.cancel_owner(bench.caller)
    assert bench.sent() == [Cancel(sequence=2)]
    bench.receive(result(1), result(2))
    assert bench.sent() == []
    assert bench.finished[-1] is stranger


def test_the_deadline_travels_as_what_is_left_when_the_request_is_sent() -> None:
    """Time spent waiting for credit counts; what is left is rounded down, so that nothing starts after the deadline."""
    bench = Bench()
    model = bench.open(requests=1)
    bench.submit(model)
    bench.submit(model, timeout=0.5)
    bench.turn()
    bench.now += 0.1996
    bench.receive(result(1, total_us=99_600))  # so the way takes 50 ms
    (request,) = bench.sent()
    assert isinstance(request, RequestEntry)
    assert request.remaining_ms == 250


def test_a_result_after_the_deadline_frees_the_window_and_is_dropped() -> None:
    """An expired request holds its credit until the server's reply, like a withdrawn one."""
    bench = Bench()
    model = bench.open(requests=1)
    late = bench.submit(model, timeout=0.25)
    bench.turn()
    bench.now += 0.25
    bench.submit(model)
    assert sequences(bench.sent()) == []
    bench.receive(result(1))
    assert sequences(bench.sent()) == [2]
    assert isinstance(late.outcome, DeadlineExceeded)


def test_closing_ends_every_ticket_and_says_goodbye() -> None:
    """Whoever still waits gets `cancelled`; the server may drop the rest."""
    bench = Bench()
    model = bench.open()
    ticket, withdrawn = bench.submit(model), bench.submit(model)
    bench.turn()
    bench.session.cancel(withdrawn)
    turn = bench.session.close()
    assert turn.entries == [Cancel(sequence=2), Goodbye()]
    assert turn.finished == [ticket]
    assert isinstance(ticket.outcome, Cancelled)


def test_deadlines_that_were_met_do_not_pile_up() -> None:
    """Ten thousand answered requests with long deadlines leave no trail behind."""
    bench = Bench()
    model = bench.open()
    before = len(held(bench.session))
    for _ in range(10_000):
        ticket = bench.submit(model, timeout=3600)
        bench.session.turn(bench.now)
        bench.session.receive([result(ticket.id)], bench.now)
    assert len(held(bench.session)) - before <= 65 * 4, "of each a pair of a time and a number, at most"
