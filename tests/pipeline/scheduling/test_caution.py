"""Admission trusts its estimates less while what it admitted ends late. A row of 4 takes 0.1 s."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shapestream.scheduling.actions import FailRequest
from shapestream.scheduling.caution import MAX_CAUTION, Caution


def test_nothing_is_multiplied_before_anything_was_late() -> None:
    """However much went well."""
    caution = Caution()
    caution.ended_well(1000)
    assert 1.0 == caution.factor


@given(st.lists(st.booleans() | st.integers(1, 1000), max_size=300))
def test_the_factor_stays_between_one_and_its_limit(ends: list[bool | int]) -> None:
    """Each late end raises it, each result lowers it."""
    caution = Caution()
    for end in ends:
        before = caution.factor
        if isinstance(end, bool):
            caution.ended_late()
            assert before < caution.factor or MAX_CAUTION == caution.factor
        else:
            caution.ended_well(end)
            assert before >= caution.factor
        assert 1.0 <= caution.factor <= MAX_CAUTION


def test_the_share_of_late_ends_settles_below_one_in_a_hundred() -> None:
    """Where every estimate is half of the truth, so that more than half of it is late without caution."""
    caution = Caution()
    late = 0
    for _ in range(20_000):
        if caution.factor < 2.0:
            caution.ended_late()
            late += 1
        else:
            caution.ended_well(1)
    assert late < 200


def _refused(stage) -> list[str]:
    return [action.code for action in stage.last if isinstance(action, FailRequest)]


def test_requests_that_miss_their_deadlines_make_admission_refuse_earlier(stage) -> None:
    """What was admitted before would be refused after promises were broken, and is admitted again after enough were kept."""
    stage.model(max_batch=1)
    stage.measured_slots(0)
    stage.arrive((1, 4))
    stage.arrive((1, 4), deadline=0.32)
    assert [] == _refused(stage)
    stage.cancel(2)
    queue = stage.scheduler._queues[stage.scheduler.statistics().models[0].name]
    for _ in range(20):
        queue.caution.ended_late()
    stage.arrive((1, 4), deadline=0.32)
    assert ["overloaded"] == _refused(stage)
    assert "count 2.65 times" in stage.last[0].message
    queue.caution.ended_well(10_000)
    stage.arrive((1, 4), deadline=0.32)
    assert [] == _refused(stage)


def test_what_ends_late_in_the_queue_or_while_it_runs_counts(stage) -> None:
    """Both were admitted, and should not have been."""
    stage.model(max_batch=1)
    stage.measured_slots(0)
    stage.arrive((1, 4), deadline=0.15)
    stage.arrive((1, 4), deadline=0.3)
    stage.pass_time(0.5)
    assert 1.05**2 == stage.scheduler._queues["m"].caution.factor
