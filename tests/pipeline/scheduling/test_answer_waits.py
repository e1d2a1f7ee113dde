"""A slot that has just answered requests waits a little for those that follow them."""

from __future__ import annotations

from typing import Any

import pytest

from shapestream.scheduling.answer_waits import LONGEST_WAIT
from shapestream.scheduling.events import BatchFailed, RequestCancelled, SlotJoined
from shapestream_engine.cost_table import CostPoint, CostTable

CALL_S = 1.0
TRIP_S = 0.001
"""From answers to the requests that follow them."""


@pytest.fixture
def waves(stage: Any) -> Any:
    """Sixteen requests in flight in two waves: 14 have been answered, and 2 run, which the other 14 followed in time."""
    stage.model(max_batch=16)
    stage.measured_slots(0, call_s=CALL_S, token_s=1e-6)
    stage.arrive(*[(1, 4)] * 14, at=0.0)
    stage.arrive(*[(1, 4)] * 2, at=TRIP_S)
    stage.finish(stage.started[-1], run_s=CALL_S, at=1.0)
    assert [(15, 16)] == stage.starts()
    stage.arrive(*[(1, 4)] * 14, at=1.0 + TRIP_S)
    return stage


def answer(stage: Any, at: float) -> None:
    """The batch that started last is over."""
    stage.finish(stage.started[-1], run_s=CALL_S, at=at)


def test_two_waves_join(waves):
    """The slot waits for those that follow the two that it answered, and all sixteen share a call from then on."""
    answer(waves, at=2.0)
    assert [] == waves.starts()
    assert 2.0 < waves.scheduler.next_wakeup() <= 2.0 + LONGEST_WAIT * CALL_S
    waves.arrive(*[(1, 4)] * 2, at=2.0 + TRIP_S)
    assert [16] == [len(members) for members in waves.starts()]
    assert waves.scheduler.next_wakeup() is None


def test_the_first_to_return_waits_for_the_others(waves):
    """Answers do not come back all at once: a slot that nothing waited for does not start with the first of them."""
    answer(waves, at=2.0)
    waves.arrive(*[(1, 4)] * 2, at=2.0 + TRIP_S)
    answer(waves, at=3.0)
    waves.arrive((1, 4), at=3.0 + TRIP_S)
    assert [] == waves.starts()
    waves.arrive(*[(1, 4)] * 15, at=3.0 + 2 * TRIP_S)
    assert [16] == [len(members) for members in waves.starts()]


def test_a_wait_ends_with_its_time(waves):
    """Nobody came back: the slot starts with what waits, and waits no more until answers are followed in time again."""
    answer(waves, at=2.0)
    until = waves.scheduler.next_wakeup()
    waves.wait(until)
    assert [14] == [len(members) for members in waves.starts()]
    waves.arrive((1, 4), at=2.5)
    answer(waves, at=3.2)
    assert [(31,)] == waves.starts()
    waves.arrive(*[(1, 4)] * 7, at=3.2 + TRIP_S)
    answer(waves, at=4.2)
    assert [] == waves.starts()


def test_requests_at_their_own_times_are_not_waited_for(stage):
    """Where answers are not followed within a share of their call, a slot that is free starts at once."""
    stage.model(max_batch=16)
    stage.measured_slots(0, call_s=CALL_S, token_s=1e-6)
    stage.arrive((1, 4), at=0.0)
    for second in range(1, 20):
        stage.arrive(*[(1, 4)] * 4, at=second - 0.1)
        answer(stage, at=float(second))
        assert [4] == [len(members) for members in stage.starts()]


def test_nothing_is_saved_where_seconds_are_linear(stage):
    """Each row takes as long in company as alone, so that no slot waits."""
    stage.model(max_batch=16)
    stage.measured_slots(0, call_s=0.0, token_s=0.05)
    stage.arrive(*[(1, 4)] * 4, at=0.0)
    stage.arrive((1, 4), at=TRIP_S)
    now = 0.0
    for _ in range(8):
        now += (run_s := 0.2 * len(stage.started[-1].requests))
        stage.finish(stage.started[-1], run_s=run_s, at=now)
        assert stage.starts()
        stage.arrive(*[(1, 4)] * 3, at=now + TRIP_S)


def test_requests_that_may_not_share_a_call_are_not_waited_for(waves):
    """Their sizes differ, and are not padded."""
    answer(waves, at=2.0)
    waves.arrive(*[(1, 4)] * 2, at=2.0 + TRIP_S)
    waves.arrive((1, 9), at=2.5)
    answer(waves, at=3.0)
    assert [(33,)] == waves.starts()


def test_a_full_batch_waits_for_nothing(waves):
    """Two more came from elsewhere meanwhile."""
    waves.arrive((1, 4), (1, 4), at=1.5)
    answer(waves, at=2.0)
    assert [16] == [len(members) for members in waves.starts()]


