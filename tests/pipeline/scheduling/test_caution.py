"""Admission trusts its estimates less while what it admitted ends late. A row of 4 takes 0.1 s."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shapestream.scheduling.admission import FIRST_CAUTION, MAX_CAUTION, Caution
from shapestream.scheduling.events import FailRequest


def test_the_first_rush_is_met_with_a_margin_that_results_take_away() -> None:
    """Nothing is known of the estimates before; when enough went well, they are taken as they are."""
    caution = Caution()
    assert FIRST_CAUTION == caution.factor
    caution.ended_well(10_000)
    assert 1.0 == round(caution.factor, 3)


def test_what_was_admitted_before_the_factor_rose_raises_it_by_half_at_most() -> None:
    """A queue full of promises that were all too short is one mistake; what came later is another."""
    caution = Caution()
    for _ in range(100):
        caution.ended_late(0.0, 1.0)
    assert FIRST_CAUTION * 1.5 == caution.factor
    caution.ended_late(1.0, 2.0)
    assert FIRST_CAUTION * 1.5 < caution.factor


@given(st.lists(st.booleans() | st.integers(1, 1000), max_size=300))
def test_the_factor_stays_between_one_and_its_limit(ends: list[bool | int]) -> None:
    """Each late end raises it, each result lowers it."""
    caution = Caution()
    for now, end in enumerate(ends):
        before = caution.factor
        if isinstance(end, bool):
            caution.ended_late(now, now)
            assert before < caution.factor or MAX_CAUTION == caution.factor
        else:
            caution.ended_well(end)
            assert before >= caution.factor
        assert 1.0 <= caution.factor <= MAX_CAUTION


def test_the_share_of_late_ends_settles_near_one_in_a_hundred() -> None:
    """Where every estimate is half of the truth, so that more than half of it would be late without caution."""
    caution = Caution()
    late = 0
    for now in range(20_000):
        if caution.factor < 2.0:
            caution.ended_late(now, now)
            late += 1
        else:
            caution.ended_well(1)
    assert late < 20_000 / 80


def _refused(stage) -> list[str]:
    return [action.code for action in stage.last if isinstance(action, FailRequest)]


def _in_time(stage, until: float) -> None:
    """One request after the other, until that time."""
    while stage.now < until:
        stage.arrive((1, 4))
        stage.finish(stage.started[-1], at=stage.now + 0.1)


def test_broken_promises_make_admission_refuse_earlier_and_kept_ones_trust_again(stage) -> None:
    """A deadline that would be accepted, is not after a slot took much longer than it is predicted to."""
    stage.model(max_batch=1)
    stage.measured_slots(0)
    stage.arrive((1, 4))
    stage.arrive(*[(1, 4)] * 9, deadline=1.2)
    assert [] == _refused(stage)
    stage.wait(1.2)
    assert 9 == list(stage.ends.values()).count("deadline_exceeded")
    stage.finish(stage.started[0], at=1.2)
    stage.arrive((1, 4))
    stage.arrive((1, 4), deadline=stage.now + 0.25)
    assert ["overloaded"] == _refused(stage)
    assert "count 1.65 times" in stage.last[0].message
    stage.finish(stage.started[-1], at=1.3)
    _in_time(stage, 400.0)
    stage.arrive((1, 4))
    stage.arrive((1, 4), deadline=stage.now + 0.25)
    assert [] == _refused(stage)


def test_what_ends_late_while_it_runs_counts(stage) -> None:
    """It was admitted, and its slot worked for nobody."""
    stage.model(max_batch=1)
    stage.measured_slots(0)
    stage.arrive((1, 4), deadline=0.15)
    stage.wait(0.5)
    stage.finish(stage.started[0], at=0.5)
    stage.arrive((1, 4))
    stage.arrive((1, 4), deadline=stage.now + 0.205)
    assert ["overloaded"] == _refused(stage)


def test_what_was_not_promised_breaks_no_promise(stage) -> None:
    """Deadlines that only an optimist accepts, of requests that find a slot free, end late and raise nothing."""
    stage.model(max_batch=1)
    stage.measured_slots(0)
    for _ in range(20):
        stage.arrive((1, 4), client=1, deadline=stage.now + 0.06)
        stage.finish(stage.started[-1], at=stage.now + 0.1)
    assert 20 == list(stage.ends.values()).count("deadline_exceeded")
    stage.arrive((1, 4))
    stage.arrive((1, 4), client=2, deadline=stage.now + 0.23)
    assert [] == _refused(stage)
