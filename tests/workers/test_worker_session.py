"""The worker's side of the protocol, against an executor that only writes down what it is told."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from shapestream.wire.messages import (
    BatchDone,
    BatchFailed,
    CancelBatch,
    Entry,
    Execute,
    ExecuteMember,
    Goodbye,
    Heartbeat,
    RecallBatch,
    Unknown,
    WorkerDraining,
    WorkerHello,
    WorkerWelcome,
)
from shapestream_engine.batch import Batch, BatchReport
from shapestream_engine.cost_table import CostPoint, CostTable
from shapestream_engine.layout import Tensors
from shapestream_engine.ports import Rows
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import InputPort, ModelSignature, OutputPort
from shapestream_workers.worker_session import WorkerSession

ROWS = NamedShape.parse("batch:1..8, 2")
SIGNATURE = ModelSignature("m", (InputPort("x", "f32", ROWS),), (OutputPort("y", "f32", ROWS, Rows()),))
TENSORS = Tensors(layout=((0, "f32", (1, 2)),), buffers=[bytes(8)])
COSTS = CostTable(key="k", dimensions=("batch",), points=(CostPoint(sizes=(4,), seconds=0.25),))


class RecordingExecutor:
    """Two slots that start and cancel nothing, but remember having been asked to."""

    name = "w"
    slots = 2
    prefetch_s = 0.0
    digests: Mapping[str, str] = {}
    models: Mapping[str, ModelSignature] = {"m": SIGNATURE}
    costs: Mapping[str, CostTable] = {"m": COSTS}

    def __init__(self) -> None:
        self.started: list[Batch] = []
        self.cancelled: list[int] = []
        self.recalled: list[int] = []

    def start_nowait(self, batch: Batch) -> None:
        """Remembers the batch."""
        self.started.append(batch)

    def cancel_nowait(self, batch: int) -> None:
        """Remembers the number."""
        self.cancelled.append(batch)

    def recall_nowait(self, batch: int) -> None:
        """Remembers the number."""
        self.recalled.append(batch)


def greeted() -> tuple[WorkerSession, RecordingExecutor]:
    """A session that the server has welcomed, with nothing left to say."""
    executor = RecordingExecutor()
    session = WorkerSession("w-1", 42, executor)
    session.greet(0.0)
    session.accept(WorkerWelcome(epoch=b"e" * 16, heartbeat_ms=1000), 0.0)
    session.outgoing.clear()
    return session, executor


def execute(batch: int, *, slot: int = 0, remaining_ms: int | None = None, model: str = "m") -> Execute:
    """One member of one row."""
    member = ExecuteMember(remaining_ms=remaining_ms, tensors=TENSORS)
    return Execute(batch=batch, slot=slot, model=model, sizes=(1,), members=(member,))


def ran(batch: Batch) -> BatchReport:
    """The report of a batch whose outputs are its inputs."""
    return BatchReport(
        batch=batch.batch,
        outputs=batch.members,
        run_s=0.25,
        busy_s=0.375,
        reallocations=1,
        preparations=1,
        code=None,
        message="",
        calls=((2, (4,)),),
    )


def test_the_greeting_tells_what_the_worker_can_do() -> None:
    """Slots, models and the process; the signature survives the way."""
    session = WorkerSession("w-1", 42, RecordingExecutor())
    session.greet(0.0)
    (hello,) = session.outgoing
    assert isinstance(hello, WorkerHello)
    assert ("w-1", 42, 2) == (hello.worker, hello.pid, hello.slots)
    assert SIGNATURE == ModelSignature.from_dict(hello.models["m"])
    assert COSTS == CostTable.from_dict(hello.costs["m"])


def test_a_batch_runs_and_is_answered_under_the_servers_number() -> None:
    """The received tensors go to the slot as they are; run time and reallocations come back."""
    session, executor = greeted()
    session.accept(execute(70, slot=1), 1.0)
    (batch,) = executor.started
    assert (1, "m", (1,), (TENSORS,), None) == (
        batch.slot,
        batch.model,
        batch.sizes,
        batch.members,
        batch.start_before,
    )
    session.reported([ran(batch)], 2.0)
    assert [
        BatchDone(
            batch=70,
            run_us=250_000,
            busy_us=375_000,
            reallocations=1,
            preparations=1,
            calls=((2, (4,)),),
            outputs=(TENSORS,),
        )
    ] == session.outgoing


def test_a_failure_keeps_its_code_and_words() -> None:
    """What the engine said reaches the server."""
    session, executor = greeted()
    session.accept(execute(70), 1.0)
    report = BatchReport(
        batch=executor.started[0].batch,
        outputs=None,
        run_s=0.0,
        busy_s=0.0,
        reallocations=0,
        preparations=0,
        code="model_error",
        message="Broadcast",
    )
    session.reported([report], 2.0)
    assert [BatchFailed(batch=70, code="model_error", message="Broadcast")] == session.outgoing


def test_deadlines_are_shortened_by_half_the_round_trip() -> None:
    """The greeting took 20 ms, so 10 of the 500 ms had passed on the way here."""
    executor = RecordingExecutor()
    session = WorkerSession("w-1", 42, executor)
    session.greet(5.0)
    session.accept(WorkerWelcome(epoch=b"e" * 16, heartbeat_ms=1000), 5.02)
    session.accept(execute(70, remaining_ms=500), 6.0)
    assert (pytest.approx(6.490),) == executor.started[0].start_before


def test_what_the_worker_cannot_do_is_refused_and_nothing_else_harmed() -> None:
    """An unknown model, slot or layout is our server's mistake, answered with its batch."""
    session, executor = greeted()
    wrong = Tensors(layout=((0, "f32", (1, 3)),), buffers=[bytes(12)])
    session.accept(execute(1, model="other"), 1.0)
    session.accept(execute(2, slot=7), 1.0)
    member = ExecuteMember(remaining_ms=None, tensors=wrong)
    session.accept(Execute(batch=3, slot=0, model="m", sizes=(1,), members=(member,)), 1.0)
    assert [(1, "internal"), (2, "internal"), (3, "internal")] == [
        (entry.batch, entry.code) for entry in session.outgoing if isinstance(entry, BatchFailed)
    ]
    assert [] == executor.started


