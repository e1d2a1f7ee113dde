"""The pure session: what it sends, what it hands back, and when, with the time as an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from shapestream.client.link import LinkSettings
from shapestream.client.session import Session, Turn
from shapestream.client.tickets import (
    AnyTicket,
    ModelHandle,
    OpenTicket,
    RequestTicket,
    StatisticsTicket,
    WelcomeTicket,
)
from shapestream.errors import (
    AlreadyAnswered,
    Cancelled,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    Overloaded,
    TooLarge,
    Unavailable,
    WorkerLost,
)
from shapestream.wire.messages import (
    Cancel,
    Clock,
    Credit,
    Entry,
    Failure,
    Goodbye,
    Heartbeat,
    Hello,
    ModelOpened,
    ModelRefused,
    OpenModel,
    Request,
    Result,
    Statistics,
    StatisticsRequest,
    Timings,
    Unknown,
    Welcome,
)
from shapestream_engine.layout import Tensors

TENSORS = Tensors(layout=((0, "f32", (1, 4)),), buffers=(bytes(16),))
TIMINGS = Timings(queue_us=1, run_us=2, total_us=3, batch_requests=1, batch_rows=1, worker="w/0")
SETTINGS = LinkSettings(greeting_s=1.0, silence_s=10.0, rest_s=0.5, unavailable_after_s=60.0)
SIGNATURE: dict[str, Any] = {"name": "m"}


class Caller:
    """Somebody who waits; the session looks at nothing of it but its identity."""

    closed = False

    def finish(self, tickets: list[AnyTicket]) -> None:
        """The core would call this."""


class Bench:
    """A session, a clock, and everything that came out of it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.session = Session(
            client=bytes(16), software="test", server="test://", settings=SETTINGS, now=self.now
        )
        self.finished: list[AnyTicket] = []
        self.caller = Caller()

    def turn(self, *, may_send: bool = True) -> Turn:
        """One turn; the invariants hold after it."""
        turn = self.session.turn(self.now, may_send=may_send)
        self.session.check_invariants()
        self.finished += turn.finished
        return turn

    def sent(self) -> list[Entry]:
        """What this turn sends, besides what the clock shows."""
        return [entry for entry in self.turn().entries if not isinstance(entry, Clock)]

    def receive(self, *entries: Entry) -> None:
        """The server says something."""
        self.session.receive(entries, self.now)
        self.session.check_invariants()

    def wait_until_due(self) -> Turn:
        """Move the clock to the next wake-up, and take that turn."""
        self.now = self.session.next_wakeup()
        return self.turn()

    def welcome(self, *, epoch: bytes = b"a", requests: int = 8, nbytes: int = 1 << 20) -> None:
        """The server answers `Hello`."""
        self.receive(Welcome(epoch=epoch, window_requests=requests, window_bytes=nbytes, heartbeat_ms=1000))

    def open(self, *, requests: int = 8, nbytes: int = 1 << 20) -> ModelHandle:
        """Connect, be welcomed, and open the model `m`."""
        self.session.connected(self.now)
        self.turn()
        self.welcome(requests=requests, nbytes=nbytes)
        ticket = OpenTicket(self.caller, name="m")
        self.session.submit(ticket)
        self.turn()
        self.receive(ModelOpened(name="m", number=7, signature=SIGNATURE))
        self.turn()
        handle = ticket.outcome
        assert isinstance(handle, ModelHandle)
        return handle

    def submit(self, model: ModelHandle, *, nbytes: int = 16, timeout: float | None = None) -> RequestTicket:
        """One request."""
        ticket = RequestTicket(
            self.caller,
            model=model,
            tensors=TENSORS,
            nbytes=nbytes,
            deadline=None if timeout is None else self.now + timeout,
        )
        self.session.submit(ticket)
        self.session.check_invariants()
        return ticket


def result(sequence: int, *, total_us: int = TIMINGS.total_us) -> Result:
    """The server's answer to a request."""
    return Result(sequence=sequence, timings=replace(TIMINGS, total_us=total_us), tensors=TENSORS)


