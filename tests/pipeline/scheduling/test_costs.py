"""What batches are predicted to cost, by kind, worker and request; how traffic corrects it; what the next server keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import exp, inf, isfinite, log, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapestream.scheduling.cost_grid import LEAST_S, Grid, LinearCost
from shapestream.scheduling.costs import CostModel
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.worker_class import WorkerClass
from shapestream_engine.batching.calls import RowCover
from shapestream_engine.cost_table import MAX_SECONDS, CostPoint, CostTable, LearnedCosts

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


def costs_over(points: dict[Sizes, float], own: ModelProfile | None = None) -> CostModel:
    """One worker with these points; none were measured if there are none."""
    own = profile(len(next(iter(points), (1, 1))) - 1) if own is None else own
    measured = tuple(CostPoint(sizes=sizes, seconds=seconds) for sizes, seconds in points.items())
    table = CostTable(key="k", dimensions=own.dimensions, points=measured)
    costs = CostModel()
    costs.add_model(own)
    costs.join(0, "w", {"m": table} if points else {}, ["m"])
    return costs


def prices(costs: CostModel, slot: int | None = None) -> WorkerClass:
    """The prices of the model on a slot, else of most slots: all that tests ask for stands behind this one."""
    return costs["m"].on(slot).worker_class


def costs_of(points: dict[Sizes, float], own: ModelProfile | None = None) -> WorkerClass:
    """The prices on one worker whose table has these points."""
    return prices(costs_over(points, own))


def predicted(over: WorkerClass, calls: list[tuple[int, Sizes]]) -> list[float]:
    """The predictions for these batches, at once; the same as one by one, which is checked here."""
    together = over.seconds(
        np.array([rows for rows, _ in calls]),
        np.array([list(shape) for _, shape in calls]).reshape(len(calls), -1),
    ).tolist()
    assert together == pytest.approx([over.second(rows, shape) for rows, shape in calls], rel=1e-9)
    return together


def linear(sizes: Sizes) -> float:
    """A call of 2 ms and 1 us per element."""
    return 2e-3 + 1e-6 * prod(sizes)


def test_a_table_that_is_told_before_the_slots_join_says_the_same() -> None:
    """Slots that join later reuse its class; a table of other dimensions, or of an unknown model, is left out."""
    points = {(rows, size): linear((rows, size)) for rows in (1, 8, 64) for size in (16, 256)}
    own = profile()
    table = CostTable(
        key="k",
        dimensions=own.dimensions,
        points=tuple(CostPoint(sizes=sizes, seconds=seconds) for sizes, seconds in points.items()),
    )
    costs = CostModel()
    costs.take_in("m", table)
    costs.add_model(own)
    costs.take_in("m", table)
    costs.take_in("m", replace(table, key="other", dimensions=("batch", "x", "y"), points=()))
    kinds = dict(costs["m"].worker_classes)
    costs.join(0, "w", {"m": table}, ["m"])
    assert (["k"], kinds) == ([*kinds], costs["m"].worker_classes)
    calls = [(rows, (size,)) for rows in (1, 5, 64) for size in (16, 100)]
    assert predicted(costs_of(points), calls) == predicted(prices(costs), calls)


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
    found = predicted(costs_of(points), [(sizes[0], sizes[1:]) for sizes in asked])
    assert [brute_force(axes, values, sizes) for sizes in asked] == pytest.approx(found, rel=1e-6)
    assert list(points.values()) == pytest.approx(found[-len(points) :], rel=1e-6)


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.tuples(st.integers(1, 99), st.integers(0, 999)), st.floats(0.0, 10.0), min_size=1, max_size=12
    ),
    CALLS,
)
def test_any_table_gives_sensible_predictions(points, calls):
    """Whatever was measured, with whatever holes and noise: finite, never negative, never falling with size."""
    over = costs_of(points)
    found = predicted(over, [(rows, (size,)) for rows, size in calls])
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
    assert linear((rows, seq)) == pytest.approx(predicted(costs_of(points), [(rows, (seq,))])[0], rel=1e-6)


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
    found = costs_of(points).second(rows, (seq,))
    assert 0.5 <= found / truth[rows, seq] <= 2.0


def test_one_point_is_enough_to_compare():
    """Half of it is taken to be the call's fixed part: more elements take longer, fewer are not free."""
    over = costs_of({(2, 32): 1.0})
    half, whole, double = predicted(over, [(1, (32,)), (2, (32,)), (4, (32,))])
    assert 0.0 < half <= whole == 1.0
    assert 1.5 == double


