"""Dividing the CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shapestream_engine.machine import MAX_SLOTS, divide_cpus, thread_times


@pytest.mark.parametrize(
    ("cpus", "workers", "slots", "threads", "expected"),
    [
        (2, 2, "auto", "auto", (1, 1)),
        (2, 1, "auto", "auto", (1, 2)),
        (16, 1, "auto", "auto", (8, 16)),
        (16, 3, "auto", "auto", (3, 5)),
        (1, 4, "auto", "auto", (1, 1)),
        (8, 1, 2, "auto", (2, 8)),
        (2, 1, 4, "auto", (4, 4)),
        (8, 1, "auto", 3, (2, 3)),
        (8, 2, 3, 1, (3, 1)),
        (1024, 1, "auto", "auto", (MAX_SLOTS, 1024)),
    ],
)
def test_each_worker_gets_its_share(
    cpus: int, workers: int, slots: Any, threads: Any, expected: tuple[int, int]
) -> None:
    """`auto` follows the worker's share of the CPUs; what is given is kept."""
    assert expected == divide_cpus(cpus, workers, slots, threads)


@pytest.mark.parametrize(
    "arguments", [(0, 1), (1, 0), (1, 1, 0), (1, 1, 1, 0), (1, 1, "many"), (1, 1, True), (2.0, 1)]
)
def test_counts_begin_at_one(arguments: tuple[Any, ...]) -> None:
    """Nothing can be divided among nobody."""
    with pytest.raises(ValueError, match="counts from 1"):
        divide_cpus(*arguments)


def test_times_of_threads_are_summed(tmp_path: Path) -> None:
    """Running and waiting; without the files both are 0."""
    assert (0, 0) == thread_times(tmp_path)
    for number, text in enumerate(("100 20 3\n", "1000 5 7\n")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "schedstat").write_text(text)
    assert (1100, 25) == thread_times(tmp_path)
