"""Prefetch: when a batch is queued behind another, where, and how it comes back.

A row of 4 takes 0.1 s, four take 0.112 s; a batch takes 0.02 s to its slot, and may end `PREFETCH_MARGIN` of its time early.
"""

from __future__ import annotations

import pytest

from shapestream.scheduling.events import (
    BatchFailed,
    BatchFinished,
    CancelBatch,
    DeliverResults,
    FailRequest,
    RecallBatch,
    RequestCancelled,
    SlotClosing,
    SlotLeft,
    StartBatch,
)
from shapestream.scheduling.slots import PREFETCH_MARGIN


@pytest.fixture
def busy(stage):
    """One slot that takes batches ahead and runs request 1 until 0.1 s."""
    stage.model(max_batch=8)
    stage.measured_slots(0, prefetch_s=0.02)
    stage.arrive((1, 4))
    return stage


def _ahead(stage) -> StartBatch:
    """Sends request 2 ahead, behind the batch of request 1."""
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
    assert [StartBatch(batch=2, slot=0, model="text", requests=(2, 3), sizes=(2, 4), behind=1)] == busy.last
    assert "3 running, 0 queued" == repr(busy.scheduler.statistics())


def test_it_is_sent_at_once_when_that_moment_has_passed(busy):
    """Also when the running batch takes longer than predicted."""
    busy.arrive((1, 4), at=5.0)
    assert [(2,)] == busy.starts()


def test_only_one_batch_waits_behind_another(busy):
    """The next goes when the first of them has ended, at its own time."""
    _ahead(busy)
    busy.arrive((1, 4))
    assert [] == busy.starts()
    assert busy.scheduler.next_wakeup() is None
    assert [DeliverResults(batch=1, requests=(1,))] == busy.finish(busy.started[0], at=0.1)
    assert pytest.approx(0.18 - PREFETCH_MARGIN * 0.1) == busy.scheduler.next_wakeup()
    busy.wait(busy.scheduler.next_wakeup())
    assert [(3,)] == busy.starts()
    assert 2 == busy.started[-1].behind


@pytest.mark.parametrize("options", [{"prefetch_s": None}, {"prefetch_s": 0.02, "free": True}])
def test_nothing_is_sent_ahead_where_it_is_not_wanted(stage, options):
    """A slot may not take it, and while another slot is free there is no need."""
    stage.model(max_batch=1)
    stage.measured_slots(0, *([1] if options.pop("free", False) else []), **options)
    stage.arrive((1, 4), (1, 4))
    stage.wait(0.09)
    assert all(start.behind is None for start in stage.started)


def test_nothing_is_sent_ahead_while_nothing_is_measured(stage):
    """Nobody knows when the slot will be free."""
    stage.model()
    stage.slots(0, prefetch_s=0.02)
    stage.arrive((1, 4))
    stage.arrive((1, 4))
    assert stage.scheduler.next_wakeup() is None
    assert 1 == len(stage.started)


def test_a_batch_is_never_sent_before_the_running_one_has_started(busy):
    """However long the way is."""
    busy.slots(1, models=("text",), prefetch_s=9.0)
    busy.arrive((1, 4), at=0.5)
    assert [(2,)] == busy.starts()
    busy.arrive((1, 4), at=0.5)
    assert [(3,)] == busy.starts()


def test_what_fails_makes_room_for_what_waits_behind(busy):
    """The waiting batch becomes the running one, whatever the other's end; its own report frees the slot."""
    behind = _ahead(busy)
    busy.fail(busy.started[0])
    assert {1: "model_error"} == busy.ends
    busy.finish(behind)
    assert {1: "model_error", 2: "delivered"} == busy.ends
    assert 1 == busy.scheduler.statistics().free_slots


def test_what_is_queued_behind_another_batch_stays_there_though_a_slot_is_free(stage):
    """A free slot takes what waits in the queue; what was sent runs where it was sent to."""
    stage.model(max_batch=4)
    stage.measured_slots(0, 1, prefetch_s=0.02)
    stage.arrive(*[(1, 4)] * 8, (1, 4))
    stage.wait(stage.scheduler.next_wakeup())
    assert [None, None, 1] == [start.behind for start in stage.started]
    stage.finish(stage.started[1], at=0.09)
    assert [DeliverResults] == [type(action) for action in stage.last]
    assert stage.scheduler.next_wakeup() is None
    stage.arrive((1, 4))
    assert [(10,)] == stage.starts()
    assert (1, None) == (stage.started[-1].slot, stage.started[-1].behind)
    stage.finish(stage.started[0])
    stage.finish(stage.started[2])
    stage.finish(stage.started[3])
    assert dict.fromkeys(range(1, 11), "delivered") == stage.ends