def test_models_without_dynamic_sizes_have_costs_too():
    """No batch axis, no dimension: one number."""
    own = ModelProfile(name="m", dimensions=(), has_batch=False, paddable=(), max_batch=1)
    over = costs_of({(): 0.25}, own)
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
    over = costs_of(points, own)
    calls = [(rows, (seq,)) for rows in range(most + 1) for seq in (8, 20, 64)]
    expected = [sum(linear((each, *shape)) for each in cover(rows)) for rows, shape in calls]
    assert expected == pytest.approx(predicted(over, calls))
    far = over.second(10 * most, (8,))
    assert isfinite(far)
    assert far > 5 * over.second(most, (8,))


def test_what_cannot_be_run_costs_infinity():
    """Beyond the model's bounds there is no price."""
    own = profile(bounds=(8, 100))
    over = costs_of({(1, 8): 0.1, (8, 100): 1.0}, own)
    found = predicted(over, [(8, (100,)), (9, (100,)), (8, (101,))])
    assert [False, True, True] == [seconds == inf for seconds in found]
    alone = ModelProfile(name="m", dimensions=("x",), has_batch=False, paddable=(True,), max_batch=1)
    assert inf == costs_of({(8,): 1.0}, alone).second(2, (8,))


def test_static_shapes_cost_what_was_measured_for_them():
    """Exactly their sizes, and no others; one that was not measured costs what its like do."""
    points = {sizes: linear(sizes) for sizes in product((1, 8), (8, 64))}
    own = profile(static_shapes=((4, 16), (4, 99), (5, 16), (2, 32)))
    over = costs_of({**points, (4, 16): 1e-5, (4, 99): 2e-5, (5, 16): 3e-5}, own)
    asked = [(4, (16,)), (4, (99,)), (5, (16,)), (2, (32,)), (5, (99,)), (4, (17,)), (600, (16,))]
    found = predicted(over, asked)
    assert [1e-5, 2e-5, 3e-5] == found[:3]
    assert [linear((rows, *shape)) for rows, shape in asked[3:]] == pytest.approx(found[3:])


def test_predictions_are_remembered_until_the_version_changes():
    """The same question has the same answer while plans made with it are valid."""
    costs = costs_over({(1, 8): 0.001, (8, 64): 0.01})
    over = prices(costs)
    before, version = over.second(4, (20,)), over.version
    while over.version == version:
        assert before == over.second(4, (20,))
        learned(costs, 4, 20, 2 * before)
    assert over.second(4, (20,)) > before


# ---------------------------------------------------------------- learning


def learned(costs: CostModel, rows: int, seq: int, busy_s: float, times: int = 1) -> None:
    """Batches that took so long."""
    for _ in range(times):
        costs["m"].observe(0, (rows, seq), busy_s, requests=rows)


def with_table() -> CostModel:
    """Over the linear grid."""
    return costs_over({sizes: linear(sizes) for sizes in product((1, 4, 16, 64), (8, 64, 512))})


def without_table() -> CostModel:
    """After 40 honest batches of many sizes."""
    costs = costs_over({})
    for turn in range(40):
        rows, seq = 1 + turn % 7, 8 * (1 + turn % 5)
        learned(costs, rows, seq, linear((rows, seq)))
    return costs


@pytest.mark.parametrize("start", [with_table, without_table])
@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_an_outlier_hardly_counts(start, factor):
    """A batch of 100 times its usual duration (the machine stood still) moves no prediction by 10 %."""
    costs = start()
    over = prices(costs)
    asked = [(1, (8,)), (5, (40,)), (7, (16,)), (16, (64,))]
    before = predicted(over, asked)
    learned(costs, 5, 40, factor * linear((5, 40)))
    learned(costs, 5, 40, linear((5, 40)))  # whatever was held back is published by now
    assert all(0.9 < after / was < 1.1 for after, was in zip(predicted(over, asked), before, strict=True))


