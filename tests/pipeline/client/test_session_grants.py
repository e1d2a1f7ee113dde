"""Large requests of a session: it asks before it sends one, small ones pass, and what ends meanwhile is withdrawn."""

from __future__ import annotations

import pytest
from tests.entries import (
    Ask,
    AsksFirst,
    Cancel,
    Clock,
    GrantBounds,
    Granted,
    Hello,
    RequestEntry,
    Unknown,
    failure_of,
)
from tests.pipeline.client.bench import Bench, refusal, result, sequences

from shapestream.client.tickets import ModelHandle
from shapestream.errors import DeadlineExceeded, Overloaded, TooLarge

LARGE = 5000


def opened(bench: Bench, **window: int) -> ModelHandle:
    """A model of a server that grants: requests above 1000 bytes are asked for, and none is above 9000."""
    model = bench.open(**window)
    bench.receive(GrantBounds(unasked_bytes=1000, most_bytes=9000))
    assert [] == bench.sent()
    return model


def asked(sequence: int, remaining_ms: int | None = None) -> Ask:
    """The question for a large request."""
    return Ask(sequence=sequence, nbytes=LARGE, remaining_ms=remaining_ms)


def test_a_greeting_says_that_large_requests_are_asked_for() -> None:
    """Behind each `Hello`, with the version of what is said of grants."""
    bench = Bench()
    bench.session.connected(bench.now)
    assert [Hello, AsksFirst, Clock] == [type(entry) for entry in bench.turn().entries]


def test_a_server_that_grants_nothing_is_not_asked() -> None:
    """An older one: large requests go within its window, as before."""
    bench = Bench()
    model = bench.open()
    bench.submit(model, nbytes=LARGE)
    assert [1] == sequences(bench.sent())


def test_a_large_request_is_sent_when_it_is_granted_and_small_ones_pass_it() -> None:
    """It keeps its number, though higher ones were sent meanwhile."""
    bench = Bench()
    model = opened(bench)
    bench.submit(model, nbytes=LARGE)
    bench.submit(model)
    question, small = bench.sent()
    assert (asked(1), [2]) == (question, sequences([small]))
    bench.submit(model)
    assert [3] == sequences(bench.sent())
    bench.receive(Granted(sequence=1))
    assert [1] == sequences(bench.sent())
    bench.receive(result(1))
    assert [1] == [ticket.id for ticket in bench.turn().finished]


def test_granted_bytes_take_no_window() -> None:
    """Small ones go beside it; its place among the requests is taken from the question on."""
    bench = Bench()
    model = opened(bench, requests=3, nbytes=32)
    for nbytes in (LARGE, 16, 16, 16):
        bench.submit(model, nbytes=nbytes)
    question, *small = bench.sent()
    assert (asked(1), [2, 3]) == (question, sequences(small))
    bench.receive(Granted(sequence=1))
    assert [1] == sequences(bench.sent())
    bench.receive(result(1))
    assert [] == bench.sent(), "the window of bytes is full"
    bench.receive(result(2))
    assert [4] == sequences(bench.sent())


def test_a_request_that_no_memory_can_hold_ends_at_once() -> None:
    """The server said how much it grants at most."""
    bench = Bench()
    ticket = bench.submit(opened(bench), nbytes=9001)
    assert [] == bench.sent()
    assert isinstance(ticket.outcome, TooLarge)
    assert "9001" in ticket.outcome.message
    assert "9000" in ticket.outcome.message


def test_a_refused_question_ends_its_request() -> None:
    """With the time after which the server may have memory."""
    bench = Bench()
    model = opened(bench)
    ticket = bench.submit(model, nbytes=LARGE, timeout=1.0)
    assert [asked(1, 1000)] == bench.sent()
    bench.receive(failure_of(1, "overloaded", retryable=True, retry_after_ms=250))
    bench.turn()
    assert isinstance(ticket.outcome, Overloaded)
    assert 0.25 == ticket.outcome.retry_after_s


@pytest.mark.parametrize("granted", [False, True])
def test_what_is_cancelled_before_it_is_sent_is_withdrawn(granted: bool) -> None:
    """Also where its grant has come already: the server has the memory back. A later grant is ignored."""
    bench = Bench()
    model = opened(bench)
    ticket = bench.submit(model, nbytes=LARGE)
    bench.sent()
    if granted:
        bench.receive(Granted(sequence=1))
    bench.session.cancel(ticket)
    assert [Cancel(sequence=1)] == bench.sent()
    bench.receive(Granted(sequence=1))
    assert [] == bench.sent()
    bench.receive(failure_of(1, "cancelled"))
    assert [] == bench.sent()


def test_a_deadline_that_comes_first_withdraws_the_question() -> None:
    """Its caller is told that it was never sent."""
    bench = Bench()
    model = opened(bench)
    ticket = bench.submit(model, nbytes=LARGE, timeout=0.5)
    bench.sent()
    due = bench.wait_until_due()
    assert [Cancel(sequence=1)] == [entry for entry in due.entries if not isinstance(entry, Clock)]
    assert isinstance(ticket.outcome, DeadlineExceeded)
    assert "never sent" in ticket.outcome.message


def test_a_server_that_forgot_the_session_is_asked_again() -> None:
    """It has forgotten the questions, too. A request that was sent may have run: it is asked for under its old number."""
    bench = Bench()
    model = opened(bench)
    for _ in range(2):
        bench.submit(model, nbytes=LARGE)
    assert [asked(1), asked(2)] == bench.sent()
    bench.receive(Granted(sequence=1))
    assert [1] == sequences(bench.sent())
    bench.receive(Unknown())
    bench.turn()
    bench.come_back()
    bench.receive(GrantBounds(unasked_bytes=1000, most_bytes=9000))
    assert [asked(1), asked(2)] == bench.sent()


def test_a_leaving_server_gives_the_question_back() -> None:
    """The next server is asked."""
    bench = Bench()
    model = opened(bench)
    bench.submit(model, nbytes=LARGE)
    bench.sent()
    bench.receive(refusal(1, "draining"))
    assert [] == bench.sent()
    bench.receive(Unknown())
    bench.turn()
    bench.come_back(epoch=b"b")
    bench.receive(GrantBounds(unasked_bytes=1000, most_bytes=9000))
    (question,) = bench.sent()
    assert isinstance(question, Ask)


def test_the_deadline_of_a_granted_request_counts_on() -> None:
    """The wait for the grant is taken off; too late, it is not sent, and the grant goes back."""
    bench = Bench()
    model = opened(bench)
    bench.submit(model, nbytes=LARGE, timeout=1.0)
    assert [asked(1, 1000)] == bench.sent()
    bench.now += 0.75
    bench.receive(Granted(sequence=1))
    (request,) = bench.sent()
    assert isinstance(request, RequestEntry)
    assert 250 == request.remaining_ms