def refusal(sequence: int, code: str) -> Failure:
    """The server's answer to a request that it does not take."""
    return Failure(sequence=sequence, code=code, message="no", retryable=True, retry_after_ms=None)


def sequences(entries: Iterable[Entry]) -> list[int]:
    """The requests among what was sent."""
    return [entry.sequence for entry in entries if isinstance(entry, Request)]


def test_greets_first_and_sends_nothing_before_the_welcome() -> None:
    """A new connection sends `Hello` once, and only that until it is answered."""
    bench = Bench()
    bench.session.submit(OpenTicket(bench.caller, name="m"))
    assert bench.sent() == []
    bench.session.connected(bench.now)
    assert bench.sent() == [Hello(client=bytes(16), software="test")]
    assert bench.sent() == []
    bench.welcome()
    assert bench.sent() == [OpenModel(name="m")]


def test_a_request_goes_out_under_its_number_and_its_result_comes_back_to_its_ticket() -> None:
    """Submit, send, answer: the ticket holds the result and is handed back once."""
    bench = Bench()
    model = bench.open()
    ticket = bench.submit(model)
    expected = Request(sequence=1, model=7, remaining_ms=None, priority=0, tensors=TENSORS)
    assert bench.sent() == [expected]
    bench.receive(result(1))
    bench.receive(result(1))
    bench.turn()
    assert bench.finished[-1] is ticket
    assert ticket.outcome == result(1)
    assert bench.finished.count(ticket) == 1


def test_a_model_is_asked_for_once_however_many_wait_and_is_known_from_then_on() -> None:
    """Two callers share one question; a third needs none."""
    bench = Bench()
    first, second, third = (OpenTicket(bench.caller, name="m") for _ in range(3))
    bench.session.connected(bench.now)
    bench.turn()
    bench.welcome()
    bench.session.submit(first)
    bench.session.submit(second)
    assert bench.sent() == [OpenModel(name="m")]
    bench.receive(ModelOpened(name="m", number=7, signature=SIGNATURE))
    bench.session.submit(third)
    assert bench.sent() == []
    assert bench.finished == [first, second, third]
    assert first.outcome is second.outcome is third.outcome


def test_a_refused_model_fails_with_the_servers_code_and_may_be_asked_for_again() -> None:
    """`ModelRefused` becomes the error of its code; the next caller asks anew."""
    bench = Bench()
    bench.open()
    ticket = OpenTicket(bench.caller, name="other")
    bench.session.submit(ticket)
    bench.turn()
    bench.receive(ModelRefused(name="other", code="invalid", message="known models: m"))
    bench.turn()
    assert isinstance(ticket.outcome, InvalidRequest)
    assert "known models: m" in str(ticket.outcome)
    bench.session.submit(OpenTicket(bench.caller, name="other"))
    assert bench.sent() == [OpenModel(name="other")]


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
    bench.receive(Failure(sequence=1, code="overloaded", message="", retryable=True, retry_after_ms=20))
    assert sequences(bench.sent()) == [4]


def test_credit_replaces_the_window() -> None:
    """A larger window lets waiting requests out."""
    bench = Bench()
    model = bench.open(requests=1)
    for _ in range(3):
        bench.submit(model)
    assert sequences(bench.sent()) == [1]
    bench.receive(Credit(window_requests=3, window_bytes=1 << 20))
    assert sequences(bench.sent()) == [2, 3]


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


def test_no_window_at_all_holds_requests_until_there_is_one() -> None:
    """A server may have nothing to give for a moment."""
    bench = Bench()
    model = bench.open()
    bench.receive(Credit(window_requests=0, window_bytes=0))
    bench.submit(model)
    assert bench.sent() == []
    bench.receive(Credit(window_requests=1, window_bytes=1 << 20))
    assert sequences(bench.sent()) == [1]


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


def test_a_failure_carries_its_code_and_when_to_try_again() -> None:
    """`Failure` becomes the error of its code, with the estimate in seconds."""
    bench = Bench()
    ticket = bench.submit(bench.open())
    bench.turn()
    bench.receive(Failure(sequence=1, code="overloaded", message="full", retryable=True, retry_after_ms=250))
    bench.turn()
    assert isinstance(ticket.outcome, Overloaded)
    assert ticket.outcome.retry_after_s == 0.25