@pytest.mark.parametrize("start", [with_table, without_table])
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_lasting_change_is_followed(start, factor):
    """After 30 batches at another slowdown, that slowdown is what is expected."""
    costs = start()
    over = prices(costs)
    for turn in range(30):
        rows, seq = 1 + turn % 7, 8 * (1 + turn % 5)
        learned(costs, rows, seq, factor * linear((rows, seq)))
    found = over.second(4, (24,))
    assert factor * linear((4, 24)) == pytest.approx(found, rel=0.15)


def test_one_region_may_change_alone():
    """Long calls turn out to take twice as long as measured: short ones are predicted as before."""
    costs = with_table()
    over = prices(costs)
    for _ in range(60):
        learned(costs, 16, 512, 2 * linear((16, 512)))
        learned(costs, 4, 8, linear((4, 8)))
    assert 2 * linear((16, 512)) == pytest.approx(over.second(16, (512,)), rel=0.1)
    assert linear((4, 8)) == pytest.approx(over.second(4, (8,)), rel=0.1)


def test_a_static_shape_that_changes_says_nothing_about_others():
    """Without a table: the static shape becomes ten times slower, and then ten times faster; other prices stay."""
    costs = costs_over({}, profile(static_shapes=((4, 16),)))
    over = prices(costs)
    for turn in range(40):
        rows, seq = 1 + turn % 7, 8 * (1 + turn % 5)
        if (rows, seq) != (4, 16):
            learned(costs, rows, seq, linear((rows, seq)))
    before = predicted(over, [(1, (8,)), (7, (40,))])
    for factor in (1.0, 10.0, 1.0):
        learned(costs, 4, 16, factor * linear((4, 16)), times=8)
    assert before == pytest.approx(predicted(over, [(1, (8,)), (7, (40,))]), rel=0.1)


def test_one_short_call_is_no_change():
    """Of calls that had not run for long, one that takes half as long moves no price by 10 %."""
    costs = with_table()
    over = prices(costs)
    learned(costs, 4, 8, linear((4, 8)), times=20)
    asked = [(16, (512,)), (16, (64,)), (4, (64,))]
    before = predicted(over, asked)
    for rows, seq in ((16, 512), (16, 64)):
        learned(costs, rows, seq, 0.5 * linear((rows, seq)))
        learned(costs, 4, 8, linear((4, 8)), times=20)
        learned(costs, 64, 64, linear((64, 64)))
    assert all(0.9 < after / was < 1.1 for after, was in zip(predicted(over, asked), before, strict=True))


def test_several_short_calls_are_a_change():
    """After three different calls in a row that had not run for long and take half as long, the next one is believed."""
    costs = with_table()
    over = prices(costs)
    learned(costs, 4, 8, linear((4, 8)), times=20)
    for rows, seq in ((16, 512), (16, 64), (4, 64)):
        learned(costs, rows, seq, 0.5 * linear((rows, seq)))
        learned(costs, 4, 8, linear((4, 8)), times=3)
    learned(costs, 64, 64, 0.5 * linear((64, 64)))
    assert 0.5 * linear((64, 64)) == pytest.approx(over.second(64, (64,)), rel=0.05)


def test_noise_is_no_change():
    """Seconds of calls of many sizes vary by a factor of 1.3 (sigma 0.25): prices are within 1.2 of the truth."""
    random = np.random.default_rng(1)
    asked = [(rows, (seq,)) for rows, seq in product((1, 4, 16, 64), (8, 64, 512))]
    off = []
    for _ in range(10):
        costs = with_table()
        over = prices(costs)
        for _ in range(300):
            rows, seq = int(2 ** random.uniform(0, 6)), int(2 ** random.uniform(3, 9))
            learned(costs, rows, seq, linear((rows, seq)) * exp(0.25 * random.standard_normal()))
        off += [
            log(found / linear((rows, *shape)))
            for found, (rows, shape) in zip(predicted(over, asked), asked, strict=True)
        ]
    assert float(np.sqrt(np.mean(np.square(off)))) < log(1.2)


def test_small_changes_leave_the_version_alone():
    """Within 5 % plans stay valid, however many batches confirm it."""
    costs = with_table()
    over = prices(costs)
    version = over.version
    random = np.random.default_rng(1)
    for _ in range(200):
        learned(costs, 4, 64, float(linear((4, 64)) * random.uniform(0.98, 1.02)))
    assert version == over.version


