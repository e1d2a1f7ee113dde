"""A memo: each value is made once, and their number is bounded."""

from __future__ import annotations

import pytest
from tests.held import held

from shapestream_engine.memo import Memo


def test_a_value_is_made_once() -> None:
    """Which makes the usual case a look-up."""
    made: list[int] = []
    memo = Memo[int, tuple[int]](lambda key: (made.append(key), (key,))[1])
    assert memo(7) is memo(7)
    assert [7] == made


def test_no_more_values_are_kept_than_its_limit() -> None:
    """However many keys arrive, the memory of them does not grow past it; what was forgotten is made again."""
    memo = Memo[int, str](str, limit=10)
    empty = len(held(memo))
    assert ["3", "1003"] == [memo(3), memo(1003)]
    for key in range(1000):
        memo(key)
    assert len(held(memo)) - empty <= 10 * 2, "a key and a value of each"
    assert "3" == memo(3)


def test_a_failure_is_not_kept() -> None:
    """It is raised each time, as whatever made it may have passed."""
    keys: list[int] = []

    def refuse(key: int) -> int:
        keys.append(key)
        raise ValueError(key)

    memo = Memo(refuse)
    for _ in range(2):
        with pytest.raises(ValueError, match="5"):
            memo(5)
    assert [5, 5] == keys
