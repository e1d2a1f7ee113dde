"""Slots that close before they leave, and slots that rest because they cannot run what they get."""

from __future__ import annotations

import pytest
from tests.pipeline.scheduling.seen import KillAsked

from shapestream.scheduling.events import BatchFinished, ModelAdded, ModelProfile, SlotClosing, SlotLeft
from shapestream.scheduling.hang_watch import HangLimits
from shapestream.scheduling.slots import rest_s


def places(stage) -> list[int]:
    """The slots that the last event gave work to."""
    return [start.slot for start in stage.started if start in stage.last]


def test_a_closing_slot_finishes_its_batch_and_gets_no_other(stage):
    """What it runs is delivered; what waits stays for others until it has left, and nothing runs twice."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4))
    stage.arrive((1, 4))
    stage.play(SlotClosing(slot=0))
    stage.finish(stage.started[0])
    assert ({1: "delivered"}, []) == (stage.ends, stage.starts())
    stage.play(SlotLeft(slot=0))
    stage.slots(1)
    assert [(2,)] == stage.starts()
    stage.finish(stage.started[1])
    assert {1: "delivered", 2: "delivered"} == stage.ends


def test_a_free_slot_that_closes_is_offered_nothing(stage):
    """Work goes to the other slot, and waits when that is busy; closing twice or nowhere changes nothing."""
    stage.model()
    stage.slots(0, 1)
    for slot in (0, 0, 7):
        stage.play(SlotClosing(slot=slot))
    stage.arrive((1, 4))
    assert [1] == places(stage)
    stage.arrive((1, 4))
    assert [] == stage.starts()
    statistics = stage.scheduler.statistics()
    assert (2, 0, 1) == (statistics.slots, statistics.free_slots, statistics.closing_slots)
    assert (1, 0) == (statistics.models[0].slots, statistics.models[0].free_slots)


def test_a_closing_slot_that_dies_loses_its_batch_like_any_other(stage):
    """Its members run again elsewhere."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4))
    stage.play(SlotClosing(slot=0))
    stage.slots(1)
    stage.play(SlotLeft(slot=0))
    assert [(1,)] == stage.starts()
    assert [] == stage.play(BatchFinished(batch=stage.started[0].batch, busy_s=0.1))


def test_a_model_that_is_added_later_does_not_reach_a_closing_slot(stage):
    """Not even one that had announced it."""
    stage.model()
    stage.slots(0, models=("text", "late"))
    stage.play(SlotClosing(slot=0))
    profile = ModelProfile(name="late", dimensions=("n",), has_batch=False, paddable=(False,), max_batch=1)
    stage.play(ModelAdded(model=profile))
    stage.arrive((4,), model="late")
    assert [] == stage.starts()


def test_a_batch_that_fails_on_a_closing_slot_runs_again_elsewhere(stage):
    """Also its halves are nothing for a slot that leaves."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), (1, 4))
    stage.play(SlotClosing(slot=0))
    stage.fail(stage.started[0])
    assert [] == stage.starts()
    stage.slots(1)
    assert [(1,)] == stage.starts()


def test_a_slot_that_cannot_run_anything_costs_a_request_one_attempt(stage):
    """While the sound slot is busy, the broken one does not eat up the attempts of what waits."""
    stage.model()
    stage.slots(0, 1)
    stage.arrive((1, 4))
    stage.finish(stage.started[0], run_s=1.0, at=1.0)
    stage.arrive((1, 4), (1, 4), (1, 4), at=1.0)
    broken, sound = stage.started[1:]
    stage.fail(broken, "unavailable")
    assert [] == stage.starts()
    stage.wait(2.9)
    assert [] == stage.starts()
    stage.finish(sound, run_s=1.0, at=2.9)
    assert [sound.slot] == places(stage)
    assert {} == {id_: how for id_, how in stage.ends.items() if how != "delivered"}


def test_a_slot_comes_back_from_its_rest(stage):
    """At the time that `next_wakeup` names, though nothing else happens; after a success the pauses start anew."""
    stage.model()
    stage.slots(0)
    stage.arrive((1, 4), (1, 4), (1, 4))
    rests = []
    for _ in range(4):
        began = stage.now
        stage.fail(stage.started[-1], "unavailable")
        assert ([], 1) == (stage.starts(), stage.scheduler.statistics().slots_resting)
        stage.wait(stage.scheduler.next_wakeup())
        assert 1 == len(stage.starts())
        rests.append(stage.now - began)
    assert pytest.approx([0.1, 0.2, 0.4, 0.8]) == rests
    assert "slot 0 rests for 0.1 s" in [what for _, what in stage.scheduler.troubles(1)]
    stage.finish(stage.started[-1], run_s=0.0)
    stage.fail(stage.started[-1], "unavailable")
    assert pytest.approx(0.1) == stage.scheduler.next_wakeup() - stage.now


def test_a_slot_that_rests_may_leave_or_close(stage):
    """It comes back to nobody."""
    stage.model()
    stage.slots(0, 1)
    stage.arrive((1, 4))
    stage.fail(stage.started[0], "unavailable")
    stage.arrive((1, 4))
    stage.fail(stage.started[1], "unavailable")
    stage.play(SlotClosing(slot=0))
    stage.play(SlotLeft(slot=1))
    stage.wait(60.0)
    assert [] == stage.starts()
    assert (1, 0) == (stage.scheduler.statistics().slots, stage.scheduler.statistics().slots_resting)


def test_pauses_double_up_to_their_limit():
    """At least 0.1 s, at least two calls of the model, at most half a minute, whatever the count."""
    assert [0.1, 0.2, 0.4] == [rest_s(refusals, None) for refusals in (1, 2, 3)]
    assert [6.0, 12.0, 24.0, 30.0] == [rest_s(refusals, 3.0) for refusals in (1, 2, 3, 4)]
    assert 30.0 == rest_s(10**9, 0.001)


def test_a_worker_is_not_kept_to_be_killed_when_the_slot_that_hung_has_left_alone(make_stage):
    """The rest of it serves on: nobody will end its process any more."""
    stage = make_stage(hangs=HangLimits(min_s=1.0, grace_s=1.0))
    stage.model(hang_after_s=1.0)
    stage.slots(0, 1, worker="w")
    stage.arrive((1, 4))
    stage.wait(1.0)
    stage.wait(2.0)
    assert [KillAsked] == [type(action) for action in stage.last]
    hung = stage.started[0].slot
    stage.play(SlotLeft(slot=hung))
    assert [1 - hung] == places(stage)
