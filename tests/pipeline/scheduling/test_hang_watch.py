"""Batches that run far longer than their like: cancelled, then their process killed, then answered."""

from __future__ import annotations

from math import inf

import pytest
from tests.pipeline.scheduling.seen import CancelAsked, Failed, KillAsked, RecallAsked, Started

from shapestream.scheduling.events import BatchFailed, RequestCancelled, SlotLeft
from shapestream.scheduling.hang_watch import HangLimits

LIMITS = HangLimits(min_s=10.0, grace_s=5.0)


@pytest.fixture
def watched(make_stage):
    """A stage whose batches may hang."""
    return make_stage(hangs=LIMITS)


def _steps(stage) -> list[object]:
    """What the last event led to against batches that hang."""
    return [action for action in stage.last if isinstance(action, CancelAsked | KillAsked | RecallAsked)]


def _wake(stage) -> float:
    """Lets the time come that the scheduler waits for, and returns it."""
    stage.wait(stage.scheduler.next_wakeup())
    return stage.now


def _warm_up(stage, batches: int, busy_s: float = 0.1) -> None:
    """So many batches that took so long each."""
    for _ in range(batches):
        stage.arrive((1, 4))
        stage.finish(stage.started[-1], busy_s, at=stage.now + busy_s)


def test_the_least_limit_holds_for_quick_models(watched):
    """Ten times 0.1 s is no hang; 10 s are."""
    watched.model()
    watched.slots(0)
    _warm_up(watched, 20)
    watched.wait(15.0)  # a look in vain, for the first of them
    watched.arrive((1, 4))
    assert 25.0 == _wake(watched)
    assert [CancelAsked(batch=21, slot=0)] == _steps(watched)


def test_who_stood_still_takes_no_batch_for_hanging(watched):
    """Reports are read first, and a worker that was paused as well goes on; one that hangs is found then."""
    watched.model()
    watched.slots(0)
    _warm_up(watched, 20)
    watched.wait(15.0)
    watched.arrive((1, 4))
    watched.wait(60.0)
    assert [] == _steps(watched)
    assert 60.0 + LIMITS.grace_s == _wake(watched)
    assert [CancelAsked(batch=21, slot=0)] == _steps(watched)


def test_slow_models_have_many_times_what_nearly_all_of_their_batches_take(watched):
    """One outlier in two hundred does not count."""
    watched.model()
    watched.slots(0)
    _warm_up(watched, 250, 3.0)
    watched.arrive((1, 4))
    watched.finish(watched.started[-1], 100.0, at=watched.now + 9.0)
    _warm_up(watched, 10, 3.0)
    began = watched.now
    watched.arrive((1, 4))
    # The prediction, which follows what ran, gives it twenty times 3 s.
    assert pytest.approx(began + 60.0, rel=0.2) == _wake(watched)


@pytest.mark.parametrize(
    ("call_s", "limit_s"),
    [(None, 200.0), (2.0, 40.0), (60.0, 5 * 60.0 + 200.0)],
    ids=["a first call may compile", "twenty times the prediction", "five times minutes, and a first call"],
)
def test_the_first_batch_has_a_limit_by_its_prediction(watched, call_s, limit_s):
    """As its worker has measured; without, twenty times the least limit."""
    watched.model()
    if call_s is None:
        watched.slots(0)
    else:
        watched.measured_slots(0, call_s=call_s - 0.004)
    watched.arrive((1, 4))
    assert pytest.approx(limit_s) == _wake(watched)
    assert [CancelAsked(batch=1, slot=0)] == _steps(watched)


def test_sizes_that_never_ran_have_a_first_calls_time(watched):
    """Without a calibration nobody knows what has to be prepared; the sizes that ran have ten seconds."""
    watched.model()
    watched.slots(0)
    _warm_up(watched, 2)
    watched.wait(200.0)  # a look in vain, for the first of them
    watched.arrive((1, 4))
    assert 210.0 == watched.scheduler.next_wakeup()
    watched.finish(watched.started[-1], at=201.0)
    watched.arrive((1, 8))
    watched.wait(210.0)  # in vain again
    assert 401.0 == _wake(watched)
    assert [CancelAsked(batch=4, slot=0)] == _steps(watched)


def test_after_twenty_batches_new_sizes_are_nothing_new(watched):
    """What first calls take is among what the twenty took."""
    watched.model()
    watched.slots(0)
    _warm_up(watched, 20)
    watched.wait(200.0)
    watched.arrive((1, 8))
    assert 210.0 == _wake(watched)