def test_traffic_alone_finds_both_parts_of_a_call():
    """Without a table: the fixed part and the part per element, from batches of different sizes."""
    over = prices(without_table())
    assert over.measured
    for rows, seq in ((1, 8), (7, 40), (64, 512)):
        assert linear((rows, seq)) == pytest.approx(over.second(rows, (seq,)), rel=0.02)


def test_equal_batches_say_nothing_about_the_fixed_part():
    """All of one size: their seconds are known; what one of their requests alone would take stays a guess, in between."""
    costs = costs_over({})
    over = prices(costs)
    learned(costs, 8, 16, 0.09, times=500)
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
    for costs in (with_table(), without_table()):
        over = prices(costs)
        for rows, seq, busy_s in batches:
            learned(costs, rows, seq, busy_s)
        found = predicted(over, [(rows, (seq,)) for rows in (1, 9, 64, 100) for seq in (1, 50, 1000)])
        assert all(isfinite(seconds) and seconds >= 0.0 for seconds in found)


def test_before_anything_ran_calls_can_be_compared():
    """The prior: sharing a call pays, padding costs, and a longer row is dearer."""
    over = costs_of({})
    assert not over.measured
    one, two, longer, apart = predicted(over, [(1, (16,)), (2, (16,)), (2, (17,)), (1, (17,))])
    assert one < two < 2 * one
    assert two < longer < one + apart


def test_a_static_shape_learns_by_itself():
    """What its own model shows is not what the dynamic one does."""
    points = {sizes: 100 * linear(sizes) for sizes in product((1, 8), (8, 64))}
    own = profile(static_shapes=((4, 16),))
    costs = costs_over(points, own)
    over = prices(costs)
    before = over.second(4, (17,))
    for _ in range(100):
        learned(costs, 4, 16, 1e-2)
        learned(costs, 4, 17, before)
    assert 1e-2 == pytest.approx(over.second(4, (16,)), rel=0.06)
    assert before == pytest.approx(over.second(4, (17,)), rel=0.18)


# ---------------------------------------------------------------- kinds, workers and requests

PROFILE = ModelProfile(
    name="m", dimensions=("batch", "seq"), has_batch=True, paddable=(False, True), max_batch=16
)


def seconds_of(rows: int, seq: int) -> float:
    """A call costs 1 ms and 10 us per element."""
    return 0.001 + 1e-5 * rows * seq


def table(key: str = "k", *, scale: float = 1.0) -> CostTable:
    """What a worker measured: `seconds_of`, and 50 ms more where the shape was new."""
    return CostTable(
        key=key,
        dimensions=("batch", "seq"),
        points=tuple(
            CostPoint(
                sizes=(rows, seq),
                seconds=scale * seconds_of(rows, seq),
                first_seconds=scale * seconds_of(rows, seq) + 0.05,
            )
            for rows in (1, 4, 16)
            for seq in (8, 64, 512)
        ),
    )


def costs_with(
    *workers: tuple[str, CostTable | None],
    profile: ModelProfile = PROFILE,
    known: Sequence[LearnedCosts] = (),
) -> CostModel:
    """A cost model with a slot per worker, numbered from 0; `known`: what an earlier server learned."""
    costs = CostModel({learned.table: learned for learned in known})
    costs.add_model(profile)
    for slot, (worker, own) in enumerate(workers):
        costs.join(slot, worker, {} if own is None else {"m": own}, ["m"])
    return costs


def test_nothing_is_known_before_the_first_batch_which_is_the_first_estimate():
    """Without a table no seconds are invented, also not from times that cannot be; one measurement is an estimate."""
    costs = costs_with(("a", None))
    for busy_s in (-1.0, math.nan, math.inf):
        costs["m"].observe(0, (1, 1), busy_s)
    assert not costs["m"].on().worker_class.measured
    assert (None, None) == (costs["m"].batch_s((4, 16)), costs["m"].batched_share_s((1, 16)))
    assert (None, None, 0) == (costs["m"].mean_request_s, costs["m"].mean_batch_s, costs["m"].shapes)
    costs["m"].observe(0, (4, 16), 2.0, requests=4)
    assert pytest.approx(2.0) == costs["m"].batch_s((4, 16))
    assert (2.0, 0.5) == (costs["m"].mean_batch_s, costs["m"].mean_request_s)


