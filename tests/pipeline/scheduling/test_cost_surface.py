"""Surfaces: what is predicted between, beside and beyond what was measured, and how traffic corrects it."""

from __future__ import annotations

from itertools import count, product
from math import inf, isfinite, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapestream.scheduling.cost_base import CostBase
from shapestream.scheduling.cost_line import Line
from shapestream.scheduling.cost_surface import Surface
from shapestream.scheduling.events import ModelProfile
from shapestream_engine.batching.calls import RowCover

Sizes = tuple[int, ...]


def profile(dimensions: int = 1, **changes: object) -> ModelProfile:
    """A model with a batch axis and so many others."""
    values: dict[str, object] = {
        "name": "m",
        "dimensions": ("batch", *"xyz"[:dimensions]),
        "has_batch": True,
        "paddable": (False, *[True] * dimensions),
        "max_batch": 64,
        **changes,
    }
    return ModelProfile(**values)  # type: ignore[arg-type] # built above


def surface(points: dict[Sizes, float], own: ModelProfile | None = None) -> Surface:
    """Over these points."""
    own = profile(len(next(iter(points))) - 1) if own is None else own
    return Surface(own, CostBase(points, own.static_shapes, count(1)), Line())


def both_ways(over: Surface, calls: list[tuple[int, Sizes]]) -> list[float]:
    """The predictions for these batches; the same one by one as all together, which is checked here."""
    single = [over.second(rows, shape) for rows, shape in calls]
    together = over.seconds(
        np.array([rows for rows, _ in calls]),
        np.array([list(shape) for _, shape in calls]).reshape(len(calls), -1),
    )
    assert single == pytest.approx(together.tolist(), rel=1e-9)
    return single


def linear(sizes: Sizes) -> float:
    """A call of 2 ms and 1 us per element."""
    return 2e-3 + 1e-6 * prod(sizes)


AXIS = st.lists(st.integers(1, 300), min_size=1, max_size=4, unique=True).map(sorted)
CALLS = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400)), min_size=1, max_size=20)


@st.composite
def rising_grids(draw: st.DrawFn) -> tuple[list[list[int]], np.ndarray]:
    """Axes, and values over all of their nodes that never fall along an axis."""
    axes = draw(st.lists(AXIS, min_size=1, max_size=3))
    shape = tuple(map(len, axes))
    steps = draw(st.lists(st.floats(1e-6, 1.0), min_size=prod(shape), max_size=prod(shape)))
    values = np.array(steps).reshape(shape)
    for axis in range(len(shape)):
        values = np.cumsum(values, axis)
    return axes, values


def brute_force(axes: list[list[int]], values: np.ndarray, sizes: Sizes) -> float:
    """Multilinear: interpolated along one axis after the other, by NumPy."""
    for axis, size in zip(reversed(axes), reversed(sizes), strict=True):
        lines = values.reshape(-1, len(axis))
        values = np.array([np.interp(size, axis, line) for line in lines])
    return float(values[0])


@given(rising_grids(), st.data())
def test_between_measured_points_it_is_multilinear(grid, data):
    """On a full grid every prediction within it is what plain interpolation says, and exact at the points."""
    axes, values = grid
    points = {
        tuple(axis[place] for axis, place in zip(axes, node, strict=True)): float(values[node])
        for node in product(*[range(len(axis)) for axis in axes])
    }
    inside = [st.integers(axis[0], axis[-1]) for axis in axes]
    asked = data.draw(st.lists(st.tuples(*inside), min_size=1, max_size=10))
    asked += list(points)
    found = both_ways(surface(points), [(sizes[0], sizes[1:]) for sizes in asked])
    assert [brute_force(axes, values, sizes) for sizes in asked] == pytest.approx(found, rel=1e-6)
    assert list(points.values()) == pytest.approx(found[-len(points) :], rel=1e-6)


