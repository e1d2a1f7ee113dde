"""Stories of requests: what the recorder keeps and forgets, and what a server tells of them to whom."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.entries import Explain, Explanation, Failure, ResultEntry, Role
from tests.pipeline.serving.batches import record_of
from tests.pipeline.serving.clocks import real_time, virtual_time
from tests.pipeline.serving.echo_model import SIGNATURE, echo_tensors, model_settings, request
from tests.pipeline.serving.harness import memory_serving, scripted_client
from tests.pipeline.serving.protected_server import ADMIN, ALICE, BOB, serving
from tests.pipeline.serving.raw_peer import RawPeer, ending
from tests.pipeline.serving.scripted_slots import ScriptedSlots

from shapestream.scheduling.actions import FailRequest
from shapestream.scheduling.batches import Batch, BatchState, CutFacts
from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import CutReason
from shapestream.scheduling.fairness import QueueRoom
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.queueing import Request
from shapestream.scheduling.slots import Slot
from shapestream.serving import stories
from shapestream.serving.ends import BatchEnded, End, Ends, RequestEnded, RequestRefused, run_of
from shapestream.serving.kept_replies import ClientReplies
from shapestream.serving.port_traffic import Outgoing
from shapestream.serving.served_models import ServedModel
from shapestream.serving.sessions import ClientSession, RequestRecord
from shapestream.serving.stories import (
    COMPANY,
    MINUTES,
    MOST_FAILED_RUNS,
    MOST_STORIES,
    SLOWEST,
    Stories,
    may_see,
)
from shapestream.serving.story_words import cut_reason, story_of
from shapestream.serving.workers import ConnectedWorker, Offer
from shapestream.slices import at_once
from shapestream.telemetry.counters import ServerStatistics
from shapestream.telemetry.runs import ClientId
from shapestream.transport.memory import memory_server
from shapestream.wire.codec import codec_of
from shapestream_engine.batch import BatchReport

CLIENT, OTHER = (b"c" * 16, None), (b"d" * 16, None)


def id_of(sequence: int, client: bytes = CLIENT[0]) -> str:
    """A request's id, as its user knows it."""
    return f"{client.hex()}-{sequence}"


class Played(Batch):
    """A batch, and what a test remembers of it."""

    began_ms: int | None = None
    answered: Any = None
    late: int | None = None
    """The member that it left out."""


def queue_of(number: int, name: str) -> tuple[ServedModel, ModelQueue]:
    """A served model, and the scheduler's queue for it."""
    model = ServedModel(number, name, SIGNATURE, model_settings())
    costs = CostModel().add_model(model.profile)
    return model, ModelQueue(model.profile, costs, QueueRoom(1000, 10**9))


MODELS = {name: queue_of(number, name) for number, name in enumerate("mn")}
TENSORS = echo_tensors()
SHAPE = SIGNATURE.resolve(TENSORS.layout)


