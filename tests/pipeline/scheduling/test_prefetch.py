"""Prefetch: when a batch is queued behind another, where, and how it comes back.

A row of 4 takes 0.1 s, four take 0.112 s; a batch takes 0.02 s to its slot, and may end `PREFETCH_MARGIN` of its time early.
"""

from __future__ import annotations

import pytest
from tests.pipeline.scheduling.seen import CancelAsked, Delivered, Failed, RecallAsked, Started

from shapestream.scheduling.events import BatchFailed, BatchFinished, RequestCancelled, SlotClosing, SlotLeft
from shapestream.scheduling.slots import PREFETCH_MARGIN


@pytest.fixture
def busy(stage):
    """One slot with prefetch that runs request 1 until 0.1 s."""
    stage.model(max_batch=8)
    stage.measured_slots(0, prefetch_s=0.02)
    stage.arrive((1, 4))
    return stage


def _behind(stage) -> Started:
    """Queues request 2 behind the batch of request 1."""
    stage.arrive((1, 4))
    stage.wait(stage.scheduler.next_wakeup())
    return stage.started[1]


def test_the_next_batch_is_sent_as_late_as_it_takes_to_get_there(busy):
    """Not when the request arrives, but that long before the slot is predicted to be free; with all who came till then."""
    busy.arrive((1, 4), at=0.01)
    busy.arrive((1, 4), at=0.02)
    assert [] == busy.starts()
    assert pytest.approx(0.08 - PREFETCH_MARGIN * 0.1) == busy.scheduler.next_wakeup()
    busy.wait(busy.scheduler.next_wakeup())
    assert [Started(batch=2, slot=0, model="text", requests=(2, 3), sizes=(2, 4), behind=1)] == busy.last
    assert "3 running, 0 queued" == repr(busy.scheduler.statistics())


def test_a_batch_that_ends_a_tenth_early_finds_the_next_one_at_its_slot(busy):
    """Predicted to end at 0.1 s, it ends at 0.09 s: the next one has made its way of 0.02 s by then."""
    busy.arrive((1, 4), at=0.01)
    busy.wait(busy.scheduler.next_wakeup())
    assert [(2,)] == busy.starts()
    assert busy.now + 0.02 <= 0.09


def test_it_is_sent_at_once_when_that_moment_has_passed(busy):
    """Also when the running batch takes longer than predicted."""
    busy.arrive((1, 4), at=5.0)
    assert [(2,)] == busy.starts()


def test_only_one_batch_is_queued_behind_another(busy):
    """The next goes when the first of them has ended, at its own time."""
    _behind(busy)
    busy.arrive((1, 4))
    assert [] == busy.starts()
    assert busy.scheduler.next_wakeup() is None
    assert [Delivered(batch=1, requests=(1,))] == busy.finish(busy.started[0], at=0.1)
    assert pytest.approx(0.18 - PREFETCH_MARGIN * 0.1) == busy.scheduler.next_wakeup()
    busy.wait(busy.scheduler.next_wakeup())
    assert [(3,)] == busy.starts()
    assert 2 == busy.started[-1].behind


@pytest.mark.parametrize(
    ("model", "prefetch_s", "measured"),
    [({}, None, True), ({}, 5.0, False), ({"idempotent": False}, 5.0, True)],
    ids=["the slot takes none", "nothing is measured", "no request may run twice"],
)
def test_no_batch_is_queued_behind_another_where(stage, model, prefetch_s, measured):
    """Then the request stays in the queue until the slot is free."""
    stage.model(max_batch=1, **model)
    (stage.measured_slots if measured else stage.slots)(0, prefetch_s=prefetch_s)
    stage.arrive((1, 4), (1, 4))
    stage.wait(10.0)
    assert [(1,)] == [start.requests for start in stage.started]
    assert stage.scheduler.next_wakeup() is None
    stage.finish(stage.started[0])
    assert [(2,)] == stage.starts()


def test_a_free_slot_takes_queued_requests_only(stage):
    """None is queued behind a batch while a slot is free, and one that was stays there when a slot becomes free."""
    stage.model(max_batch=4)
    stage.measured_slots(0, 1, prefetch_s=0.02)
    stage.arrive(*[(1, 4)] * 8, (1, 4))
    stage.wait(stage.scheduler.next_wakeup())
    assert [None, None, 1] == [start.behind for start in stage.started]
    stage.finish(stage.started[1], at=0.09)
    assert [Delivered] == [type(action) for action in stage.last]
    assert stage.scheduler.next_wakeup() is None
    stage.arrive((1, 4))
    assert [(10,)] == stage.starts()
    assert (1, None) == (stage.started[-1].slot, stage.started[-1].behind)


