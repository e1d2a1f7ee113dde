"""Deadlines that cannot be met. A row of 4 takes 0.1 s."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.held import held
from tests.pipeline.scheduling.seen import Failed, Started
from tests.pipeline.scheduling.stage import Stage

from shapestream.scheduling.deadlines import SAFETY
from shapestream.scheduling.events import Arrival


@pytest.fixture
def alone(stage):
    """A slot that runs one request at a time, and is busy with request 1 until 0.1 s."""
    stage.model(max_batch=1)
    stage.measured_slots(0)
    stage.arrive((1, 4))
    return stage


def _order(stage, batches: int) -> list[int]:
    """Finishes batch after batch; the ids in the order in which so many started."""
    while len(stage.started) < batches:
        stage.finish(stage.started[-1], at=stage.now + 0.1)
    return [id_ for start in stage.started for id_ in start.requests]


def _failures(stage) -> list[tuple[int, str]]:
    return [(action.id, action.code) for action in stage.last if isinstance(action, Failed)]


def test_what_is_certain_to_be_late_is_refused_at_once(alone):
    """Not even half of the predicted time until the slot is free and then of its own is left."""
    alone.arrive((1, 4), deadline=0.09)
    assert [(2, "deadline_exceeded")] == _failures(alone)
    alone.arrive((1, 4), deadline=0.29)
    assert [] == _failures(alone)


def test_a_wait_that_outlasts_the_deadline_is_refused_with_a_hint(alone):
    """Somebody who comes back later may find it shorter."""
    alone.arrive(*[(1, 4)] * 10)
    alone.arrive((1, 4), deadline=0.6)
    (refused,) = alone.last
    assert ("overloaded", pytest.approx(1.1)) == (refused.code, refused.retry_after_s)
    alone.arrive((1, 4), deadline=1.7)
    assert [] == _failures(alone)


def test_the_expected_wait_is_that_of_a_fair_share(alone):
    """Another client's flood is not this client's wait."""
    alone.arrive(*[(1, 4)] * 10, client=1)
    alone.arrive((1, 4), client=2, deadline=0.6)
    assert [] == _failures(alone)


def test_priority_shortens_the_expected_wait(alone):
    """Who goes before the others need not wait for them."""
    alone.arrive(*[(1, 4)] * 10)
    alone.arrive((1, 4), deadline=0.6, priority=5)
    assert [] == _failures(alone)


def test_a_newcomer_waits_for_the_newcomers_before_it(alone):
    """Fair shares put none of them before another: whoever asks first goes first."""
    for client in range(10):
        alone.arrive((1, 4), client=client)
    alone.arrive((1, 4), client=10, deadline=0.8)
    assert [(12, "overloaded")] == _failures(alone)


def test_what_was_sent_ahead_is_waited_for(stage):
    """A slot is not free before it has run what waits there, too."""
    stage.model(max_batch=1)
    stage.measured_slots(0, prefetch_s=0.05)
    stage.arrive((1, 4), (1, 4))
    stage.wait(0.06)
    assert [None, 1] == [start.behind for start in stage.started]
    stage.arrive((1, 4), deadline=0.06 + 0.25)
    assert [(3, "overloaded")] == _failures(stage)


def test_time_is_left_for_the_whole_call(stage):
    """Eight rows of 64 take 0.6 s together: 1.46 s are enough for the wait and a call of one, and not for that."""
    stage.model(max_batch=8)
    stage.measured_slots(0)
    stage.arrive((1, 64))
    stage.arrive(*[(1, 64)] * 10)
    stage.arrive((1, 64), deadline=1.46)
    assert [(12, "overloaded")] == _failures(stage)
    stage.arrive((1, 64), deadline=2.42)
    assert [] == _failures(stage)


def test_nothing_is_refused_while_nothing_is_measured(stage):
    """Nobody knows what cannot be met; only a deadline that has passed is certain."""
    stage.model(max_batch=1)
    stage.slots(0)
    stage.arrive(*[(1, 4)] * 10, deadline=0.001)
    assert [] == _failures(stage)


def test_without_a_slot_nothing_is_refused(stage):
    """Workers may be starting; when one is there, what is hopeless then ends then."""
    stage.model()
    stage.arrive((1, 4), deadline=0.01)
    assert [] == _failures(stage)


def test_a_request_that_cannot_be_met_any_more_ends_at_that_moment(alone):
    """Half its predicted time before the deadline, instead of running for nothing, and the scheduler asks to be
    woken."""
    alone.arrive((1, 4), deadline=0.3)
    assert pytest.approx(0.25) == alone.scheduler.next_wakeup()
    alone.wait(alone.scheduler.next_wakeup())
    assert [(2, "deadline_exceeded")] == _failures(alone)
    assert "too little time is left" in alone.last[0].message
    assert 1 == len(alone.started)


def test_a_request_that_runs_has_until_its_deadline(alone):
    """Once it has started, predictions say nothing."""
    alone.arrive((1, 4), deadline=0.3)
    alone.finish(alone.started[0], at=0.1)
    alone.wait(0.27)
    assert {1: "delivered"} == alone.ends
    alone.finish(alone.started[1], at=0.29)
    assert {1: "delivered", 2: "delivered"} == alone.ends


def test_the_fastest_slot_decides_what_is_hopeless(stage):
    """A slow one does not make a deadline impossible that a fast one can meet."""
    stage.model(max_batch=1)
    stage.measured_slots(0, call_s=0.9, worker="slow")
    stage.arrive((1, 4), at=0.0)
    stage.finish(stage.started[0], run_s=0.904)
    stage.measured_slots(1, call_s=0.096, worker="fast", key="fast")
    stage.arrive((1, 4), (1, 4), at=1.0)
    stage.arrive((1, 4), deadline=1.4, at=1.0)
    assert [] == _failures(stage)


def test_an_idle_slot_tries_what_seems_hopeless(stage):
    """Otherwise a prediction that is far too long would never be corrected; beside it, the hopeless is refused."""
    stage.model(max_batch=1)
    stage.measured_slots(0)
    stage.arrive((1, 4), deadline=stage.now + 0.04)
    assert stage.now + 0.04 == stage.scheduler.next_wakeup()
    stage.arrive((1, 4), deadline=stage.now + 0.04)
    assert [(1,)] == [start.requests for start in stage.started]
    assert [(2, "deadline_exceeded")] == _failures(stage)


def test_a_short_deadline_takes_no_turn(alone):
    """First come, first served among equals, whatever their deadlines."""
    alone.arrive((1, 4), (1, 4), (1, 4), client=1)
    alone.arrive((1, 4), client=1, deadline=0.6)
    for client in (2, 3):
        alone.arrive((1, 9), (1, 9), client=client)
    assert 2 == next(id_ for id_ in _order(alone, 6) if id_ in range(2, 6))


def test_short_deadlines_buy_no_turns_from_others(alone):
    """Two clients with a backlog, one of which has deadlines: still one turn each."""
    alone.arrive((1, 8), (1, 8), (1, 8), client=1)
    alone.arrive((1, 9), (1, 9), (1, 9), client=2)
    alone.arrive((1, 4), (1, 5), (1, 6), client=2, deadline=1.0)
    turns = [1 if id_ <= 4 else 2 for id_ in _order(alone, 7)[1:]]
    assert 3 == turns.count(1)


def test_a_batch_is_cut_where_it_would_make_a_member_late(stage):
    """Eight rows of 64 together take 0.6 s; the one that has 0.25 s left does not wait for all of them."""
    stage.model(max_batch=8)
    stage.measured_slots(0)
    stage.arrive((1, 64))
    stage.arrive((1, 64), deadline=0.9)
    stage.arrive(*[(1, 64)] * 7)
    stage.finish(stage.started[0], at=0.6)
    assert 2 in stage.started[1].requests
    assert len(stage.started[1].requests) <= 3


@settings(max_examples=40, deadline=None)
@given(
    specs=st.lists(st.tuples(st.sampled_from([4, 4, 64, 128]), st.floats(0.05, 3.0)), min_size=1, max_size=30)
)
def test_where_predictions_are_right_nothing_starts_that_could_not_have_been_met(specs):
    """On an exact clock: a started request has at least half its predicted time left, and none starts late.

    An idle slot with an empty queue tries whatever comes.
    """
    stage = Stage()
    stage.model(max_batch=8)
    stage.measured_slots(0, 1, prefetch_s=0.01)
    deadlines = {}
    for size, deadline in specs:
        before = stage.scheduler.statistics()
        idle = before.free_slots > 0 and before.queued == 0
        (id_,) = stage.arrive((1, size), deadline=stage.now + deadline)
        deadlines[id_] = (stage.now + deadline, 0.0 if idle else 0.096 + 0.001 * size)
        _check_starts(stage, deadlines)
        if stage.started and len(stage.started) % 3 == 0:
            done = [start for start in stage.started if start.batch not in stage.finished]
            if done and done[0].behind in (None, *stage.finished):
                stage.finish(done[0], at=stage.now + 0.1)
                _check_starts(stage, deadlines)


def _check_starts(stage: Stage, deadlines: dict[int, tuple[float, float]]) -> None:
    for action in stage.last:
        if isinstance(action, Started):
            for id_ in action.requests:
                deadline, alone_s = deadlines[id_]
                assert stage.now < deadline - 0.49 * alone_s


def test_a_long_request_that_goes_later_is_no_part_of_the_wait(stage):
    """Ten short requests go before a newcomer, and one of a second after it: its deadline of a second is accepted."""
    stage.model(max_batch=1)
    stage.measured_slots(0, call_s=0.001, token_s=0.0039)
    stage.arrive((1, 4), client=1)
    for client in range(1, 11):
        stage.arrive((1, 1), client=client)
    stage.arrive((1, 256), client=1)
    (newcomer,) = stage.arrive((1, 4), client=20, deadline=1.0)
    assert [] == _failures(stage)
    while newcomer not in stage.ends:
        stage.finish(stage.started[-1], at=stage.now + 0.001 + 0.0039 * stage.started[-1].sizes[1])
    assert "delivered" == stage.ends[newcomer]


def test_a_long_request_that_goes_first_is_all_of_the_wait(stage):
    """One request of a second goes before a newcomer, and many short ones after it: its deadline of a second is refused."""
    stage.model(max_batch=1)
    stage.measured_slots(0, call_s=0.001, token_s=0.0039)
    stage.arrive((1, 4), client=1)
    stage.arrive((1, 256), client=2)
    stage.arrive(*[(1, 4)] * 40, client=1)
    stage.arrive((1, 4), client=20, deadline=1.0)
    assert ["overloaded"] == [code for _, code in _failures(stage)]


@pytest.mark.parametrize(("factor", "refused"), [(SAFETY + 0.01, []), (SAFETY - 0.01, ["overloaded"])])
def test_an_estimate_counts_with_one_margin_for_all(stage, factor, refused):
    """A wait of 0.1 s and a call of 0.1 s, whatever became of other estimates before."""
    stage.model(max_batch=1)
    stage.measured_slots(0)
    for _ in range(20):
        stage.arrive((1, 4), client=1, deadline=stage.now + 0.06)
        stage.finish(stage.started[-1], at=stage.now + 0.1)
    assert 20 == list(stage.ends.values()).count("deadline_exceeded")
    stage.arrive((1, 4))
    stage.arrive((1, 4), client=2, deadline=stage.now + factor * 0.2)
    assert refused == [code for _, code in _failures(stage)]


def test_what_arrives_together_is_let_in_together_where_slots_are_free(stage):
    """Each has a slot of its own, as it would have had one after the other."""
    stage.model(max_batch=1)
    stage.measured_slots(*range(8))
    stage.arrive((1, 4), (1, 4), (1, 4), deadline=0.13)
    assert [(1,), (2,), (3,)] == stage.starts()


def test_a_request_that_has_ended_is_not_held(stage):
    """Its tensors would stay with it, for as long as one with an earlier deadline runs, and others wait."""
    stage.model(max_batch=1)
    stage.measured_slots(0, 1)
    stage.arrive((1, 4), deadline=50.0)
    for _ in range(20):
        stage.arrive((1, 4), deadline=100.0)
        stage.finish(stage.started[-1], at=stage.now + 0.1)
    assert 20 == len(stage.ends)
    living = [thing for thing in held(stage.scheduler) if isinstance(thing, Arrival) and thing.id > 0]
    assert [1] == [arrival.id for arrival in living]
