"""How the sessions of one key divide its credit: pure."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shapestream.serving.kept_replies import Answered
from shapestream.serving.key_credit import CONFIRM_WITHIN_S, KeyCredit
from shapestream.serving.sessions import Session
from shapestream.wire.messages import Credit

NOW = 0.0
NO_RECORD: Any = None


def window(requests: int, nbytes: int | None = None) -> Credit:
    """A window, with 1000 bytes per request unless another number is given."""
    return Credit(window_requests=requests, window_bytes=1000 * requests if nbytes is None else nbytes)


def session_of(credit: KeyCredit) -> Session:
    """A session that has not joined yet."""
    return Session(credit.number, Answered(b"c" * 16), b"peer", "test", NOW, credit)


def joined(credit: KeyCredit, sessions: int) -> list[Session]:
    """So many sessions of this key, whose clients keep to what they were told."""
    new = [session_of(credit) for _ in range(sessions)]
    for session in new:
        told = credit.join(session, NOW)
        while told:
            other, smaller = told.popitem()
            told |= credit.confirm(other, smaller)
    return new


def send(session: Session, nbytes: int) -> None:
    """A request of this session arrives; it is within the bound."""
    credit = session.key_credit
    assert credit is not None
    assert credit.covers(nbytes), "an honest client would be refused"
    session.running[len(session.running)] = NO_RECORD
    session.held_bytes += nbytes
    credit.take(nbytes)


def end(session: Session, nbytes: int) -> None:
    """One of its requests ends."""
    assert session.key_credit is not None
    session.running.popitem()
    session.held_bytes -= nbytes
    session.key_credit.give_back(nbytes)


def test_one_session_has_the_whole_window() -> None:
    """As where no key is asked for."""
    credit = KeyCredit(1, window(1024), 2)
    assert [window(1024)] == [credit.told(session) for session in joined(credit, 1)]
    assert {} == credit.grow(NOW)


def test_sessions_have_equal_parts() -> None:
    """Halved with each doubling: five to eight sessions have an eighth each."""
    credit = KeyCredit(1, window(1024), 2)
    for sessions, part in ((2, 1024), (1, 512), (1, 512), (1, 256), (3, 256), (1, 128)):
        new = joined(credit, sessions)
        assert {window(part)} == {credit.told(session) for session in new}


def test_a_new_session_takes_nothing_from_those_that_have_no_more_than_their_part() -> None:
    """The sixth, seventh and eighth change nothing for the others."""
    credit = KeyCredit(1, window(1024), 2)
    joined(credit, 5)
    assert {} == credit.join(session_of(credit), NOW)


def test_a_new_session_gets_what_another_lets_go_of_when_it_has_said_so() -> None:
    """Until then that one's client may have sent as much as it had."""
    credit = KeyCredit(1, window(1024), 1)
    (first,) = joined(credit, 1)
    second = session_of(credit)
    assert {first: window(512)} == credit.join(second, NOW)
    assert window(0) == credit.told(second)
    assert {} == credit.grow(NOW)
    assert {} == credit.confirm(first, window(1024))
    assert {second: window(512)} == credit.confirm(first, window(512))
    assert {} == credit.confirm(first, window(512))


def test_a_new_session_waits_for_those_that_use_all() -> None:
    """It gets its part as they let go of theirs."""
    credit = KeyCredit(1, window(4), 1)
    (first,) = joined(credit, 1)
    for _ in range(4):
        send(first, 0)
    second = session_of(credit)
    credit.join(second, NOW)
    assert {second: window(0, 2000)} == credit.confirm(first, window(2))
    end(first, 0)
    assert {second: window(1, 2000)} == credit.grow(NOW)
    end(first, 0)
    assert {second: window(2)} == credit.grow(NOW)


def test_what_is_free_is_given_out_once() -> None:
    """Of several that have less than their part the first gets it; the next gets what is left."""
    credit = KeyCredit(1, window(8, 0), 1)
    (first,) = joined(credit, 1)
    for _ in range(8):
        send(first, 0)
    second, third = joined(credit, 2)
    for _ in range(3):
        end(first, 0)
    assert {second: window(2, 0), third: window(1, 0)} == credit.grow(NOW)


def test_a_client_that_repeats_nothing_is_not_waited_for_for_ever() -> None:
    """It may not know that it should; what it has sent still counts."""
    credit = KeyCredit(1, window(1024), 1)
    (first,) = joined(credit, 1)
    second = session_of(credit)
    credit.join(second, NOW)
    assert {} == credit.grow(CONFIRM_WITHIN_S)
    assert {second: window(512)} == credit.grow(CONFIRM_WITHIN_S + 1.0)
    assert {} == credit.confirm(first, window(512))


def test_what_a_session_leaves_goes_to_the_others_now_and_then() -> None:
    """Not at once: its coming and going must not make the server write to all of them."""
    credit = KeyCredit(1, window(1024), 1)
    first, second = joined(credit, 2)
    credit.leave(second)
    assert window(512) == credit.told(first)
    assert {first: window(1024)} == credit.grow(NOW)


def test_what_a_session_without_a_connection_has_asked_for_still_counts() -> None:
    """But not what it was told that it may ask for; when it is back it joins again."""
    credit = KeyCredit(1, window(8, 0), 1)
    first, second = joined(credit, 2)
    send(first, 0)
    credit.leave(first)
    assert {second: window(7, 0)} == credit.grow(NOW)
    assert {second: window(4, 0)} == credit.join(first, NOW)
    assert {first: window(4, 0)} == credit.confirm(second, window(4, 0))


