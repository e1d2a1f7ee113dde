"""The call that a batch is run in: rounded sizes, static shapes, preparations, and what is remembered of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.scheduling.planning_stage import OWN_PRICES, FormulaPrices, affine

from shapestream.scheduling import call_costs
from shapestream.scheduling.call_costs import CallCosts
from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.rounding import ShapeRounding
from shapestream_engine.cost_table import CostPoint, CostTable


def _profile(**options) -> ModelProfile:
    options = {"paddable": (False, True), "dimensions": ("batch", "seq"), **options}
    return ModelProfile(name="m", has_batch=True, max_batch=8, **options)


SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@OWN_PRICES
@settings(deadline=None)
@given(
    SHAPES,
    st.sampled_from([(), ((2, 16),), ((2, 16), (8, 32), (1, 40))]),
    st.sampled_from([None, 6, 30]),
    st.lists(st.integers(1, 40), max_size=30),
    st.booleans(),
    st.booleans(),
)
def test_tables_and_single_calls_agree(lengths, static, max_shapes, seen, prepares, fills):
    """What the cuts are computed with is what a batch is then said to cost."""
    profile = _profile(static_shapes=static, max_shapes=max_shapes, fills_rows=fills, bounds=(8, 64))
    prices = affine(
        0.05,
        0.001,
        exact=dict.fromkeys(static, 0.01),
        new=(lambda rows, shape: 0.1 * (rows + shape[0] % 3)) if prepares else None,
    )
    sizes = None if max_shapes is None else ShapeRounding(profile)
    if sizes is not None:
        for length in seen:
            sizes.observe((1, length))
            sizes.start(1, (length,))
    costs = CallCosts(prices, profile, sizes)
    costs.renew()
    table = costs.table(np.array([[length] for length in lengths]), 8)
    for place, length in enumerate(lengths):
        for rows in range(1, 9):
            call = costs.call(rows, (length,))
            assert call.rows >= rows
            assert call.shape[0] >= length
            assert pytest.approx(call.seconds) == table[place, rows]
        assert table[place, 0] == pytest.approx(table[place, 1])


@OWN_PRICES
def test_what_was_worked_out_is_forgotten_with_its_version():
    """New predictions give new tables; the same ones are not asked for twice."""
    prices = affine()
    costs = CallCosts(prices, _profile())
    costs.renew()
    shapes = np.array([[4], [5]])
    costs.table(shapes, 8)
    asked = prices.asked
    costs.renew()
    costs.table(shapes, 8)
    assert asked == prices.asked
    prices.formula = lambda rows, elements: 1.0 + rows * 0.0 * elements
    prices.version = 2
    costs.renew()
    assert (costs.table(shapes, 8) == 1.0).all()


@OWN_PRICES
def test_tables_of_endless_shapes_are_forgotten_all_together(monkeypatch):
    """A window of shapes, some of which were known before, is priced although there is no room for all of them."""
    monkeypatch.setattr(call_costs, "_REMEMBERED", 4)
    prices = affine()
    costs = CallCosts(prices, _profile())
    costs.renew()
    for length in range(1, 20):
        table = costs.table(np.array([[length], [length + 1], [length + 2]]), 8)
        assert pytest.approx(prices.second(3, (length + 2,))) == table[2, 3]
        assert len(costs._tables) <= 4 + 3


@OWN_PRICES
def test_a_full_batch_is_one_to_which_more_would_gain_nothing():
    """With a fixed part that is all rows; where seconds per row stop falling it is fewer."""
    costs = CallCosts(affine(1.0), _profile())
    costs.renew()
    assert 8 == costs.useful_rows((4,))[0]
    fours = FormulaPrices(lambda rows, elements: np.ceil(rows / 4) * elements)
    costs = CallCosts(fours, _profile())
    costs.renew()
    assert 4 == costs.useful_rows((4,))[0]


def test_workers_that_are_alike_share_what_was_worked_out():
    """Unless what is new to the device of each matters."""
    model = CostModel()
    model.add_model(_profile())
    points = tuple(CostPoint(sizes=(rows, 8), seconds=0.01 * rows) for rows in (1, 8))
    table = CostTable(key="k", dimensions=("batch", "seq"), points=points)
    for slot, worker in enumerate(("one", "one", "other")):
        model.join(slot, worker, {"m": table}, ["m"])
    assert model["m"].call_costs(0) is model["m"].call_costs(2)
    model["m"].observe(0, (1, 8), 1.0, preparations=1)
    assert model["m"].call_costs(0) is not model["m"].call_costs(2)
    assert model["m"].call_costs(0) is model["m"].call_costs(1)
