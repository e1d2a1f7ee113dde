"""The dynamic programme against every possible cut of small windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.scheduling.planning_stage import OWN_PRICES

from shapestream.scheduling.planner import WINDOW
from shapestream.scheduling.segments import (
    NEVER,
    SegmentLimits,
    Window,
    are_nested,
    cut_window,
    nearest,
    optimal_ends,
    segment_seconds,
)

pytestmark = OWN_PRICES


class Formula:
    """Costs by a formula of rows and elements."""

    def __init__(self, seconds: Callable[..., np.ndarray]) -> None:
        self._seconds = seconds
        self.asked = 0
        self.bytes = self
        """It says the bytes of calls, too."""

    def seconds(self, rows, shapes):
        """One formula for all."""
        self.asked += len(rows)
        return self._seconds(rows, shapes.prod(axis=1)).astype(np.float64)

    def table(self, shapes, max_rows):
        """The same, from 0 to `max_rows` rows."""
        rows = np.tile(np.arange(max_rows + 1), len(shapes))
        return self.seconds(rows, np.repeat(shapes, max_rows + 1, axis=0)).reshape(len(shapes), -1)

    def padded_columns(self, shapes):
        """Any size may be padded."""
        return list(shapes.T)

    def of_batches(self, rows, shapes):
        """A byte per element."""
        return rows * shapes.prod(axis=1)


AFFINE = Formula(lambda rows, elements: 8.0 + rows * elements)
STEPS = Formula(lambda rows, elements: 5.0 + np.ceil(rows / 4) * elements**1.5)
# What is cheap and what is dear follows no rule at all.
WILD = Formula(lambda rows, elements: (rows * 7919 + elements * 104729) % 97 + 1.0)
COSTS = st.sampled_from([AFFINE, STEPS, WILD])


def _window(requests: Sequence[tuple[int, ...]]) -> Window:
    """Of (rows, *shape), sorted as lanes are."""
    ordered = sorted(requests, key=lambda request: (np.prod(request[1:]), request[1:]))
    return Window(
        rows=np.array([request[0] for request in ordered], dtype=np.intp),
        shapes=np.array([request[1:] for request in ordered], dtype=np.intp),
    )


def _partitions(n: int) -> Iterator[list[int]]:
    """The ends of every partition into contiguous segments."""
    for mask in range(2 ** (n - 1)):
        yield [place + 1 for place in range(n) if place == n - 1 or mask >> place & 1]


def _set_partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, *others = items
    for partition in _set_partitions(others):
        yield [[first], *partition]
        for place, block in enumerate(partition):
            yield [*partition[:place], [first, *block], *partition[place + 1 :]]


def _seconds(window: Window, members: Sequence[int], costs: Formula, limits: SegmentLimits) -> float:
    """Of one batch; inf where it is not legal."""
    rows = int(window.rows[members].sum())
    shape = window.shapes[members].max(axis=0)
    seconds = float(costs.seconds(np.array([rows]), shape[None])[0])
    if len(members) == 1:
        return seconds
    real = int((window.rows * window.shapes.prod(axis=1))[members].sum())
    too_padded = limits.max_padding_ratio is not None and real < (1.0 - limits.max_padding_ratio) * (
        rows * int(shape.prod())
    )
    too_large = limits.max_bytes is not None and rows * int(shape.prod()) > limits.max_bytes
    too_long = limits.most_s is not None and seconds > limits.most_s
    too_many = rows > limits.max_rows or len(members) > limits.max_rows
    return float("inf") if too_many or too_padded or too_large or too_long else seconds


def _cost(
    window: Window,
    batches: Sequence[Sequence[int]],
    costs: Formula,
    limits: SegmentLimits,
    delayed: float | None,
    batch_s: float,
) -> float:
    return sum(
        (_seconds(window, batch, costs, limits) + batch_s)
        * (1.0 if delayed is None else delayed + 0.5 * len(batch))
        for batch in batches
    )


def _segments(ends: Sequence[int]) -> list[list[int]]:
    return [list(range(start, end)) for start, end in pairwise([0, *ends])]


REQUESTS_1D = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=9)
REQUESTS_2D = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=8
)
LIMITS = st.builds(
    SegmentLimits,
    max_rows=st.integers(1, 10),
    max_bytes=st.none() | st.integers(0, 20),
    max_padding_ratio=st.none() | st.sampled_from([0.0, 0.125, 0.25, 0.5]),
    most_s=st.none() | st.floats(1.0, 100.0),
)


@settings(max_examples=60)
@given(
    REQUESTS_1D | REQUESTS_2D,
    COSTS,
    LIMITS,
    st.none() | st.floats(0.0, 100.0),
    st.sampled_from([0.0, 3.0]),
)
def test_no_partition_into_segments_is_cheaper(requests, costs, limits, delayed, batch_s):
    """Whatever costs, limits, rows, dimensions and weights: all contiguous partitions are tried."""
    window = _window(requests)
    ends = cut_window(window, costs, limits, delayed=delayed, batch_s=batch_s)
    assert len(window) == ends[-1]
    least = min(
        _cost(window, _segments(other), costs, limits, delayed, batch_s) for other in _partitions(len(window))
    )
    assert pytest.approx(least) == _cost(window, _segments(ends), costs, limits, delayed, batch_s)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=7),
    st.sampled_from([AFFINE, STEPS]),
    st.integers(1, 5),
    st.none() | st.integers(0, 30),
)
def test_contiguity_loses_nothing_where_costs_grow_with_length(lengths, costs, max_rows, delayed):
    """One padded dimension, one row each, seconds that never fall with the length: no sets are cheaper than segments."""
    window = _window([(1, length) for length in lengths])
    limits = SegmentLimits(max_rows=max_rows)
    ends = cut_window(window, costs, limits, delayed=delayed)
    least = min(
        _cost(window, sets, costs, limits, delayed, 0.0) for sets in _set_partitions(list(range(len(window))))
    )
    assert pytest.approx(least) == _cost(window, _segments(ends), costs, limits, delayed, 0.0)


def test_contiguity_may_lose_where_rows_differ():
    """The condition is needed: with unequal rows under a limit, sets can be cheaper than segments."""
    window = _window([(2, 10), (2, 11), (1, 12), (1, 13)])
    limits = SegmentLimits(max_rows=3)
    costs = Formula(lambda rows, elements: 1000.0 + rows * elements)
    ends = cut_window(window, costs, limits)
    sets = [[0, 2], [1, 3]]
    assert _cost(window, sets, costs, limits, None, 0.0) < _cost(
        window, _segments(ends), costs, limits, None, 0.0
    )


@given(st.integers(1, 40), st.integers(1, 12), st.randoms(use_true_random=False))
def test_the_programme_finds_the_least_sum(n, reach, random):
    """`optimal_ends` alone against a plain recursion, over arbitrary costs and illegal segments."""
    costs = np.array([[random.choice([1.0, 2.0, 5.0, np.inf]) for _ in range(reach)] for _ in range(n)])
    costs[:, -1] = [random.uniform(0.0, 3.0) for _ in range(n)]
    best = [0.0]
    for end in range(1, n + 1):
        best.append(
            min(
                best[end - length] + costs[end - 1, reach - length]
                for length in range(1, min(reach, end) + 1)
            )
        )
    ends = optimal_ends(costs)
    found = sum(costs[end - 1, reach - (end - start)] for start, end in pairwise([0, *ends]))
    assert pytest.approx(best[-1]) == found


def test_of_equally_cheap_cuts_the_larger_batches_win():
    """Fewer calls mean fewer hand-overs, though they cost the same."""
    free = Formula(lambda rows, elements: rows * 1.0)
    assert [4] == cut_window(_window([(1, 8)] * 4), free, SegmentLimits(max_rows=8))


def test_a_short_queue_hesitates_to_let_the_first_wait_for_the_last():
    """The same costs: a long queue is cut by work alone, a short one by waiting times."""
    window = _window([(1, 10)] * 4)
    costs = Formula(lambda rows, elements: 1.0 + rows * elements)
    assert [4] == cut_window(window, costs, SegmentLimits(max_rows=8), delayed=1000.0)
    assert [1, 2, 3, 4] == cut_window(window, costs, SegmentLimits(max_rows=8), delayed=2.0)


def test_a_request_that_nothing_can_run_spoils_no_other_segment():
    """It is alone in its segment, and the others are cut as if it were not there."""
    window = _window([(1, 1), (1, 1), (1, 2), (1, 100)])
    costs = Formula(lambda rows, elements: np.where(elements > 50, np.inf, 10.0 + rows * elements))
    assert [3, 4] == cut_window(window, costs, SegmentLimits(max_rows=8))
    assert np.isfinite(segment_seconds(window, costs, SegmentLimits(max_rows=8))[-1, -1])
    assert NEVER > 1.0


def test_a_request_larger_than_a_batch_is_alone():
    """More rows than the limit: no company, and costs of its own."""
    window = _window([(1, 4), (20, 4), (1, 4)])
    assert [1, 2, 3] == cut_window(window, AFFINE, SegmentLimits(max_rows=8))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_what_is_looked_at_is_bounded(dimensions):
    """However large a batch may be, no segment is longer than the window, and few more costs are asked for."""
    random = np.random.default_rng(7)
    requests = [(1, *shape) for shape in random.integers(1, 200, (WINDOW, dimensions)).tolist()]
    costs = Formula(lambda rows, elements: 1.0 + rows * elements)
    seconds = segment_seconds(_window(requests), costs, SegmentLimits(max_rows=10_000))
    assert seconds.size <= WINDOW**2
    assert costs.asked <= 2 * WINDOW**2 + WINDOW


def test_few_different_shapes_are_asked_for_once_each():
    """The costs of equal call shapes come from one table, also with two dimensions."""
    random = np.random.default_rng(7)
    requests = [(1, *shape) for shape in random.integers(1, 4, (200, 2)).tolist()]
    costs = Formula(lambda rows, elements: 1.0 + rows * elements)
    segment_seconds(_window(requests), costs, SegmentLimits(max_rows=64))
    assert costs.asked <= 9 * 65


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=24),
    COSTS,
    st.integers(1, 12),
    st.sampled_from([None, 0.1, 0.5]),
    st.sampled_from([None, 400, 4000]),
)
def test_the_nearest_pass_no_limit_and_pay(requests, costs, max_rows, max_padding_ratio, max_bytes):
    """The first request gets company within all limits, and only if that costs less per efficient second than alone."""
    rows, shapes = np.array([r[0] for r in requests]), np.array([r[1:] for r in requests])
    limits = SegmentLimits(max_rows=max_rows, max_padding_ratio=max_padding_ratio, max_bytes=max_bytes)
    window, cost_s = Window(rows=rows, shapes=shapes), np.full(len(requests), 2.0)
    places = nearest(window, cost_s, costs, limits, delayed=50.0, batch_s=0.1)
    assert len({0, *places}) == len(places) + 1
    chosen = [0, *places]
    total, largest = int(rows[chosen].sum()), shapes[chosen].max(axis=0)

    def weighed(count: int, total: int, largest: np.ndarray) -> float:
        seconds = float(costs.seconds(np.array([total]), largest[None])[0])
        return (seconds + 0.1) * (50.0 + 0.5 * count) / (2.0 * count)

    assert weighed(len(chosen), total, largest) <= weighed(1, int(rows[0]), shapes[0]) * (1 + 1e-9)
    if places:
        assert total <= max_rows
        if max_bytes is not None:
            assert total * largest.prod() <= max_bytes
        if max_padding_ratio is not None:
            real = (rows[chosen] * shapes[chosen].prod(axis=1)).sum()
            assert real >= (1.0 - max_padding_ratio) * total * largest.prod()


def test_neighbours_by_elements_that_are_not_nested_share_no_call():
    """Of wide and tall pictures, the anchor gets those of its own kind, which are further by elements."""
    shapes = np.array([(10, 90), (91, 10), (10, 92), (93, 10), (10, 94), (95, 10)])
    window = Window(rows=np.ones(6, np.intp), shapes=shapes)
    costs = Formula(lambda rows, elements: 1.0 + 1e-3 * rows * elements)
    limits = SegmentLimits(max_rows=6)
    assert not are_nested(shapes)
    assert [2, 4] == sorted(nearest(window, np.full(6, 1.2), costs, limits, delayed=50.0, batch_s=0.0))