def test_a_calibration_has_met_what_is_new(watched):
    """Then a first call has what it was predicted to take, twenty times, and ten seconds at least."""
    watched.model()
    watched.measured_slots(0)
    _warm_up(watched, 2)
    watched.wait(10.0)
    watched.arrive((1, 8))
    assert 20.0 == _wake(watched)


@pytest.mark.parametrize(("min_s", "expected"), [(1.0, 20.0), (10.0, 200.0), (60.0, 600.0), (1000.0, 1000.0)])
def test_the_first_call_has_a_bound(min_s, expected):
    """However long the least is that could be called a hang."""
    assert expected == HangLimits(min_s=min_s, grace_s=5.0).first_call_s


@pytest.mark.parametrize(("limit_s", "expected"), [(2.0, 2.0), (inf, None)])
def test_a_model_may_have_a_limit_of_its_own(watched, limit_s, expected):
    """Also below the least of all, or none at all."""
    watched.model(hang_after_s=limit_s)
    watched.slots(0)
    watched.arrive((1, 4))
    assert expected == watched.scheduler.next_wakeup()


def test_without_limits_nothing_is_watched(stage):
    """As in simulations, where nothing hangs."""
    stage.model(hang_after_s=1.0)
    stage.slots(0)
    stage.arrive((1, 4))
    assert stage.scheduler.next_wakeup() is None


def test_a_batch_that_ends_in_time_leaves_at_most_one_look_in_vain(watched):
    """The watch is not told of ends: it looks, and finds nothing to do."""
    watched.model(hang_after_s=2.0)
    watched.slots(0)
    watched.arrive((1, 4))
    watched.finish(watched.started[0], at=1.0)
    assert 2.0 == _wake(watched)
    assert ([], None) == (watched.last, watched.scheduler.next_wakeup())


def test_each_step_has_its_time(watched):
    """Cancelled, killed after a grace, answered after another; the slot is lost, what comes goes elsewhere."""
    watched.model(hang_after_s=2.0)
    watched.slots(0, 1, worker="w")
    watched.arrive((1, 4))
    hung = watched.started[0].slot
    assert (2.0, [CancelAsked(batch=1, slot=hung)]) == (_wake(watched), _steps(watched))
    watched.wait(6.9)
    assert [] == watched.last
    assert 7.0 == _wake(watched)
    assert [KillAsked(slot=hung, reason="batch 1 of text has run for 7.0 s")] == _steps(watched)
    watched.arrive((1, 4))
    assert [] == watched.starts(), "nothing is started in a process that is about to be killed"
    assert 12.0 == _wake(watched)
    assert [("worker_lost", 1)] == [(a.code, a.id) for a in watched.last if isinstance(a, Failed)]
    assert [1 - hung] == [action.slot for action in watched.last if isinstance(action, Started)]
    watched.finish(watched.started[1])
    assert 1 == watched.scheduler.statistics().closing_slots


def test_the_process_of_a_hung_batch_takes_innocent_neighbours_along(watched):
    """Only the hung batch is to blame, since the process was killed because of it; the neighbours run again as they are."""
    watched.model(hang_after_s=20.0)
    watched.slots(0, 1, worker="w")
    watched.arrive((1, 4))
    watched.arrive((1, 4), at=19.0)
    watched.wait(20.0)
    watched.wait(25.0)
    assert [KillAsked] == [type(step) for step in _steps(watched)]
    for slot in (1, 0):
        watched.play(SlotLeft(slot=slot, died=True))
    assert 1 == watched.scheduler.statistics().suspects
    watched.slots(2, worker="w")
    assert [(1,)] == watched.starts(), "the suspect goes first, and alone"
    watched.finish(watched.started[-1])
    watched.finish(watched.started[-1])
    assert {1: "delivered", 2: "delivered"} == watched.ends


def test_a_suspect_that_hangs_alone_is_poisoned(watched):
    """Whether cancelling it helps, or only the end of its process."""
    watched.model(hang_after_s=2.0)
    watched.slots(0, worker="w")
    watched.arrive((1, 4), (1, 4), (1, 4))
    _wake(watched)
    watched.fail(watched.started[0], "cancelled", "as asked")
    assert [(1,)] == watched.starts()
    _wake(watched)
    watched.fail(watched.started[1], "cancelled", "as asked")
    assert ({1: "poisoned"}, [(2,)]) == (watched.ends, watched.starts())
    _wake(watched)
    _wake(watched)
    assert 1 == len([action for action in watched.last if isinstance(action, KillAsked)])
    watched.play(SlotLeft(slot=0, died=True))
    watched.slots(1)
    watched.finish(watched.started[3])
    assert {1: "poisoned", 2: "poisoned", 3: "delivered"} == watched.ends