def test_a_request_withdrawn_before_it_was_sent_is_never_sent() -> None:
    """Cancelled while it waits for credit: the server never hears of it."""
    bench = Bench()
    model = bench.open(requests=1)
    bench.submit(model)
    waiting = bench.submit(model)
    bench.turn()
    bench.session.cancel(waiting)
    bench.receive(result(1))
    assert bench.sent() == []
    assert waiting not in bench.finished


def test_a_request_withdrawn_after_it_was_sent_keeps_its_credit_until_the_terminal_reply() -> None:
    """The server is told; the window is free again only when it has answered; nobody hears of it."""
    bench = Bench()
    model = bench.open(requests=1)
    withdrawn = bench.submit(model)
    bench.submit(model)
    bench.turn()
    bench.session.cancel(withdrawn)
    assert bench.sent() == [Cancel(sequence=1)]
    bench.receive(Failure(sequence=1, code="cancelled", message="", retryable=False, retry_after_ms=None))
    assert sequences(bench.sent()) == [2]
    assert withdrawn not in bench.finished


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
    bench.receive(result(1, total_us=199_600))
    (request,) = bench.sent()
    assert isinstance(request, Request)
    assert request.remaining_ms == 300


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


def test_wakes_for_the_next_deadline() -> None:
    """The earliest of the deadlines, the heartbeat and the server's silence is what the core sleeps until."""
    bench = Bench()
    model = bench.open()
    assert bench.session.next_wakeup() == bench.now + 1.0
    bench.submit(model, timeout=0.7)
    bench.submit(model, timeout=0.3)
    assert bench.session.next_wakeup() == bench.now + 0.3


def test_heartbeats_only_when_nothing_else_was_sent() -> None:
    """Any traffic is a sign of life, so a busy client sends no heartbeats."""
    bench = Bench()
    model = bench.open()
    bench.now += 0.6
    bench.submit(model)
    bench.turn()
    bench.now += 0.6
    assert bench.sent() == []
    bench.now += 0.4
    assert bench.sent() == [Heartbeat()]


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
    assert [entry.model for entry in again if isinstance(entry, Request)] == [9, 9]
    bench.receive(result(1), result(2))
    assert sequences(bench.sent()) == [3]
    bench.receive(result(3))
    bench.turn()
    assert bench.finished[-3:] == tickets


def test_a_new_epoch_without_unknown_also_starts_again() -> None:
    """A welcome from another process resends what was unfinished."""
    bench = Bench()
    model = bench.open()
    bench.submit(model)
    bench.turn()
    bench.welcome(epoch=b"b")
    assert bench.sent() == [OpenModel(name="m")]
    bench.receive(ModelOpened(name="m", number=1, signature=SIGNATURE))
    assert sequences(bench.sent()) == [1]


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


def test_a_model_that_changed_meanwhile_fails_what_was_checked_against_the_old_one() -> None:
    """Port numbers may mean something else now: unfinished requests fail, and so does the stale handle."""
    bench = Bench()
    model = bench.open()
    ticket = bench.submit(model)
    bench.turn()
    bench.welcome(epoch=b"b")
    bench.turn()
    bench.receive(ModelOpened(name="m", number=1, signature={"name": "m", "inputs": []}))
    later = bench.submit(model)
    assert sequences(bench.sent()) == []
    assert isinstance(ticket.outcome, Unavailable)
    assert isinstance(later.outcome, Unavailable)
    assert model.stale


def test_a_model_that_is_gone_after_a_restart_fails_its_requests_with_the_servers_code() -> None:
    """`ModelRefused` on a reconnect ends what waited for that model."""
    bench = Bench()
    ticket = bench.submit(bench.open())
    bench.turn()
    bench.welcome(epoch=b"b")
    bench.turn()
    bench.receive(ModelRefused(name="m", code="unavailable", message="gone"))
    bench.turn()
    assert isinstance(ticket.outcome, Unavailable)