def test_a_cancelled_batch_is_cancelled_at_its_slot_only() -> None:
    """The engine is asked to stop; the answer still comes with the report."""
    session, executor = greeted()
    session.accept(execute(70, slot=0), 1.0)
    session.accept(execute(71, slot=1), 1.0)
    session.accept(CancelBatch(batch=71), 1.1)
    session.accept(CancelBatch(batch=999), 1.1)
    assert [executor.started[1].batch] == executor.cancelled
    assert [] == session.outgoing


def test_a_new_server_never_gets_the_answers_of_an_old_one() -> None:
    """Its numbers start again: batch 1 of the old server must not pass for its own."""
    session, executor = greeted()
    session.accept(execute(1), 1.0)
    session.accept(Unknown(), 2.0)
    assert session.welcome is None
    assert [executor.started[0].batch] == executor.cancelled
    session.reported([ran(executor.started[0])], 3.0)
    assert [WorkerHello] == [type(entry) for entry in session.outgoing]
    session.outgoing.clear()
    session.accept(execute(1), 4.0)
    orphan, again = executor.started
    assert orphan.batch != again.batch
    session.reported([ran(again)], 5.0)
    assert [1] == [entry.batch for entry in session.outgoing if isinstance(entry, BatchDone)]


def test_a_greeting_waits_for_slots_that_nobody_waits_for() -> None:
    """What the new server sent would stand behind them, and its requests be blamed if they hang."""
    session, executor = greeted()
    session.accept(execute(1, slot=0), 1.0)
    session.accept(execute(2, slot=1), 1.0)
    session.greet(2.0)
    session.reported([ran(executor.started[0])], 3.0)
    assert ([], True) == (session.outgoing, session.greeting_waits)
    session.reported([ran(executor.started[1])], 4.0)
    assert ([WorkerHello], False) == ([type(entry) for entry in session.outgoing], session.greeting_waits)