def test_what_was_sent_ahead_to_a_hung_slot_comes_back(watched):
    """It need not wait for the slot's end, and nothing more is sent there."""
    watched.model(max_batch=1, hang_after_s=2.0)
    watched.measured_slots(0, prefetch_s=0.01)
    watched.arrive((1, 4), (1, 4))
    _wake(watched)
    behind = watched.started[1]
    assert 1 == behind.behind
    assert 2.0 == _wake(watched)
    assert [CancelAsked(batch=1, slot=0), RecallAsked(batch=behind.batch, slot=0)] == _steps(watched)
    watched.play(BatchFailed(batch=behind.batch, code="recalled", message="as asked"))
    assert ([], 7.0) == (watched.starts(), watched.scheduler.next_wakeup())


def test_a_hung_batch_that_ends_after_all_is_delivered(watched):
    """Within the grace nothing is lost."""
    watched.model(hang_after_s=2.0)
    watched.slots(0)
    watched.arrive((1, 4))
    _wake(watched)
    watched.finish(watched.started[0], 2.5, at=2.5)
    assert {1: "delivered"} == watched.ends


def test_a_batch_that_nobody_waits_for_is_cancelled_once_and_killed_too(watched):
    """Its slot is wanted for others."""
    watched.model(hang_after_s=2.0)
    watched.slots(0)
    watched.arrive((1, 4))
    watched.play(RequestCancelled(id=1), at=1.0)
    assert [CancelAsked(batch=1, slot=0)] == _steps(watched)
    _wake(watched)
    assert [] == _steps(watched)
    _wake(watched)
    assert [KillAsked] == [type(step) for step in _steps(watched)]


def test_suspects_do_not_wait_for_a_slot_that_is_given_up(watched):
    """In a process that cannot be ended, the slots that are left are enough to be alone in."""
    watched.model(max_batch=1, hang_after_s=2.0)
    watched.slots(0, 1, worker="local")
    watched.arrive((1, 4))
    hung = watched.started[0]
    for _ in range(3):
        _wake(watched)
    assert {1: "worker_lost"} == watched.ends
    watched.arrive((1, 4))
    _wake(watched)
    watched.fail(watched.started[1], "cancelled", "as asked")
    assert [(2,)] == watched.starts()
    assert hung.slot != watched.started[2].slot
    watched.finish(watched.started[2])
    assert {1: "worker_lost", 2: "delivered"} == watched.ends


def test_a_suspect_waits_for_what_is_queued_behind_a_call_that_is_stuck(watched):
    """It was asked back, but begins beside the suspect if the call ends first."""
    watched.model(max_batch=1, hang_after_s=2.0)
    watched.measured_slots(0, worker="local", prefetch_s=0.01)
    watched.arrive((1, 4), (1, 4))
    _wake(watched)
    behind = watched.started[1]
    assert (0, 1) == (behind.slot, behind.behind)
    for _ in range(3):
        _wake(watched)
    assert {1: "worker_lost"} == watched.ends
    watched.slots(1, worker="local")
    watched.arrive((1, 4))
    _wake(watched)
    watched.fail(watched.started[2], "cancelled", "as asked")
    assert [] == watched.starts()
    watched.play(BatchFailed(batch=behind.batch, code="recalled", message="as asked"))
    assert [(3,)] == watched.starts()
    watched.finish(watched.started[3])
    watched.finish(watched.started[4])
    assert {1: "worker_lost", 2: "delivered", 3: "delivered"} == watched.ends


def test_a_suspect_that_is_given_up_gives_the_rest_of_its_worker_back(watched):
    """It is poisoned, and the other slots, which were kept beside it, serve everybody again."""
    watched.model(max_batch=1, hang_after_s=2.0)
    watched.slots(0, 1, worker="local")
    watched.arrive((1, 4))
    _wake(watched)
    watched.fail(watched.started[0], "cancelled", "as asked")
    watched.arrive((1, 4))
    assert [] == watched.starts()
    for _ in range(3):
        _wake(watched)
    assert ({1: "poisoned"}, [(2,)]) == (watched.ends, watched.starts())
    assert 0 == watched.scheduler.statistics().slots_reserved


def test_limits_that_make_no_sense_are_refused():
    """A batch would hang before it has begun."""
    with pytest.raises(ValueError, match="more than 0 s"):
        HangLimits(min_s=0.0, grace_s=5.0)