def test_slots_that_join_before_their_model_count():
    """A worker may be there before its model is added."""
    costs = CostModel()
    costs.join(0, "a", {"m": table()}, ["m"])
    costs.add_model(PROFILE)
    assert pytest.approx(0.00108) == costs["m"].batch_s((1, 8), 0)


def test_workers_of_one_kind_have_speeds_of_their_own():
    """Of two alike on paper one is twice as fast, on all of its slots; a new one is in between."""
    costs = costs_with(("slow", table()), ("fast", table()), ("slow", table()))
    for _ in range(100):
        costs["m"].observe(0, (4, 64), 0.004)
        costs["m"].observe(1, (4, 64), 0.002)
    assert pytest.approx(2.0, rel=0.05) == costs["m"].on(0).slowdown / costs["m"].on(1).slowdown
    assert costs["m"].on(0).slowdown == costs["m"].on(2).slowdown
    assert pytest.approx(0.004, rel=0.08) == costs["m"].batch_s((4, 64), 0)
    assert pytest.approx(0.002, rel=0.08) == costs["m"].batch_s((4, 64), 1)
    costs.join(3, "new", {"m": table()}, ["m"])
    assert pytest.approx(1.0) == costs["m"].on(3).slowdown


def test_workers_with_equal_keys_share_costs_and_others_do_not():
    """What one worker shows is known of all that are alike, and of no other."""
    costs = costs_with(("a", table("k")), ("b", table("k")), ("c", table("other")))
    before = costs["m"].batch_s((4, 64), 2)
    for _ in range(200):
        costs["m"].observe(0, (4, 64), 0.01)
        costs["m"].observe(1, (4, 64), 0.01)
    assert pytest.approx(0.01, rel=0.06) == prices(costs, 1).second(4, (64,))
    assert before == costs["m"].batch_s((4, 64), 2)


def test_what_is_known_survives_the_last_worker():
    """A worker that is replaced finds what its predecessor has shown."""
    costs = costs_with(("a", table()))
    for _ in range(100):
        costs["m"].observe(0, (4, 64), 0.01)
    costs.leave(0)
    costs.join(1, "b", {"m": table()}, ["m"])
    assert pytest.approx(0.01, rel=0.02) == costs["m"].batch_s((4, 64), 1)
    # But not what its predecessor's devices had prepared.
    assert costs["m"].on().preparation_s(4, (64,)) > 0.0


def test_a_table_for_other_dimensions_is_no_table():
    """What does not fit the model is left aside, not misread."""
    wrong = replace(table(), dimensions=("batch", "width"))
    costs = costs_with(("a", wrong))
    assert not costs["m"].on().worker_class.measured


def test_requests_cost_what_they_cost_in_good_company():
    """A short request alone pays for a call; with 15 others of its length it pays a sixteenth."""
    costs = costs_with(("a", table()))

    def own_s(shape: Sizes, rows: int = 1) -> float:
        company = costs["m"].batched_share_s((rows, *shape))
        assert company is not None
        return company[0]

    assert pytest.approx((0.001 + 1e-5 * 16 * 8) / 16) == own_s((8,))
    assert pytest.approx((0.001 + 1e-5 * 16 * 8) / 2) == own_s((8,), rows=8)
    smallest_s = costs["m"].batch_s((1, 1))
    assert [smallest_s] * 3 == [own_s((length,), 0) for length in (1, 64, 2**60)], (
        "without elements: the least"
    )
    assert smallest_s == costs["m"].batch_s((0, 2**60)) == costs["m"].batch_s((2**60, 0))
    alone = replace(PROFILE, dimensions=("seq",), has_batch=False, paddable=(False,))
    assert (0.5, 0.5) == costs_over({(8,): 0.5}, alone)["m"].batched_share_s((8,))


def test_prices_asked_for_together_are_those_asked_for_one_by_one():
    """A turn of arrivals is priced in one prediction: sizes that are none, empty and huge ones."""
    asked = [(rows, seq) for rows in (0, 1, 5, 16, 17, 2**60) for seq in (0, 1, 8, 300, 2**60)]
    together, apart = costs_with(("a", table()))["m"], costs_with(("a", table()))["m"]
    together.expect([(1,), *asked, *asked])
    for sizes in asked:
        assert apart.batched_share_s(sizes) == pytest.approx(together.batched_share_s(sizes))
        assert apart.batch_s(sizes) == pytest.approx(together.batch_s(sizes))