class Bench:
    """A recorder of the ends of batches and requests on the two slots of a worker."""

    def __init__(self, slots_of: Sequence[str] = ("w/0",)) -> None:
        self.troubles: dict[int, list[tuple[float, str]]] = {}
        self.running: dict[int, Batch] = {}
        self.stories = Stories(
            lambda number: self.troubles.get(number, []),
            lambda: self.running,
            lambda model: slots_of,
            {},
        )
        self._ends = Ends(self.stories)
        self._batches = 0
        offer = Offer(name="w", pid=1, slots=2, models={})
        port = Outgoing(memory_server(), "workers", ServerStatistics(), codec_of(Role.SERVER_OF_WORKERS))
        worker = ConnectedWorker(None, offer, {}, port, 0.0, session=1, dialled_in=False)
        self._slots = {slot.label: Slot(slot.slot, frozenset(MODELS), peer=slot) for slot in worker.slots}

    def session(self, client: ClientId = CLIENT) -> ClientSession:
        """A session of a client."""
        return ClientSession(0, ClientReplies(client), b"peer", 0.0)

    def record(
        self, number: int, arrived: float, client: ClientId = CLIENT, model: str = "m", tags: Any = None
    ) -> RequestRecord:
        """A request."""
        record = record_of(self.session(client), number, MODELS[model][0], SHAPE, TENSORS)
        return dataclasses.replace(record, id=number, arrived=arrived, tags=tags)

    def run(
        self, *records: RequestRecord, at: float, began: float | None = None, slot: str = "w/0", **facts: Any
    ) -> Played:
        """A batch of these requests that began then."""
        self._batches += 1
        queue = MODELS[records[0].model][1]
        members = [
            Request(record, queue.flow_of(0), 0.0, record.id, record.arrived, has_batch=queue.has_batch)
            for record in records
        ]
        batch = Played(self._batches, self._slots[slot], queue, members, (len(records), 4))
        batch.facts = CutFacts(ahead=(0,) * len(records), max_batch=8, **facts)
        batch.begin()
        batch.sent_at = batch.began = batch.started = at if began is None else began
        return batch

    def queued(self, batch: Played, behind: int) -> None:
        """Queue this batch behind another."""
        batch.state = BatchState.BEHIND
        batch.behind = behind

    def ended(self, end: End) -> None:
        """Tell the recorder of an end."""
        self._ends.add(end)
        self._ends.tell()

    def ran(self, batch: Played, *records: RequestRecord, at: float, **report: Any) -> None:
        """A batch ran, and these were answered."""
        outputs = (None,) * len(batch.arrivals)
        batch.report, batch.left_out = BatchReport(batch=batch.id, outputs=outputs, **report), frozenset()
        self.ended(
            BatchEnded(batch=batch, slot=batch.slot.peer, at=at, report=batch.report, answered=records)
        )

    def answer(self, *records: RequestRecord, at: float, **facts: Any) -> None:
        """A batch of these requests ran, and all were answered."""
        self.ran(self.run(*records, at=at, **facts), *records, at=at)

    def lose(self, batch: Played, code: str, why: str, at: float) -> None:
        """A batch failed, or was lost."""
        self.ended(BatchEnded(batch=batch, slot=batch.slot.peer, at=at, report=None, code=code, why=why))

    def fail(self, record: RequestRecord, code: str, at: float, batch: Batch | None = None) -> None:
        """A request ended without a result."""
        action = FailRequest(request=record, code=code, message="why", batch=batch)
        run = None if batch is None else run_of(batch)
        self.ended(RequestEnded(record=record, at=at, code=code, message="why", run=run, action=action))

    def of(self, sequence: int, now: float = 0.0) -> list[dict[str, Any]]:
        """The stories of a request."""
        return [story_of(past, now, None) for past in at_once(self.stories.of(id_of(sequence), (), now))]


ENDS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 3), st.integers(0, 90), st.booleans()), max_size=120
)


@given(ENDS)
def test_the_slowest_are_those_of_the_last_minutes_and_one_of_a_batch(ends: list[Any]) -> None:
    """Against all ends, sorted: of each batch its slowest member, as long as fewer ended in a minute than are kept."""
    bench, now, number = Bench(), 0.0, 0
    told: list[tuple[float, float]] = []
    for later_s, members, waited_s, failed in ends:
        now += later_s
        records = []
        for member in range(members):
            number += 1
            records.append(bench.record(number, now - waited_s - member))
        if failed:
            bench.fail(records[0], "overloaded", now)
            told.append((now, float(waited_s)))
        else:
            bench.answer(*records, at=now)
            told.append((now, float(waited_s + members - 1)))
    kept = [past.ended - past.member.arrived for past in bench.stories.slowest(now)]
    recent = sorted([waited for at, waited in told if at > now - 60 * MINUTES], reverse=True)
    assert recent[:SLOWEST] == kept[:SLOWEST]
    assert len(kept) <= SLOWEST * (MINUTES + 1)


def test_a_flood_of_one_error_hides_no_other() -> None:
    """Some of each code are kept for the page; the newest come first, whatever their code."""
    bench = Bench()
    session = bench.session()
    bench.fail(bench.record(1, 0.0), "model_error", 0.0)
    for number in range(1000):
        message = "why" * stories.MOST_MESSAGE
        bench.ended(
            RequestRefused(session=session, sequence=7, at=1.0 + number, code="overloaded", message=message)
        )
    bench.fail(bench.record(2, 0.0), "invalid", 5.0)
    told = bench.stories.errors
    codes = ["overloaded"] * stories.ERRORS_PER_CODE + ["invalid", "model_error"]
    assert codes == [code for _, _, code, _, _ in told]
    _, model, _, message, request = told[0]
    assert (id_of(7), None, stories.MOST_MESSAGE) == (request, model, len(message))
    _, model, _, _, request = told[-1]
    assert (id_of(1), "m") == (request, model)