def test_silence_asks_for_a_new_connection_and_greets_on_it() -> None:
    """A server that says nothing for `silence_s` counts as gone; requests stay, and are sent again."""
    bench = Bench()
    model = bench.open()
    ticket = bench.submit(model)
    bench.turn()
    start = bench.now
    while not bench.wait_until_due().reconnect:
        pass
    assert bench.now == start + SETTINGS.silence_s
    bench.session.connected(bench.now)
    assert bench.sent() == [Hello(client=bytes(16), software="test")]
    bench.welcome(epoch=b"b")
    bench.turn()
    bench.receive(ModelOpened(name="m", number=7, signature=SIGNATURE))
    assert sequences(bench.sent()) == [1]
    assert ticket.outcome is None


def test_an_unanswered_greeting_is_repeated_on_new_connections_ever_more_patiently() -> None:
    """1, 2, 4, 8, then every `silence_s` seconds."""
    bench = Bench()
    waits = []
    for _ in range(6):
        bench.session.connected(bench.now)
        before = bench.now
        assert not bench.turn().reconnect
        assert bench.wait_until_due().reconnect
        waits.append(bench.now - before)
    assert waits == [1, 2, 4, 8, 10, 10]


def test_a_server_that_says_goodbye_is_looked_for_again_after_a_rest() -> None:
    """Nothing is sent to a server that leaves; a new connection is made a moment later."""
    bench = Bench()
    model = bench.open()
    bench.receive(Goodbye())
    bench.submit(model)
    turn = bench.turn()
    assert (turn.entries, turn.reconnect) == ([], False)
    before = bench.now
    assert bench.wait_until_due().reconnect
    assert bench.now == before + SETTINGS.rest_s


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


def test_statistics_are_asked_for_once_and_shared() -> None:
    """Two callers at a time share one question, and a reconnect asks again."""
    bench = Bench()
    bench.open()
    first, second = StatisticsTicket(bench.caller), StatisticsTicket(bench.caller)
    bench.session.submit(first)
    bench.session.submit(second)
    assert bench.sent() == [StatisticsRequest()]
    bench.welcome(epoch=b"b")
    assert StatisticsRequest() in bench.sent()
    bench.receive(Statistics(values={"requests": 3}))
    bench.turn()
    assert first.outcome == second.outcome == {"requests": 3}


def test_while_the_transport_is_full_everything_stays_here_but_deadlines_still_pass() -> None:
    """`may_send=False` takes nothing out of the session's hands, so that it can still be withdrawn."""
    bench = Bench()
    model = bench.open()
    withdrawn, kept = bench.submit(model), bench.submit(model)
    expired = bench.submit(model, timeout=0.1)
    bench.now += 0.1
    assert bench.turn(may_send=False).entries == []
    assert isinstance(expired.outcome, DeadlineExceeded)
    bench.session.cancel(withdrawn)
    assert sequences(bench.sent()) == [kept.id]


def test_an_answer_that_makes_no_sense_fails_its_request_alone() -> None:
    """A bad entry with a known number ends that request as `internal`; without one it is ignored."""
    bench = Bench()
    model = bench.open()
    ticket, other = bench.submit(model), bench.submit(model)
    bench.turn()
    bench.session.unreadable_entry(ticket.id, "bad shape")
    bench.session.unreadable_entry(None, "bad kind")
    bench.turn()
    assert isinstance(ticket.outcome, InternalError)
    assert other.outcome is None


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
    for _ in range(10_000):
        ticket = bench.submit(model, timeout=3600)
        bench.session.turn(bench.now)
        bench.session.receive([result(ticket.id)], bench.now)
    assert len(bench.session._ledger._deadlines) <= 65  # the bound is the point, hence the look inside


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
    bench.welcome(epoch=b"b")
    bench.turn()
    bench.receive(ModelOpened(name="m", number=9, signature=SIGNATURE))
    assert sequences(bench.sent()) == [2, 3, 4]
    bench.receive(result(2), result(3), result(4))
    bench.turn()
    assert [ticket.outcome for ticket in tickets] == [result(number) for number in (1, 2, 3, 4)]


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


