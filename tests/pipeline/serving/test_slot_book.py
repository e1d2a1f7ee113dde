"""What the dispatcher writes down of slots, and of the batches on them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pipeline.serving.batches import record_of
from tests.pipeline.serving.echo_model import SIGNATURE, echo_tensors, echoed, model_settings

from shapestream.scheduling.events import StartBatch
from shapestream.serving.dispatcher import SlotBook
from shapestream.serving.kept_replies import KeptReplies
from shapestream.serving.served_models import ServedModel
from shapestream.serving.sessions import ClientSession, RequestRecord
from shapestream.serving.workers import ConnectedWorker, Offer, RunningBatch
from shapestream_engine.batch import BatchReport

OUTPUT = echoed(echo_tensors())


def record() -> RequestRecord:
    """A request."""
    kept = KeptReplies(max_bytes=0, max_age_s=0.0, max_replies=8, now=0.0)
    session = ClientSession(0, kept.of((b"c" * 16, None)), b"peer", "test", 0.0)
    model, tensors = ServedModel(0, "echo", SIGNATURE, model_settings()), echo_tensors()
    shape = SIGNATURE.resolve(tensors.layout)
    return record_of(session, 1, model, shape, tensors)


def start(book: SlotBook, batch: int, *, behind: int | None = None, at: float = 0.0) -> RunningBatch:
    """A batch of one request on slot 0."""
    action = StartBatch(batch=batch, slot=0, model="echo", requests=(1,), sizes=(1, 4), behind=behind)
    return book.start(action, [record()], at)


@pytest.fixture
def book() -> SlotBook:
    """One slot has joined."""
    made = SlotBook()
    outgoing: Any = None  # nothing is said to it
    offer = Offer(name="w", pid=42, slots=1, models={"echo": SIGNATURE})
    made.join(ConnectedWorker(b"peer", offer, outgoing, 0.0, session=7))
    return made


def test_what_a_slot_ran_and_what_waited_there_leaves_with_it(book: SlotBook) -> None:
    """Their reports, should they come after all, are of nothing that is known."""
    start(book, 1)
    start(book, 2, behind=1)
    book.leave([book.slots[0]], 1.0)
    assert [None, None] == [book.reported(batch, 1.0) for batch in (1, 2)]


def test_a_slot_is_busy_from_its_first_batch_until_it_has_none(book: SlotBook) -> None:
    """Also across one that was queued behind, and until it leaves; what runs counts while it runs."""
    start(book, 1, at=1.0)
    start(book, 2, behind=1, at=1.5)
    book.reported(1, 2.0)
    assert 3.0 - 1.0 == book.busy.seconds(3.0)
    book.reported(2, 4.0)
    assert 4.0 - 1.0 == book.busy.seconds(9.0)
    start(book, 3, at=10.0)
    book.leave([book.slots[0]], 10.5)
    assert 3.0 + 0.5 == book.busy.seconds(20.0)


@pytest.mark.parametrize(
    ("busy_s", "began"),
    [(0.2, 1.0), (0.5, 0.75), (9.0, 0.5)],
    ids=["when the one before was reported", "earlier, as it was busy for longer", "not before it was sent"],
)
def test_a_batch_that_waited_began_when_its_slot_was_free(
    book: SlotBook, busy_s: float, began: float
) -> None:
    """Sent at 0.5 s, behind one that is reported at 1.0 s; its own report comes at 1.25 s."""
    start(book, 1)
    waited = start(book, 2, behind=1, at=0.5)
    assert book.reported(1, 1.0) is not None
    assert waited is book.reported(2, 1.25)
    waited.ran(BatchReport(batch=2, outputs=(OUTPUT,), busy_s=busy_s), (OUTPUT,), 1.25)
    assert began == waited.started


def test_a_batch_that_comes_back_frees_nobody(book: SlotBook) -> None:
    """The one that it waited for runs on, and the next may wait there."""
    running = start(book, 1)
    start(book, 2, behind=1)
    book.reported(2, 1.0)
    assert (None, None) == (running.slot.behind, running.slot_free)
