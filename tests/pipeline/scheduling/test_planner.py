"""The planner's cuts, against every possible cut of small queues."""

from __future__ import annotations

from itertools import combinations
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.model_queue import ModelQueue
from shapestream.scheduling.planner import REACH, cut, fair_share, next_up, together
from shapestream.scheduling.records import Request, Slot

# Dyadic, so that the bound is met exactly or not at all.
RATIOS = st.sampled_from([0.0, 0.125, 0.25, 0.5])


def _queue(padded: tuple[bool, ...], max_padding_ratio: float, max_batch: int = 8) -> ModelQueue:
    names = ("batch", "height", "width")[: len(padded) + 1]
    return ModelQueue(
        ModelProfile(
            name="m",
            dimensions=names,
            has_batch=True,
            paddable=(False, *padded),
            max_batch=max_batch,
            max_padding_ratio=max_padding_ratio,
        )
    )


def _fill(queue: ModelQueue, sizes: list[tuple[int, ...]], ranks: list[float] | None = None) -> list[Request]:
    """Requests of these sizes, rows first, in this order of arrival."""
    requests = []
    for order, (rows, *shape) in enumerate(sizes):
        rank = ranks[order] if ranks else 0.0
        request = Request(order, 0, queue, rows, tuple(shape), 1, None, 0, 0.0, rank, order)
        queue.add(request)
        requests.append(request)
    return requests


def _padding_allowed(members: list[Request], max_padding_ratio: float) -> bool:
    shape = [max(sizes) for sizes in zip(*[request.shape for request in members], strict=True)]
    computed = prod(shape) * sum(request.rows for request in members)
    wanted = sum(request.rows * prod(request.shape) for request in members)
    return wanted >= (1.0 - max_padding_ratio) * computed


def _keeps_order(members: list[Request], requests: list[Request]) -> bool:
    """Whether of every shape only the first ones are taken."""
    taken = {request.id for request in members}
    passed_over: set[tuple[int, ...]] = set()
    for request in requests:
        if request.id not in taken:
            passed_over.add(request.shape)
        elif request.shape in passed_over:
            return False
    return True


def _legal(members: list[Request], requests: list[Request], max_rows: int, max_padding_ratio: float) -> bool:
    return (
        sum(request.rows for request in members) <= max_rows
        and _padding_allowed(members, max_padding_ratio)
        and _keeps_order(members, requests)
    )


def _most_rows(requests: list[Request], max_rows: int, max_padding_ratio: float) -> int:
    """The most rows of any legal batch with the first request, by trying them all."""
    first, *others = requests
    batches = ([first, *company] for size in range(len(others) + 1) for company in combinations(others, size))
    return max(
        sum(request.rows for request in batch)
        for batch in batches
        if _legal(batch, requests, max_rows, max_padding_ratio)
    )


@given(st.lists(st.integers(0, 24), min_size=1, max_size=8), st.integers(1, 6), RATIOS)
def test_single_rows_of_one_padded_dimension_are_cut_optimally(lengths, max_rows, ratio):
    """For requests of one row no legal batch with the oldest request has more rows than the planner's."""
    queue = _queue((True,), ratio)
    requests = _fill(queue, [(1, length) for length in lengths])
    plan = cut(requests[0], max_rows)
    assert _legal(list(plan.members), requests, max_rows, ratio)
    assert _most_rows(requests, max_rows, ratio) == plan.rows


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=7),
    st.integers(3, 8),
    RATIOS,
    st.tuples(st.booleans(), st.booleans()),
)
def test_every_cut_is_legal(sizes, max_rows, ratio, padded):
    """With several rows and dimensions too, a cut has its anchor, its bounds, its lane and its order."""
    queue = _queue(padded, ratio)
    requests = _fill(queue, sizes)
    plan = cut(requests[0], max_rows)
    members = list(plan.members)
    assert requests[0] in members
    assert len(members) == len({request.id for request in members})
    assert _legal(members, requests, max_rows, ratio)
    for axis, may_pad in enumerate(padded):
        assert may_pad or len({request.shape[axis] for request in members}) == 1
    assert together(members) == plan
    assert prod(plan.shape) * plan.rows - sum(r.rows * prod(r.shape) for r in members) == plan.padding


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=7),
    st.integers(3, 8),
    RATIOS,
)
def test_company_of_another_size_never_costs_rows(sizes, max_rows, ratio):
    """A padded cut has at least the rows that equals alone would have filled."""
    alone = _queue((False, False), ratio)
    padded = _queue((True, True), ratio)
    rows_alone = cut(_fill(alone, sizes)[0], max_rows).rows
    assert rows_alone <= cut(_fill(padded, sizes)[0], max_rows).rows


def test_an_old_small_request_joins_larger_ones_when_many_share_its_padding():
    """The padding of one is measured against the whole call, so the oldest need not run alone."""
    queue = _queue((True,), 0.125)
    requests = _fill(queue, [(1, 10), *[(1, 20)] * 7])
    plan = cut(requests[0], 8)
    assert ((20,), 8, 10) == (plan.shape, plan.rows, plan.padding)


def test_of_equal_company_the_smaller_shape_is_chosen():
    """Two ways to fill the batch: the one that computes less wins."""
    queue = _queue((True,), 0.5)
    requests = _fill(queue, [(1, 16), (1, 20), (1, 15)])
    assert [0, 2] == [request.id for request in cut(requests[0], 2).members]


def test_planning_looks_no_further_than_its_reach():
    """However many sizes wait, the planner looks at a bounded number of neighbours."""
    queue = _queue((True,), 0.5, max_batch=1000)
    requests = _fill(queue, [(1, 1000), *[(1, 1000 + step) for step in range(1, 101)]])
    assert REACH + 1 == cut(requests[0], 1000).rows


def test_rank_orders_a_bucket_across_priorities():
    """Company is taken in the order of rank, not of arrival."""
    queue = _queue((False,), 0.0)
    requests = []
    for order, (priority, rank) in enumerate([(0, 0.0), (0, 0.5), (1, -0.5), (1, 0.1)]):
        request = Request(order, 0, queue, 1, (4,), 1, None, priority, 0.0, rank, order)
        queue.add(request)
        requests.append(request)
    first = queue.oldest.first()
    assert first is not None
    assert requests[2] is first[2]
    assert [2, 0, 3] == [request.id for request in cut(requests[2], 3).members]


def test_the_first_by_rank_of_all_models_with_a_free_slot_is_next():
    """A model without a free slot is passed over, however long it has waited."""
    queues = [_queue((False,), 0.0) for _ in range(3)]
    for queue, rank in zip(queues, (1.0, 2.0, 3.0), strict=True):
        _fill(queue, [(1, 4)], [rank])
    assert next_up(queues, 0.0) is None
    for queue in queues[1:]:
        queue.free[0] = Slot(0, frozenset({"m"}))
    chosen = next_up(queues, 0.0)
    assert chosen is not None
    assert queues[1] is chosen.queue


@pytest.mark.parametrize(("rows", "share"), [(7, 4), (8, 4), (100, 8)])
def test_the_share_of_a_slot_is_rounded_up_and_bounded(rows, share):
    """Seven rows on two free slots are four and three; the share never exceeds `max_batch`."""
    queue = _queue((False,), 0.0, max_batch=8)
    _fill(queue, [(1, 4)] * rows)
    for id_ in range(2):
        slot = queue.free[id_] = Slot(id_, frozenset({"m"}))
        slot.queues.append(queue)
    assert share == fair_share(queue, slot)
