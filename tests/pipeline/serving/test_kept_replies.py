"""Replies that are kept: what is found again, what is only remembered, and the bounds."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shapestream.serving.kept_replies import MAX_ABSENT, Answered, KeptReplies, _level
from shapestream.serving.kept_reply import OVERHEAD_NBYTES
from shapestream.serving.spans import MAX_SPANS, Spans
from shapestream.wire.messages import Failure, Result, Timings
from shapestream_engine.layout import Tensors

TIMINGS = Timings(queue_us=1, run_us=2, total_us=3, batch_requests=1, batch_rows=1, worker="w/0")
QUESTION = Tensors(layout=((0, "u8", (3,)),), buffers=(b"abc",))


def result(sequence: int, nbytes: int = 0) -> Result:
    """A reply with so many bytes of tensors."""
    tensors = Tensors(layout=((0, "u8", (nbytes,)),), buffers=(bytes(nbytes),))
    return Result(sequence=sequence, timings=TIMINGS, tensors=tensors)


def kept_replies(*, max_bytes: int = 1 << 20, max_age_s: float = 60.0, max_replies: int = 8) -> KeptReplies:
    """At time 0."""
    return KeptReplies(max_bytes=max_bytes, max_age_s=max_age_s, max_replies=max_replies, now=0.0)


def keep(kept: KeptReplies, answered: Answered, sequence: int, nbytes: int = 0) -> None:
    """One reply; the books balance after it."""
    kept.keep(answered, sequence, 0, QUESTION, result(sequence, nbytes))
    kept.check_invariants()


def test_a_reply_is_found_for_the_same_model_layout_and_bytes_only() -> None:
    """Whatever differs makes it another request."""
    kept = kept_replies()
    answered = kept.of(b"a")
    keep(kept, answered, 5)
    reply = answered.find(5)
    assert reply is not None
    assert result(5) == reply.reply
    assert reply.answers(0, QUESTION)
    assert not reply.answers(1, QUESTION)
    assert not reply.answers(0, Tensors(layout=((0, "u8", (3,)),), buffers=(b"abd",)))
    assert not reply.answers(0, Tensors(layout=((0, "i8", (3,)),), buffers=(b"abc",)))


def test_a_session_that_ends_takes_nothing_with_it() -> None:
    """The replies belong to the client's id."""
    kept = kept_replies()
    keep(kept, kept.of(b"a"), 5)
    kept.left(b"a")
    kept.expire(30.0)
    assert [5] == list(kept.of(b"a").order)


def test_what_is_too_old_is_remembered_by_its_number_alone() -> None:
    """Sixty seconds later the reply is gone, and its number is not free again."""
    kept = kept_replies(max_age_s=60.0)
    answered = kept.of(b"a")
    keep(kept, answered, 1)
    kept.expire(40.0)
    keep(kept, answered, 2)
    kept.expire(60.0)
    assert [2] == list(answered.order)
    assert 1 in answered.gone
    assert (1, OVERHEAD_NBYTES) == (len(kept), kept.nbytes)


def test_a_client_keeps_as_many_as_it_may_have_unanswered() -> None:
    """The oldest make room."""
    kept = kept_replies(max_replies=3)
    answered = kept.of(b"a")
    for sequence in range(10):
        keep(kept, answered, sequence)
    assert [7, 8, 9] == list(answered.order)
    assert "0..6" == repr(answered.gone)


def test_who_holds_most_makes_room_so_that_none_pushes_out_another() -> None:
    """One alone has all the room; when others come, it shrinks by its oldest, and theirs stay."""
    kept = kept_replies(max_bytes=16 * OVERHEAD_NBYTES, max_replies=100)
    greedy, modest, other = kept.of(b"g"), kept.of(b"m"), kept.of(b"o")
    for sequence in range(20):
        keep(kept, greedy, sequence)
    assert list(range(20))[-len(greedy.order) :] == list(greedy.order)
    assert 14 <= len(greedy.order) <= 16
    for sequence in range(4):
        keep(kept, modest, sequence)
        keep(kept, other, sequence)
    for sequence in range(20, 60):
        keep(kept, greedy, sequence)
    assert (4, 4) == (len(modest.order), len(other.order))
    assert 4 <= len(greedy.order) <= 8


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(0, 1000))
def test_the_level_is_the_highest_that_fits(sizes: list[int], total: int) -> None:
    """Max-min fairness: no one above the level keeps more, no one below it loses anything, and little is wasted."""
    level = _level(sizes, total)
    assert sum(min(size, level) for size in sizes) <= max(total, 0)
    if level < max(sizes):
        assert sum(min(size, level + 1) for size in sizes) > total


def test_who_leaves_on_purpose_leaves_only_numbers() -> None:
    """Nobody will ask; what did not run twice still may not."""
    kept = kept_replies()
    answered = kept.of(b"a")
    for sequence in range(3):
        keep(kept, answered, sequence)
    kept.drop(answered)
    kept.check_invariants()
    assert (0, "0..2") == (len(kept), repr(answered.gone))


def test_a_reply_beyond_all_room_is_remembered_by_its_number() -> None:
    """It pushes nothing out."""
    kept = kept_replies(max_bytes=4096)
    answered = kept.of(b"a")
    keep(kept, answered, 1)
    keep(kept, answered, 2, nbytes=4096)
    assert [1] == list(answered.order)
    assert 2 in answered.gone


