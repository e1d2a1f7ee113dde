"""Covers of rows, against brute force over every combination of calls."""

from __future__ import annotations

from itertools import combinations_with_replacement

from hypothesis import given
from hypothesis import strategies as st

from shapestream_engine.batching.calls import RowCover

allowed_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True).map(
    lambda sizes: tuple(sorted(sizes))
)


def every_cover(sizes: tuple[int, ...], rows: int) -> list[tuple[int, ...]]:
    """All combinations of calls with room for the rows of which none can be left out."""
    found = []
    for calls in range(1, rows + 1):
        for cover in combinations_with_replacement(sizes, calls):
            if sum(cover) >= rows and sum(cover) - min(cover) < rows:
                found.append(cover)
    return found


@given(sizes=allowed_sizes, rows=st.integers(1, 9))
def test_no_cover_has_fewer_calls(sizes: tuple[int, ...], rows: int) -> None:
    """For buckets: the fewest calls of all covers, and among these the least filled up."""
    mine = RowCover(sizes, divide=False)(rows)
    assert min((len(cover), sum(cover)) for cover in every_cover(sizes, rows)) == (len(mine), sum(mine))


@given(sizes=allowed_sizes, rows=st.integers(1, 9))
def test_no_cover_fills_up_less(sizes: tuple[int, ...], rows: int) -> None:
    """For partitions: the least filled up of all covers, and among these the fewest calls."""
    mine = RowCover(sizes, divide=True)(rows)
    assert min((sum(cover), len(cover)) for cover in every_cover(sizes, rows)) == (sum(mine), len(mine))


@given(sizes=allowed_sizes, rows=st.integers(0, 400), divide=st.booleans())
def test_many_rows_are_searched_no_further_than_needed(
    sizes: tuple[int, ...], rows: int, divide: bool
) -> None:
    """Beyond the bound calls of the largest size are taken unseen; searching everything finds nothing better."""
    cover = RowCover(sizes, divide=divide)
    thorough = RowCover(sizes, divide=divide)
    thorough._searched = rows
    mine, best = cover(rows), thorough(rows)
    assert (len(best), sum(best)) == (len(mine), sum(mine))
    assert list(mine) == sorted(mine, reverse=True)
    assert sum(mine) - mine[-1] < rows or rows == 0


def test_a_million_rows_take_no_million_steps() -> None:
    """A request of absurd size costs no more to plan than a bounded one."""
    cover = RowCover((1, 3, 4096), divide=True)
    assert 1_000_000 == sum(cover(1_000_000))
    assert len(cover._best) <= (1 << 14) + 1
