"""How the sessions of one key divide its credit: pure."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shapestream.serving.kept_replies import Answered, KeptReplies
from shapestream.serving.key_credit import CONFIRM_WITHIN_S, KeyCredit
from shapestream.serving.sessions import Session, Sessions
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


def test_of_more_sessions_than_requests_each_may_have_one() -> None:
    """Or those that came last would wait for ever; the bound still holds, so some may be refused."""
    credit = KeyCredit(1, window(1), 2)
    assert {1} == {credit.told(session).window_requests for session in joined(credit, 5)}


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

    def send(self, nbytes: int) -> None:
        """As many requests of this size as its credit allows."""
        while (
            len(self.unanswered) < self.may.window_requests
            and sum(self.unanswered) + nbytes <= self.may.window_bytes
        ):
            self.unanswered.append(nbytes)
            self.outbox.append(nbytes)

    def read(self) -> None:
        """All that the server has said to it so far arrives."""
        while self.inbox:
            entry = self.inbox.popleft()
            if isinstance(entry, Credit):
                self.may = entry
                self.outbox.append(entry)
            else:
                self.unanswered.remove(entry)


class Key:
    """A key whose clients come, send what they may, and go; messages are on their way for as long as it takes."""

    def __init__(self, credit: KeyCredit) -> None:
        self.credit = credit
        self.clients: list[Client] = []

    def step(self, what: str, which: int, nbytes: int) -> None:
        """One thing happens, to one of the clients."""
        if what == "joins":
            if len(self.clients) < self.credit.max_requests:
                self.join()
        elif what == "grows":
            self.tell(self.credit.grow(NOW))
        elif self.clients:
            client = self.clients[which % len(self.clients)]
            if what == "sends":
                client.send(nbytes)
            elif what == "is answered":
                self.answer(client)
            elif what == "reads":
                client.read()
            elif what == "is read":
                self.read(client)
            else:
                self.leave(client)

    def tell(self, told: dict[Session, Credit]) -> None:
        """Credit is on its way."""
        for session, credit in told.items():
            next(client for client in self.clients if client.session is session).inbox.append(credit)

    def join(self) -> None:
        """One more; its part comes with the welcome."""
        session = session_of(self.credit)
        self.tell(self.credit.join(session, NOW))
        self.clients.append(Client(session, self.credit.told(session)))

    def read(self, client: Client) -> None:
        """All that this client has sent so far arrives: there is room for it."""
        while client.outbox:
            entry = client.outbox.popleft()
            if isinstance(entry, Credit):
                self.tell(self.credit.confirm(client.session, entry))
            else:
                send(client.session, entry)
                client.held.append(entry)

    def answer(self, client: Client) -> None:
        """All that the server has of this client ends."""
        for nbytes in client.held:
            end(client.session, nbytes)
            client.inbox.append(nbytes)
        client.held.clear()

    def leave(self, client: Client) -> None:
        """What it had ends."""
        self.clients.remove(client)
        self.credit.leave(client.session)
        for nbytes in client.held:
            end(client.session, nbytes)

    def check(self) -> None:
        """What the server counts is what it has."""
        held = [nbytes for client in self.clients for nbytes in client.held]
        assert (len(held), sum(held)) == (self.credit.requests, self.credit.held_bytes)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ("joins", "sends", "sends", "is read", "is read", "reads", "is answered", "leaves", "grows")
        ),
        st.integers(0, 3),
        st.sampled_from((0, 1, 40)),
    ),
    min_size=30,
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(requests=st.integers(2, 9), nbytes=st.integers(40, 300), windows=st.integers(1, 3), steps=STEPS)
def test_honest_clients_are_never_refused_and_end_with_equal_parts(
    requests: int, nbytes: int, windows: int, steps: list[tuple[str, int, int]]
) -> None:
    """Whoever sends what the last credit that it has read allows finds room, whatever is on its way."""
    key = Key(KeyCredit(1, window(requests, nbytes), windows))
    for step in steps:
        key.step(*step)
        key.check()
    for _ in range(3):
        for client in key.clients:
            client.read()
            key.read(client)
            key.answer(client)
    key.tell(key.credit.grow(NOW))
    halvings = max(0, len(key.clients) - 1).bit_length()
    part = min(requests, max(1, windows * requests >> halvings))
    part_bytes = min(nbytes, windows * nbytes >> halvings)
    assert {window(part, part_bytes)} >= {key.credit.told(client.session) for client in key.clients}


def test_a_key_keeps_its_number_when_all_of_its_sessions_have_gone() -> None:
    """So its debts: each return would be a new client's, which goes first. Without a key nobody is known again."""
    kept = KeptReplies(max_bytes=1, max_age_s=1.0, max_replies=1, now=NOW)
    sessions = Sessions(4, kept, window(4), 2)

    def numbers(key: str | None) -> list[int]:
        found = []
        for name in (b"a", b"b"):
            session = sessions.open(16 * name, name, "test", NOW, key)
            assert session is not None
            found.append(session.number)
            sessions.close(session)
        return found

    assert 1 == len({*numbers("key"), *numbers("key")})
    assert 6 == len({*numbers("key"), *numbers("other"), *numbers(None), *numbers(None)})