def test_failures_are_replies_too() -> None:
    """Their size is that of any reply without tensors."""
    kept = kept_replies()
    answered = kept.of(b"a")
    failure = Failure(sequence=1, code="model_error", message="no", retryable=False, retry_after_ms=None)
    kept.keep(answered, 1, 0, QUESTION, failure)
    reply = answered.find(1)
    assert reply is not None
    assert failure == reply.reply
    assert OVERHEAD_NBYTES == kept.nbytes


def test_the_garbage_collector_has_nothing_to_look_at() -> None:
    """Kept replies are bytes, which it lets go: thousands of them make none of its passes longer."""
    kept = kept_replies(max_bytes=1 << 24, max_replies=5000)
    answered = kept.of(b"a")
    for sequence in range(5000):
        kept.keep(answered, sequence, 0, QUESTION, result(sequence, 3))
    gc.collect()
    before = len(gc.get_objects())
    kept.drop(answered)
    assert abs(before - len(gc.get_objects())) < 100


@pytest.mark.parametrize("nbytes", [(0,), (5, 0, 1024), (5, 1025), (1 << 16, 3)])
def test_a_reply_comes_back_as_it_was(nbytes: tuple[int, ...]) -> None:
    """Small tensors and large ones, one or several."""
    kept = kept_replies()
    answered = kept.of(b"a")
    layout = tuple((number, "u8", (size,)) for number, size in enumerate(nbytes))
    tensors = Tensors(layout=layout, buffers=tuple(bytes([size % 251]) * size for size in nbytes))
    given = Result(sequence=3, timings=TIMINGS, tensors=tensors)
    kept.keep(answered, 3, 0, QUESTION, given)
    reply = answered.find(3)
    assert reply is not None
    assert given == reply.reply


def test_clients_that_left_are_remembered_up_to_a_number_and_those_without_answers_not_at_all() -> None:
    """A flood of greetings leaves nothing behind."""
    kept = kept_replies(max_bytes=1 << 24)
    for number in range(3 * MAX_ABSENT):
        name = str(number).encode()
        kept.of(name)
        kept.left(name)
    assert MAX_ABSENT == len(kept._by_client)
    kept.expire(1.0)
    assert {} == kept._by_client
    for number in range(MAX_ABSENT + 1):
        name = str(number).encode()
        keep_one = kept.of(name)
        kept.keep(keep_one, 1, 0, QUESTION, result(1))
        kept.left(name)
    kept.check_invariants()
    assert [] == list(kept.of(b"0").order)
    assert [1] == list(kept.of(b"1").order)


@given(st.lists(st.integers(0, 40)))
def test_spans_hold_what_was_added(numbers: list[int]) -> None:
    """Against a set; the spans are as few as they can be."""
    spans, expected = Spans(), set[int]()
    for number in numbers:
        spans.add(number)
        expected.add(number)
    assert expected == {number for number in range(-2, 45) if number in spans}
    assert len([number for number in expected if number - 1 not in expected]) == len(spans)


def test_spans_stay_few_by_closing_the_lowest_gap() -> None:
    """A peer that numbers at random costs no more memory; what it left out far below counts as used."""
    spans = Spans()
    for number in range(0, 10 * MAX_SPANS, 2):
        spans.add(number)
    assert MAX_SPANS == len(spans)
    assert 1 in spans
    assert 10 * MAX_SPANS - 3 not in spans
    assert "none" == repr(Spans())


class Books(RuleBasedStateMachine):
    """Clients come, are answered, go, and come back, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.kept = kept_replies(max_bytes=6000, max_age_s=5.0, max_replies=4)
        self.present: dict[bytes, Answered] = {}
        self.ended: dict[bytes, set[int]] = {}
        self.number = 0

    @rule(client=st.sampled_from([b"a", b"b", b"c"]))
    def come(self, client: bytes) -> None:
        """A session begins; what was answered is known still."""
        self.present[client] = answered = self.kept.of(client)
        for sequence in self.ended.get(client, ()):
            assert (answered.find(sequence) is not None) != (sequence in answered.gone)

    @precondition(lambda self: self.present)
    @rule(data=st.data(), nbytes=st.integers(0, 3000))
    def answer(self, data: st.DataObject, nbytes: int) -> None:
        """A request ends; numbers come nearly in order."""
        client = data.draw(st.sampled_from(sorted(self.present)))
        ended = self.ended.setdefault(client, set())
        sequence = data.draw(
            st.integers(0, 40).filter(lambda number: number not in ended), label="a number that is free"
        )
        ended.add(sequence)
        self.kept.keep(self.present[client], sequence, 0, QUESTION, result(sequence, nbytes))

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A session ends."""
        client = data.draw(st.sampled_from(sorted(self.present)))
        del self.present[client]
        self.kept.left(client)

    @rule(seconds=st.floats(0.1, 4.0))
    def wait(self, seconds: float) -> None:
        """A round of heartbeats."""
        self.now += seconds
        self.kept.expire(self.now)

    @invariant()
    def balanced(self) -> None:
        """The books balance, and nothing that was answered looks new."""
        self.kept.check_invariants()
        for client, answered in self.present.items():
            for sequence in self.ended.get(client, ()):
                assert (answered.find(sequence) is not None) != (sequence in answered.gone)
                assert sequence <= answered.highest


class TestBooks(Books.TestCase):  # type: ignore[misc,valid-type] # made by hypothesis
    """Nothing that was answered is ever taken for new, and no bound is passed."""

    settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
