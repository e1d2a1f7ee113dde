"""A plan is kept from batch to batch, repaired by what arrives, and made anew within its budget."""

from __future__ import annotations

import pytest
from tests.pipeline.scheduling.planning_stage import Waiting, affine, ids, make_queue

from shapestream.scheduling.planner import (
    LOOP_SHARE,
    MOST_CUT_S,
    MOST_S,
    RENEW,
    SHARE,
    UNMEASURED_S,
    WINDOWS,
    PlanningBudget,
    plan_batch,
    planning_s,
)

SURFACE = affine(0.05, 0.001)


def _plan(waiting, budget, surface=SURFACE):
    return plan_batch(waiting.first(), surface, budget, now=0.0)


def _three_groups(budget) -> Waiting:
    """Lengths near 20, 60 and 120, the oldest of each group in turn."""
    waiting = Waiting(make_queue())
    waiting.arrive((1, 20), (1, 60), (1, 120))
    waiting.arrive((1, 21), (1, 61), (1, 122), (1, 22), (1, 62), (1, 121))
    waiting.start(_plan(waiting, budget))
    return waiting


def test_one_programme_serves_several_batches():
    """Nothing arrives: the other segments are still optimal, and cost nothing."""
    budget = PlanningBudget(first_s=1.0)
    waiting = _three_groups(budget)
    assert 1 == budget.cuts
    second = _plan(waiting, budget)
    waiting.start(second)
    third = _plan(waiting, budget)
    assert ({1, 4, 7}, {2, 5, 8}) == (ids(second), ids(third))
    assert 1 == budget.cuts


def test_an_arrival_joins_the_segment_that_it_falls_into():
    """Though no programme may be run."""
    budget = PlanningBudget(first_s=1.0)
    waiting = _three_groups(budget)
    budget.balance_s = 0.0
    waiting.arrive((1, 61))
    waiting.arrive((1, 90))
    assert {1, 4, 7, 9} == ids(_plan(waiting, budget))
    assert 1 == budget.cuts


def test_an_arrival_that_would_cost_more_than_alone_stays_out():
    """It falls into a segment, but would pad more members than the plan counted on."""
    budget = PlanningBudget(first_s=1.0)
    waiting = Waiting(make_queue())
    waiting.arrive((1, 60), (1, 80), (1, 400))
    surface = affine(0.1, 0.001)
    assert {0, 1} == ids(_plan(waiting, budget, surface))
    budget.balance_s = 0.0
    waiting.queue.drop(waiting.queue.buckets[80,].first())
    waiting.arrive(*[(1, 60)] * 6)
    waiting.arrive((1, 79))
    assert {0, *range(3, 9)} == ids(_plan(waiting, budget, surface))


def test_members_that_have_left_are_not_missed():
    """Cancelled ones are gone; what is left goes together."""
    budget = PlanningBudget(first_s=1.0)
    waiting = _three_groups(budget)
    bucket = waiting.queue.buckets[61,]
    waiting.queue.drop(bucket.first())
    assert {1, 7} == ids(_plan(waiting, budget))


def test_an_arrival_outside_of_every_segment_goes_alone():
    """Until the next programme it has no company."""
    budget = PlanningBudget(first_s=1.0)
    waiting = _three_groups(budget)
    budget.balance_s = 0.0
    waiting.arrive((1, 90), rank=-1.0)
    assert {9} == ids(_plan(waiting, budget))


def test_a_segment_that_has_mostly_gone_is_not_worth_its_padding():
    """The ends of a wide segment, without the middle, are better off apart."""
    budget = PlanningBudget(first_s=1.0)
    waiting = Waiting(make_queue())
    waiting.arrive((1, 20), *[(1, length) for length in range(21, 25)], (1, 400))
    waiting.arrive(*[(1, 100 + length) for length in range(2)])
    surface = affine(0.05, 0.001)
    first = _plan(waiting, budget, surface)
    assert {0, 1, 2, 3, 4} == ids(first)
    budget.balance_s = 0.0
    waiting.queue.take(list(first.members[1:]))
    waiting.arrive((8, 24))
    assert {0} == ids(_plan(waiting, budget, surface))


