"""Sizes learned from a trace: the dynamic programme against all possibilities."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream_workers.lab import tune_sizes as module
from shapestream_workers.lab.tune_sizes import best_boundaries, powers_of_two

COUNTS = st.dictionaries(st.integers(1, 20), st.integers(0, 9), max_size=7)


def padded_elements(counts: Mapping[int, int], boundaries: tuple[int, ...]) -> int:
    """Elements that these ascending boundaries add to the observed sizes."""
    return sum(
        count * (next(boundary for boundary in boundaries if boundary >= size) - size)
        for size, count in counts.items()
    )


@given(counts=COUNTS, most=st.integers(1, 5), beyond=st.integers(0, 3))
def test_no_choice_of_boundaries_pads_less(counts: dict[int, int], most: int, beyond: int) -> None:
    """Every set of observed sizes that ends with the largest is tried, also those with fewer boundaries."""
    largest = max(counts, default=1) + beyond
    best = best_boundaries(counts, most, largest)
    assert len(best) <= most
    assert largest == best[-1]
    assert sorted(set(best)) == list(best)
    others = [size for size in counts if size != largest]
    least = min(
        padded_elements(counts, (*sorted(chosen), largest))
        for number in range(min(most, len(others) + 1))
        for chosen in combinations(others, number)
    )
    assert least == padded_elements(counts, best)


@given(counts=COUNTS)
def test_as_many_boundaries_as_sizes_pad_nothing(counts: dict[int, int]) -> None:
    """And none is spent on what nobody sends."""
    seen = {size for size, count in counts.items() if count}
    best = best_boundaries(counts, 20, 20)
    assert 0 == padded_elements(counts, best)
    assert seen | {20} == set(best)


def test_many_distinct_sizes_are_looked_at_as_quantiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clusters need two boundaries, whatever the resolution."""
    monkeypatch.setattr(module, "MAX_DISTINCT", 16)
    counts = dict.fromkeys((*range(100, 200), *range(900, 1000)), 1)
    first, last = best_boundaries(counts, 2, 1000)
    assert 199 <= first < 260
    assert 1000 == last


@pytest.mark.parametrize(("counts", "most", "largest"), [({1: 1}, 0, 8), ({9: 1}, 1, 8), ({-1: 1}, 1, 8)])
def test_impossible_wishes_are_refused(counts: dict[int, int], most: int, largest: int) -> None:
    """Rather than answered with boundaries that some request does not fit."""
    with pytest.raises(ValueError, match="boundary"):
        best_boundaries(counts, most, largest)


@pytest.mark.parametrize(
    ("most", "expected"), [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))]
)
def test_rows_are_powers_of_two_up_to_the_most(most: int, expected: tuple[int, ...]) -> None:
    """The most is one of them, so that full batches take one call."""
    assert expected == powers_of_two(most)