def test_a_leaving_servers_refusal_of_an_unwanted_request_ends_it() -> None:
    """Nobody waits for a request that was withdrawn: it is not sent again."""
    bench = Bench()
    model = bench.open()
    ticket = bench.submit(model)
    bench.turn()
    bench.session.cancel(ticket)
    bench.turn()
    bench.receive(refusal(1, "draining"))
    bench.welcome(epoch=b"b")
    bench.turn()
    bench.receive(ModelOpened(name="m", number=9, signature=SIGNATURE))
    assert sequences(bench.sent()) == []


@pytest.mark.parametrize("code", ["overloaded", "unavailable"])
def test_other_refusals_are_handed_to_the_caller(code: str) -> None:
    """Whether to try again under load is for the caller to decide."""
    bench = Bench()
    ticket = bench.submit(bench.open())
    bench.turn()
    bench.receive(refusal(1, code))
    bench.turn()
    assert isinstance(ticket.outcome, Overloaded | Unavailable)


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
    signature = {**SIGNATURE, "idempotent": False}
    bench.session.connected(bench.now)
    bench.turn()
    bench.welcome(requests=2)
    opening = OpenTicket(bench.caller, name="m")
    bench.session.submit(opening)
    bench.turn()
    bench.receive(ModelOpened(name="m", number=7, signature=signature))
    bench.turn()
    assert isinstance(opening.outcome, ModelHandle)
    had, refused, unsent = [bench.submit(opening.outcome) for _ in range(3)]
    assert sequences(bench.sent()) == [1, 2]
    bench.receive(refusal(2, "draining"), Unknown())
    bench.turn()
    bench.welcome(epoch=b"b")
    bench.turn()
    bench.receive(ModelOpened(name="m", number=7, signature=signature))
    assert sequences(bench.sent()) == [2, 3]
    assert isinstance(had.outcome, WorkerLost)
    assert refused.outcome is unsent.outcome is None


def test_what_may_not_run_twice_is_sent_again_to_the_same_server() -> None:
    """It knows whether it ran."""
    bench = Bench()
    model = bench.open()
    model.signature = {**SIGNATURE, "idempotent": False}
    bench.submit(model)
    bench.turn()
    bench.receive(Unknown())
    bench.turn()
    bench.welcome()
    bench.turn()
    bench.receive(ModelOpened(name="m", number=7, signature=model.signature))
    assert sequences(bench.sent()) == [1]


def test_a_reply_that_was_lost_and_is_no_longer_kept_is_asked_for_under_a_new_number() -> None:
    """The model is idempotent, so running once more is better than an error; the deadline stays what it was."""
    bench = Bench()
    model = bench.open()
    ticket = bench.submit(model, timeout=2.0)
    bench.turn()
    bench.now += 0.5
    bench.receive(refusal(1, "answered"))
    (request,) = [entry for entry in bench.sent() if isinstance(entry, Request)]
    assert (2, 1500) == (request.sequence, request.remaining_ms)
    bench.receive(result(2))
    bench.turn()
    assert ticket.outcome == result(2)


def test_a_server_that_always_says_answered_is_not_asked_for_ever() -> None:
    """After three new numbers the caller is told."""
    bench = Bench()
    ticket = bench.submit(bench.open())
    for number in range(1, 5):
        assert sequences(bench.sent()) == [number]
        bench.receive(refusal(number, "answered"))
    bench.turn()
    assert isinstance(ticket.outcome, AlreadyAnswered)


def test_a_lost_reply_of_a_model_that_may_not_run_twice_is_told_to_the_caller() -> None:
    """It ran; what it gave is gone."""
    bench = Bench()
    model = bench.open()
    model.signature = {**SIGNATURE, "idempotent": False}
    ticket = bench.submit(model)
    bench.turn()
    bench.receive(refusal(1, "answered"))
    assert sequences(bench.sent()) == []
    assert isinstance(ticket.outcome, AlreadyAnswered)
