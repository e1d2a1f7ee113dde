"""How the queue is divided over several slots, free and busy, of equal and unequal speed. A row of 4 takes 0.1 s."""

from __future__ import annotations

from bisect import insort

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.scheduling.stage import Stage

from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.fairness import QueueRoom
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.slots import Slot, SlotPool


def _pool() -> SlotPool:
    profile = ModelProfile(name="m", dimensions=("n",), has_batch=False, paddable=(False,), max_batch=1)
    return SlotPool(ModelQueue(profile, CostModel().add_model(profile), QueueRoom(1000, 10**9)))


def _sizes(stage) -> list[int]:
    return [len(members) for members in stage.starts()]


def test_slots_that_join_together_share_what_waits(stage):
    """None of them is given everything because it was named first."""
    stage.model(max_batch=64)
    stage.arrive(*[(1, 4)] * 12)
    stage.measured_slots(0, 1, 2)
    assert [4, 4, 4] == _sizes(stage)


def test_slots_that_join_one_by_one_do_not(stage):
    """Nobody can know that others are about to come."""
    stage.model(max_batch=64)
    stage.arrive(*[(1, 4)] * 12)
    stage.slots(0, 1)
    assert [12] == [len(start.requests) for start in stage.started]


def test_a_slot_that_is_about_to_be_free_has_its_share(stage):
    """The queue is not emptied into the one slot that is free a moment earlier."""
    stage.model(max_batch=64)
    stage.measured_slots(0, 1)
    stage.arrive((1, 4), (1, 4))
    stage.arrive(*[(1, 4)] * 20)
    stage.finish(stage.started[0], at=0.099)
    assert [10] == _sizes(stage)
    stage.finish(stage.started[1], at=0.1)
    assert [10] == _sizes(stage)


def test_a_slot_that_is_busy_for_long_has_none(stage):
    """What it would get only later goes now, to the one that is free."""
    stage.model(max_batch=64)
    stage.measured_slots(0, 1)
    stage.arrive((1, 256), (1, 4))
    stage.arrive(*[(1, 4)] * 8)
    other = next(start for start in stage.started if start.sizes == (1, 4))
    stage.finish(other, at=0.1)
    assert [8] == _sizes(stage)


def test_the_faster_of_two_free_slots_goes_first(stage):
    """Though the slower one has been free for longer."""
    stage.model(max_batch=1)
    stage.measured_slots(0, call_s=0.9, key="slow", worker="slow")
    stage.arrive((1, 4))
    stage.finish(stage.started[0], run_s=0.904)
    stage.measured_slots(1, call_s=0.096, key="fast", worker="fast")
    stage.arrive((1, 4), at=1.0)
    assert [1] == [start.slot for start in stage.started[1:]]
    stage.arrive((1, 4), at=1.0)
    assert [1, 0] == [start.slot for start in stage.started[1:]], "a slow slot is better than none"


def test_a_slower_slot_gets_smaller_batches(stage):
    """Both should end at about the same time."""
    stage.model(max_batch=64)
    stage.measured_slots(0, call_s=0.001, token_s=0.04, key="slow", worker="slow")
    stage.arrive((1, 4))
    stage.finish(stage.started[0], run_s=0.161)
    stage.measured_slots(1, call_s=0.001, token_s=0.01, key="fast", worker="fast")
    stage.arrive(*[(1, 4)] * 10, at=1.0)
    sizes = {start.slot: len(start.requests) for start in stage.started[1:]}
    assert sizes[0] <= sizes[1]


@settings(max_examples=200, deadline=None)
@given(
    busy=st.lists(st.floats(0.0, 10.0), max_size=20),
    free=st.integers(0, 5),
    work_s=st.floats(0.0, 50.0),
)
def test_the_level_is_where_the_work_comes_to_rest(busy, free, work_s):
    """What the slots below the level take until then is the work; against a search."""
    if not busy and not free:
        return
    pool = _pool()
    for number in range(free):
        pool.free[number] = Slot(number, frozenset())
    for number, ends_at in enumerate(busy):
        insort(pool.ends, (100.0 + ends_at, free + number, Slot(free + number, frozenset())))
    level_s, slots = pool.free_in_s(work_s, 100.0)
    heights = [0.0] * free + busy
    assert pytest.approx(work_s, abs=1e-6) == sum(max(0.0, level_s - height) for height in heights)
    # Slots that are free exactly at the level may count or not.
    below, up_to = (sum(height < level_s + margin for height in heights) for margin in (-1e-6, 1e-6))
    assert below <= slots <= max(up_to, free)


def test_the_level_of_a_thousand_slots_is_estimated_from_few():
    """Within a few per cent of the exact one, without a look at each."""
    pool = _pool()
    heights = [(number * 37 % 1000) / 1000 for number in range(1000)]
    for number, height in enumerate(heights):
        insort(pool.ends, (height, number, Slot(number, frozenset())))
    level_s, _ = pool.free_in_s(100.0, 0.0)
    assert pytest.approx(100.0, rel=0.1) == sum(max(0.0, level_s - height) for height in heights)


def test_one_model_that_waits_for_company_is_not_divided():
    """It asked for large batches."""
    stage = Stage()
    stage.model(max_batch=8, max_delay_s=0.5)
    stage.measured_slots(0, 1, 2)
    stage.arrive(*[(1, 4)] * 8)
    assert [8] == _sizes(stage)
