"""The worker's side of the protocol, with slots that only write down what they are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.entries import (
    BatchFailedEntry,
    CancelBatchEntry,
    Clock,
    Entry,
    Goodbye,
    Heartbeat,
    RecallBatchEntry,
    Role,
    SlotEnded,
    Unknown,
    WorkerDraining,
    WorkerHello,
    WorkerRefused,
    WorkerWelcome,
)

from shapestream.errors import ProtocolError
from shapestream.serving.slot_threads import (
    BatchWithdrawn,
    News,
    SessionBroken,
    SlotIdle,
    SlotSession,
    ThreadEnded,
)
from shapestream.transport.interface import PeerSocket
from shapestream.wire.codec import decode, encode
from shapestream.wire.limits import WORKER_LIMITS
from shapestream_engine.batch import ErrorCode
from shapestream_engine.cost_table import CostPoint, CostTable
from shapestream_engine.output_rules import Rows
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_workers.worker_session import WorkerSession, with_costs_that_fit

ROWS = NamedShape.parse("batch:1..8, 2")
SIGNATURE = ModelSignature("m", (InputPort("x", "f32", ROWS),), (OutputPort("y", "f32", ROWS, Rows()),))
COSTS = CostTable(key="k", dimensions=("batch",), points=(CostPoint(sizes=(4,), seconds=0.25),))


class RecordingSlots:
    """Two slots that do nothing, but remember what they were told."""

    slots = 2
    digests: Mapping[str, str] = {}
    tolerances: Mapping[str, Mapping[str, Any]] = {}
    engines: Mapping[str, str] = {"m": "openvino openvino==2026.4.1"}
    models: Mapping[str, ModelSignature] = {"m": SIGNATURE}
    costs: Mapping[str, CostTable] = {"m": COSTS}
    wide_costs: Mapping[str, CostTable] = {}

    def __init__(self) -> None:
        self.occupied = False
        self.session: SlotSession | None = None
        self.withdrawn: list[tuple[int, int, str]] = []
        self.difference_s: float | None = None

    def start(self, tell: Callable[[News], None]) -> None:
        """Not the session's to ask."""

    def listen(self) -> PeerSocket:
        """Not asked of a worker's slots."""
        raise AssertionError

    def begin(self, session: SlotSession) -> None:
        """Remembers."""
        self.session = session

    def end(self) -> None:
        """Remembers."""
        self.session = None

    def withdraw(self, slot: int, batch: int, code: ErrorCode) -> None:
        """Remembers."""
        self.withdrawn.append((slot, batch, code))

    def set_clock(self, difference_s: float) -> None:
        """Remembers."""
        self.difference_s = difference_s

    async def aclose(self) -> None:
        """Nothing to do."""


def welcome(session: int = 1, heartbeat_ms: int = 1000) -> WorkerWelcome:
    """The server's answer to a greeting."""
    return WorkerWelcome(epoch=b"e" * 16, token=b"t" * 16, session=session, heartbeat_ms=heartbeat_ms)


def greeted() -> tuple[WorkerSession, RecordingSlots]:
    """A session that the server has welcomed, with nothing left to say."""
    slots = RecordingSlots()
    session = WorkerSession("w-1", 42, slots)
    session.greet(0.0)
    session.handle_entry(welcome(), 0.0)
    session.outgoing.clear()
    return session, slots


def test_the_greeting_tells_what_the_worker_can_do() -> None:
    """Slots, models and the process; the signature survives the way."""
    session = WorkerSession("w-1", 42, RecordingSlots(), ("m",))
    session.greet(0.0)
    (hello,) = session.outgoing
    assert isinstance(hello, WorkerHello)
    assert {"m": "openvino openvino==2026.4.1"} == hello.engines
    assert ("m",) == hello.once
    assert ("w-1", 42, 2) == (hello.worker, hello.pid, hello.slots)
    assert SIGNATURE == ModelSignature.from_dict(hello.models["m"])
    assert COSTS == CostTable.from_dict(hello.costs["m"])


def test_a_refused_model_ends_the_session_unless_the_others_are_welcome() -> None:
    """The server refuses each model by itself; then it welcomes the worker with the others, or says goodbye."""
    session, slots = greeted()
    session.handle_entry(Unknown(), 1.0)
    session.handle_entry(WorkerRefused(model="m", message="other files"), 1.0)
    session.handle_entry(welcome(session=2), 1.0)
    assert (None, None) == (session.refused, session.ended)
    assert slots.session is not None
    assert 2 == slots.session.number
    session.handle_entry(Unknown(), 2.0)
    session.handle_entry(WorkerRefused(model="m", message="other files"), 2.0)
    session.handle_entry(Goodbye(), 2.0)
    assert session.refused is not None
    assert session.ended is not None


