"""What the dispatcher writes down of slots, and of the batches on them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pipeline.serving.echo_model import SIGNATURE, echo_tensors, echoed, model_settings

from shapestream.scheduling.events import StartBatch
from shapestream.serving.dispatcher import SlotBook
from shapestream.serving.kept_replies import KeptReplies
from shapestream.serving.models import ServedModel
from shapestream.serving.outgoing import Link
from shapestream.serving.sessions import RequestRecord, Session
from shapestream.serving.workers import Offer, RunningBatch, Worker
from shapestream.wire.messages import Entry, Execute
from shapestream_engine.batch import BatchReport
from shapestream_engine.layout import Tensors

OUTPUT = echoed(echo_tensors())


class Said:
    """What was said, in order, in the place of `Outgoing`."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def say(self, _link: Link, entry: Entry) -> None:
        """As `Outgoing` would."""
        self.entries.append(entry)


def worker(slots: int = 1, said: Said | None = None) -> Worker:
    """A worker in session 7."""
    outgoing: Any = said
    offer = Offer(name="w", pid=42, slots=slots, models={"echo": SIGNATURE})
    return Worker(b"peer", offer, outgoing, 0.0, session=7)


def records(*deadlines: float | None) -> list[RequestRecord]:
    """Requests of one session, numbered from 1."""
    kept = KeptReplies(max_bytes=0, max_age_s=0.0, max_replies=8, now=0.0)
    session = Session(0, kept.of((b"c" * 16, None)), b"peer", "test", 0.0)
    model, tensors = ServedModel(0, "echo", SIGNATURE, model_settings()), echo_tensors()
    shape = SIGNATURE.resolve(tensors.layout)
    return [
        RequestRecord(id_, session, id_, model, shape, tensors, 0.0, deadline, 0)
        for id_, deadline in enumerate(deadlines, 1)
    ]


def start(
    book: SlotBook, batch: int, *deadlines: float | None, behind: int | None = None, at: float = 0.0
) -> RunningBatch:
    """A batch on slot 0 of requests with these deadlines."""
    members = records(*deadlines or (None,))
    action = StartBatch(
        batch=batch,
        slot=0,
        model="echo",
        requests=tuple(record.id for record in members),
        sizes=(len(members), 4),
        behind=behind,
    )
    return book.start(action, members, at)


def report(batch: int, *outputs: Tensors | None, busy_s: float = 0.1) -> BatchReport:
    """It ran for so long."""
    return BatchReport(
        batch=batch,
        outputs=outputs,
        run_s=busy_s,
        busy_s=busy_s,
        reallocations=0,
        preparations=0,
        code=None,
        message="",
    )


@pytest.fixture
def book() -> SlotBook:
    """One slot has joined."""
    made = SlotBook()
    made.join(worker())
    return made


def test_numbers_of_slots_are_never_used_twice() -> None:
    """Not even those of an worker that has left."""
    book, first = SlotBook(), worker(2)
    assert [0, 1] == [slot.number for slot in book.join(first)]
    book.leave(book.of(first))
    assert [2] == [slot.number for slot in book.join(worker())]
    assert [2] == list(book.slots)


def test_what_a_slot_ran_and_what_waited_there_leaves_with_it(book: SlotBook) -> None:
    """Their reports, should they come after all, are of nothing that is known."""
    start(book, 1)
    start(book, 2, behind=1)
    book.leave([book.slots[0]])
    assert [None, None] == [book.reported(batch, 1.0) for batch in (1, 2)]


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
    waited.ran(report(2, OUTPUT, busy_s=busy_s), (OUTPUT,), 1.25)
    assert began == waited.started


def test_a_batch_that_comes_back_frees_nobody(book: SlotBook) -> None:
    """The one that it waited for runs on, and the next may wait there."""
    running = start(book, 1)
    start(book, 2, behind=1)
    book.reported(2, 1.0)
    assert (None, None) == (running.slot.behind, running.slot_free)


def test_members_whose_deadline_had_passed_are_those_without_outputs(book: SlotBook) -> None:
    """Each of the others gets its own, whatever order they are asked for in."""
    batch = start(book, 1, 0.5, None, 0.7)
    outputs = (None, OUTPUT, echoed(echo_tensors(value=2.0)))
    batch.ran(report(1, *outputs), outputs, 1.0)
    assert frozenset({1}) == batch.expired()
    assert [outputs[2], outputs[1]] == list(batch.outputs_of((3, 2)))
    assert (0.5, None, 0.7) == batch.batch.start_before


def test_without_deadlines_nothing_can_expire(book: SlotBook) -> None:
    """And no points in time travel with the batch."""
    batch = start(book, 1, None, None)
    batch.ran(report(1, OUTPUT, OUTPUT), (OUTPUT, OUTPUT), 1.0)
    assert (None, frozenset()) == (batch.batch.start_before, batch.expired())
    assert [OUTPUT, OUTPUT] == list(batch.outputs_of((1, 2)))


def test_a_deadline_is_the_one_that_was_decided_however_long_this_process_stands_still() -> None:
    """It travels by the server's clock, beside the time of the decision: no second look at a clock is taken."""
    said = Said()
    book = SlotBook()
    book.join(worker(said=said))
    start(book, 1, 10.5, None, at=10.0).send()
    (execute,) = said.entries
    assert isinstance(execute, Execute)
    assert (7, 0, 10_000_000) == (execute.session, execute.slot, execute.sent_us)
    assert (10.5, None) == execute.start_before
