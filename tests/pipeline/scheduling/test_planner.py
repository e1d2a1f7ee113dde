"""The batch that a request goes in: always legal, at least cost, and in time."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.scheduling.planning_stage import (
    OWN_PRICES,
    FormulaPrices,
    Waiting,
    affine,
    ids,
    make_queue,
)

from shapestream.scheduling import planner
from shapestream.scheduling.planner import BATCH_S, DELAYED, WINDOW, Plan, batch_of, plan_batch
from shapestream.scheduling.queueing import QUEUED
from shapestream.scheduling.worker_costs import USES

pytestmark = OWN_PRICES

SIZES = st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 5))
SURFACES = st.sampled_from(
    [
        affine(),
        affine(1.0),
        affine(measured=False),
        FormulaPrices(lambda rows, elements: (rows * 7919 + elements * 104729) % 97 * 0.01 + 0.01),
    ]
)


def _plan(waiting, prices, plan=None, **options):
    """The next batch, in a turn of its own unless a plan is given."""
    return plan_batch(
        waiting.first(), waiting.queue, waiting.costs(prices), plan or Plan(), **{"starts_at": 0.0, **options}
    )


def _in_order(queue, members) -> bool:
    """Whether of every shape only the first by rank are taken."""
    taken = {request.id for request in members}
    for bucket in queue.buckets.values():
        order = [request.id for request in bucket.held if request.state is QUEUED]
        chosen = [id_ for id_ in order if id_ in taken]
        if chosen != order[: len(chosen)]:
            return False
    return True


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            SIZES,
            st.sampled_from([0.0, 5.0, -3.0]),
            st.none() | st.floats(0.0, 0.4),
        ),
        min_size=1,
        max_size=14,
    ),
    st.tuples(st.booleans(), st.booleans()),
    SURFACES,
    st.builds(
        dict,
        max_batch=st.integers(1, 8),
        max_batch_bytes=st.none() | st.integers(0, 30),
        max_padding_ratio=st.none() | st.sampled_from([0.0, 0.25]),
    ),
    st.none() | st.floats(0.0, 0.2),
    st.sampled_from([1.0, 2.5]),
    st.integers(1, 4),
)
def test_every_batch_is_legal_until_the_queue_is_empty(
    arrivals, padded, prices, limits, most_s, slowdown, slots
):
    """Anchor, lanes, order, rows, bytes, padding, share and deadlines, whatever arrives between turns."""
    queue = make_queue(padded, **limits)
    waiting = Waiting(queue)
    later = arrivals[len(arrivals) // 2 :]
    for sizes, rank, deadline in arrivals[: len(arrivals) // 2]:
        waiting.arrive(sizes, rank=rank, deadline=deadline)
    plan = Plan()
    batches = 0
    while queue.count or later:
        if not batches % slots or not queue.count:
            plan.begin_turn()
            if later:
                sizes, rank, deadline = later.pop()
                waiting.arrive(sizes, rank=rank, deadline=deadline)
        batches += 1
        anchor = waiting.first()
        cut = _plan(waiting, prices, plan, most_s=most_s, slowdown=slowdown)
        members = list(cut.members)
        assert anchor in members
        assert len(members) == len(ids(cut))
        assert _in_order(queue, members)
        for axis, may_pad in enumerate(padded):
            assert may_pad or len({request.shape[axis] for request in members}) == 1
        assert sum(request.rows for request in members) == cut.rows == cut.call_rows
        assert tuple(map(max, zip(*[request.shape for request in members], strict=True))) == cut.shape
        real = sum(request.rows * prod(request.shape) for request in members)
        assert cut.rows * prod(cut.shape) - real == cut.padding
        if prices.measured:
            assert pytest.approx(prices.second(cut.rows, cut.shape)) == cut.seconds
        if len(members) > 1:
            _check_limits(cut, limits, prices, real, most_s, slowdown)
        waiting.start(cut)


def _check_limits(cut, limits, prices, real, most_s, slowdown) -> None:
    predicted = prices.second(max(1, cut.rows), cut.shape)
    assert cut.rows <= limits["max_batch"]
    if limits["max_batch_bytes"] is not None:
        assert cut.rows * prod(cut.shape) <= limits["max_batch_bytes"]
    if limits["max_padding_ratio"] is not None:
        assert real >= (1.0 - limits["max_padding_ratio"]) * cut.rows * prod(cut.shape)
    if most_s is not None:
        assert predicted <= most_s / slowdown * 1.000001
    if prices.measured:
        for request in cut.members:
            alone = prices.second(max(1, request.rows), request.shape) * slowdown
            if request.deadline is not None and alone <= request.deadline:
                assert predicted * slowdown <= request.deadline * 1.000001


def test_lengths_that_are_near_share_a_batch_and_far_ones_do_not():
    """The fixed part of a call is worth some padding, not any."""
    waiting = Waiting(make_queue())
    waiting.arrive((1, 20), (1, 100), (1, 21), (1, 104), (1, 19))
    prices = affine(0.1, 0.001)
    cut = _plan(waiting, prices)
    assert {0, 2, 4} == ids(cut)
    waiting.start(cut)
    assert {1, 3} == ids(_plan(waiting, prices))


def test_where_batches_save_nothing_requests_run_alone():
    """Long rows on a CPU: a call of two costs twice as much, so nobody waits for a second one."""
    waiting = Waiting(make_queue())
    waiting.arrive(*[(1, 200)] * 6, *[(1, 201)] * 6)
    cut = _plan(waiting, FormulaPrices(lambda rows, elements: rows * elements * 1e-3 + 1e-6))
    assert 1 == cut.rows


@pytest.fixture
def programmes() -> Iterator[Mock]:
    """The dynamic programmes that were run."""
    with _programmes() as run:
        yield run


def _programmes() -> Any:
    return patch.object(planner, "cut_window", wraps=planner.cut_window)


def test_equal_shapes_are_not_planned(programmes):
    """One shape in the lane, or one that fills its batch: no dynamic programme."""
    waiting = Waiting(make_queue())
    plan = Plan()
    waiting.arrive(*[(1, 16)] * 20)
    cut = _plan(waiting, affine(1.0), plan)
    assert set(range(8)) == ids(cut)
    waiting.start(cut)
    waiting.arrive((1, 17))
    assert 8 == _plan(waiting, affine(1.0), plan).rows
    assert 0 == programmes.call_count


def _three_groups(plan) -> Waiting:
    """Lengths near 20, 60 and 120, the oldest of each group in turn; the first batch is started."""
    waiting = Waiting(make_queue())
    waiting.arrive((1, 20), (1, 60), (1, 120))
    waiting.arrive((1, 21), (1, 61), (1, 122), (1, 22), (1, 62), (1, 121))
    waiting.start(_plan(waiting, NEAR, plan))
    return waiting


NEAR = affine(0.05, 0.001)


def test_one_programme_serves_all_slots_of_a_turn(programmes):
    """The other segments are still optimal, and cost nothing; the next turn plans anew."""
    plan = Plan()
    waiting = _three_groups(plan)
    second = _plan(waiting, NEAR, plan)
    assert ({1, 4, 7}, 1) == (ids(second), programmes.call_count)
    waiting.start(second)
    assert ({2, 5, 8}, 1) == (ids(_plan(waiting, NEAR, plan)), programmes.call_count)
    plan.begin_turn()
    assert ({2, 5, 8}, 2) == (ids(_plan(waiting, NEAR, plan)), programmes.call_count)


def test_members_that_have_left_within_a_turn_are_not_missed(programmes):
    """One that was given up is gone; the others of its segment go together."""
    plan = Plan()
    waiting = _three_groups(plan)
    waiting.queue.drop(waiting.queue.buckets[61,].first())
    assert ({1, 7}, 1) == (ids(_plan(waiting, NEAR, plan)), programmes.call_count)


def test_a_request_outside_of_the_window_gets_one_of_its_own(programmes):
    """A lane that is longer than a window is cut again around the next request, in the same turn."""
    plan = Plan()
    waiting = Waiting(make_queue())
    waiting.arrive((1, 1000), (1, 3000), (1, 3010), *[(1, 1000 + order) for order in range(1, 3 * WINDOW)])
    waiting.start(_plan(waiting, NEAR, plan))
    assert ({1, 2}, 2) == (ids(_plan(waiting, NEAR, plan)), programmes.call_count)


def test_a_model_without_a_batch_axis_runs_requests_alone():
    """No company, and the call's sizes are the request's."""
    waiting = Waiting(make_queue((True, True), has_batch=False))
    queue = waiting.queue
    (first, _) = waiting.arrive((1, 4, 5), (1, 4, 5))
    cut = _plan(waiting, affine())
    assert [first] == list(cut.members)
    assert (4, 5) == cut.sizes(queue.has_batch)


def test_the_slots_share_bounds_a_batch():
    """It lasts no longer than wanted, on a slot of that slowdown, unless its first request does."""
    prices = affine(0.01, 0.001)
    for slowdown, most_s, rows in ((1.0, 0.05, 4), (2.0, 0.06, 2)):
        waiting = Waiting(make_queue())
        waiting.arrive(*[(1, 10)] * 8)
        assert rows == _plan(waiting, prices, most_s=most_s, slowdown=slowdown).rows
        assert 1 == _plan(waiting, prices, most_s=1e-9, slowdown=slowdown).rows
    assert 2 == _plan(waiting, prices, max_rows=2).rows


def test_a_batch_is_cut_smaller_rather_than_make_a_member_late():
    """The urgent one stays, the others are left for the next batch."""
    waiting = Waiting(make_queue())
    prices = affine(1.0, 0.001)
    waiting.arrive((1, 100), (1, 101), (1, 102))
    waiting.arrive((1, 101), deadline=1.25)
    cut = _plan(waiting, prices)
    assert {0, 1} == ids(cut)
    waiting = Waiting(make_queue())
    waiting.arrive((1, 100), (1, 102), (1, 103))
    waiting.arrive((1, 101), deadline=1.25)
    assert {0, 3} == ids(_plan(waiting, prices))
    assert {0, 1, 2, 3} == ids(_plan(waiting, prices, starts_at=1.0))
    assert 4 == _plan(waiting, affine(1.0, 0.001, measured=False)).rows


def test_shapes_that_the_device_knows_are_preferred():
    """A new shape whose share of its preparation is more than padding wastes is not made."""
    known = {(2, (24,)), (1, (20,)), (1, (24,))}
    prices = affine(0.1, 0.001, new=lambda rows, shape: 0.0 if (rows, shape) in known else USES)
    waiting = Waiting(make_queue())
    waiting.arrive((1, 20), (1, 24), (1, 20))
    calls = []
    while waiting.queue.count:
        cut = _plan(waiting, prices)
        calls.append((cut.rows, cut.shape, round(cut.seconds, 6)))
        waiting.start(cut)
    assert [(1, (20,), 0.12), (2, (24,), 0.148)] == calls


def test_a_new_shape_is_an_investment():
    """A queue does not keep to single requests for ever, because only their shapes are known already."""
    prices = affine(0.1, 0.001, new=lambda rows, shape: 0.0 if rows == 1 else 0.3)
    waiting = Waiting(make_queue())
    waiting.arrive((1, 20), (1, 20), (1, 21), (1, 21))
    cut = _plan(waiting, prices)
    assert (4, pytest.approx(0.1 + 0.084 + 0.3)) == (cut.rows, cut.seconds)


def test_a_model_without_other_dimensions_is_cut_within_limits():
    """Where only the rows vary, a batch is made smaller for a deadline too."""
    waiting = Waiting(make_queue(()))
    waiting.arrive(*[(1,)] * 8, deadline=0.0145)
    cut = _plan(waiting, affine(0.01, 0.001))
    assert (4, pytest.approx(0.014)) == (cut.rows, cut.seconds)


def test_a_started_call_counts_as_known():
    """The second batch of a shape is not charged for its preparation; the prices may still say otherwise."""
    made: set[tuple[int, tuple[int, ...]]] = set()
    prices = affine(new=lambda rows, shape: 0.0 if (rows, shape) in made else 5.0)
    waiting = Waiting(make_queue())
    waiting.arrive((2, 20), (1, 21), (1, 22))
    first = _plan(waiting, prices)
    made.add((first.rows, first.shape))
    again = _plan(waiting, prices)
    assert first.members == again.members
    assert pytest.approx(first.seconds - 5.0) == again.seconds


def test_a_batch_runs_at_a_static_shape_that_is_faster():
    """Exactly its rows, its shape fits under it, and the call's sizes are the static model's."""
    prices = affine(0.01, 0.001, exact={(2, 32): 0.02})
    waiting = Waiting(make_queue(static_shapes=((2, 32),)))
    waiting.arrive((1, 30), (1, 31))
    cut = _plan(waiting, prices)
    assert ((2, 32), 3, 0.02) == (cut.sizes(True), cut.padding, cut.seconds)
    slow = affine(0.01, 0.001, exact={(2, 32): 9.0})
    assert ((2, 31), 1) == (_plan(waiting, slow).sizes(True), _plan(waiting, slow).padding)


def test_a_static_shape_is_not_padded_to_where_padding_is_forbidden():
    """The dimension that may not be padded has to agree."""
    prices = affine(0.01, 0.001, exact={(1, 8, 32): 1e-6})
    waiting = Waiting(make_queue((False, True), static_shapes=((1, 8, 32),)))
    waiting.arrive((1, 7, 30))
    assert (1, 7, 30) == _plan(waiting, prices).sizes(True)


def test_reruns_keep_exactly_their_members():
    """Whatever it costs."""
    waiting = Waiting(make_queue())
    requests = waiting.arrive((1, 4), (2, 400))
    cut = batch_of(requests, waiting.costs(affine()))
    assert requests == cut.members
    assert (3, (400,), 396) == (cut.rows, cut.shape, cut.padding)


def test_a_deep_lane_costs_no_more_than_a_shallow_one():
    """Of all that wait only those around the anchor are looked at."""
    prices = affine()
    asked = []
    for count in (1_000, 5_000):
        waiting = Waiting(make_queue(max_batch=64))
        waiting.arrive(*[(1, 10 + order * 7919 % count) for order in range(count)])
        prices.asked = 0
        _plan(waiting, prices)
        asked.append(prices.asked)
    assert asked[0] == asked[1]


def _partitions(members):
    """Every partition of a sequence into contiguous, not empty parts."""
    if not members:
        yield []
        return
    for end in range(1, len(members) + 1):
        for others in _partitions(members[end:]):
            yield [members[:end], *others]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=8), st.sampled_from([0.003, 0.02, 0.1]), st.booleans()
)
def test_a_new_plan_is_optimal(lengths, fixed_s, measured):
    """The batch is part of a partition of all that waits than which none is cheaper."""
    prices = affine(fixed_s, 0.001, measured=measured)
    waiting = Waiting(make_queue())
    waiting.arrive(*[(1, length) for length in lengths])
    with _programmes() as programmes:
        cut = _plan(waiting, prices)

    def cost(batches) -> float:
        return sum(
            (prices.second(len(batch), (max(batch),)) + (BATCH_S if measured else 0.0))
            * (DELAYED * len(lengths) + 0.5 * len(batch) if measured else 1.0)
            for batch in batches
        )

    left = sorted(lengths)
    batch = sorted(request.shape[0] for request in cut.members)
    least = min(map(cost, _partitions(left)))
    for length in batch:
        left.remove(length)
    with_batch = cost([batch]) + min(map(cost, _partitions(left)))
    if programmes.called:
        assert pytest.approx(least) == with_batch
    else:
        # Equal shapes are not planned: as many as are best for each of them, whatever remains.
        assert 1 == len(set(batch))


def test_what_cannot_be_run_takes_nobody_along():
    """No call is said to take such a shape; it goes alone, and the model says why."""
    prices = FormulaPrices(
        lambda rows, elements: np.where(elements > 50, np.inf, 0.01 + rows * elements * 1e-4)
    )
    waiting = Waiting(make_queue())
    waiting.arrive((1, 60), (1, 60), (1, 20))
    cut = _plan(waiting, prices)
    assert ({0}, 0.0) == (ids(cut), cut.seconds)
    waiting = Waiting(make_queue())
    waiting.arrive((1, 60), (1, 60))
    assert {0} == ids(_plan(waiting, prices))