def test_the_welcome_tells_the_slots_whom_to_serve() -> None:
    """By what token they greet, and how long a silence is one."""
    _, slots = greeted()
    assert SlotSession(number=1, token=b"t" * 16, silence_s=3.0) == slots.session


def test_deadlines_count_by_the_servers_clock_and_half_the_round_trip() -> None:
    """The greeting took 20 ms, so 10 of what the fastest message took had passed on the way here."""
    slots = RecordingSlots()
    session = WorkerSession("w-1", 42, slots)
    session.greet(5.0)
    session.handle_entry(welcome(), 5.02)
    session.handle_entry(Clock(sent_us=1_000_000), 5.02)
    assert pytest.approx(4.01) == slots.difference_s
    session.handle_entry(Clock(sent_us=2_000_000), 6.5)  # it lay unread for a while
    assert pytest.approx(4.01, abs=1e-3) == slots.difference_s


def test_cancels_and_recalls_go_to_the_slot_that_they_name() -> None:
    """Only it can tell whether the batch has begun."""
    session, slots = greeted()
    session.handle_entry(CancelBatchEntry(batch=71, slot=1), 1.1)
    session.handle_entry(RecallBatchEntry(batch=72, slot=0), 1.1)
    assert [(1, 71, "cancelled"), (0, 72, "recalled")] == slots.withdrawn
    assert [] == session.outgoing


def test_the_control_answers_for_what_was_withdrawn_in_this_session() -> None:
    """A new server's batch 1 must not be answered by the old one's."""
    session, _ = greeted()
    for number in (9, 1):
        session.handle_news(BatchWithdrawn(session=number, slot=0, batch=5), 1.0)
    (failed,) = session.outgoing
    assert isinstance(failed, BatchFailedEntry)
    assert (5, 1, "recalled") == (failed.batch, failed.session, failed.code)


def test_a_thread_that_ended_is_told_in_its_session() -> None:
    """With the batch that it had begun."""
    session, _ = greeted()
    for number in (None, 9, 1):
        session.handle_news(ThreadEnded(session=number, slot=1, batch=5), 1.0)
    assert [SlotEnded(slot=1, session=1, batch=5)] == session.outgoing


def test_a_slot_that_lost_the_server_ends_this_session_and_no_later_one() -> None:
    """The shell then connects anew."""
    session, _ = greeted()
    session.handle_news(SessionBroken(session=9, why="it is silent"), 1.0)
    assert session.ended is None
    session.handle_news(SessionBroken(session=1, why="it is silent"), 1.0)
    assert "a slot has lost the server: it is silent" == session.ended


def test_a_goodbye_ends_what_runs_for_that_server() -> None:
    """At once, and not with the next greeting: its results are of no use to any server."""
    session, slots = greeted()
    assert slots.session is not None
    session.handle_entry(Goodbye(), 1.0)
    assert slots.session is None
    assert "the server said goodbye" == session.ended


def test_a_new_server_ends_what_runs_for_an_old_one() -> None:
    """Its numbers start again: the slots serve another session."""
    session, slots = greeted()
    session.handle_entry(Unknown(), 2.0)
    assert (None, None) == (session.welcome, slots.session)
    assert [WorkerHello] == [type(entry) for entry in session.outgoing]
    session.handle_entry(welcome(2), 3.0)
    assert slots.session is not None
    assert 2 == slots.session.number


def test_a_greeting_waits_for_slots_that_an_ended_session_holds() -> None:
    """What the new server sent would be queued behind them, and its requests be blamed if they hang."""
    session, slots = greeted()
    slots.occupied = True
    session.greet(2.0)
    session.handle_news(SlotIdle(slot=0), 3.0)
    assert ([], True, 2.0) == (session.outgoing, session.greeting_waits, session.occupied_since)
    session.greet(2.5)
    assert 2.0 == session.occupied_since
    slots.occupied = False
    session.handle_news(SlotIdle(slot=1), 4.0)
    assert ([WorkerHello], False) == ([type(entry) for entry in session.outgoing], session.greeting_waits)
    assert session.occupied_since is None