@given(
    st.dictionaries(
        st.tuples(st.integers(1, 99), st.integers(0, 999)), st.floats(0.0, 10.0), min_size=1, max_size=12
    ),
    CALLS,
)
def test_any_table_gives_sensible_predictions(points, calls):
    """Whatever was measured, with whatever holes and noise: finite, never negative, never falling with size."""
    over = surface(points)
    found = both_ways(over, [(rows, (size,)) for rows, size in calls])
    assert all(isfinite(seconds) and seconds >= 0.0 for seconds in found)
    for rows, size in calls:
        least = over.second(rows, (size,))
        assert least <= over.second(rows + 1, (size,)) * (1 + 1e-9)
        assert least <= over.second(rows, (size + 1,)) * (1 + 1e-9)


@given(
    st.sets(st.tuples(st.sampled_from([1, 4, 16]), st.sampled_from([8, 64, 512])), min_size=1),
    st.integers(1, 64),
    st.integers(8, 2000),
)
def test_where_seconds_are_linear_in_elements_few_points_do(kept, rows, seq):
    """The corner of the grid that a calibration has time for says all about calls of any size."""
    corner = {(1, 8), (1, 64), (4, 8), (4, 64)}
    points = {sizes: linear(sizes) for sizes in corner | kept}
    assert linear((rows, seq)) == pytest.approx(both_ways(surface(points), [(rows, (seq,))])[0], rel=1e-6)


CALIBRATED = [
    *[(1, seq) for seq in (1, 3, 64, 128, 256)],
    *[(2, seq) for seq in (1, 3, 16, 32)],
    *[(rows, seq) for rows in (4, 8, 16) for seq in (1, 3)],
    *[(16, 8), (32, 1), (32, 8)],
]
"""What a calibration had time for, of a model whose calls of 1 or 4 rows are run by static models of their own."""


@given(st.sampled_from(CALIBRATED), st.floats(0.6, 1.7), st.integers(1, 64), st.integers(1, 512))
def test_one_point_that_is_off_leads_nowhere_far(point, factor, rows, seq):
    """A machine's noise in two small calls must not make calls a hundred times as large look free."""
    truth = {sizes: 2e-3 + 2e-4 * prod(sizes) for sizes in [*CALIBRATED, (rows, seq)]}
    points = {sizes: truth[sizes] for sizes in CALIBRATED}
    points[point] *= factor
    found = surface(points).second(rows, (seq,))
    assert 0.5 <= found / truth[rows, seq] <= 2.0


def test_one_point_is_enough_to_compare():
    """More elements take longer, in proportion; fewer are not free."""
    over = surface({(2, 32): 1.0})
    half, whole, double = both_ways(over, [(1, (32,)), (2, (32,)), (4, (32,))])
    assert 0.0 < half <= whole == 1.0
    assert 2.0 == double


def test_models_without_dynamic_sizes_have_surfaces_too():
    """No batch axis, no dimension: one number."""
    own = ModelProfile(name="m", dimensions=(), has_batch=False, paddable=(), max_batch=1)
    over = Surface(own, CostBase({(1,): 0.25}, (), count(1)), Line())
    assert 0.25 == over.second(1, ())
    assert [0.25] == over.seconds(np.array([1]), np.zeros((1, 0), np.intp)).tolist()


# ---------------------------------------------------------------- what batches become


@pytest.mark.parametrize("whole_first", [True, False])
@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (3, 5), (8,)])
def test_covered_rows_cost_the_sum_of_their_calls(sizes, whole_first):
    """Where only some numbers of rows are allowed, a batch costs its calls; more rows take more of the largest."""
    cover = RowCover(sizes, divide=whole_first)
    most = 2 * sizes[-1] + 1
    own = profile(max_batch=most, row_calls=tuple(cover(rows) for rows in range(most + 1)))
    points = {(rows, seq): linear((rows, seq)) for rows in sizes for seq in (8, 64)}
    over = surface(points, own)
    calls = [(rows, (seq,)) for rows in range(most + 1) for seq in (8, 20, 64)]
    expected = [sum(linear((each, *shape)) for each in cover(rows)) for rows, shape in calls]
    assert expected == pytest.approx(both_ways(over, calls))
    far = over.second(10 * most, (8,))
    assert isfinite(far)
    assert far > 5 * over.second(most, (8,))