def test_the_page_is_told_each_batch_that_ran_once() -> None:
    """From any number on, up to a number; also one that answered nobody."""
    bench = Bench()
    for number in range(1, 11):
        bench.answer(bench.record(number, 0.0), at=float(number), began=number - 0.5)
    unwanted = bench.run(bench.record(11, 0.0), at=10.5)
    unwanted.cancelled = True
    bench.ran(unwanted, at=11.0)
    assert 11 == bench.stories.ran
    assert [10.0, 11.0] == [ended for _, ended, *_ in bench.stories.since(9, 512)]
    assert [9.0, 10.0, 11.0] == [ended for _, ended, *_ in bench.stories.since(0, 3)]
    assert [] == bench.stories.since(11, 512)
    began, ended, slot, model, requests, rows, useful, computed, new_shapes, sizes = bench.stories.since(
        0, 11
    )[0]
    assert (0.5, 1.0, "w/0", "m", 1, 1, 4, 4, 0, (1, 4)) == (
        began, ended, slot, model, requests, rows, useful, computed, new_shapes, sizes
    )  # fmt: skip


def test_batches_of_a_slot_are_not_counted_twice_where_their_times_overlap() -> None:
    """A batch that was queued at the slot has begun a little before the end of the one before it is heard of."""
    bench = Bench()
    bench.answer(bench.record(1, 0.0), at=2.0, began=0.0)
    bench.answer(bench.record(2, 0.0), at=4.0, began=1.5)
    bench.answer(bench.record(3, 0.0), at=4.0)
    assert [4000.0] == [told["waited_behind"]["own_ms"] for told in bench.of(3)]


def test_a_story_says_where_it_does_not_know_all_that_its_request_waited_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches that are forgotten, or more than are looked at; the last ones are told."""
    monkeypatch.setattr(stories, "MOST_ANSWERED", 8)
    monkeypatch.setattr(stories, "MOST_BEHIND", 4)
    bench = Bench()
    for number in range(1, 21):
        bench.answer(bench.record(number, 0.0), at=float(number), began=number - 1.0)
    told = []
    for number, arrived in ((21, 1.0), (22, 14.0), (23, 16.0)):
        bench.fail(bench.record(number, arrived), "overloaded", 20.0)
        told += [story["waited_behind"] for story in bench.of(number)]
    assert [(4, False), (4, False), (4, True)] == [(one["batches"], one["complete"]) for one in told]


def test_what_the_slowest_waited_behind_is_kept_once_it_was_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look at a time, the slowest first; then the batches may be forgotten."""
    monkeypatch.setattr(stories, "MOST_ANSWERED", 4)
    bench = Bench()
    bench.answer(bench.record(1, 0.0), at=2.0, began=0.0)
    for number, arrived in ((2, 1.0), (3, -1.0)):
        bench.answer(bench.record(number, arrived), at=2.0)
    bench.stories.look(2.0)
    for number in range(4, 9):
        bench.answer(bench.record(number, 3.0), at=3.0)
    told = [story_of(past, 3.0, None)["waited_behind"] for past in bench.stories.slowest(3.0)]
    assert [(2000.0, True), (0.0, False)] == [
        (one["own_ms"], one["complete"])
        for one, past in zip(told, bench.stories.slowest(3.0), strict=True)
        if past.member.number in (2, 3)
    ]


def test_another_key_cannot_hide_a_story_behind_newer_ones_of_the_same_id() -> None:
    """Of those that the asker may see the newest are told."""
    bench = Bench()
    keyed, other, same = (b"c" * 16, "key"), (b"d" * 16, "other"), {"request_id": "same"}
    for number in range(1, 101):
        client = keyed if number == 1 else other
        bench.answer(bench.record(number, float(number), client, tags=same), at=number + 0.5)
    assert [1] == [past.member.number for past in at_once(bench.stories.of("same", (), 101.0, keyed))]