def test_several_unknowns_cause_one_greeting() -> None:
    """Each heartbeat that a new server found waiting is answered so; a second greeting would drop what runs."""
    session, _ = greeted()
    session.handle_entry(Unknown(), 2.0)
    session.handle_entry(Unknown(), 2.0)
    assert [WorkerHello] == [type(entry) for entry in session.outgoing]


def test_an_idle_worker_announces_that_it_leaves() -> None:
    """Only the server knows whether a batch is on its way."""
    session, _ = greeted()
    session.drain()
    assert ([WorkerDraining()], None) == (session.outgoing, session.ended)


def test_a_greeting_that_waited_for_the_server_tells_nothing_of_the_way() -> None:
    """The worker was started first: the way counts from when its greeting left."""
    slots = RecordingSlots()
    session = WorkerSession("w-1", 42, slots)
    session.greet(0.0)
    session.sent(60.0)
    session.handle_entry(welcome(), 60.002)
    session.sent(70.0)
    session.handle_entry(Clock(sent_us=0), 80.0)
    assert pytest.approx(79.999) == slots.difference_s


def test_a_worker_whose_welcome_is_on_its_way_drains_as_any_other() -> None:
    """The server knows it already, and may have sent it a batch: its slots serve, until the server's goodbye."""
    slots = RecordingSlots()
    session = WorkerSession("w-1", 42, slots)
    session.greet(0.0)
    session.drain()
    session.drain()
    assert ([WorkerHello, WorkerDraining], None) == (
        [type(entry) for entry in session.outgoing],
        session.ended,
    )
    session.handle_entry(welcome(), 0.1)
    assert slots.session is not None
    assert session.ended is None
    session.handle_entry(Goodbye(), 0.3)
    assert "drained" == session.ended


def test_a_draining_worker_that_the_server_does_not_know_leaves_at_once() -> None:
    """Nothing is owed to a server that waits for nothing."""
    session, _ = greeted()
    session.drain()
    session.handle_entry(Unknown(), 1.0)
    assert (Goodbye(), "drained") == (session.outgoing[-1], session.ended)


def test_the_servers_goodbye_ends_the_session_and_its_heartbeat_does_not() -> None:
    """The shell then connects anew."""
    session, _ = greeted()
    session.handle_entry(Heartbeat(), 1.0)
    assert session.ended is None
    session.handle_entry(Goodbye(), 2.0)
    assert "the server said goodbye" == session.ended


def test_the_greeting_leaves_out_the_costs_that_have_no_room() -> None:
    """The largest tables first; what is sent, the server can read."""
    large = [[[rows], 0.25, 0.25] for rows in range(1024)]
    tables = {f"m{n}": {"key": "k", "dimensions": ["batch"], "points": large[: 50 * n]} for n in range(1, 21)}
    bare = hello_with({})
    hello = with_costs_that_fit(bare, tables)
    assert [f"m{n}" for n in range(1, len(hello.costs) + 1)] == list(hello.costs)
    assert 5 < len(hello.costs) < 20
    assert [[*hello.costs]] == [[*seen.costs] for seen in read(hello) if isinstance(seen, WorkerHello)]
    assert [] == read(hello_with(tables))


def test_a_wide_slot_whose_costs_have_no_room_is_not_told() -> None:
    """It would be known without prices, and get nothing. Where there is room, it goes before the other costs."""
    many = {f"m{n}": table_of(200) for n in range(60)}
    bare = hello_with({})
    told = with_costs_that_fit(replace(bare, wide={"m": table_of(3)}), many)
    assert {"m"} == set(told.wide)
    assert [] != read(told)
    none = with_costs_that_fit(replace(bare, wide=many), {"m": table_of(3)})
    assert ({}, {"m"}) == (none.wide, set(none.costs))
    assert [] != read(none)


def table_of(points: int) -> dict[str, Any]:
    """A table with so many points, as plain data."""
    return {"key": "k", "dimensions": ["batch"], "points": [[[n], 0.1, None] for n in range(points)]}


def hello_with(costs: dict[str, Any]) -> WorkerHello:
    """The greeting of a worker of one model, with these costs."""
    return WorkerHello(worker="w", pid=1, slots=1, models={"m": SIGNATURE.to_dict()}, costs=costs)


def read(hello: WorkerHello) -> list[Entry]:
    """What the server reads of it; nothing where it cannot."""
    frames = encode([hello], limits=WORKER_LIMITS)
    try:
        return decode(frames, role=Role.SERVER_OF_WORKERS, limits=WORKER_LIMITS).entries
    except ProtocolError:
        return []
