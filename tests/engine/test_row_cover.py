"""Covers of rows, against brute force over every combination of calls."""

from __future__ import annotations

from itertools import combinations_with_replacement

from hypothesis import given
from hypothesis import strategies as st
from tests.held import held_nbytes

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


def best_cover(sizes: tuple[int, ...], rows: int, divide: bool) -> tuple[int, int]:
    """The calls, and the rows that they have room for, of the best of all covers: the fewest calls for each room."""
    calls = [0, *[rows + 1] * (rows + sizes[-1])]
    for room in range(1, len(calls)):
        calls[room] = min((calls[room - size] + 1 for size in sizes if size <= room), default=rows + 1)
    found = [(calls[room], room) for room in range(rows, len(calls)) if calls[room] <= rows]
    return min(found, key=lambda cover: cover[::-1] if divide else cover)


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
    mine = RowCover(sizes, divide=divide)(rows)
    if rows:
        calls, room = best_cover(sizes, rows, divide)
        assert (calls, room) == (len(mine), sum(mine))
    assert list(mine) == sorted(mine, reverse=True)
    assert sum(mine) - mine[-1] < rows or rows == 0


def test_a_million_rows_take_no_million_steps() -> None:
    """A request of absurd size costs no more to plan than a bounded one: what is remembered shows how far it looked."""
    far, bounded = RowCover((1, 3, 4096), divide=True), RowCover((1, 3, 4096), divide=True)
    assert 1_000_000 == sum(far(1_000_000))
    assert 1 << 14 == sum(bounded(1 << 14))
    assert held_nbytes(far) <= held_nbytes(bounded)