def test_what_cannot_be_run_costs_infinity():
    """Beyond the model's bounds there is no price."""
    own = profile(bounds=(8, 100))
    over = surface({(1, 8): 0.1, (8, 100): 1.0}, own)
    found = both_ways(over, [(8, (100,)), (9, (100,)), (8, (101,))])
    assert [False, True, True] == [seconds == inf for seconds in found]
    alone = ModelProfile(name="m", dimensions=("x",), has_batch=False, paddable=(True,), max_batch=1)
    assert inf == Surface(alone, CostBase({(1, 8): 1.0}, (), count(1)), Line()).second(2, (8,))


def test_static_shapes_cost_what_was_measured_for_them():
    """Exactly their sizes, and no others; one that was not measured costs what its like do."""
    points = {sizes: linear(sizes) for sizes in product((1, 8), (8, 64))}
    own = profile(static_shapes=((4, 16), (4, 99), (5, 16), (2, 32)))
    over = surface({**points, (4, 16): 1e-5, (4, 99): 2e-5, (5, 16): 3e-5}, own)
    asked = [(4, (16,)), (4, (99,)), (5, (16,)), (2, (32,)), (5, (99,)), (4, (17,)), (600, (16,))]
    found = both_ways(over, asked)
    assert [1e-5, 2e-5, 3e-5] == found[:3]
    assert [linear((rows, *shape)) for rows, shape in asked[3:]] == pytest.approx(found[3:])


def test_predictions_are_remembered_until_the_version_changes():
    """The same question has the same answer while plans made with it are valid."""
    base = CostBase({(1, 8): 0.001, (8, 64): 0.01}, (), count(1))
    own = profile()
    over = Surface(own, base, Line())
    before, version = over.second(4, (20,)), over.version
    while over.version == version:
        assert before == over.second(4, (20,))
        base.learn(over.calls(4, (20,)), 2 * before, None, requests=4)
    assert over.second(4, (20,)) > before


# ---------------------------------------------------------------- learning


def learned(over: Surface, base: CostBase, rows: int, seq: int, busy_s: float, times: int = 1) -> None:
    """Batches that took so long."""
    for _ in range(times):
        base.learn(over.calls(rows, (seq,)), busy_s, "w", requests=rows)


def with_table(*workers: str) -> tuple[Surface, CostBase]:
    """A surface over the linear grid, and its workers."""
    points = {sizes: linear(sizes) for sizes in product((1, 4, 16, 64), (8, 64, 512))}
    base = CostBase(points, (), count(1))
    for worker in workers or ("w",):
        base.join(worker)
    return Surface(profile(), base, Line()), base


def without_table() -> tuple[Surface, CostBase]:
    """A surface that has seen 40 honest batches of many sizes."""
    base = CostBase({}, (), count(1))
    base.join("w")
    over = Surface(profile(), base, Line())
    for turn in range(40):
        rows, seq = 1 + turn % 7, 8 * (1 + turn % 5)
        learned(over, base, rows, seq, linear((rows, seq)))
    return over, base


@pytest.mark.parametrize("start", [with_table, without_table])
@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_an_outlier_hardly_counts(start, factor):
    """A batch of 100 times its usual duration (the machine stood still) moves no prediction by 10 %."""
    over, base = start()
    asked = [(1, (8,)), (5, (40,)), (7, (16,)), (16, (64,))]
    before = both_ways(over, asked)
    learned(over, base, 5, 40, factor * linear((5, 40)))
    learned(over, base, 5, 40, linear((5, 40)))  # whatever was held back is published by now
    assert all(0.9 < after / was < 1.1 for after, was in zip(both_ways(over, asked), before, strict=True))


