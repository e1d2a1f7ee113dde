"""The call that a batch is run in: rounded sizes, static shapes, preparations, and what is remembered of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.scheduling.planning_stage import OWN_PRICES, FormulaPrices, affine

from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.rounding import ShapeRounding
from shapestream_engine.cost_table import CostPoint, CostTable


def _profile(**options) -> ModelProfile:
    options = {"paddable": (False, True), "dimensions": ("batch", "seq"), "max_batch": 8, **options}
    return ModelProfile(name="m", has_batch=True, **options)


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
    costs = prices.costs(profile, sizes)
    table = costs.table(np.array([[length] for length in lengths]), 8)
    for place, length in enumerate(lengths):
        for rows in range(1, 9):
            call = costs.call(rows, (length,))
            assert call.rows >= rows
            assert call.shape[0] >= length
            assert pytest.approx(call.seconds) == table[place, rows]


@OWN_PRICES
def test_a_shape_is_priced_once_in_a_version():
    """All that is asked of a shape looks up one row: the window, one call, the useful rows, the share of a request."""
    prices = affine()
    costs = prices.costs(_profile())
    costs.table(np.array([[4], [5]]), 8)
    asked = prices.asked
    costs.table(np.array([[5], [4]]), 8)
    costs.call(3, (4,))
    costs.worker_class.useful_rows((5,))
    costs.worker_class.batched_share_s(1, (4,))
    assert 2 * 9 == asked == prices.asked


@OWN_PRICES
def test_prices_of_endless_shapes_are_forgotten_all_together():
    """A window of shapes, some of which were known before, is priced although there is no room for all of them."""
    row = 1 << 18  # a million prices are remembered, which are four rows
    prices = affine()
    costs = prices.costs(_profile(max_batch=row - 1))
    for length in range(1, 20):
        before = prices.asked
        table = costs.table(np.array([[length], [length + 1], [length + 2]]), 8)
        assert pytest.approx(0.01 + 0.001 * 3 * (length + 2)) == table[2, 3]
        assert prices.asked - before in (row, 3 * row)


@OWN_PRICES
def test_a_full_batch_is_one_to_which_more_would_gain_nothing():
    """With a fixed part that is all rows; where seconds per row stop falling it is fewer."""
    costs = affine(1.0).costs(_profile())
    assert 8 == costs.worker_class.useful_rows((4,))[0]
    fours = FormulaPrices(lambda rows, elements: np.ceil(rows / 4) * elements)
    costs = fours.costs(_profile())
    assert 4 == costs.worker_class.useful_rows((4,))[0]


def test_workers_that_are_alike_have_one_table():
    """They differ by what is new to the device of each, once that is known to cost anything."""
    model = CostModel()
    model.add_model(_profile())
    points = tuple(CostPoint(sizes=(rows, 8), seconds=0.01 * rows) for rows in (1, 8))
    table = CostTable(key="k", dimensions=("batch", "seq"), points=points)
    for slot, worker in enumerate(("one", "one", "other")):
        model.join(slot, worker, {"m": table}, ["m"])
    one, same, other = [model["m"].on(slot) for slot in range(3)]
    assert one is same
    assert one.row_seconds((8,)) is other.row_seconds((8,))
    model["m"].observe(0, (1, 8), 1.0, preparations=1)
    assert one.row_seconds((8,))[1] < other.row_seconds((8,))[1]
    assert one.row_seconds((8,))[8] == other.row_seconds((8,))[8]
