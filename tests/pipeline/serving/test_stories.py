"""Stories of requests: what the recorder keeps and forgets, and what a server tells of them to whom."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline.serving.clocks import real_time, virtual_time
from tests.pipeline.serving.echo_model import request
from tests.pipeline.serving.harness import memory_serving, scripted_client
from tests.pipeline.serving.protected_server import ADMIN, ALICE, BOB, serving
from tests.pipeline.serving.raw_peer import RawPeer, ending
from tests.pipeline.serving.scripted_slots import ScriptedSlots

from shapestream.scheduling.events import CutFacts, CutReason, FailRequest, StartBatch
from shapestream.serving import stories
from shapestream.serving.stories import (
    COMPANY,
    MINUTES,
    MOST_STORIES,
    SLOWEST,
    Stories,
    cut_reason,
    may_see,
    story_of,
)
from shapestream.wire.messages import Explain, Explanation, Failure, Result

CLIENT, OTHER = (b"c" * 16, None), (b"d" * 16, None)


def id_of(sequence: int, client: bytes = CLIENT[0]) -> str:
    """A request's id, as its user knows it."""
    return f"{client.hex()}-{sequence}"


class Bench:
    """A recorder, and batches and requests as far as it looks at them."""

    def __init__(self) -> None:
        self.troubles: dict[int, list[tuple[float, str]]] = {}
        self.running: dict[int, Any] = {}
        self.stories = Stories(
            lambda number: self.troubles.get(number, []), lambda: self.running, lambda model: ["w/0"]
        )
        self._batches = 0

    def record(self, number: int, arrived: float, client: Any = CLIENT) -> Any:
        """A request."""
        return SimpleNamespace(
            arrived=arrived,
            id=number,
            session=SimpleNamespace(client=client),
            sequence=number,
            model="m",
            shape=SimpleNamespace(sizes=(1, 4)),
            tags=None,
        )

    def run(self, *records: Any, at: float, began: float | None = None, **facts: Any) -> Any:
        """A batch of these requests that began then."""
        self._batches += 1
        began = at if began is None else began
        start = StartBatch(
            batch=self._batches,
            slot=0,
            model="m",
            requests=tuple(record.id for record in records),
            sizes=(len(records), 4),
            facts=CutFacts(ahead=(0,) * len(records), max_batch=8, **facts),
        )
        return SimpleNamespace(
            action=start,
            slot=SimpleNamespace(label="w/0"),
            sent_at=began,
            started=began,
            slot_free=None,
            run_us=0,
            report=None,
            records=records,
        )

    def answer(self, *records: Any, at: float, **facts: Any) -> None:
        """A batch of these requests ran, and all were answered."""
        running = self.run(*records, at=at, **facts)
        running.report = SimpleNamespace(busy_s=0.0, preparations=0, calls=())
        self.stories.delivered(running, records, at)

    def fail(self, record: Any, code: str, at: float) -> None:
        """A request ended without a result."""
        self.stories.failed(record, FailRequest(id=record.id, code=code, message="why"), code, at)

    def of(self, sequence: int, now: float = 0.0) -> list[dict[str, Any]]:
        """The stories of a request."""
        return [story_of(past, now, None) for past in self.stories.of(id_of(sequence), (), now)]


Ends = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 3), st.integers(0, 90), st.booleans()), max_size=120
)


@given(Ends)
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