def test_attempts_and_troubles_are_told_in_their_order() -> None:
    """A run that failed, the scheduler's words, and the run that answered."""
    bench = Bench()
    record = bench.record(1, 1.0)
    bench.troubles[1] = [(3.0, "batch 1 died: its worker w died")]
    bench.lose(bench.run(record, at=3.0, began=2.0), "worker_lost", "its worker died", 3.0)
    bench.answer(record, at=5.0, reason=CutReason.SUSPECT)
    (told,) = bench.of(1)
    assert [0.0, 1000.0, 2000.0, 2000.0, 4000.0, 4000.0] == [time for time, _ in told["events"]]
    assert (2, 4000.0, None) == (told["attempts"], told["total_ms"], told["code"])
    assert "it spent 1000 ms in a failed attempt (batch 1 on w/0: worker_lost)" in told["why"]
    assert "it waited 2000 ms to run again" in told["why"]


def test_a_wait_at_the_slot_is_told_apart_from_that_in_the_queue() -> None:
    """It is queued for a second, then at its slot behind batch 7 for two, and fails after four more."""
    bench = Bench()
    record = bench.record(1, 0.0)
    running = bench.run(record, at=1.0)
    bench.queued(running, behind=7)
    bench.running[1] = running
    story = story_of(at_once(bench.stories.of(id_of(1), [record], 2.0))[0], 2.0, None)
    assert ("queued", 0) == (story["state"], story["attempts"])
    running.begin()
    running.started = 3.0
    bench.lose(running, "model_error", "no", 7.0)
    bench.fail(record, "model_error", 7.0, running)
    (told,) = bench.of(1)
    assert [("queued", 1000.0, None), ("behind", 2000.0, "w/0"), ("failed", 4000.0, "w/0")] == [
        (phase["phase"], phase["ms"], phase["slot"]) for phase in told["phases"]
    ]
    assert "it waited 3000 ms for a slot, 2000 ms of it at the slot behind batch 7" in told["why"]
    assert [3000.0, "batch 1 began"] in told["events"]


def test_a_wait_for_company_is_told() -> None:
    """One request waited for a second, the last half of it beside a free slot; another one came only then."""
    bench = Bench()
    bench.answer(bench.record(1, 0.0), bench.record(2, 0.9), at=1.0, company_s=0.5)
    told = [bench.of(number)[0]["why"] for number in (1, 2)]
    assert "waited 1000 ms for a slot, 500 ms of it while the slot was free and waited for company" in told[0]
    assert "waited 100 ms for a slot, 100 ms of it while the slot was free and waited for company" in told[1]


def test_a_batch_that_never_began_is_no_attempt() -> None:
    """It was queued behind another one when its slot left."""
    bench = Bench()
    running = bench.run(bench.record(1, 0.0), at=0.0)
    bench.queued(running, behind=7)
    bench.lose(running, "worker_lost", "its slot ended", 1.0)
    bench.answer(bench.record(1, 0.0), at=2.0, reason=CutReason.RERUN)
    assert 1 == bench.of(1)[0]["attempts"]


