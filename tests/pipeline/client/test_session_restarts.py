"""What a session does when its server forgets it, leaves, or is another one: what is sent again, and what is not."""

from __future__ import annotations

from tests.entries import (
    Cancel,
    Goodbye,
    Hello,
    ModelOpened,
    ModelRefused,
    OpenModel,
    RequestEntry,
    Unknown,
)
from tests.pipeline.client.bench import SIGNATURE, Bench, refusal, result, sequences

from shapestream.errors import AlreadyAnswered, Unavailable, WorkerLost


def test_a_forgetful_server_is_greeted_once_and_gets_everything_again_under_the_same_numbers() -> None:
    """`Unknown` leads to one `Hello`, whatever else it is repeated for; the welcome to a resend in order."""
    bench = Bench()
    model = bench.open(requests=2)
    tickets = [bench.submit(model) for _ in range(3)]
    assert sequences(bench.sent()) == [1, 2]
    bench.receive(Unknown(), Unknown())
    assert bench.sent() == [Hello(client=bytes(16), software="test")]
    bench.receive(Unknown())
    assert bench.sent() == []
    bench.welcome(epoch=b"b", requests=2)
    assert bench.sent() == [OpenModel(name="m")]
    bench.receive(ModelOpened(name="m", number=9, signature=SIGNATURE))
    again = bench.sent()
    assert sequences(again) == [1, 2]
    assert [entry.model for entry in again if isinstance(entry, RequestEntry)] == [9, 9]
    bench.receive(result(1), result(2))
    assert sequences(bench.sent()) == [3]
    bench.receive(result(3))
    bench.turn()
    assert bench.finished[-3:] == tickets


def test_the_same_welcome_twice_changes_nothing() -> None:
    """A duplicate welcome of the same epoch on an open link resends nothing."""
    bench = Bench()
    model = bench.open()
    bench.submit(model)
    bench.turn()
    bench.welcome()
    assert bench.sent() == []


def test_what_nobody_wants_is_cancelled_not_sent_again() -> None:
    """After a reconnect, withdrawn requests are named in a cancel, in case the server still has them."""
    bench = Bench()
    model = bench.open()
    withdrawn = bench.submit(model)
    bench.submit(model)
    bench.turn()
    bench.session.cancel(withdrawn)
    bench.turn()
    bench.receive(Unknown())
    bench.turn()
    bench.welcome()
    assert bench.sent() == [Cancel(sequence=1), OpenModel(name="m")]
    bench.receive(ModelOpened(name="m", number=7, signature=SIGNATURE))
    assert sequences(bench.sent()) == [2]


def test_a_model_that_is_gone_after_a_restart_fails_its_requests_with_the_servers_code() -> None:
    """`ModelRefused` on a reconnect ends what waited for that model."""
    bench = Bench()
    model = bench.open()
    ticket = bench.submit(model)
    bench.turn()
    bench.welcome(epoch=b"b")
    bench.turn()
    bench.receive(ModelRefused(name="m", code="unavailable", message="gone"))
    later = bench.submit(model)
    bench.turn()
    assert isinstance(ticket.outcome, Unavailable)
    assert isinstance(later.outcome, Unavailable)


def test_a_request_that_a_leaving_server_refuses_waits_for_the_next_one() -> None:
    """`draining` is not handed to the caller; the request goes to the next server under its number, in its old place."""
    bench = Bench()
    model = bench.open()
    tickets = [bench.submit(model) for _ in range(3)]
    assert sequences(bench.sent()) == [1, 2, 3]
    bench.receive(result(1), refusal(2, "draining"), refusal(3, "draining"))
    tickets.append(bench.submit(model))
    assert bench.sent() == []
    bench.receive(Goodbye())
    assert bench.wait_until_due().reconnect
    bench.session.connected(bench.now)
    bench.turn()
    bench.come_back(epoch=b"b", number=9)
    assert sequences(bench.sent()) == [2, 3, 4]
    bench.receive(result(2), result(3), result(4))
    bench.turn()
    assert [ticket.outcome for ticket in tickets] == [result(number) for number in (1, 2, 3, 4)]


def test_a_leaving_servers_refusal_of_an_unwanted_request_ends_it() -> None:
    """Nobody waits for a request that was withdrawn: it is not sent again."""
    bench = Bench()
    model = bench.open()
    ticket = bench.submit(model)
    bench.turn()
    bench.session.cancel(ticket)
    bench.turn()
    bench.receive(refusal(1, "draining"))
    bench.come_back(epoch=b"b", number=9)
    assert sequences(bench.sent()) == []


def test_a_late_reply_of_an_earlier_attempt_ends_the_request_once() -> None:
    """It answers the same request; what comes after it is nobody's, and the request is not sent again."""
    bench = Bench()
    model = bench.open()
    ticket = bench.submit(model)
    bench.turn()
    bench.receive(Unknown(), result(1))
    bench.turn()
    bench.welcome(epoch=b"b")
    bench.receive(result(1, total_us=99), ModelOpened(name="m", number=9, signature=SIGNATURE))
    assert sequences(bench.sent()) == []
    assert bench.finished.count(ticket) == 1
    assert ticket.outcome == result(1)


def test_what_may_not_run_twice_is_not_sent_to_another_server() -> None:
    """The one that the old server had ends as `worker_lost`; the one that was never sent, or was refused, goes on."""
    bench = Bench()
    model = bench.open(requests=2, signature={**SIGNATURE, "idempotent": False})
    had, refused, unsent = [bench.submit(model) for _ in range(3)]
    assert sequences(bench.sent()) == [1, 2]
    bench.receive(refusal(2, "draining"), Unknown())
    bench.turn()
    bench.come_back(epoch=b"b", signature=model.described)
    assert sequences(bench.sent()) == [2, 3]
    assert isinstance(had.outcome, WorkerLost)
    assert refused.outcome is unsent.outcome is None


def test_what_may_not_run_twice_and_waits_to_be_sent_again_is_not_sent_to_the_server_after_that() -> None:
    """A server forgot the client, and was replaced before it said that the model is still there: it may have run."""
    bench = Bench()
    once = bench.open(signature={**SIGNATURE, "idempotent": False})
    ticket = bench.submit(once)
    assert [1] == sequences(bench.sent())
    bench.receive(Unknown())
    bench.sent()
    bench.welcome()
    assert [OpenModel(name="m")] == bench.sent()
    bench.welcome(epoch=b"b")
    bench.receive(ModelOpened(name="m", number=1, signature={**SIGNATURE, "idempotent": False}))
    assert [] == sequences(bench.sent())
    assert isinstance(ticket.outcome, WorkerLost)


def test_a_server_that_always_says_answered_is_not_asked_for_ever() -> None:
    """After three new numbers the caller is told."""
    bench = Bench()
    ticket = bench.submit(bench.open())
    for number in range(1, 5):
        assert sequences(bench.sent()) == [number]
        bench.receive(refusal(number, "answered"))
    bench.turn()
    assert isinstance(ticket.outcome, AlreadyAnswered)