def test_what_is_remembered_is_bounded_by_requests_not_by_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest batches go; a failed request is remembered beside them."""
    monkeypatch.setattr(stories, "MOST_ANSWERED", 8)
    bench = Bench()
    bench.fail(bench.record(1, 0.0), "cancelled", 0.5)
    for number in range(2, 200, 2):
        bench.answer(bench.record(number, 1.0), bench.record(number + 1, 1.0), at=2.0 + number)
    bench.stories._slow.clear()
    assert [[], []] == [bench.of(2), bench.of(191)]
    assert [1, 1] == [len(bench.of(number)) for number in (192, 199)]
    assert 6.0 == bench.stories.reach_s(198.0 + 2.0)
    (failed,) = bench.of(1)
    assert ("cancelled", 500.0) == (failed["code"], failed["total_ms"])


def test_a_story_counts_the_batches_that_ran_while_its_request_was_queued() -> None:
    """Neither those before its arrival, nor itself; of the first one it counts what was left."""
    bench = Bench()
    for number in range(1, 6):
        bench.answer(bench.record(number, 0.0), at=float(number), began=number - 1.0)
    bench.answer(bench.record(6, 2.5), at=5.0)
    (told,) = bench.of(6)
    assert (2500.0, 2500.0) == (told["queue_ms"], told["total_ms"])
    assert (3, 2500.0) == (told["waited_behind"]["batches"], told["waited_behind"]["own_ms"])
    assert told["waited_behind"]["complete"]


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


def test_of_one_id_the_newest_stories_are_told() -> None:
    """Of a thousand requests that were given the same one."""
    bench = Bench()
    for number in range(1, 1001):
        record = bench.record(number, float(number))
        record.tags = {"request_id": "same"}
        bench.answer(record, at=number + 0.5)
    told = bench.stories.of("same", (), 1001.0)
    assert list(range(1001 - MOST_STORIES, 1001)) == [past.member.number for past in told]


def test_a_story_of_the_slowest_outlives_the_rings_with_some_of_its_company(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large batch is cut down to the members that a story names."""
    monkeypatch.setattr(stories, "MOST_ANSWERED", 4)
    bench = Bench()
    bench.answer(*[bench.record(number, number / 100) for number in range(1, 101)], at=9.0)
    bench.answer(bench.record(101, 8.5), at=9.0)
    (slowest, _) = bench.stories.slowest(9.0)
    (told,) = bench.of(1)
    assert told == story_of(slowest, 0.0, None)
    assert (100, COMPANY) == (told["batch_requests"], len(told["with"]))


def test_attempts_and_troubles_are_told_in_their_order() -> None:
    """A run that failed, the scheduler's words, and the run that answered."""
    bench = Bench()
    record = bench.record(1, 1.0)
    bench.troubles[1] = [(3.0, "batch 1 died: its worker w died")]
    bench.stories.lost(bench.run(record, at=3.0, began=2.0), "worker_lost", "its worker died", 3.0)
    bench.answer(record, at=5.0, reason=CutReason.SUSPECT)
    (told,) = bench.of(1)
    assert [0.0, 1000.0, 2000.0, 2000.0, 4000.0, 4000.0] == [time for time, _ in told["events"]]
    assert (2, 4000.0, None) == (told["attempts"], told["total_ms"], told["code"])
    assert "it spent 1000 ms in a failed attempt (batch 1 on w/0: worker_lost)" in told["why"]
    assert "it waited 2000 ms to run again" in told["why"]


def test_a_batch_that_never_began_is_no_attempt() -> None:
    """It was queued behind another one when its slot left."""
    bench = Bench()
    running = bench.run(bench.record(1, 0.0), at=0.0)
    running.action = replace(running.action, behind=7)
    bench.stories.lost(running, "worker_lost", "its slot ended", 1.0)
    bench.answer(bench.record(1, 0.0), at=2.0, reason=CutReason.RERUN)
    assert 1 == bench.of(1)[0]["attempts"]


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
    start = StartBatch(
        batch=1, slot=0, model="m", requests=(1, 2), sizes=(2, 4), facts=CutFacts(**{"max_batch": 8, **facts})
    )
    assert said == cut_reason(start)


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
        assert [("running", "local/0", None), ("queued", None, None)] == [
            (story["state"], story["slot"], story["run_ms"]) for story in (running, queued)
        ]
        slots.finish(first)
        slots.finish(await slots.next_batch())
        results = await client.hear_each(Result, 3)
        stories_of = [(await told(client, id_of(n)))["stories"] for n in (1, 2, 3, 4)]
        assert [1, 1, 1, 1] == list(map(len, stories_of))
        (_, second, third, late) = [story for (story,) in stories_of]
        assert (2, [id_of(3)], 1) == (second["batch_requests"], second["with"], second["attempts"])
        assert (0, 1) == (second["queued_before"], third["queued_before"])
        timings = results[1].timings
        assert [timings.queue_us / 1000, timings.run_us / 1000, timings.total_us / 1000] == [
            pytest.approx(second[name]) for name in ("queue_ms", "run_ms", "total_ms")
        ]
        assert ("deadline_exceeded", "deadline_exceeded", 0) == (
            late["state"],
            late["code"],
            late["attempts"],
        )
        slowest = (await told(client))["stories"]
        assert {id_of(1), id_of(2), id_of(4)} == {story["request_id"] for story in slowest}
        assert 1 == len((await told(client, slowest=1))["stories"])


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
            await alice.hear(Result)
            other = await place.client(asker, b"c" * 16 if asker is BOB else b"e" * 16)
            seen = [len((await told(other, text))["stories"]) for text in (id_of(1), "")]
            assert [0, 0] == seen if asker is BOB else [1, 1] == seen

    play()
