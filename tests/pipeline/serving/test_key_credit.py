"""How the sessions of one key divide its credit: pure."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shapestream.serving.kept_replies import Answered
from shapestream.serving.key_credit import KeyCredit
from shapestream.serving.sessions import Session
from shapestream.wire.messages import Credit


def window(requests: int, nbytes: int | None = None) -> Credit:
    """A window, with 1000 bytes per request unless another number is given."""
    return Credit(window_requests=requests, window_bytes=1000 * requests if nbytes is None else nbytes)


def joined(credit: KeyCredit, sessions: int) -> list[Session]:
    """So many sessions of this key."""
    new = [session_of(credit) for _ in range(sessions)]
    for session in new:
        credit.join(session)
    return new


def session_of(credit: KeyCredit) -> Session:
    """A session that has not joined yet."""
    return Session(credit.number, Answered(b"c" * 16), b"peer", "test", 0.0, credit)


def hold(session: Session, requests: int, nbytes: int = 1000) -> None:
    """The session has so many unanswered requests from now on."""
    blank: Any = None
    session.running = dict.fromkeys(range(requests), blank)
    session.held_bytes = requests * nbytes


def test_one_session_has_the_whole_window() -> None:
    """As where no key is asked for."""
    credit = KeyCredit(1, window(1024), 2)
    assert [window(1024)] == [credit.told(session) for session in joined(credit, 1)]
    assert {} == credit.grow()


def test_sessions_have_equal_parts_and_some_is_left_for_what_is_on_its_way() -> None:
    """Halved with each doubling: five to eight sessions have an eighth of what is given out, which is 7/8 of all."""
    credit = KeyCredit(1, window(1024), 2)
    eight = joined(credit, 8)
    assert {window(224)} == {credit.told(session) for session in eight}


def test_a_new_session_takes_nothing_from_those_that_have_no_more_than_their_part() -> None:
    """The sixth, seventh and eighth change nothing for the others."""
    credit = KeyCredit(1, window(1024), 2)
    joined(credit, 5)
    assert {} == credit.join(session_of(credit))


def test_a_new_session_gets_what_the_others_do_not_use() -> None:
    """What an idle one was told that it may have is taken back at once."""
    credit = KeyCredit(1, window(1024), 1)
    first, second = session_of(credit), session_of(credit)
    credit.join(first)
    assert {first: window(512)} == credit.join(second)
    assert window(512) == credit.told(second)


def test_a_new_session_waits_for_those_that_use_all() -> None:
    """It is told so, and gets its part when they have let go of theirs."""
    credit = KeyCredit(1, window(1024), 1)
    first, second = session_of(credit), session_of(credit)
    credit.join(first)
    hold(first, 1000)
    assert {first: window(512)} == credit.join(second)
    assert window(24) == credit.told(second)
    hold(first, 700)
    assert {second: window(324)} == credit.grow()
    hold(first, 512)
    assert {second: window(512)} == credit.grow()
    assert {} == credit.grow()


def test_what_is_free_is_given_out_once() -> None:
    """Of several that have less than their part the first gets it; the next gets what is left."""
    credit = KeyCredit(1, window(1024), 1)
    first, second, third = session_of(credit), session_of(credit), session_of(credit)
    credit.join(first)
    hold(first, 1000)
    credit.join(second)
    credit.join(third)
    assert [window(24), window(0)] == [credit.told(second), credit.told(third)]
    hold(first, 700)
    assert {second: window(256), third: window(68)} == credit.grow()


def test_what_a_session_leaves_goes_to_the_others_now_and_then() -> None:
    """Not at once: its coming and going must not make the server write to all of them."""
    credit = KeyCredit(1, window(1024), 1)
    first, second = joined(credit, 2)
    credit.leave(second)
    assert window(512) == credit.told(first)
    assert {first: window(1024)} == credit.grow()


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


class CreditMachine(RuleBasedStateMachine):
    """Sessions of one key come, use what they were told, and go. Each knows what it was told last."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Session, Credit] = {}

    window: Credit
    credit: KeyCredit
    given_out: Credit

    @initialize(requests=st.integers(1, 40), nbytes=st.integers(1, 4000), windows=st.integers(1, 4))
    def begin(self, requests: int, nbytes: int, windows: int) -> None:
        """Any window, and any number of them."""
        self.window = window(requests, nbytes)
        self.credit = KeyCredit(1, self.window, windows)
        self.given_out = window(
            max(requests, windows * requests - windows * requests // 8),
            max(nbytes, windows * nbytes - windows * nbytes // 8),
        )

    @rule()
    def join(self) -> None:
        """One more."""
        session = session_of(self.credit)
        told = self.credit.join(session)
        assert all(not _exceeds(new, self.known[other]) for other, new in told.items()), "it grew"
        self.known |= told
        self.known[session] = self.credit.told(session)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        """A client sends, as far as it may, or hears answers."""
        session = data.draw(st.sampled_from(list(self.known)))
        may = self.known[session]
        requests = data.draw(st.integers(0, max(may.window_requests, len(session.running))))
        hold(session, requests, 0)
        if requests:
            session.held_bytes = data.draw(st.integers(0, max(may.window_bytes, session.held_bytes)))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A client goes; what it had has ended."""
        session = data.draw(st.sampled_from(list(self.known)))
        del self.known[session]
        self.credit.leave(session)

    @rule()
    def grow(self) -> None:
        """A moment later."""
        told = self.credit.grow()
        assert all(_exceeds(new, self.known[session]) for session, new in told.items()), "it shrank"
        self.known |= told

    @precondition(lambda self: self.known)
    @rule()
    def settle(self) -> None:
        """When nothing is unanswered everybody gets his part, and parts are equal."""
        for session in self.known:
            hold(session, 0)
        self.known |= self.credit.grow()
        halvings = (len(self.known) - 1).bit_length()
        part = Credit(
            window_requests=min(self.window.window_requests, self.given_out.window_requests >> halvings),
            window_bytes=min(self.window.window_bytes, self.given_out.window_bytes >> halvings),
        )
        assert {part} == set(self.known.values())

    @invariant()
    def promises_are_kept(self) -> None:
        """What clients have, or were told that they may have, is never more than is given out."""
        known = self.known.items()
        requests = sum(max(len(session.running), told.window_requests) for session, told in known)
        nbytes = sum(max(session.held_bytes, told.window_bytes) for session, told in known)
        assert requests <= self.given_out.window_requests
        assert nbytes <= self.given_out.window_bytes

    @invariant()
    def clients_know_what_holds(self) -> None:
        """Whoever's part has changed was told."""
        assert self.known == {session: self.credit.told(session) for session in self.known}
        assert not any(_exceeds(told, self.window) for told in self.known.values())


def _exceeds(one: Credit, other: Credit) -> bool:
    return one.window_requests > other.window_requests or one.window_bytes > other.window_bytes


CreditMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCreditMachine = CreditMachine.TestCase