class World:
    """Requests of two clients for two models on two slots, as the dispatcher tells of them; times are whole milliseconds."""

    def __init__(self) -> None:
        self.bench, self.now = Bench(("w/0", "w/1")), 0
        self.slots: list[list[Any]] = [[], []]
        """Of each, the batch that runs and the one behind it."""
        self.queue: list[Any] = []
        self.known: dict[int, Any] = {}
        """Every request that ever arrived."""
        self.ended: dict[int, int] = {}
        self.begun: set[tuple[int, int]] = set()
        """Each batch that began, and a request in it that had not ended: both may be in the same millisecond."""
        self.ran: list[tuple[int, int, int, Any]] = []
        """The slot of each run, its begin and its end, and the batch."""

    def arrive(self, first: int, second: int) -> None:
        """A request arrives."""
        client, model = (CLIENT, OTHER)[first % 2], "mn"[second % 2]
        record = self.bench.record(len(self.known) + 1, self.now / 1000, client, model)
        self.known[record.id] = record
        self.queue.append(record)

    def start(self, first: int, second: int) -> None:
        """A batch of up to three goes to a slot that is free, or runs one."""
        slot = self.slots[second % 2]
        if len(slot) == 2 or not self.queue:
            return
        like = [record for record in self.queue if record.model == self.queue[0].model]
        records = like[: 1 + first % 3]
        self.queue = [record for record in self.queue if record not in records]
        label = f"w/{second % 2}"
        running = self.bench.run(*records, at=self.now / 1000, slot=label, reason=CutReason.RERUN)
        if slot:
            self.bench.queued(running, behind=slot[0].id)
        running.began_ms = None
        if not slot:
            self._begin(running)
        self.bench.running[running.id] = running
        slot.append(running)

    def _over(self, at: int, began: int) -> Any:
        """The batch that runs on this slot is over, and the next one begins."""
        running = self.slots[at].pop(0)
        self.ran.append((at, began, self.now, running))
        if self.slots[at]:
            self.slots[at][0].begin()
            self.slots[at][0].started = self.now / 1000
            self._begin(self.slots[at][0])
        return running

    def _begin(self, running: Any) -> None:
        running.began_ms = self.now
        self.begun |= {(running.id, record.id) for record in self._living(running)}

    def _living(self, running: Any) -> list[Any]:
        return [record for record in running.arrivals if record.id not in self.ended]

    def finish(self, first: int, second: int) -> None:
        """A batch ran; one of several members may have been too late for it."""
        at = first % 2
        if not self.slots[at]:
            return
        running = self.slots[at][0]
        # The slot's own clock: it has begun a little before the end of the batch before was heard of.
        busy = (self.now - running.began_ms) * (second % 5) // 4 + second % 3
        busy = min(busy, self.now - round(running.sent_at * 1000))
        if running.behind is not None:  # as `Batch.ran` has it
            free = round(running.started * 1000)
            running.began_ms = max(round(running.sent_at * 1000), min(free, self.now - busy))
            running.began = running.began_ms / 1000
        self._over(at, running.began_ms)
        running.run_us = busy * (second % 3) * 500
        living = self._living(running)
        running.cancelled = not living
        if second % 7 == 0 and len(living) > 1:
            running.late = living[0].id
        answered = [record for record in living if record.id != running.late]
        running.answered = answered or None
        self.bench.ran(running, *answered, at=self.now / 1000, busy_s=busy / 1000)
        if len(answered) < len(living):
            self._end(living[0], running)
        self.ended |= {record.id: self.now for record in answered}
        del self.bench.running[running.id]

    def fail(self, first: int, second: int) -> None:
        """A batch fails: of several members each runs again, a single one fails."""
        at = first % 2
        if not self.slots[at]:
            return
        running = self._over(at, self.slots[at][0].began_ms)
        self.bench.lose(running, "model_error", "no", self.now / 1000)
        living = self._living(running)
        if len(running.arrivals) == 1 and living:
            self._end(living[0], running)
        else:
            self.queue[:0] = living
        del self.bench.running[running.id]

    def lose(self, first: int, second: int) -> None:
        """A slot is lost with both its batches, and comes again."""
        at = first % 2
        lost, self.slots[at] = self.slots[at], []
        for running in lost:
            del self.bench.running[running.id]
        for running in lost:
            if running.began_ms is not None:
                self.ran.append((at, running.began_ms, self.now, running))
            self.bench.lose(running, "worker_lost", "gone", self.now / 1000)
            self.queue[:0] = self._living(running)

    def withdraw(self, first: int, second: int) -> None:
        """A request ends wherever it is."""
        living = [record for record in self.known.values() if record.id not in self.ended]
        if not living:
            return
        record = living[first % len(living)]
        batches = [running for running in self.bench.running.values() if record in running.arrivals]
        self._end(record, batches[0] if batches else None)
        self.queue = [other for other in self.queue if other is not record]

    def _end(self, record: Any, running: Any) -> None:
        self.bench.fail(record, "cancelled", self.now / 1000, running)
        self.ended[record.id] = self.now

    def check(self) -> None:
        """Every story adds up, and says of its attempts and of others what happened."""
        for record in self.known.values():
            if record.id in self.ended:
                (past,) = at_once(self.bench.stories.of(self.id_of(record), (), self.now / 1000))
            else:
                (past,) = at_once(self.bench.stories.of(self.id_of(record), [record], self.now / 1000))
            self._check_one(record, story_of(past, self.now / 1000, None))

    def id_of(self, record: Any) -> str:
        """As its user knows it."""
        return id_of(record.sequence, record.session.client[0])

    def _check_one(self, record: Any, story: dict[str, Any]) -> None:
        phases, until = story["phases"], self.ended.get(record.id, self.now)
        assert until - round(record.arrived * 1000) == story["total_ms"]
        assert story["total_ms"] == pytest.approx(sum(phase["ms"] for phase in phases), abs=1e-9)
        assert all(phase["ms"] >= 0 for phase in phases)
        everything = self.ran + [
            (at, slot[0].began_ms, self.now, slot[0]) for at, slot in enumerate(self.slots) if slot
        ]
        own = [run for run in everything if record in run[3].arrivals and record.id != run[3].late]
        own = [run for run in own if run[1] < until or (run[3].id, record.id) in self.begun]
        assert len(own) == story["attempts"]
        time, waits = round(record.arrived * 1000), []
        for phase in phases:
            if phase["phase"] in ("queued", "behind"):
                waits += range(time, time + round(phase["ms"]))
            time += round(phase["ms"])
        taken = Counter[str]()
        for tick, at in product(waits, range(2)):
            there = [run for run in everything if run[0] == at and run[1] <= tick < run[2]]
            for *_, running in there[
                :1
            ]:  # the next one may have begun a little before the end of this was heard of
                clients = [one.session.client for one in self._members(running)]
                taken["own_ms"] += clients.count(record.session.client) / len(clients)
                taken["others_ms"] += 1 - clients.count(record.session.client) / len(clients)
        told = story["waited_behind"]
        assert [told["own_ms"], told["others_ms"]] == pytest.approx(
            [taken["own_ms"], taken["others_ms"]], abs=0.01
        )
        assert all(math.isfinite(time) for time, _ in story["events"])

    def _members(self, running: Any) -> list[Any]:
        """Those that the batch answered, else all."""
        return running.answered or running.arrivals


Steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive", "arrive", "start", "start", "finish", "finish", "fail", "lose", "withdraw"]
        ),
        st.integers(0, 5),
        st.integers(0, 14),
        st.integers(0, 9),
    ),
    max_size=40,
)


@given(Steps)
def test_whatever_happens_a_story_adds_up(steps: list[tuple[str, int, int, int]]) -> None:
    """Against every millisecond of two slots, counted one by one."""
    world = World()
    for step, first, second, later_ms in steps:
        getattr(world, step)(first, second)
        world.now += later_ms
    world.check()


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "nothing else was queued"),
        ({"left": 3, "max_batch": 2}, "the batch is full"),
        ({"left": 3}, CutReason.COST.value),
        ({"left": 3, "reason": CutReason.DIVIDED}, CutReason.DIVIDED.value),
        ({"reason": CutReason.RERUN}, CutReason.RERUN.value),
    ],
)
def test_why_a_batch_has_no_more_requests(facts: dict[str, Any], said: str) -> None:
    """The queue's end and the batch's come before what the planner weighed."""
    bench = Bench()
    batch = bench.run(bench.record(1, 0.0), bench.record(2, 0.0), at=0.0)
    batch.facts = CutFacts(**{"max_batch": 8, **facts})
    assert said == cut_reason(run_of(batch))


def test_a_story_is_for_the_key_that_sent_the_request_and_for_admins() -> None:
    """Without keys all are the same."""
    keyed = (b"c" * 16, "key")
    assert [True, True, False, False, True] == [
        may_see(None, keyed),
        may_see((b"x" * 16, "key"), keyed),
        may_see((b"c" * 16, "other"), keyed),
        may_see((b"c" * 16, None), keyed),
        may_see(OTHER, CLIENT),
    ]


# ---------------------------------------------------------------- of a server


async def told(peer: RawPeer, request_id: str = "", slowest: int = 10) -> dict[str, Any]:
    """What a server answers to this peer."""
    peer.say(Explain(question=7, request=request_id, slowest=slowest))
    answer = await peer.hear(Explanation)
    assert 7 == answer.question
    values: dict[str, Any] = json.loads(json.dumps(answer.values))  # lists again
    return values


