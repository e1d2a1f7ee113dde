"""Replies that are kept: what is found again, what counts as answered, the bounds, and what a request is known by."""

from __future__ import annotations

import gc

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.entries import ResultEntry, failure_of, result_of
from tests.held import held

from shapestream.serving.kept_replies import (
    MAX_ABSENT,
    MOST_EXPIRED,
    OVERHEAD_NBYTES,
    ClientReplies,
    KeptReplies,
)
from shapestream.telemetry.runs import ClientId
from shapestream_engine.layout import Tensors

A: ClientId = (b"a" * 16, None)
B: ClientId = (b"b" * 16, None)
C: ClientId = (b"a" * 16, "key")


def tensors(*buffers: bytes) -> Tensors:
    """Tensors of these bytes."""
    layout = tuple((number, "u8", (len(buffer),)) for number, buffer in enumerate(buffers))
    return Tensors(layout=layout, buffers=buffers)


QUESTION = tensors(b"abc")
EMPTY = tensors()
GONE = failure_of(0, "model_error")


def result(sequence: int, nbytes: int = 0) -> ResultEntry:
    """A reply with so many bytes of tensors."""
    return result_of(sequence, tensors(bytes(nbytes)))


def kept_replies(*, max_bytes: int = 1 << 20, max_age_s: float = 60.0, max_replies: int = 8) -> KeptReplies:
    """At time 0."""
    return KeptReplies(max_bytes=max_bytes, max_age_s=max_age_s, max_replies=max_replies, now=0.0)


def keep(kept: KeptReplies, answered: ClientReplies, *sequences: int, nbytes: int = 0) -> None:
    """Replies to these; the books balance after each."""
    for sequence in sequences:
        kept.keep(answered, sequence, (0, QUESTION.layout), result(sequence, nbytes))
        kept.check_invariants()


def keep_many(kept: KeptReplies, answered: ClientReplies, count: int) -> None:
    """Replies to so many requests."""
    for sequence in range(count):
        kept.keep(answered, sequence, (0, QUESTION.layout), GONE)


def test_a_reply_is_found_for_the_same_model_and_layout_only() -> None:
    """Another model, or other shapes or types, make it another request."""
    kept = kept_replies()
    answered = kept.of(A)
    keep(kept, answered, 5)
    assert result(5) == answered.reply_to(5, (0, QUESTION.layout))
    assert answered.reply_to(5, (1, QUESTION.layout)) is None
    assert answered.reply_to(5, (0, tensors(b"ab").layout)) is None
    assert answered.reply_to(5, (0, ((0, "i8", (3,)),))) is None
    failure = failure_of(6, "model_error")
    kept.keep(answered, 6, (0, QUESTION.layout), failure)
    assert failure == answered.reply_to(6, (0, QUESTION.layout))
    assert 2 * OVERHEAD_NBYTES == kept.nbytes


def test_what_is_too_old_is_remembered_by_its_number_alone() -> None:
    """Also while its client is away: the replies belong to the client, and not to its session."""
    kept = kept_replies(max_age_s=60.0)
    keep(kept, kept.of(A), 1)
    kept.left(A)
    kept.expire(40.0)
    answered = kept.of(A)
    keep(kept, answered, 3)
    kept.expire(60.0)
    assert [3] == list(answered.replies)
    assert [True, True, False, True] == [answered.knows(number) for number in (0, 1, 2, 3)]


def test_no_heartbeat_drops_more_than_a_few_thousand() -> None:
    """What is left goes with the next ones, so that no turn of the event loop drops the replies of many clients."""
    kept = kept_replies(max_bytes=1 << 30, max_age_s=60.0, max_replies=1024)
    for number in range(5):
        keep_many(kept, kept.of((bytes([number]) * 16, None)), 1000)
    counts = []
    for now in (60.0, 61.0, 62.0):
        kept.expire(now)
        kept.check_invariants()
        counts.append(len(kept))
    assert [5000 - MOST_EXPIRED, 5000 - 2 * MOST_EXPIRED, 0] == counts


def test_a_client_keeps_as_many_as_it_may_have_unanswered() -> None:
    """The oldest make room; they and all numbers below them count as answered."""
    kept = kept_replies(max_replies=3)
    answered = kept.of(A)
    keep(kept, answered, 1, 2, 7, 4, 5)
    assert [7, 4, 5] == list(answered.replies)
    keep(kept, answered, 6)
    assert [4, 5, 6] == list(answered.replies)
    assert all(answered.knows(number) for number in range(8))
    assert not answered.knows(8)


def test_the_client_that_holds_most_makes_room_so_that_none_pushes_out_another() -> None:
    """One alone has all the room; when others come it gives up its oldest, and theirs stay."""
    kept = kept_replies(max_bytes=16 * OVERHEAD_NBYTES, max_replies=100)
    greedy, modest, other = kept.of(A), kept.of(B), kept.of(C)
    keep(kept, greedy, *range(16))
    assert 16 == len(kept)
    keep(kept, modest, *range(4))
    keep(kept, other, *range(4))
    keep(kept, greedy, *range(20, 60))
    assert (4, 4) == (len(modest.replies), len(other.replies))
    assert 4 <= len(greedy.replies) <= 8
    assert 59 in greedy.replies


