"""Waits that arrivals are told: all that goes before them counts, at what it will take. A row of 4 alone takes 0.1 s."""

from __future__ import annotations

import pytest
from tests.pipeline.scheduling.seen import Failed

from shapestream.scheduling.events import ModelUnavailable, RequestCancelled, SlotClosing, SlotLeft


def _failures(stage) -> list[tuple[int, str]]:
    return [(action.id, action.code) for action in stage.last if isinstance(action, Failed)]


def _lose_sixteen(stage, *, died: bool = False) -> None:
    """A batch of 16 is lost with its slot, and the first of its members runs again on another one."""
    stage.model(max_batch=16)
    stage.measured_slots(0, worker="first")
    stage.arrive(*[(1, 4)] * 16)
    assert [16] == [len(start.requests) for start in stage.started]
    stage.play(SlotLeft(slot=0, died=died))
    stage.measured_slots(1, worker="second")
    assert [(1,)] == stage.starts()


@pytest.mark.parametrize("died", [False, True], ids=["reruns", "suspects"])
def test_requests_that_run_again_count_as_calls_of_their_own(stage, died):
    """Sixteen calls of one take 1.6 s, where a call of sixteen takes 0.16 s."""
    _lose_sixteen(stage, died=died)
    stage.arrive((1, 4), deadline=1.0)
    (refused,) = stage.last
    assert ("overloaded", pytest.approx(1.6)) == (refused.code, refused.retry_after_s)
    assert pytest.approx(1.5) == stage.scheduler.statistics().models[0].queued_s
    stage.arrive((1, 4), deadline=2.6)
    assert [] == _failures(stage)


def test_requests_that_run_again_go_before_any_share_and_priority(stage):
    """They are no part of anybody's turn."""
    _lose_sixteen(stage)
    stage.arrive((1, 4), client=7, priority=30, deadline=1.0)
    assert [(17, "overloaded")] == _failures(stage)


def test_a_half_counts_as_the_call_that_it_is(stage):
    """Each half of a failed batch of 16 takes 0.128 s, however little its members cost in the company of 16."""
    stage.model(max_batch=16)
    stage.measured_slots(0)
    stage.arrive(*[(1, 4)] * 16)
    stage.fail(stage.started[0])
    assert pytest.approx(0.128) == stage.scheduler.statistics().models[0].queued_s


@pytest.mark.parametrize("died", [False, True], ids=["reruns", "suspects"])
def test_requests_that_no_longer_run_again_no_longer_count(stage, died):
    """Neither those that start, nor those that are withdrawn."""
    _lose_sixteen(stage, died=died)
    for id_ in range(3, 17):
        stage.play(RequestCancelled(id=id_))
    assert pytest.approx(0.1) == stage.scheduler.statistics().models[0].queued_s
    stage.finish(stage.started[1], at=0.1)
    assert [(2,)] == stage.starts()
    assert 0.0 == stage.scheduler.statistics().models[0].queued_s
    stage.arrive((1, 4), deadline=0.5)
    assert [] == _failures(stage)


def test_the_slots_beside_a_suspect_shorten_no_wait(stage):
    """While it runs nothing else does on its worker's three slots: sixteen suspects take 1.6 s there as well."""
    stage.model(max_batch=16)
    stage.measured_slots(0, worker="first")
    stage.arrive(*[(1, 4)] * 16)
    stage.measured_slots(1, 2, 3, worker="second")
    stage.play(SlotLeft(slot=0, died=True))
    assert [(1,)] == stage.starts()
    stage.arrive((1, 4), deadline=1.0)
    (refused,) = stage.last
    assert ("overloaded", pytest.approx(1.6)) == (refused.code, refused.retry_after_s)


def test_what_is_queued_behind_a_batch_is_its_slots_work(stage):
    """A slot that joins beside one with 0.352 s queued behind takes all eight rows, not the half of them."""
    stage.model(max_batch=8)
    stage.measured_slots(0, prefetch_s=0.05)
    stage.arrive((1, 4))
    stage.arrive((1, 256))
    stage.wait(0.05)
    assert [None, 1] == [start.behind for start in stage.started]
    stage.arrive(*[(1, 4)] * 8)
    stage.measured_slots(1)
    assert [8] == [len(members) for members in stage.starts()]


def test_a_slot_that_is_busy_for_long_shortens_no_wait(stage):
    """One of two slots waits for company, the other is busy for 16 s: what waits is not done by both at once."""
    stage.model(max_batch=64, max_delay_s=5.0)
    stage.measured_slots(0, 1)
    stage.arrive((64, 256))
    stage.arrive(*[(1, 4)] * 60)
    assert 1 == stage.scheduler.statistics().free_slots
    # What waits takes 0.33 s on the free slot, and then the call 0.1 s.
    stage.arrive((1, 4), deadline=0.55)
    assert [(62, "overloaded")] == _failures(stage)
    stage.arrive((1, 4), deadline=1.0)
    assert [] == _failures(stage)


def test_what_comes_back_from_a_closing_slot_of_a_model_given_up_is_unavailable(stage):
    """No slot will come for it, so it must not wait for one."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), (1, 4))
    stage.play(SlotClosing(slot=0))
    stage.arrive((1, 4))
    stage.play(ModelUnavailable(model="text", message="its workers were given up"))
    assert [(3, "unavailable")] == _failures(stage)
    stage.play(SlotLeft(slot=0))
    assert [(1, "unavailable"), (2, "unavailable")] == _failures(stage)
    assert "its workers were given up" in stage.last[0].message


def test_what_a_dead_process_ran_of_a_model_given_up_is_unavailable(stage):
    """A suspect finds no worker either."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4))
    stage.play(SlotClosing(slot=0))
    stage.play(ModelUnavailable(model="text", message="gone"))
    stage.play(SlotLeft(slot=0, died=True))
    assert [(1, "unavailable")] == _failures(stage)


def test_what_is_taken_back_from_a_closing_slot_of_a_model_given_up_is_unavailable(stage):
    """A batch that is queued behind another is recalled when its slot closes, and has no other slot to go to."""
    stage.model(max_batch=1)
    stage.measured_slots(0, prefetch_s=0.05)
    stage.arrive((1, 4), (1, 4))
    stage.wait(0.06)
    stage.play(SlotClosing(slot=0))
    stage.play(ModelUnavailable(model="text", message="gone"))
    assert [] == _failures(stage)
    stage.fail(stage.started[1], code="recalled")
    assert [(2, "unavailable")] == _failures(stage)
    stage.finish(stage.started[0], at=0.1)
    assert {1: "delivered", 2: "unavailable"} == stage.ends


def test_a_slot_that_joins_all_the_same_brings_a_model_back(stage):
    """A worker may dial in: what is lost then runs again."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4))
    stage.play(SlotClosing(slot=0))
    stage.play(ModelUnavailable(model="text", message="gone"))
    stage.slots(1)
    stage.play(SlotLeft(slot=0))
    assert [(1,)] == stage.starts()
