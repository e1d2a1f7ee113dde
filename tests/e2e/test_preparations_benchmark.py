"""The benchmark of new shapes (docs/performance.md), as short as it can be: its runs, their answers and what they report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.preparations import first_report, memory_report
from benchmarks.prepared_runs import RUNS

pytestmark = pytest.mark.e2e


def test_the_runs_on_openvino_check_their_answers_and_report() -> None:
    """Each in a process of its own, as the benchmark does it."""
    first = first_report(shapes=3, rounds=1)
    assert ["the first of its shape", "a repeated one", "the difference, shape by shape"] == [
        row[0] for row in first.rows
    ]
    memory = memory_report(shapes=20, rounds=1)
    assert ["native", "native, max_prepared: 64"] == [row[0] for row in memory.rows]


def test_the_documented_table_is_of_the_present_runs() -> None:
    """docs/performance.md names each command and each strategy that is measured."""
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    assert "python -m benchmarks.preparations" in page
    assert re.search(r"bounded and bucketed .*\| 6 \|", page)
    assert {
        "xla-exact",
        "xla-bucketed",
        "openvino-first",
        "openvino-native",
        "openvino-rounded",
    } == RUNS.keys()