def test_preparing_batches_teach_what_preparing_costs_and_nothing_else():
    """The first call of a shape is dear; that it is says nothing about the second."""
    costs = costs_with(("a", table()))
    over = costs["m"].on()
    assert pytest.approx(0.05, rel=0.1) == over.preparation_s(4, (64,))
    before = prices(costs).second(4, (64,))
    for seq in range(1, 60):
        costs["m"].observe(0, (4, seq), 0.2, preparations=1)
    assert before == prices(costs).second(4, (64,))
    assert pytest.approx(0.2, rel=0.1) == over.preparation_s(4, (64,))
    assert 0.0 == over.preparation_s(4, (59,))


def test_a_preparing_batch_that_is_short_all_the_same_corrects_the_price():
    """Where sizes never come again no other batch does; one that is little shorter says nothing."""
    costs = costs_with(("a", table()))
    over = prices(costs)
    before = over.second(4, (64,))
    costs["m"].observe(0, (4, 64), before / 1.4, preparations=1)
    assert before == over.second(4, (64,))
    for seq in range(60, 68):
        costs["m"].observe(0, (4, seq), before / 2, preparations=1)
    assert over.second(4, (64,)) < 0.6 * before


def test_shapes_are_known_per_worker():
    """What one device has prepared, another has not."""
    costs = costs_with(("a", table()), ("b", table()))
    costs["m"].observe(0, (4, 64), 0.004)
    assert 0.0 == costs["m"].on(0).preparation_s(4, (64,))
    assert 0.0 < costs["m"].on(1).preparation_s(4, (64,))


def test_preparations_of_all_rows_are_those_asked_for_one_by_one():
    """Of no elements, of shapes of which some numbers of rows have run, and of claimed sizes beyond any device."""
    costs = costs_with(("a", table()))
    for rows in (1, 4):
        costs["m"].observe(0, (rows, 64), 0.004)
    over = costs["m"].on()
    for shape in ((0,), (1,), (64,), (2**62,)):
        each = [over.preparation_s(rows, shape) for rows in range(1, PROFILE.max_batch + 1)]
        assert each == over.preparations_s(shape)
    assert [True, False, False, True] == [seconds == 0.0 for seconds in over.preparations_s((64,))[:4]]


def test_known_shapes_are_bounded():
    """However many shapes come, so many are remembered, the newest among them."""
    costs = costs_with(("a", table()))
    for size in range(5000):
        costs["m"].observe(0, (1, size), 0.001)
    assert 4096 == costs["m"].shapes
    over = costs["m"].on()
    assert 0.0 == over.preparation_s(1, (4999,)) < over.preparation_s(1, (1,))


def test_the_most_common_worker_class_stands_for_the_model():
    """Without a slot, predictions are those of most slots."""
    costs = costs_with(
        ("a", table("few", scale=10.0)), ("b", table("many")), ("c", table("many")), ("d", table("many"))
    )
    assert pytest.approx(0.00108) == costs["m"].batch_s((1, 8))
    assert pytest.approx(0.0108) == costs["m"].batch_s((1, 8), 0)


# ---------------------------------------------------------------- kept for the next server

SIZES = [(1, 8), (3, 40), (4, 64), (16, 64), (9, 300), (16, 512), (16, 700)]
"""At measured points, between them, and beyond."""


WORKER = "w", table()


def ran(costs: CostModel, sizes: tuple[int, ...], factor: float, times: int, slot: int = 0) -> None:
    """So many batches took `factor` times what the table says."""
    for _ in range(times):
        costs["m"].observe(slot, sizes, factor * seconds_of(*sizes))


def predictions(costs: CostModel, *asked: tuple[int, ...]) -> list[float]:
    """Of these sizes, else of all `SIZES`, by all that was observed: what is held back until it is 5 % is published."""
    (kind,) = costs["m"].worker_classes.values()
    kind._publish()
    return [prices(costs).second(sizes[0], sizes[1:]) for sizes in asked or SIZES]


@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.floats(0.2, 5.0), st.integers(1, 30)), max_size=8),
    st.sampled_from([[("w", table())], [("v", table()), ("w", table())]]),
)
@settings(max_examples=40, deadline=None)
def test_the_next_server_predicts_what_this_one_did(traffic, workers):
    """At measured sizes, between and beyond: within the 1 % by which a node must be off to be kept."""
    before = costs_with(*workers)
    for number, (sizes, factor, times) in enumerate(traffic):
        ran(before, sizes, factor, times, slot=number % len(workers))
    after = costs_with(*workers, known=before.learned(1.0))
    assert predictions(before) == pytest.approx(predictions(after), rel=0.011)


