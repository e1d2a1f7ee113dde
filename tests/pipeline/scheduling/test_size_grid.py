"""Grids of sizes."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from shapestream.scheduling.size_grid import geometric_sizes, grid_sizes
from shapestream_engine.shapes import Dimension


def test_a_grid_of_one_dimension_is_geometric() -> None:
    """Each size is the same factor larger than the one before, as whole numbers go."""
    assert ((5, 23, 108, 512),) == grid_sizes([Dimension(1, 512)], 4)


@given(low=st.integers(0, 50), more=st.integers(0, 1000), count=st.integers(1, 20))
def test_geometric_sizes_reach_the_bound(low: int, more: int, count: int) -> None:
    """At most so many, ascending, the last of them the upper bound."""
    sizes = geometric_sizes(low, low + more, count)
    assert len(sizes) <= count
    assert sorted(set(sizes)) == list(sizes)
    assert low + more == sizes[-1]


@given(budget=st.integers(1, 200))
def test_a_grid_has_no_more_combinations_than_its_budget(budget: int) -> None:
    """So that what is rounded to it takes no more shapes; the bounds themselves are in it."""
    grid = grid_sizes([Dimension(1, 64), Dimension(1, 512)], budget)
    assert prod(map(len, grid)) <= budget
    assert (64, 512) == tuple(axis[-1] for axis in grid)