def test_a_batch_that_fails_makes_room_for_the_one_behind(busy):
    """That one begins, whatever the other's end; its own report frees the slot."""
    behind = _behind(busy)
    busy.fail(busy.started[0])
    assert {1: "model_error"} == busy.ends
    busy.finish(behind)
    assert {1: "model_error", 2: "delivered"} == busy.ends
    assert 1 == busy.scheduler.statistics().free_slots


@pytest.mark.parametrize("begun", [False, True])
def test_a_closing_slot_gives_back_what_is_queued_there(busy, begun):
    """What it runs stays; the rest goes elsewhere, unless it had begun when the recall came."""
    behind = _behind(busy)
    assert [RecallAsked(batch=2, slot=0)] == busy.play(SlotClosing(slot=0))
    if not begun:
        busy.fail(behind, "recalled", "as asked")
    busy.finish(busy.started[0])
    if begun:
        busy.finish(behind)
    assert [] == busy.fail(behind, "recalled", "as asked")
    busy.measured_slots(1)
    assert ([] if begun else [(2,)]) == busy.starts()
    busy.finish(busy.started[-1])
    assert {1: "delivered", 2: "delivered"} == busy.ends


def test_a_slot_that_cannot_run_anything_gives_back_what_is_queued_there(busy):
    """It is asked at once, gets no other, and rests when it has answered; the batch loses no attempt."""
    behind = _behind(busy)
    assert RecallAsked(batch=2, slot=0) in busy.play(
        BatchFailed(batch=1, code="unavailable", message="no device")
    )
    busy.arrive((1, 4), at=1.0)
    assert [] == busy.starts()
    busy.fail(behind, "recalled", "as asked")
    statistics = busy.scheduler.statistics()
    assert (1, 3) == (statistics.slots_resting, statistics.queued)


@pytest.mark.parametrize("begun", [False, True])
def test_a_batch_that_no_request_needs_any_more_is_recalled(busy, begun):
    """And cancelled if it begins all the same, since the recall crossed its start. Nothing runs again."""
    behind = _behind(busy)
    assert RecallAsked(batch=2, slot=0) == busy.play(RequestCancelled(id=2))[-1]
    if begun:
        assert CancelAsked(batch=2, slot=0) in busy.finish(busy.started[0])
        assert [] == busy.fail(behind, "cancelled", "as asked")
    else:
        assert [] == busy.fail(behind, "recalled", "as asked")
        busy.finish(busy.started[0])
    assert {1: "delivered", 2: "cancelled"} == busy.ends


def test_a_member_that_is_cancelled_before_the_start_is_not_delivered(busy):
    """Its batch-mates are."""
    busy.arrive((1, 4), (1, 4))
    busy.wait(busy.scheduler.next_wakeup())
    busy.play(RequestCancelled(id=2))
    busy.finish(busy.started[0])
    assert [Delivered(batch=2, requests=(3,))] == busy.finish(busy.started[1])


def test_a_deadline_that_passes_before_the_start_found_the_request_waiting(busy):
    """The error does not say that it ran."""
    busy.arrive((1, 4), deadline=0.3)
    busy.wait(busy.scheduler.next_wakeup())
    busy.wait(0.3)
    failed = next(action for action in busy.last if isinstance(action, Failed))
    assert ("deadline_exceeded", "the deadline passed while the request was waiting") == (
        failed.code,
        failed.message,
    )
    assert RecallAsked(batch=2, slot=0) == busy.last[-1]


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_slot_that_leaves_costs_what_was_queued_there_no_attempt(make_stage, attempts):
    """It never started, so it cannot be what brought the slot down; it goes again as it is."""
    stage = make_stage(max_attempts=attempts)
    stage.model(max_batch=8)
    stage.measured_slots(0, prefetch_s=0.02)
    stage.arrive((1, 4))
    stage.arrive((1, 4), (1, 4))
    stage.wait(0.08)
    stage.play(SlotLeft(slot=0))
    assert ({1: "worker_lost"} if attempts == 1 else {}) == stage.ends
    assert [] == stage.play(BatchFinished(batch=2, busy_s=0.1))
    stage.measured_slots(1, 2)
    assert {(2, 3), (1,)} - ({(1,)} if attempts == 1 else set()) == set(stage.starts())


def test_troubles_tell_of_a_recall(busy):
    """With its reason, and what became of the batch."""
    behind = _behind(busy)
    busy.play(SlotClosing(slot=0))
    busy.fail(behind, "recalled", "as asked")
    told = [what for _, what in busy.scheduler.troubles(2)]
    assert ["batch 2 is recalled: slot 0 closes", "batch 2 did not start: it was taken back"] == told