def test_a_batch_goes_to_its_slot_while_another_one_runs_there() -> None:
    """The slot's thread takes it up by itself: nothing is held back here."""
    session, executor = greeted()
    session.accept(execute(1), 1.0)
    session.accept(execute(2), 1.1)
    first, second = executor.started
    assert (0, 0) == (first.slot, second.slot)
    session.reported([ran(first), ran(second)], 2.0)
    assert [1, 2] == [entry.batch for entry in session.outgoing if isinstance(entry, BatchDone)]


def test_a_third_batch_waits_for_an_answer_and_a_fifth_is_refused() -> None:
    """A new server knows nothing of the orphans; a server that sends ever more is not kept for."""
    session, executor = greeted()
    for batch in range(1, 6):
        session.accept(execute(batch), 1.0)
    assert 2 == len(executor.started)
    assert [(5, "internal")] == refused(session.outgoing)
    session.reported([ran(executor.started[0])], 2.0)
    session.accept(execute(6), 2.0)
    session.reported([ran(executor.started[1])], 3.0)
    session.reported([ran(batch) for batch in executor.started[2:4]], 4.0)
    session.reported([ran(executor.started[4])], 5.0)
    done = [entry.batch for entry in session.outgoing if isinstance(entry, BatchDone)]
    assert [1, 2, 3, 4, 6] == done


def refused(entries: list[Entry]) -> list[tuple[int, str]]:
    """Batch and code of each that failed."""
    return [(entry.batch, entry.code) for entry in entries if isinstance(entry, BatchFailed)]


def test_a_recall_reaches_the_slot_that_has_the_batch() -> None:
    """It alone can tell whether the batch has begun; its report is the answer, whichever it is."""
    session, executor = greeted()
    session.accept(execute(70), 1.0)
    session.accept(execute(71), 1.1)
    session.accept(RecallBatch(batch=71), 1.2)
    session.accept(RecallBatch(batch=999), 1.2)
    first, second = executor.started
    assert ([second.batch], []) == (executor.recalled, session.outgoing)
    report = BatchReport(
        batch=second.batch,
        outputs=None,
        run_s=0.0,
        busy_s=0.0,
        reallocations=0,
        preparations=0,
        code="recalled",
        message="taken back",
    )
    session.reported([report, ran(first)], 2.0)
    assert [(71, "recalled")] == refused(session.outgoing)
    assert [70] == [entry.batch for entry in session.outgoing if isinstance(entry, BatchDone)]


def test_several_unknowns_cause_one_greeting() -> None:
    """Each heartbeat that a new server found waiting is answered so; a second greeting would drop what runs."""
    session, _ = greeted()
    session.accept(Unknown(), 2.0)
    session.accept(Unknown(), 2.0)
    assert [WorkerHello] == [type(entry) for entry in session.outgoing]


def test_a_batch_that_waits_here_loses_that_time() -> None:
    """Half a second behind two orphans is half a second less until the deadline."""
    session, executor = behind_two_orphans()
    session.accept(execute(1, remaining_ms=2000), 3.0)
    assert 2 == len(executor.started)
    session.reported([ran(executor.started[0])], 3.5)
    assert (pytest.approx(5.0),) == executor.started[2].start_before


def behind_two_orphans() -> tuple[WorkerSession, RecordingExecutor]:
    """A session whose first slot has no room, for what an earlier one left there."""
    session, executor = greeted()
    session.accept(execute(1), 1.0)
    session.accept(execute(2), 1.0)
    session.greet(2.0)
    session.accept(WorkerWelcome(epoch=b"e" * 16, heartbeat_ms=1000), 2.0)
    session.outgoing.clear()
    assert [batch.batch for batch in executor.started] == executor.cancelled
    return session, executor


