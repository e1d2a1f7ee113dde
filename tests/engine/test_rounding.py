"""Endless shapes under a cap: few, large enough, and exact while there is room."""

from __future__ import annotations

import tracemalloc
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream_engine import InputPort, ModelSignature, NamedShape, OutputPort, Rows
from shapestream_engine.batching.native import Native
from shapestream_engine.batching.rounding import RoundingTable, geometric_sizes
from shapestream_engine.batching.strategy import PlannedCall
from shapestream_engine.errors import SignatureError
from shapestream_engine.shapes import Dimension

ROWS, SEQ = Dimension(1, 64), Dimension(1, 512)


def test_the_first_shapes_are_exact() -> None:
    """A model that sees few shapes never pays for the cap."""
    table = RoundingTable(8, [ROWS, SEQ])
    shapes = [(1, 17), (64, 3), (5, 200), (7, 7)]
    assert shapes == [table.round_up(shape) for shape in shapes]
    assert shapes == [table.round_up(shape) for shape in shapes]
    assert 4 == table.shapes


def test_late_shapes_are_rounded_up_to_a_grid() -> None:
    """Once half of the cap is used; the grid has no more combinations than the other half."""
    table = RoundingTable(8, [SEQ])
    for size in (100, 101, 102, 103):
        table.round_up((size,))
    assert ((5, 23, 108, 512),) == table.grid
    assert [(5,), (108,), (512,)] == [table.round_up((size,)) for size in (2, 104, 300)]


def test_a_known_shape_is_better_than_a_new_one_that_is_no_smaller() -> None:
    """It costs nothing to prepare."""
    table = RoundingTable(8, [SEQ])
    for size in (100, 101, 102, 103):
        table.round_up((size,))
    assert (100,) == table.round_up((99,))
    assert 4 == table.shapes


def test_what_may_not_be_rounded_stays() -> None:
    """Each of its sizes has a cap of its own."""
    table = RoundingTable(4, [SEQ, None])
    for size in (1, 2, 3, 4, 5, 6):
        for width in (7, 9):
            assert width == table.round_up((size, width))[1]
    assert table.shapes <= 8


def test_sizes_that_clients_choose_do_not_fill_the_memory() -> None:
    """Each size that may not be rounded has a cap of its own; of the sizes themselves only the latest are known."""
    table = RoundingTable(8, [SEQ, None])
    tracemalloc.start()
    try:
        for width in range(20_000):
            assert (7, width) == table.round_up((7, width))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2 << 20, "20,000 sizes took 8 MiB"
    assert table.shapes <= 1024


@given(
    cap=st.integers(2, 40),
    shapes=st.lists(st.tuples(st.integers(0, 64), st.integers(1, 512), st.integers(3, 4)), max_size=80),
)
def test_never_more_than_the_cap_and_never_smaller(cap: int, shapes: list[tuple[int, int, int]]) -> None:
    """Per group of sizes that may not be rounded; every shape is large enough, and within the bounds."""
    table = RoundingTable(cap, [Dimension(0, 64), SEQ, None])
    given_out = {shape: table.round_up(shape) for shape in shapes}
    for shape, rounded in given_out.items():
        assert all(own <= size <= most for own, size, most in zip(shape, rounded, (64, 512, 4), strict=True))
        assert shape[2] == rounded[2]
    for width in (3, 4):
        assert len({rounded for rounded in given_out.values() if rounded[2] == width}) <= cap


@given(low=st.integers(0, 50), more=st.integers(0, 1000), count=st.integers(1, 20))
def test_geometric_sizes_reach_the_bound(low: int, more: int, count: int) -> None:
    """At most so many, ascending, the last of them the upper bound."""
    sizes = geometric_sizes(low, low + more, count)
    assert len(sizes) <= count
    assert sorted(set(sizes)) == list(sizes)
    assert low + more == sizes[-1]


@given(cap=st.integers(2, 200))
def test_the_grid_fits_into_its_half(cap: int) -> None:
    """So that exact shapes and rounded ones are no more than the cap together."""
    table = RoundingTable(cap, [ROWS, SEQ])
    assert prod(map(len, table.grid)) <= cap - cap // 2


def signature(shape: str) -> ModelSignature:
    """A native model with a cap."""
    return ModelSignature(
        "m",
        (InputPort("x", "f32", NamedShape.parse(shape), {"seq": 0}),),
        (OutputPort("y", "f32", NamedShape.parse(shape), Rows()),),
        Native(max_prepared=4, fill_rows=True),
    )


def test_more_rows_than_the_bound_take_several_calls() -> None:
    """A batch may be larger than what a single request may be."""
    planner = signature("batch:1..4, seq:1..8").planner
    assert planner is not None
    assert (PlannedCall((4, 3), 0, 4), PlannedCall((1, 3), 4, 5)) == planner.plan((5, 3))


def test_rounding_needs_bounds() -> None:
    """There is nothing to round up to otherwise, and memory would grow without end."""
    with pytest.raises(SignatureError, match="'batch' has no upper bound, and max_prepared needs one"):
        signature("batch, seq:1..8")