def test_no_more_room_is_made_than_a_reply_needs() -> None:
    """So no turn drops thousands. Those that hold most give it in turn; a client with a single one keeps it."""
    kept = kept_replies(max_bytes=64 * OVERHEAD_NBYTES, max_replies=100)
    many = [kept.of((bytes([number]) * 16, None)) for number in range(4)]
    single = kept.of(A)
    keep(kept, single, 1)
    for sequence in range(16):
        for answered in many:
            kept.keep(answered, sequence, (0, QUESTION.layout), result(sequence))
            kept.check_invariants()
    assert 64 == len(kept)
    assert all(15 in answered.replies for answered in many)
    assert [1] == list(single.replies)


def test_what_is_dropped_on_purpose_or_beyond_all_room_counts_as_answered() -> None:
    """No reply will be asked for, or none can be kept; what did not run twice still may not."""
    kept = kept_replies(max_bytes=4096)
    answered = kept.of(A)
    keep(kept, answered, 1)
    keep(kept, answered, 2, nbytes=4096)
    assert [1] == list(answered.replies)
    assert answered.knows(2)
    kept.drop(answered)
    kept.check_invariants()
    assert (0, True) == (len(kept), answered.knows(1))


def test_to_drop_a_reply_takes_as_long_however_many_were_dropped_before() -> None:
    """With the largest window. Otherwise this test takes half a minute, for which a server would answer nobody."""
    most = 65_536
    kept = kept_replies(max_bytes=most * OVERHEAD_NBYTES, max_replies=most)
    answered = kept.of(A)
    for sequence in range(most):
        kept.keep(answered, sequence, (0, EMPTY.layout), GONE)
    for _ in range(most // MOST_EXPIRED):
        kept.expire(60.0)
    kept.check_invariants()
    assert (0, most) == (len(kept), answered.below)


def tracked(most: int) -> int:
    """The objects behind so many replies that each garbage collection visits, once some have seen them."""
    kept = kept_replies(max_bytes=1 << 24, max_replies=most)
    answered = kept.of(A)
    for sequence in range(0, most, 2):
        known_by = (0, tensors(bytes(sequence)).layout)
        kept.keep(answered, sequence, known_by, result(sequence, 16))
        kept.keep(answered, sequence + 1, known_by, failure_of(sequence + 1, "model_error"))
    for _ in range(6):  # each sees one level of tuples
        gc.collect()
    return sum(map(gc.is_tracked, held(kept)))


def test_kept_replies_are_nothing_to_the_garbage_collector() -> None:
    """A full store has a hundred thousand of them, and its objects would make a full collection long."""
    assert tracked(2) == tracked(2000)


def remembered(kept: KeptReplies) -> list[ClientId]:
    """The clients of which anything is known."""
    return [thing.client for thing in held(kept) if isinstance(thing, ClientReplies)]


def test_clients_that_left_are_remembered_up_to_a_number_and_those_without_answers_not_at_all() -> None:
    """A flood of greetings leaves nothing behind."""
    kept = kept_replies(max_bytes=1 << 24)
    names: list[ClientId] = [(str(number).encode(), None) for number in range(3 * MAX_ABSENT)]
    for name in names:
        kept.of(name)
        kept.left(name)
    assert MAX_ABSENT == len(remembered(kept))
    kept.expire(1.0)
    assert [] == remembered(kept)
    for name in names[: MAX_ABSENT + 1]:
        kept.keep(kept.of(name), 1, (0, QUESTION.layout), result(1))
        kept.left(name)
    kept.check_invariants()
    assert [False, True] == [kept.of(name).knows(1) for name in names[:2]]


class Books(RuleBasedStateMachine):
    """Clients come, are answered, go, and come back, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.kept = kept_replies(max_bytes=6000, max_age_s=5.0, max_replies=4)
        self.present: dict[ClientId, ClientReplies] = {}
        self.ended: dict[ClientId, set[int]] = {}

    @rule(client=st.sampled_from([A, B, C]))
    def come(self, client: ClientId) -> None:
        """A session begins; what was answered is known still."""
        self.present[client] = self.kept.of(client)

    @precondition(lambda self: self.present)
    @rule(data=st.data(), nbytes=st.integers(0, 3000))
    def answer(self, data: st.DataObject, nbytes: int) -> None:
        """A request ends; numbers come nearly in order."""
        client = data.draw(st.sampled_from(sorted(self.present, key=repr)))
        answered, ended = self.present[client], self.ended.setdefault(client, set())
        sequence = data.draw(
            st.integers(0, 60).filter(lambda number: number not in ended), label="a number that is free"
        )
        ended.add(sequence)
        self.kept.keep(answered, sequence, (0, QUESTION.layout), result(sequence, nbytes))
        if sequence in answered.replies:
            assert result(sequence, nbytes) == answered.reply_to(sequence, (0, QUESTION.layout))

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A session ends."""
        client = data.draw(st.sampled_from(sorted(self.present, key=repr)))
        del self.present[client]
        self.kept.left(client)

    @rule(seconds=st.floats(0.1, 4.0))
    def wait(self, seconds: float) -> None:
        """A round of heartbeats."""
        self.now += seconds
        self.kept.expire(self.now)

    @invariant()
    def balanced(self) -> None:
        """The books balance, and nothing that was answered looks new; nor does anything above it look answered."""
        self.kept.check_invariants()
        for client, answered in self.present.items():
            ended = self.ended.get(client, set())
            assert all(answered.knows(sequence) for sequence in ended)
            assert not answered.knows(max(ended, default=-1) + 1)


class TestBooks(Books.TestCase):  # type: ignore[misc,valid-type] # made by hypothesis
    """Nothing that was answered is ever taken for new, and no bound is passed."""

    settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