def test_a_batch_that_waits_here_can_be_cancelled_or_recalled() -> None:
    """Either is answered at once, and it never starts."""
    session, executor = behind_two_orphans()
    session.accept(execute(5), 3.0)
    session.accept(execute(6), 3.0)
    session.accept(CancelBatch(batch=5), 3.1)
    session.accept(RecallBatch(batch=6), 3.1)
    assert [(5, "cancelled"), (6, "recalled")] == refused(session.outgoing)
    session.reported([ran(batch) for batch in executor.started], 4.0)
    assert 2 == len(executor.started)


def test_draining_answers_also_what_was_on_its_way() -> None:
    """The server had sent a batch before it heard of it: that one runs too, and the server's goodbye is the end."""
    session, executor = greeted()
    session.accept(execute(1, slot=0), 1.0)
    session.drain()
    session.drain()
    session.accept(execute(2, slot=1), 1.5)
    session.reported([ran(batch) for batch in executor.started], 2.0)
    assert [WorkerDraining, BatchDone, BatchDone] == [type(entry) for entry in session.outgoing]
    assert session.ended is None
    session.accept(Goodbye(), 2.1)
    assert "drained" == session.ended


def test_an_idle_worker_announces_that_it_leaves() -> None:
    """Only the server knows whether a batch is on its way."""
    session, _ = greeted()
    session.drain()
    assert ([WorkerDraining()], None) == (session.outgoing, session.ended)


def test_a_draining_worker_finishes_what_waits_for_its_slot() -> None:
    """Also behind an orphan, a batch that was accepted is answered."""
    session, executor = greeted()
    session.accept(execute(1), 1.0)
    session.greet(2.0)
    session.accept(WorkerWelcome(epoch=b"e" * 16, heartbeat_ms=1000), 2.0)
    session.accept(execute(1), 3.0)
    session.drain()
    session.reported([ran(executor.started[0])], 4.0)
    session.reported([ran(executor.started[1])], 5.0)
    assert [1] == [entry.batch for entry in session.outgoing if isinstance(entry, BatchDone)]


def test_a_greeting_that_waited_for_the_server_tells_nothing_of_the_way() -> None:
    """The worker was started first: the way counts from when its greeting left."""
    executor = RecordingExecutor()
    session = WorkerSession("w-1", 42, executor)
    session.greet(0.0)
    session.sent(60.0)
    session.accept(WorkerWelcome(epoch=b"e" * 16, heartbeat_ms=1000), 60.002)
    session.sent(70.0)
    session.accept(execute(1, remaining_ms=20), 80.0)
    (batch,) = executor.started
    assert (pytest.approx(80.019),) == batch.start_before


def test_a_worker_whose_welcome_is_on_its_way_drains_as_any_other() -> None:
    """The server knows it already, and may have sent it a batch: that one runs, and is not lost with an attempt."""
    executor = RecordingExecutor()
    session = WorkerSession("w-1", 42, executor)
    session.greet(0.0)
    session.drain()
    assert ([WorkerHello, WorkerDraining], None) == (
        [type(entry) for entry in session.outgoing],
        session.ended,
    )
    session.accept(WorkerWelcome(epoch=b"e" * 16, heartbeat_ms=1000), 0.1)
    session.accept(execute(1), 0.1)
    session.reported([ran(executor.started[0])], 0.2)
    assert [1] == [entry.batch for entry in session.outgoing if isinstance(entry, BatchDone)]
    session.accept(Goodbye(), 0.3)
    assert "drained" == session.ended


def test_a_draining_worker_that_the_server_does_not_know_leaves_at_once() -> None:
    """Nothing is owed to a server that waits for nothing."""
    session, _ = greeted()
    session.drain()
    session.accept(Unknown(), 1.0)
    assert (Goodbye(), "drained") == (session.outgoing[-1], session.ended)


def test_the_servers_goodbye_ends_the_session_and_its_heartbeat_does_not() -> None:
    """The shell then connects anew."""
    session, _ = greeted()
    session.accept(Heartbeat(), 1.0)
    assert session.ended is None
    session.accept(Goodbye(), 2.0)
    assert "the server said goodbye" == session.ended
