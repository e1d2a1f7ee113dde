"""What the cost model remembers of calls."""

from __future__ import annotations

import math

import pytest

from shapestream.scheduling.cost_model import MAX_SHAPES, CostModel


def test_it_knows_nothing_before_the_first_call():
    """No estimate is invented."""
    costs = CostModel()
    assert (None, None, {}) == (costs.call_s("m"), costs.request_s("m"), costs.shapes("m"))


def test_the_first_call_is_the_first_estimate():
    """One measurement is an estimate, per call and per request."""
    costs = CostModel()
    costs.observe("m", (4, 16), 4, 2.0)
    assert (2.0, 0.5) == (costs.call_s("m"), costs.request_s("m"))
    assert 2.0 == costs.call_s("m", (4, 16))


def test_an_unmet_shape_costs_what_the_model_costs():
    """Without interpolation the model's mean is the best answer."""
    costs = CostModel()
    costs.observe("m", (1, 1), 1, 1.0)
    assert 1.0 == costs.call_s("m", (9, 9))


def test_the_means_follow_a_change():
    """After twenty calls of another duration the old one hardly counts."""
    costs = CostModel()
    costs.observe("m", (1, 1), 1, 10.0)
    for _ in range(20):
        costs.observe("m", (1, 1), 1, 1.0)
    assert pytest.approx(1.0, abs=0.2) == costs.call_s("m")
    assert pytest.approx(1.0, abs=0.2) == costs.call_s("m", (1, 1))
    assert pytest.approx(1.0, abs=0.2) == costs.request_s("m")


def test_shapes_are_bounded():
    """However many shapes come, so many are remembered, the newest among them."""
    costs = CostModel()
    for size in range(MAX_SHAPES + 10):
        costs.observe("m", (1, size), 1, float(size))
    shapes = costs.shapes("m")
    assert MAX_SHAPES == len(shapes)
    assert (1, 0) not in shapes
    assert float(MAX_SHAPES + 9) == shapes[1, MAX_SHAPES + 9]


@pytest.mark.parametrize("run_s", [-1.0, math.nan, math.inf])
def test_impossible_times_are_ignored(run_s):
    """A worker's nonsense does not poison the estimates."""
    costs = CostModel()
    costs.observe("m", (1, 1), 1, run_s)
    assert costs.call_s("m") is None