@given(st.floats(-2.0, 2.0).map(exp), st.sampled_from(SIZES[:6]))
@settings(max_examples=40, deadline=None)
def test_what_is_wrong_is_unlearned_as_quickly_as_by_who_learned_it(factor, sizes):
    """A machine that was loaded, or idle, then and is not now: as many batches correct it, after a restart or without."""

    def until_right(costs: CostModel) -> int:
        count = 0
        while abs(log(predictions(costs, sizes)[0] / seconds_of(*sizes))) > log(1.1):
            ran(costs, sizes, 1.0, 1)
            count += 1
        return count

    stayed = costs_with(WORKER)
    ran(stayed, sizes, factor, 200)
    again = costs_with(WORKER, known=stayed.learned(1.0))
    batches = until_right(stayed)
    assert until_right(again) <= batches + 1
    assert batches < 60  # where it is off by up to seven times


def test_corrections_belong_to_the_table_that_they_correct():
    """Measured anew, with another outcome, a model begins with what was measured."""
    before = costs_with(WORKER)
    ran(before, (4, 64), 3.0, 100)
    point = replace(table().points[0], seconds=0.5)
    for other in (replace(table(), points=(point, *table().points[1:])), table("other")):
        after = costs_with(("w", other), known=before.learned(1.0))
        assert predictions(costs_with(("w", other))) == predictions(after)


def test_what_preparing_costs_is_learned_too():
    """Traffic has shown that new shapes cost 0.2 s rather than 0.05: the next server knows, and unlearns it, too."""
    before = costs_with(WORKER)
    for seq in range(1, 100):
        before["m"].observe(0, (4, seq), seconds_of(4, seq) + 0.2, preparations=1)
    after = costs_with(WORKER, known=before.learned(1.0))
    assert 0.2 == pytest.approx(after["m"].on().preparation_s(4, (64,)), rel=0.1)
    for seq in range(1, 60):
        after["m"].observe(0, (4, seq), seconds_of(4, seq) + 0.05, preparations=1)
    assert 0.05 == pytest.approx(after["m"].on().preparation_s(4, (64,)), rel=0.2)


@given(st.floats(0.0, 1.0), st.floats(0.0, 1e-3), st.floats(1.0, 1e4), st.floats(1.0, 100.0))
@settings(max_examples=60, deadline=None)
def test_a_line_goes_on_from_its_ends(fixed_s, element_s, fewest, times):
    """Two points say all of a straight line, and replace what made it."""
    ends = {elements: fixed_s + element_s * elements for elements in (fewest, fewest * times)}
    line = LinearCost()
    line.recall(ends)
    for elements, seconds in ends.items():
        assert seconds == pytest.approx(line.second(elements), rel=1e-6, abs=2e-7)


def test_static_shapes_and_models_without_a_batch_axis_are_kept_too():
    """By the model's own dimensions, whether or not they hold a number of rows."""
    profile = replace(
        PROFILE, dimensions=("seq",), has_batch=False, paddable=(False,), static_shapes=((16,),)
    )
    points = tuple(CostPoint(sizes=(seq,), seconds=seq / 1000) for seq in (8, 16, 64))
    worker = "w", CostTable(key="k", dimensions=("seq",), points=points)
    before = costs_with(worker, profile=profile)
    for seq in (8, 16) * 100:
        before["m"].observe(0, (seq,), 0.5)
    (learned,) = before.learned(1.0)
    after = costs_with(worker, profile=profile, known=[learned])
    assert {1} == {len(sizes) for sizes in learned.seconds}
    assert [0.5, 0.5] == pytest.approx([after["m"].batch_s((seq,)) for seq in (8, 16)], rel=0.06)


def test_without_a_table_or_before_the_first_batch_nothing_is_kept():
    """There is nothing that it would be a correction of, or no correction."""
    without = costs_with(("w", None))
    ran(without, (4, 64), 1.0, 10)
    assert ([], []) == (without.learned(1.0), costs_with(WORKER).learned(1.0))
    line = LinearCost()
    line.recall(LinearCost().ends())
    assert ({}, False) == (line.ends(), line.measured)