@virtual_time
async def test_a_server_tells_of_queued_running_answered_and_failed_requests() -> None:
    """Two that share a batch behind one that runs, and one that is too late."""
    async with scripted_client(prefetch=False) as (client, slots):
        client.say(request(1))
        first = await slots.next_batch()
        client.say(request(2), request(3), request(4, remaining_ms=0))
        assert (4, "deadline_exceeded") == ending(await client.hear(Failure))
        (running,), (queued,) = [(await told(client, id_of(n)))["stories"] for n in (1, 2)]
        assert [("running", "local/0"), ("queued", None)] == [
            (story["state"], story["slot"]) for story in (running, queued)
        ]
        await trio.sleep(0.25)
        slots.finish(first)
        batch = await slots.next_batch()
        await trio.sleep(0.004)
        slots.finish(batch)
        results = await client.hear_each(ResultEntry, 3)
        stories_of = [(await told(client, id_of(n)))["stories"] for n in (1, 2, 3, 4)]
        assert [1, 1, 1, 1] == list(map(len, stories_of))
        (_, second, third, late) = [story for (story,) in stories_of]
        assert (2, [id_of(3)], 1) == (second["batch_requests"], second["with"], second["attempts"])
        assert (0, 1) == (second["queued_before"], third["queued_before"])
        timings = results[1].timings
        assert ["queued", "calls", "copies", "way"] == [phase["phase"] for phase in second["phases"]]
        assert [timings.queue_us / 1000, timings.run_us / 1000, timings.total_us / 1000] == [
            second["phases"][0]["ms"],
            second["phases"][1]["ms"],
            second["total_ms"],
        ]
        assert ("deadline_exceeded", "deadline_exceeded", 0) == (
            late["state"],
            late["code"],
            late["attempts"],
        )
        slowest = (await told(client))["stories"]
        assert {id_of(1), id_of(2), id_of(4)} == {story["request_id"] for story in slowest}
        assert 1 == len((await told(client, slowest=1))["stories"])


ONE_BY_ONE = {"echo": model_settings(max_batch=1)}


async def play(slots: ScriptedSlots, times: int, end: Callable[[Any], None], took_s: float = 1.0) -> None:
    """So many batches, one after the other, each of which takes so long and ends so."""
    for _ in range(times):
        batch = await slots.next_batch()
        await trio.sleep(took_s)
        end(batch)