@pytest.mark.parametrize(("left_s", "waits"), [(CALL_S + 0.01, False), (CALL_S + 0.2, True)])
def test_a_wait_costs_no_deadline(waves, left_s, waits):
    """The call that the slot ended took longer than predicted; what waits has only the time of its own call left."""
    waves.play(RequestCancelled(id=17))
    waves.arrive((1, 4), at=1.01, deadline=5.5)
    answer(waves, at=5.5 - left_s)
    assert waits == (not waves.starts())
    assert 31 not in waves.ends


def test_a_request_without_time_ends_a_wait(stage):
    """Calls of long requests take 1 s whatever their rows; a short one of 0.02 s goes first, and has 0.08 s."""
    stage.model(max_batch=16, padded=True)
    points = [
        CostPoint(sizes=(rows, seq), seconds=seq / 256) for rows in (1, 2, 4, 8, 16) for seq in (1, 256)
    ]
    table = CostTable(key="k", dimensions=("batch", "seq"), points=tuple(points))
    stage.play(SlotJoined(slot=0, models=frozenset({"text"}), costs={"text": table}))
    stage.arrive(*[(1, 256)] * 14, at=0.0)
    stage.arrive(*[(1, 256)] * 2, at=TRIP_S)
    answer(stage, at=1.0)
    stage.arrive(*[(1, 256)] * 14, at=1.0 + TRIP_S)
    answer(stage, at=2.0)
    assert [] == stage.starts()
    (hurried,) = stage.arrive((1, 5), at=2.0 + TRIP_S, client=1, priority=9, deadline=2.08)
    assert [(hurried,)] == stage.starts()


def test_another_slot_that_is_free_ends_a_wait(waves):
    """A slot that has answered nothing is not held back."""
    answer(waves, at=2.0)
    waves.play(SlotJoined(slot=1, models=frozenset({"text"})), at=2.001)
    assert waves.starts()


def test_what_failed_is_not_held_back(waves):
    """Nothing follows a failure, and what it makes run again goes at once, though its slot has just answered others."""
    waves.play(BatchFailed(batch=waves.started[-1].batch, code="model_error", message="bad data"), at=2.0)
    assert [14] == [len(members) for members in waves.starts()]
    answer(waves, at=3.0)
    assert [(15,)] == waves.starts()


def test_what_will_be_waited_for_is_not_prefetched(stage):
    """A batch queued behind a running one could not be joined by those that follow what that answers."""
    stage.model(max_batch=16)
    stage.measured_slots(0, call_s=CALL_S, token_s=1e-6, prefetch_s=0.002)
    stage.arrive(*[(1, 4)] * 14, at=0.0)
    stage.arrive(*[(1, 4)] * 2, at=TRIP_S)
    stage.wait(stage.scheduler.next_wakeup())
    assert [(15, 16)] == stage.starts()  # nothing is known of returns yet
    stage.finish(stage.started[0], run_s=CALL_S, at=1.0)
    stage.arrive(*[(1, 4)] * 14, at=1.0 + TRIP_S)
    stage.wait(stage.scheduler.next_wakeup())
    assert [] == stage.starts()
    assert stage.scheduler.next_wakeup() is None
    answer(stage, at=2.0)
    stage.arrive(*[(1, 4)] * 2, at=2.0 + TRIP_S)
    assert [16] == [len(members) for members in stage.starts()]


def test_two_slots_that_end_together_share_what_returns(stage):
    """Each answered eight: the first to return do not take both slots, and each gets its half."""
    stage.model(max_batch=16)
    stage.measured_slots(0, 1, call_s=CALL_S, token_s=1e-6)
    stage.arrive(*[(1, 4)] * 16, at=0.0)
    for second in range(1, 3):
        first, other = stage.started[-2:]
        stage.finish(first, run_s=CALL_S, at=float(second))
        stage.finish(other, run_s=CALL_S, at=float(second))
        stage.arrive(*[(1, 4)] * 16, at=second + TRIP_S)
    first, other = stage.started[-2:]
    stage.finish(first, run_s=CALL_S, at=3.0)
    stage.finish(other, run_s=CALL_S, at=3.0)
    stage.arrive((1, 4), (1, 4), at=3.0 + TRIP_S)
    assert [] == stage.starts()
    stage.arrive(*[(1, 4)] * 14, at=3.0 + 2 * TRIP_S)
    assert [8, 8] == [len(members) for members in stage.starts()]


def test_a_wait_is_told(waves):
    """A batch knows for how long its slot was free and waited."""
    answer(waves, at=2.0)
    waves.arrive(*[(1, 4)] * 2, at=2.0 + TRIP_S)
    assert TRIP_S == pytest.approx(waves.started[-1].facts.company_s)
    assert 0.0 == waves.started[0].facts.company_s
