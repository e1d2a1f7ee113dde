"""Learned roundings: optimal boundaries, never too small, never too many different shapes, whatever arrives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.scheduling.seen import Started
from tests.pipeline.scheduling.stage import Stage

from shapestream.scheduling.boundaries import (
    FIRST_LOOK,
    LOOK_EVERY,
    BoundaryChoices,
    SizeHistogram,
    cost_of,
    geometric_sizes,
    grid_sizes,
)
from shapestream.scheduling.cost_grid import Floats, Integers
from shapestream.scheduling.events import ModelProfile
from shapestream.scheduling.rounding import ShapeRounding, choose_row_sizes, row_sizes


def profile(cap: int, bounds: tuple[int | None, ...] = (8, 512), **changes: object) -> ModelProfile:
    """A model under a cap, of `batch` and others that may be padded."""
    values: dict[str, object] = {
        "name": "m",
        "dimensions": ("batch", "seq", "width")[: len(bounds)],
        "has_batch": True,
        "paddable": (False, True, True)[: len(bounds)],
        "max_batch": bounds[0],
        "bounds": bounds,
        "max_shapes": cap,
        "fills_rows": True,
        **changes,
    }
    return ModelProfile(**values)  # type: ignore[arg-type] # built above


# --- boundaries ------------------------------------------------------------------------------------------------------


@given(
    weights=st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=8),
    kept=st.sets(st.integers(1, 40), max_size=3),
    steps=st.lists(st.integers(0, 5), min_size=41, max_size=41),
    new=st.integers(0, 4),
)
def test_boundaries_are_the_best_that_there_are(
    weights: dict[int, int], kept: set[int], steps: list[int], new: int
) -> None:
    """Against all subsets, for every number of new ones, with any costs that do not fall."""
    kept = {*kept, 40}
    sizes = np.array(sorted(weights.keys() | kept), np.intp)
    amounts = np.array([weights.get(size, 0) for size in sizes.tolist()], np.float64)
    costs = 1.0 + np.cumsum(steps)[sizes].astype(np.float64)
    choices = BoundaryChoices.of(sizes, amounts, costs, sorted(kept), new)
    free = [size for size in sizes.tolist() if size not in kept]
    for count, (cost, boundaries) in enumerate(zip(choices.costs, choices.boundaries, strict=True)):
        tried = [
            cost_of(sorted({*kept, *chosen}), sizes, amounts, costs)
            for most in range(count + 1)
            for chosen in combinations(free, most)
        ]
        assert cost == pytest.approx(min(tried))
        assert cost == pytest.approx(cost_of(boundaries, sizes, amounts, costs))
        assert len(set(boundaries) - kept) <= count
        assert kept <= set(boundaries)


@given(
    seen=st.lists(st.integers(0, 5000), min_size=1, max_size=200),
    most=st.integers(1, 64),
    kept=st.lists(st.integers(1, 5000), max_size=4),
)
def test_a_histogram_keeps_all_weight_however_few_columns_it_shows(
    seen: list[int], most: int, kept: list[int]
) -> None:
    """Sizes only move up, by less than a per cent where each is not counted by itself, and never beyond the bound."""
    histogram = SizeHistogram(5000)
    for size in seen:
        histogram.add(size)
    sizes, weights = histogram.columns(most, kept)
    assert len(seen) == pytest.approx(float(weights.sum()))
    assert sorted(set(sizes.tolist())) == sizes.tolist()
    assert set(kept) <= set(sizes.tolist())
    assert max(seen) <= sizes[-1] <= max([5000 if max(seen) > 256 else max(seen), *kept])
    assert len(sizes) <= most + 1 + len(kept)


@given(most=st.integers(1, 3000), count=st.integers(1, 40))
def test_sizes_reach_from_one_to_the_most(most: int, count: int) -> None:
    """At most so many, ascending, the last of them the upper bound; a request alone has one row if there is a choice."""
    for sizes in (
        row_sizes(most, count),
        geometric_sizes(min(7, most), most, count),
        geometric_sizes(0, 0, count),
    ):
        assert len(sizes) <= count
        assert sorted(set(sizes)) == list(sizes)
    assert [most, most, 0] == [
        row_sizes(most, count)[-1],
        geometric_sizes(min(7, most), most, count)[-1],
        sizes[-1],
    ]
    assert 1 == row_sizes(most, count)[0] or count == 1


@given(budget=st.integers(1, 200))
def test_a_grid_has_no_more_combinations_than_its_budget(budget: int) -> None:
    """So that what is rounded to it takes no more shapes; the bounds themselves are in it, in equal factors."""
    assert ((5, 23, 108, 512),) == grid_sizes([(1, 512)], 4)
    grid = grid_sizes([(1, 64), (1, 512)], budget)
    assert prod(map(len, grid)) <= budget
    assert (64, 512) == tuple(axis[-1] for axis in grid)


def test_rows_are_few_where_other_dimensions_need_the_shapes() -> None:
    """And all of them where there is nothing else to round."""
    assert tuple(range(1, 9)) == choose_row_sizes(8, 12, [])
    assert len(choose_row_sizes(64, 42, [512.0])) < 8 < len(choose_row_sizes(64, 400, [512.0]))


# --- under a cap -----------------------------------------------------------------------------------------------------

CALLS = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 512)), max_size=300)


class Played:
    """A rounding with traffic: every request is observed, and some are started."""

    def __init__(self, rounding: ShapeRounding) -> None:
        self.rounding = rounding
        self.given: set[tuple[int, ...]] = set()

    def play(self, requests: Sequence[tuple[int, ...]], every: int = 1) -> float:
        """What was computed / what was asked for, in elements."""
        asked = computed = 0
        for number, sizes in enumerate(requests):
            self.rounding.observe(sizes)
            if number % every:
                continue
            rows, shape = self.rounding.start(sizes[0], sizes[1:])
            assert (rows, shape) == self.rounding.call_sizes(rows, shape)
            assert all(own <= size for own, size in zip(sizes, (rows, *shape), strict=True))
            self.given.add((rows, *shape))
            asked, computed = asked + prod(sizes), computed + rows * prod(shape)
        return computed / max(1, asked)


@settings(max_examples=15, deadline=None)
@given(cap=st.integers(1, 60), calls=CALLS, images=st.booleans(), seed=st.integers(0, 99))
def test_never_smaller_never_beyond_the_bounds_never_more_than_the_cap(
    cap: int, calls: list[tuple[int, int]], images: bool, seed: int
) -> None:
    """Texts or images of any sizes, and a drift through several learnings, until nothing is left."""
    bounds = (8, 512, 900) if images else (8, 512)
    played = Played(ShapeRounding(profile(cap, bounds)))
    random = np.random.default_rng(seed)
    played.play([(rows, *[size] * (len(bounds) - 1)) for rows, size in calls])
    for centre in (10, 300, 60):
        drawn = random.normal(centre, 1 + seed, (700, len(bounds) - 1)).clip(1, bounds[1:]).astype(int)
        played.play([(1 + number % 8, *sizes) for number, sizes in enumerate(drawn.tolist())])
    assert len(played.given) <= cap
    assert played.given == played.rounding.known
    assert all(size <= most for sizes in played.given for size, most in zip(sizes, bounds, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    cap=st.integers(1, 30),
    has_batch=st.booleans(),
    calls=st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 90), st.integers(3, 5)), min_size=1, max_size=400
    ),
)
def test_what_may_not_be_rounded_stays(cap: int, has_batch: bool, calls: list[tuple[int, int, int]]) -> None:
    """Each of its sizes has the cap for itself."""
    known = profile(cap, (8, 90, None), paddable=(False, True, False))
    if not has_batch:
        alone = {"dimensions": ("seq", "width"), "bounds": (90, None), "paddable": (True, False)}
        known = replace(known, has_batch=False, max_batch=1, **alone)
    rounding = ShapeRounding(known)
    given: dict[int, set[tuple[int, int]]] = {}
    for rows, seq, width in calls:
        rounding.observe((rows, seq, width) if has_batch else (seq, width))
        got_rows, (got_seq, got_width) = rounding.start(rows if has_batch else 1, (seq, width))
        assert (width, True) == (got_width, rows <= got_rows or not has_batch)
        assert seq <= got_seq <= 90
        given.setdefault(width, set()).add((got_rows, got_seq))
    assert max(map(len, given.values())) <= cap
    many = np.array([call[0] if has_batch else 1 for call in calls], np.intp)
    shapes = np.array([call[1:] for call in calls], np.intp)
    many_rows, many_shapes = rounding.preview(many, shapes)
    for number, own in enumerate(many.tolist()):
        alone = rounding.call_sizes(own, tuple(shapes[number].tolist()))
        assert alone == (int(many_rows[number]), tuple(many_shapes[number].tolist()))


@settings(max_examples=40, deadline=None)
@given(
    cap=st.integers(1, 60),
    before=CALLS,
    asked=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 512)), min_size=1, max_size=40),
    static=st.sets(st.tuples(st.integers(1, 4), st.integers(1, 512)), max_size=3),
)
def test_a_preview_says_what_each_call_would_get(
    cap: int, before: list[tuple[int, int]], asked: list[tuple[int, int]], static: set[tuple[int, int]]
) -> None:
    """Each by itself, and `start` of the same then does, as long as nothing else was started in between."""
    known = profile(cap, static_shapes=tuple(static))

    def rounding() -> ShapeRounding:
        made = ShapeRounding(known)
        Played(made).play(before)
        return made

    rows = np.array([each[0] for each in asked], np.intp)
    shapes = np.array([each[1:] for each in asked], np.intp)
    own, other = rounding(), rounding()
    call_rows, call_shapes = own.preview(rows, shapes)
    for number, (one, seq) in enumerate(asked[:6]):
        expected = rounding().start(one, (seq,))
        assert expected == own.call_sizes(one, (seq,))
        assert expected == (int(call_rows[number]), tuple(call_shapes[number].tolist()))
    assert [own.start(one, (seq,)) for one, seq in asked] == [other.start(one, (seq,)) for one, seq in asked]


def test_more_rows_than_one_call_may_have_are_divided() -> None:
    """As the worker divides them: whole calls and the rest, all of them known shapes."""
    rounding = ShapeRounding(profile(16, (8, 512)))
    rows, shape = rounding.start(21, (100,))
    assert rows >= 21
    calls = {(8, *shape), (rows % 8 or 8, *shape)}
    assert calls == rounding.known


# --- learning --------------------------------------------------------------------------------------------------------


def lognormal(count: int, median: float, seed: int = 0) -> list[tuple[int, int]]:
    """Requests of one row, as texts are long."""
    drawn = np.exp(np.log(median) + 0.9 * np.random.default_rng(seed).standard_normal(count))
    return [(1, int(size)) for size in drawn.round().clip(4, 256)]


def test_most_models_see_few_shapes_and_run_them_as_they_come() -> None:
    """A quarter of the cap."""
    played = Played(ShapeRounding(profile(40)))
    played.play([(1 + number % 2, 10 + number % 5) for number in range(5 * LOOK_EVERY)])
    assert {(rows, size) for rows in (1, 2) for size in range(10, 15)} == played.given


def test_boundaries_are_learned_from_the_traffic() -> None:
    """They waste far less than the grid that stands there first."""
    changes: list[None] = []
    rounding = ShapeRounding(profile(56), changed=lambda: changes.append(None))
    played = Played(rounding)
    for sizes in lognormal(FIRST_LOOK - 1, 24):
        rounding.observe(sizes)
    assert 0 == len(changes)
    rounding.observe((1, 24))
    assert 1 == len(changes)
    grid = ShapeRounding(profile(56))
    unlearned = 0.0
    for rows, size in lognormal(2000, 24, seed=1):
        call_rows, (call,) = grid.start(rows, (size,))
        unlearned += call_rows * call
    learned = played.play(lognormal(2000, 24, seed=1))
    assert learned < 1.3
    assert unlearned / sum(size for _, size in lognormal(2000, 24, seed=1)) > 1.5


def test_other_traffic_is_learned_while_there_is_room() -> None:
    """Part of the cap is kept back for it; what was learned first stays."""
    rounding = ShapeRounding(profile(112))
    played = Played(rounding)
    played.play(lognormal(3 * LOOK_EVERY, 12))
    used = {rounding.start(2, (size,))[1][0] for size in range(4, 200)}
    stale = played.play(lognormal(LOOK_EVERY // 2, 120, seed=2))
    played.play(lognormal(4 * LOOK_EVERY, 120, seed=3))
    assert played.play(lognormal(LOOK_EVERY // 2, 120, seed=2)) < stale
    assert used <= {rounding.call_sizes(3, (size,))[1][0] for size in range(1, 513)}
    assert len(played.given) <= 112


def test_boundaries_stay_where_others_would_save_little() -> None:
    """Each new shape has to be prepared for."""
    changes: list[None] = []
    played = Played(ShapeRounding(profile(56), changed=lambda: changes.append(None)))
    played.play(lognormal(8 * LOOK_EVERY, 24))
    changes.clear()
    played.play(lognormal(8 * LOOK_EVERY, 24, seed=1))
    assert [] == changes


def test_seconds_decide_where_there_are_any() -> None:
    """Here nothing but the step at 100 costs anything, so one boundary below it is all that is gained."""

    def seconds(rows: Integers, shapes: Integers) -> Floats:
        return rows * (1.0 + 4.0 * (shapes[:, 0] > 100))

    rounding = ShapeRounding(profile(56), seconds)
    for rows, size in lognormal(FIRST_LOOK, 60):
        rounding.observe((rows, size))
    for size in range(1, 15):  # so many run as they come
        rounding.start(1, (size,))
    boundaries = {rounding.call_sizes(1, (size,))[1][0] for size in range(15, 513)}
    assert [size for size in boundaries if size < 512] == [max(s for s in boundaries if s <= 100)]


def test_two_dimensions_share_the_combinations() -> None:
    """The one whose sizes vary more gets more boundaries."""
    rounding = ShapeRounding(profile(80, (4, 256, 256)))
    random = np.random.default_rng(0)
    sizes = zip(random.integers(4, 256, 4 * LOOK_EVERY), random.integers(60, 66, 4 * LOOK_EVERY), strict=True)
    Played(rounding).play([(1, int(seq), int(width)) for seq, width in sizes])
    seq = {rounding.call_sizes(3, (size, 256))[1][0] for size in range(1, 257)}
    width = {rounding.call_sizes(3, (256, size))[1][1] for size in range(1, 257)}
    assert len(seq) > len(width) >= 2


def test_whatever_comes_when_nothing_is_left_runs_as_something_known() -> None:
    """The smallest that holds it; room for the largest was kept."""
    changes: list[None] = []
    rounding = ShapeRounding(profile(24), changed=lambda: changes.append(None))
    played = Played(rounding)
    for seed, median in enumerate((8, 200, 40)):
        played.play([(1 + size % 8, size) for _, size in lognormal(2 * LOOK_EVERY, median, seed)])
    changes.clear()
    known = played.given | {(rounding.call_sizes(rows, (512,))[0], 512) for rows in range(1, 9)}
    for rows in range(1, 9):
        for size in range(1, 513, 7):
            got_rows, (got,) = rounding.start(rows, (size,))
            best = min(r * s for r, s in known if r >= rows and s >= size)
            assert got_rows * got == best
            known.add((got_rows, got))
    assert len(known) <= 24
    assert [] == changes


def test_static_shapes_are_beside_the_cap_and_taken_where_they_are_no_larger() -> None:
    """The dynamic model never meets them."""
    rounding = ShapeRounding(profile(4, static_shapes=((1, 40),)))
    for size in range(1, 200):
        rounding.start(1, (size,))
    assert (1, (40,)) == rounding.call_sizes(1, (40,))
    assert (1, (40,)) == rounding.call_sizes(1, (39,))
    assert 40 < rounding.call_sizes(2, (39,))[1][0]
    assert (1, 40) not in rounding.known


def test_what_cannot_be_rounded_is_refused() -> None:
    """There is nothing to round up to without bounds, no cap to round for, and something might not fit."""
    with pytest.raises(ValueError, match="'seq' has no upper bound"):
        ShapeRounding(profile(8, (8, None)))
    with pytest.raises(ValueError, match="no cap"):
        ShapeRounding(ModelProfile(name="m", dimensions=(), has_batch=False, paddable=(), max_batch=1))
    with pytest.raises(ValueError, match="the largest size must be kept"):
        BoundaryChoices.of(np.array([1, 2], np.intp), np.ones(2), np.ones(2), (1,), 1)


# --- through the whole scheduler -------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch", [1, 8])
def test_rows_are_not_rounded_unless_the_profile_says_so(max_batch: int) -> None:
    """Every call has the rows of its requests, also when the cap is used up; lengths are rounded all the same."""
    stage, chance = Stage(), random.Random(5)
    stage.model(padded=True, max_shapes=4, bounds=(8, 256), max_batch=max_batch)
    stage.slots(1, 2)
    met: dict[int, set[int]] = {}
    for _ in range(300):
        burst = [(chance.choice((1, 2, 3, 5)), chance.randint(1, 256)) for _ in range(chance.randint(1, 3))]
        sizes = dict(zip(stage.arrive(*burst), burst, strict=True))
        while stage.started:
            start = stage.started.pop(0)
            rows, seq = start.sizes
            assert sum(sizes[number][0] for number in start.requests) == rows
            met.setdefault(rows, set()).add(seq)
            stage.finish(start, 0.01)
    assert all(len(lengths) <= 4 for lengths in met.values())


@pytest.mark.parametrize(("cap", "turns"), [(1, 6), (2, 6), (5, 6), (17, 6), (40, 6), (48, 60)])
def test_devices_never_meet_more_shapes_than_the_cap(stage: Stage, cap: int, turns: int) -> None:
    """Bursts around sizes that drift twice, failures and reruns in halves included; every call holds its members."""
    chance = random.Random(cap)
    sizes: dict[int, tuple[int, int]] = {}
    stage.model(padded=True, max_shapes=cap, fills_rows=True, bounds=(8, 256))
    stage.slots(1, 2)
    for turn in range(3 * turns):
        centre = (2.5, 4.5, 3.5)[turn // turns]
        burst = [
            (chance.choice((1, 1, 1, 2, 3)), min(256, max(1, round(chance.lognormvariate(centre, 0.8)))))
            for _ in range(chance.randrange(1, 24))
        ]
        sizes.update(zip(stage.arrive(*burst), burst, strict=True))
        while stage.started:
            start = stage.started.pop(0)
            rows, seq = start.sizes
            assert 8 >= rows >= sum(sizes[number][0] for number in start.requests)
            assert 256 >= seq >= max(sizes[number][1] for number in start.requests)
            if chance.random() < 0.1:
                stage.fail(start)
            else:
                stage.finish(start, 0.01 + rows * seq * 1e-4)
        stage.now += 0.1
    assert len(stage.ends) == len(sizes)
    started = [action for actions in stage.played for action in actions if isinstance(action, Started)]
    met = {start.sizes for start in started}
    assert (cap // 2 if turns == 60 else 0) < len(met) <= cap