@pytest.mark.parametrize("arrivals", [0, 8])
def test_a_plan_is_made_anew_after_enough_arrivals(arrivals):
    """More than an eighth of its requests."""
    budget = PlanningBudget(first_s=1.0)
    waiting = Waiting(make_queue())
    waiting.arrive(*[(1, 20 + order) for order in range(8 * RENEW)])
    waiting.start(_plan(waiting, budget))
    waiting.arrive(*[(1, 20)] * arrivals)
    waiting.arrive((1, 20))
    _plan(waiting, budget)
    assert 1 + (arrivals >= 8) == budget.cuts


def test_new_costs_make_a_new_plan():
    """What was planned with other predictions is out of date."""
    budget = PlanningBudget(first_s=1.0)
    waiting = _three_groups(budget)
    surface = affine(0.05, 0.001)
    surface.version = 2
    _plan(waiting, budget, surface)
    assert 2 == budget.cuts


def test_planning_costs_its_share_at_most():
    """Whatever arrives, what was spent is what was earned and the first gift, at most."""
    budget = PlanningBudget(first_s=0.0005)
    waiting = Waiting(make_queue())
    earned = 0.0
    for turn in range(200):
        waiting.arrive(*[(1, 10 + (turn * 7919 + each * 31) % 200) for each in range(4)])
        cut = _plan(waiting, budget, affine(0.001, 0.00001))
        waiting.start(cut)
        budget.earn(cut.seconds, float(turn))
        earned += SHARE * cut.seconds
        assert budget.spent_s <= 0.0005 + earned + 1e-12
    assert budget.cuts > 1


def test_a_budget_saves_up_a_bounded_amount():
    """An hour of one long batch does not pay for minutes of planning."""
    budget = PlanningBudget()
    budget.earn(3600.0, 0.0)
    assert MOST_S == budget.balance_s
    assert not budget.spend(2 * MOST_CUT_S)
    empty = PlanningBudget(first_s=0.0)
    empty.earn(None, 0.0)
    assert SHARE * UNMEASURED_S == empty.balance_s


def test_many_slots_do_not_earn_more_than_the_planning_thread_has():
    """A thousand batches of a second each, started within a second, pay for a tenth of that second at most."""
    budget = PlanningBudget(first_s=0.0)
    spent = 0
    for number in range(1000):
        budget.earn(1.0, number * 1e-3)
        spent += budget.spend(1e-3)
    assert spent <= (LOOP_SHARE * 1.0 + MOST_S) / 1e-3
    assert spent >= 0.9 * LOOP_SHARE / 1e-3


@pytest.mark.parametrize(("dimensions", "most"), [(1, 256), (2, 64)])
def test_windows_are_as_large_as_a_millisecond_allows(dimensions, most):
    """A programme over several dimensions takes longer, so it looks at fewer requests."""
    assert most == max(size for size in WINDOWS if planning_s(size, 64, dimensions) <= MOST_CUT_S)


def test_a_lane_that_goes_on_beyond_the_window_is_planned_again_at_its_edge():
    """The segment at the edge of a window was cut off; whoever is there gets a window of its own."""
    budget = PlanningBudget(first_s=1.0)
    waiting = Waiting(make_queue())
    waiting.arrive((1, 1000), *[(1, 1000 + order) for order in range(1, 600)])
    waiting.start(_plan(waiting, budget))
    plan = budget.costs(SURFACE, waiting.queue.profile).plans[()]
    assert (False, True) == plan.cut_off
    edge = waiting.queue.buckets[plan.highs[-1][1]].first()
    plan_batch(edge, SURFACE, budget, now=0.0)
    assert 2 == budget.cuts
    again = budget.costs(SURFACE, waiting.queue.profile).plans[()]
    assert again.segments[0].low < edge.bucket.key < again.segments[-1].low


def test_a_plan_outlives_its_lane():
    """A queue that is empty now and then is not planned from the beginning each time, if that cannot be afforded."""
    budget = PlanningBudget(first_s=1.0)
    waiting = _three_groups(budget)
    while waiting.queue.count:
        waiting.start(_plan(waiting, budget))
    budget.balance_s = 0.0
    assert not waiting.queue.lanes
    waiting.arrive((1, 60), (1, 120), (1, 62))
    assert {9, 11} == ids(_plan(waiting, budget))
    assert 1 == budget.cuts
