"""One call, or one shape with every number of rows, costs exactly what it costs among many calls in an array."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest

from shapestream.scheduling.cost_grid import Grid


def _drawn_grid(draw: np.random.Generator, dimensions: int) -> tuple[Grid, list[list[int]]]:
    axes = [
        sorted({int(size) for size in draw.integers(1, 300, draw.integers(1, 6))}) for _ in range(dimensions)
    ]
    points = {sizes: float(draw.random()) + 1e-3 * prod(sizes) for sizes in product(*axes)}
    kept = {sizes: seconds for sizes, seconds in points.items() if draw.random() < 0.8}
    return Grid(kept or points), axes


def _drawn_sizes(draw: np.random.Generator, axes: list[list[int]]) -> tuple[int, ...]:
    """On nodes, between them, and far beyond."""
    return tuple(
        [
            int(draw.choice([draw.integers(1, 400), draw.choice(axis), 1 << int(draw.integers(1, 40))]))
            for axis in axes
        ]
    )


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4, 7])
def test_one_call_costs_what_it_costs_among_many(dimensions: int) -> None:
    """Prices of `second` and `seconds`, corrected and published now and then."""
    draw = np.random.default_rng(dimensions)
    for _ in range(10):
        grid, axes = _drawn_grid(draw, dimensions)
        for _ in range(3):
            many = [_drawn_sizes(draw, axes) for _ in range(40)]
            among = grid.seconds(np.array(many, np.float64).T).tolist()
            assert [grid.second(sizes) for sizes in many] == among
            for sizes in many:
                grid.correct(sizes, float(draw.normal()))
            grid.publish(0.01)


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4])
@pytest.mark.parametrize("most", [1, 8, 500])
def test_every_number_of_rows_costs_what_it_costs_among_many(dimensions: int, most: int) -> None:
    """Prices of `line` and `seconds`."""
    draw = np.random.default_rng(dimensions)
    prepared = 0
    for _ in range(10):
        grid, axes = _drawn_grid(draw, dimensions)
        for _ in range(20):
            shape = _drawn_sizes(draw, axes)[1:]
            line = grid.line(most, shape)
            if line is not None:
                prepared += 1
                # No rows cost what the smallest call does.
                calls = [(1,) * dimensions, *[(rows, *shape) for rows in range(1, most + 1)]]
                assert line.tolist() == grid.seconds(np.array(calls, np.float64).T).tolist()
    assert prepared