def test_batches_are_counted_over_restarts():
    """How much a correction rests on; of a table that serves under two names, the one that rests on more is kept."""
    costs = costs_with(WORKER)
    ran(costs, (4, 64), 2.0, 10)
    costs = costs_with(WORKER, known=costs.learned(1.0))
    ran(costs, (4, 64), 2.0, 5)
    costs.add_model(replace(PROFILE, name="also"))
    costs.join(7, "v", {"also": table()}, ["also"])
    (learned,) = costs.learned(2.0)
    assert (15, 2.0, table().digest) == (learned.batches, learned.saved_at, learned.table)


@given(st.dictionaries(st.tuples(st.integers(0, 600), st.integers(0, 600)), st.floats(0.0, MAX_SECONDS)))
@settings(max_examples=50, deadline=None)
def test_whatever_a_file_says_predictions_stay_sensible(seconds):
    """Finite, not negative, never falling where a call grows; sizes that the table has not are nobody's."""
    learned = LearnedCosts(
        table=table().digest, batches=1, saved_at=0.0, seconds=seconds, preparation={0.0: MAX_SECONDS}
    )
    costs = costs_with(WORKER, known=[learned])
    over = prices(costs)
    rows = np.array([1, 2, 4, 16])
    found = [over.seconds(rows, np.full((4, 1), seq)) for seq in (8, 20, 64, 512)]
    assert np.isfinite(found).all()
    assert (np.min(found) >= 0.0, (np.diff(found, axis=0) >= -1e-9 * np.max(found)).all()) == (True, True)


def test_sizes_far_beyond_the_table_have_prices_of_their_own():
    """A call eight times as long as any measured is believed, also after a restart; small calls stay as they were."""
    costs = costs_with(WORKER)
    before = predictions(costs, (1, 8), (4, 64))
    ran(costs, (4, 4000), 0.3, 1)
    assert 0.3 * seconds_of(4, 4000) == pytest.approx(predictions(costs, (4, 4000))[0])
    assert before == pytest.approx(predictions(costs, (1, 8), (4, 64)), rel=0.02)
    asked = (1, 8), (4, 64), (4, 4000), (16, 4000)
    after = costs_with(WORKER, known=costs.learned(1.0))
    assert predictions(costs, *asked) == pytest.approx(predictions(after, *asked), rel=0.011)


def test_what_takes_longer_than_may_be_kept_is_not_kept():
    """Of a call that nobody measured, months may be predicted; the rest is kept, and the server goes on."""
    scale = 0.9 * MAX_SECONDS / seconds_of(16, 512)
    costs = costs_with(("w", table(scale=scale)))
    ran(costs, (16, 512), 3 * scale, 100)
    costs["m"].observe(0, (16, 512), 4 * MAX_SECONDS, preparations=1)
    assert predictions(costs, (16, 512))[0] > MAX_SECONDS
    (learned,) = costs.learned(1.0)
    assert 0 < len(learned.seconds)
    assert MAX_SECONDS >= max([*learned.seconds.values(), *learned.preparation.values()])


def test_a_first_call_is_believed_beside_a_node_that_takes_far_longer():
    """Seconds of a node that is not known vanish beside those of a known one, by rounding alone."""
    grid = Grid({(1, 4): LEAST_S, (4, 4): 1e9})
    grid.believe((2, 4), 1.0, lambda node: grid.nodes[node] == (4, 4))
    grid.publish(0.0)
    assert isfinite(grid.expected((2, 4)))


def test_a_single_long_call_is_not_believed_in_full():
    """The machine stood still during the first call of 32 rows: it counts as four times what was expected, not 100."""
    costs = costs_over({(1, 8): 1.0})
    over = prices(costs)
    expected_s = over.second(32, (8,))
    learned(costs, 32, 8, 100 * expected_s)
    assert 4 * expected_s == pytest.approx(over.second(32, (8,)))


def test_what_ran_bounds_what_did_not():
    """Of one point and one call of 16 rows that took as long, all between take as long."""
    costs = costs_over({(1, 8): 1.0})
    learned(costs, 16, 8, 1.0)
    over = prices(costs)
    assert [1.0] * 4 == pytest.approx([over.second(rows, (8,)) for rows in (2, 4, 8, 16)])
