"""What a killed run means for the next attempt."""

from __future__ import annotations

from typing import Any

import pytest

from shapestream_workers.offline.attempts import outlook


def seen(journal: str, *, first: int = 0, idempotent: bool = True) -> Any:
    """The deaths, the errors of lost rows, and the rows that run alone."""
    found = outlook(journal.splitlines(), first=first, idempotent=idempotent)
    return found.deaths, {row: str(error) for row, error in found.lost.items()}, found.alone_before


ONE = "attempt\nbegun 0\nbegun 1\nbegun 2\ndone 0\ndone 2\n"
POISONED = "poisoned: the process ended twice while this row was under way"
LOST = "worker_lost: an earlier attempt began this row, which must not run twice (idempotent: false)"


@pytest.mark.parametrize(
    ("journal", "first", "expected"),
    [
        ("", 0, ({}, {}, 0)),
        (ONE, 0, ({1: 1}, {}, 2)),
        (ONE, 2, ({}, {}, 0)),
        (ONE + "left\n", 0, ({}, {}, 0)),
        (ONE + "done 1\n", 0, ({}, {}, 0)),
        (ONE + "attempt\nbegun 0\ndone 0\nbegun 1\n", 0, ({1: 2}, {1: POISONED}, 0)),
        (ONE + "attempt\nbegun 0\n", 0, ({0: 1, 1: 1}, {}, 2)),
        (ONE + "attempt\nbegun 1\nleft\n", 0, ({1: 1}, {}, 2)),
        (ONE + "attempt\nbegun 1\ndone 1\nbegun 7\n", 0, ({1: 1, 7: 1}, {}, 8)),
        (ONE + "begun 1", 0, ({1: 1}, {}, 2)),
        ("attempt\nbegun 4\nbegun x\nbe", 0, ({4: 1}, {}, 5)),
        ("begun 3\n\nattempt\nbegun 3\n", 0, ({3: 2}, {3: POISONED}, 0)),
    ],
)
def test_rows_that_were_under_way_are_suspects_then_poisoned(journal: str, first: int, expected: Any) -> None:
    """One death: it runs alone, and all rows before it. Two: it fails. What is in a part, or ended well, is forgotten."""
    assert expected == seen(journal, first=first)


def test_rows_that_must_not_run_twice_are_lost_at_once() -> None:
    """Also those whose answers had come, since no part has them, and those of an attempt that ended by itself."""
    assert {0: LOST, 1: LOST, 2: LOST} == seen(ONE, idempotent=False)[1]
    assert {1: LOST, 2: LOST} == seen(ONE + "left\n", first=1, idempotent=False)[1]