@virtual_time
async def test_what_is_remembered_is_bounded_by_requests_not_by_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest batches go; a failed request is remembered beside them."""
    monkeypatch.setattr(stories, "MOST_ANSWERED", 8)
    monkeypatch.setattr(stories, "SLOWEST", 2)  # they are among the last ones, as each takes longer
    async with scripted_client() as (client, slots):
        client.say(request(1, remaining_ms=0))
        await client.hear(Failure)
        for number in range(2, 200, 2):
            client.say(request(number), request(number + 1))
            await play(slots, 1, slots.finish, took_s=number / 100)
            await client.hear_each(ResultEntry, 2)
        kept = {number: await told(client, id_of(number)) for number in (1, 2, 191, 192, 199)}
        (failed,) = kept[1]["stories"]
        assert "deadline_exceeded" == failed["code"]
        assert [0, 0, 1, 1] == [len(kept[number]["stories"]) for number in (2, 191, 192, 199)]
        # The first of the four that are remembered ended before the last three, of 1.94, 1.96 and 1.98 s.
        assert "at present 6 s" in kept[2]["unknown"]


@virtual_time
async def test_a_story_counts_the_batches_that_ran_while_its_request_was_queued() -> None:
    """Neither those before its arrival, nor itself; of the first one it counts what was left."""
    async with scripted_client(models=ONE_BY_ONE, prefetch=False) as (client, slots):
        client.say(*map(request, range(1, 6)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(play, slots, 5, partial(slots.finish, busy_s=1.0))
            await trio.sleep(2.5)
            client.say(request(6))
        await play(slots, 1, partial(slots.finish, busy_s=0.0, run_s=0.0), took_s=0.0)
        await client.hear_each(ResultEntry, 6)
        (story,) = (await told(client, id_of(6)))["stories"]
    assert 2500.0 == story["total_ms"]
    assert (3, 2500.0) == (story["waited_behind"]["batches"], story["waited_behind"]["own_ms"])
    assert story["waited_behind"]["complete"]


@virtual_time
async def test_failed_batches_that_are_forgotten_are_missed_too() -> None:
    """The ring of failed batches is full, and its oldest one ended during the wait."""
    async with scripted_client(models=ONE_BY_ONE, prefetch=False) as (client, slots):
        client.say(*map(request, range(1, MOST_FAILED_RUNS + 2)))
        behind = []
        for number, times in ((2, 2), (MOST_FAILED_RUNS + 1, MOST_FAILED_RUNS - 1)):
            await play(slots, times, slots.fail, took_s=0.01)
            await client.hear_each(Failure, times)
            (story,) = (await told(client, id_of(number)))["stories"]
            behind.append((story["waited_behind"]["batches"], story["waited_behind"]["complete"]))
    assert [(1, True), (MOST_FAILED_RUNS - 1, False)] == behind


@virtual_time
async def test_of_one_id_the_newest_stories_are_told() -> None:
    """Of hundreds of requests that were given the same one."""
    async with scripted_client(models=ONE_BY_ONE) as (client, slots):
        client.say(*[request(number, tags={"request_id": "same"}) for number in range(1, 201)])
        await play(slots, 200, slots.finish, took_s=0.01)
        await client.hear_each(ResultEntry, 200)
        answer = await told(client, "same")
    assert list(range(201 - MOST_STORIES, 201)) == [story["batch"] for story in answer["stories"]]


@virtual_time
async def test_a_story_of_the_slowest_outlives_the_rings_with_some_of_its_company(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large batch is cut down to the members that a story names."""
    monkeypatch.setattr(stories, "MOST_ANSWERED", 4)
    async with scripted_client() as (client, slots):
        client.say(*map(request, range(1, 65)))
        await play(slots, 1, slots.finish)
        client.say(request(65))
        await play(slots, 1, slots.finish, took_s=0.5)
        await client.hear_each(ResultEntry, 65)
        slowest, _ = (await told(client))["stories"]
        (story,) = (await told(client, id_of(1)))["stories"]
    assert story == slowest
    assert (64, COMPANY) == (story["batch_requests"], len(story["with"]))


@virtual_time
async def test_an_unknown_id_is_answered_with_how_long_stories_are_kept() -> None:
    """As is text that is no id at all."""
    async with memory_serving(ScriptedSlots()) as running:
        client = await running.greeted()
        for text in (id_of(5), "nonsense", "-", "é" * 500):
            answer = await told(client, text)
            assert [] == answer["stories"]
            assert "16,384 answered" in answer["unknown"]


@virtual_time
async def test_a_request_that_ran_again_tells_of_its_lost_worker() -> None:
    """The first worker leaves while it runs the request."""
    async with memory_serving() as running:
        client, worker, execute = await running.busy_worker()
        worker.close()
        await running.assert_redone(client)
        (story,) = (await told(client, id_of(1)))["stories"]
        assert (2, "other/0", "answered") == (story["attempts"], story["slot"], story["state"])
        assert any("lost" in text for _, text in story["events"])
        assert execute.batch < story["batch"]


@pytest.mark.parametrize("asker", [ALICE, BOB, ADMIN], ids=["own key", "another key", "admin"])
def test_who_is_told_a_story_where_keys_are_asked_for(asker: Any) -> None:
    """The key counts, not the client's id: the same id with another key is another client."""

    @real_time
    async def play() -> None:
        slots = ScriptedSlots()
        async with serving(slots) as place:
            alice = await place.client(ALICE, b"c" * 16)
            alice.say(request(1))
            slots.finish(await slots.next_batch())
            await alice.hear(ResultEntry)
            other = await place.client(asker, b"c" * 16 if asker is BOB else b"e" * 16)
            seen = [len((await told(other, text))["stories"]) for text in (id_of(1), "")]
            assert [0, 0] == seen if asker is BOB else [1, 1] == seen

    play()