@pytest.mark.parametrize("start", [with_table, without_table])
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_lasting_change_is_followed(start, factor):
    """After 30 batches at another speed, that speed is what is expected."""
    over, base = start()
    for turn in range(30):
        rows, seq = 1 + turn % 7, 8 * (1 + turn % 5)
        learned(over, base, rows, seq, factor * linear((rows, seq)))
    found = over.second(4, (24,))
    assert factor * linear((4, 24)) == pytest.approx(found, rel=0.15)


def test_one_region_may_change_alone():
    """Long calls turn out to take twice as long as measured: short ones are predicted as before."""
    over, base = with_table()
    for _ in range(60):
        learned(over, base, 16, 512, 2 * linear((16, 512)))
        learned(over, base, 4, 8, linear((4, 8)))
    assert 2 * linear((16, 512)) == pytest.approx(over.second(16, (512,)), rel=0.1)
    assert linear((4, 8)) == pytest.approx(over.second(4, (8,)), rel=0.1)


def test_small_changes_leave_the_version_alone():
    """Within 5 % plans stay valid, however many batches confirm it."""
    over, base = with_table()
    version = over.version
    random = np.random.default_rng(1)
    for _ in range(200):
        learned(over, base, 4, 64, float(linear((4, 64)) * random.uniform(0.98, 1.02)))
    assert version == over.version


def test_traffic_alone_finds_both_parts_of_a_call():
    """Without a table: the fixed part and the part per element, from batches of different sizes."""
    over, _ = without_table()
    assert over.measured
    for rows, seq in ((1, 8), (7, 40), (64, 512)):
        assert linear((rows, seq)) == pytest.approx(over.second(rows, (seq,)), rel=0.02)


def test_equal_batches_say_nothing_about_the_fixed_part():
    """All of one size: their seconds are known; what one of their requests alone would take stays a guess, in between."""
    base = CostBase({}, (), count(1))
    over = Surface(profile(), base, Line())
    for _ in range(500):
        base.learn(over.calls(8, (16,)), 0.09, None, requests=8)
    assert 0.09 == pytest.approx(over.second(8, (16,)))
    assert 0.09 / 8 < over.second(1, (16,)) < 0.09
    assert 0.02 == pytest.approx(over.second(1, (16,)), rel=0.05)


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 512), st.floats(1e-6, 10.0)), min_size=1, max_size=30
    )
)
@settings(max_examples=50)
def test_whatever_is_observed_predictions_stay_sensible(batches):
    """Neither part of a learned line is negative; nothing observed makes a prediction useless."""
    for over, base in (with_table(), without_table()):
        for rows, seq, busy_s in batches:
            learned(over, base, rows, seq, busy_s)
        found = both_ways(over, [(rows, (seq,)) for rows in (1, 9, 64, 100) for seq in (1, 50, 1000)])
        assert all(isfinite(seconds) and seconds >= 0.0 for seconds in found)


def test_before_anything_ran_calls_can_be_compared():
    """The prior: sharing a call pays, padding costs, and a longer row is dearer."""
    base = CostBase({}, (), count(1))
    over = Surface(profile(), base, Line())
    assert not over.measured
    one, two, longer, apart = both_ways(over, [(1, (16,)), (2, (16,)), (2, (17,)), (1, (17,))])
    assert one < two < 2 * one
    assert two < longer < one + apart


def test_a_static_shape_learns_by_itself():
    """What its own model shows is not what the dynamic one does."""
    points = {sizes: linear(sizes) for sizes in product((1, 8), (8, 64))}
    own = profile(static_shapes=((4, 16),))
    base = CostBase(points, own.static_shapes, count(1))
    over = Surface(own, base, Line())
    before = over.second(4, (17,))
    for _ in range(100):
        base.learn(over.calls(4, (16,)), 1e-4, None, requests=4)
    assert 1e-4 == pytest.approx(over.second(4, (16,)), rel=0.06)
    assert before == over.second(4, (17,))