def test_a_recall_that_comes_too_late_changes_nothing(busy):
    """The batch had started: it finishes like any other, once."""
    behind = _ahead(busy)
    assert [RecallBatch(batch=2, slot=0)] == busy.play(SlotClosing(slot=0))
    busy.finish(busy.started[0], at=0.1)
    busy.finish(behind, at=0.2)
    assert {1: "delivered", 2: "delivered"} == busy.ends
    assert [] == busy.fail(behind, "recalled", "as asked")


def test_a_batch_that_nobody_waits_for_is_taken_back(busy):
    """Before its start it is recalled instead of cancelled, and nothing runs again."""
    behind = _ahead(busy)
    assert RecallBatch(batch=2, slot=0) == busy.play(RequestCancelled(id=2))[-1]
    assert [] == busy.fail(behind, "recalled", "as asked")
    busy.finish(busy.started[0])
    assert {1: "delivered", 2: "cancelled"} == busy.ends


def test_an_unwanted_batch_that_starts_nevertheless_is_cancelled(busy):
    """The recall crossed its start."""
    behind = _ahead(busy)
    busy.play(RequestCancelled(id=2))
    assert CancelBatch(batch=2, slot=0) in busy.finish(busy.started[0])
    busy.fail(behind, "cancelled", "as asked")
    assert {1: "delivered", 2: "cancelled"} == busy.ends


def test_a_member_that_is_cancelled_before_the_start_is_not_delivered(busy):
    """Its batch-mates are."""
    busy.arrive((1, 4), (1, 4))
    busy.wait(busy.scheduler.next_wakeup())
    busy.play(RequestCancelled(id=2))
    busy.finish(busy.started[0])
    assert [DeliverResults(batch=2, requests=(3,))] == busy.finish(busy.started[1])


def test_a_deadline_that_passes_before_the_start_found_the_request_waiting(busy):
    """What was sent ahead has not started, and says so."""
    busy.arrive((1, 4), deadline=0.3)
    busy.wait(busy.scheduler.next_wakeup())
    busy.wait(0.3)
    failed = next(action for action in busy.last if isinstance(action, FailRequest))
    assert ("deadline_exceeded", "the deadline passed while the request was waiting") == (
        failed.code,
        failed.message,
    )
    assert RecallBatch(batch=2, slot=0) == busy.last[-1]


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_slot_that_leaves_costs_what_waited_there_no_attempt(make_stage, attempts):
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


def test_a_closing_slot_gives_back_what_waits_there(busy):
    """What it runs stays; the rest goes elsewhere."""
    behind = _ahead(busy)
    assert [RecallBatch(batch=2, slot=0)] == busy.play(SlotClosing(slot=0))
    busy.fail(behind, "recalled", "as asked")
    busy.finish(busy.started[0])
    assert {1: "delivered"} == busy.ends
    busy.measured_slots(1)
    assert [(2,)] == busy.starts()


def test_a_slot_that_cannot_run_anything_gives_back_what_waits_there(busy):
    """It is asked at once, and rests when it has answered; the waiting batch loses no attempt."""
    behind = _ahead(busy)
    assert RecallBatch(batch=2, slot=0) in busy.play(
        BatchFailed(batch=1, code="unavailable", message="no device")
    )
    busy.fail(behind, "recalled", "as asked")
    statistics = busy.scheduler.statistics()
    assert (1, 2) == (statistics.slots_resting, statistics.queued)


def test_the_story_tells_of_batches_sent_ahead(busy):
    """And of their recall."""
    behind = _ahead(busy)
    busy.play(SlotClosing(slot=0))
    busy.fail(behind, "recalled", "as asked")
    told = [what for _, what in busy.scheduler.story(2)]
    assert told[1].endswith("; predicted 0.100000 s; queued behind batch 1")
    assert ["batch 2 is recalled: slot 0 closes", "batch 2 did not start: it was taken back"] == told[2:]