def test_the_bound_is_on_requests_and_on_bytes() -> None:
    """Of all sessions together."""
    credit = KeyCredit(1, window(2, 100), 2)
    for nbytes in (90, 90, 19):
        assert credit.covers(nbytes)
        credit.take(nbytes)
    assert [True, False] == [credit.covers(1), credit.covers(2)]
    credit.take(1)
    assert not credit.covers(0)
    credit.give_back(90)
    assert credit.covers(90)


class Client:
    """An honest one: it sends as much as the last credit that it has read allows, and repeats each."""

    def __init__(self, session: Session, may: Credit) -> None:
        self.session = session
        self.may = may
        self.unanswered: list[int] = []
        """Bytes of each request, as far as it knows."""
        self.inbox: deque[Credit | int] = deque()
        """On its way from the server: credit, and answers by the bytes of their requests."""
        self.outbox: deque[Credit | int] = deque()
        """On its way to it: credit that was read, and requests by their bytes."""
        self.held: list[int] = []
        """What the server has of its requests."""

    def may_send(self, nbytes: int) -> bool:
        """Whether its credit allows one more request."""
        room = self.may.window_bytes - sum(self.unanswered)
        return len(self.unanswered) < self.may.window_requests and nbytes <= room


class CreditMachine(RuleBasedStateMachine):
    """Clients of one key come, send what they may, and go; messages are on their way for as long as it takes."""

    window: Credit
    credit: KeyCredit

    def __init__(self) -> None:
        super().__init__()
        self.clients: dict[Session, Client] = {}

    @initialize(requests=st.integers(1, 9), nbytes=st.integers(1, 300), windows=st.integers(1, 3))
    def begin(self, requests: int, nbytes: int, windows: int) -> None:
        """Any window, and any number of them."""
        self.window = window(requests, nbytes)
        self.credit = KeyCredit(1, self.window, windows)

    def _tell(self, told: dict[Session, Credit]) -> None:
        for session, credit in told.items():
            self.clients[session].inbox.append(credit)

    def _draw(self, data: st.DataObject) -> Client:
        return data.draw(st.sampled_from(list(self.clients.values())))

    @rule()
    def join(self) -> None:
        """One more; its part comes with the welcome."""
        session = session_of(self.credit)
        self._tell(self.credit.join(session, NOW))
        self.clients[session] = Client(session, self.credit.told(session))

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), requests=st.integers(1, 9), nbytes=st.integers(0, 100))
    def send(self, data: st.DataObject, requests: int, nbytes: int) -> None:
        """A client sends, as far as it may."""
        client = self._draw(data)
        for _ in range(requests):
            if client.may_send(nbytes):
                client.unanswered.append(nbytes)
                client.outbox.append(nbytes)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def server_reads(self, data: st.DataObject) -> None:
        """All that a client has sent so far arrives: there is room for it."""
        self._server_reads(self._draw(data))

    def _server_reads(self, client: Client) -> None:
        while client.outbox:
            entry = client.outbox.popleft()
            if isinstance(entry, Credit):
                self._tell(self.credit.confirm(client.session, entry))
            else:
                send(client.session, entry)
                client.held.append(entry)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def client_reads(self, data: st.DataObject) -> None:
        """All that the server has said to a client so far arrives."""
        self._client_reads(self._draw(data))

    def _client_reads(self, client: Client) -> None:
        while client.inbox:
            entry = client.inbox.popleft()
            if isinstance(entry, Credit):
                client.may = entry
                client.outbox.append(entry)
            else:
                client.unanswered.remove(entry)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), requests=st.integers(1, 9))
    def answer(self, data: st.DataObject, requests: int) -> None:
        """The server answers some."""
        self._answer(self._draw(data), requests)

    def _answer(self, client: Client, requests: int) -> None:
        for nbytes in client.held[:requests]:
            end(client.session, nbytes)
            client.inbox.append(nbytes)
        del client.held[:requests]

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A client goes; what it had ends."""
        client = self.clients.pop(self._draw(data).session)
        self.credit.leave(client.session)
        for nbytes in client.held:
            end(client.session, nbytes)

    @rule()
    def grow(self) -> None:
        """A moment later."""
        self._tell(self.credit.grow(NOW))

    @precondition(lambda self: self.clients)
    @rule()
    def settle(self) -> None:
        """When all was read and answered everybody gets his part, and parts are equal."""
        for _ in range(3):
            for client in self.clients.values():
                self._client_reads(client)
                self._server_reads(client)
                self._answer(client, len(client.held))
        self._tell(self.credit.grow(NOW))
        halvings = (len(self.clients) - 1).bit_length()
        part = Credit(
            window_requests=min(self.window.window_requests, self.credit.max_requests >> halvings),
            window_bytes=min(self.window.window_bytes, self.credit.max_bytes >> halvings),
        )
        assert {part} == {self.credit.told(session) for session in self.clients}

    @invariant()
    def books_balance(self) -> None:
        """What the server counts is what it has."""
        if self.clients:
            held = [nbytes for client in self.clients.values() for nbytes in client.held]
            assert (len(held), sum(held)) == (self.credit.requests, self.credit.held_bytes)


CreditMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestCreditMachine = CreditMachine.TestCase
