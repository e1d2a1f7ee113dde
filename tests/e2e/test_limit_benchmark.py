"""The benchmarks of docs/performance.md run, check every answer, and report what they promise; figures are not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.limit.answers import References
from benchmarks.limit.cuts import CallCosts, alone, by_budget, in_order, optimal, padding_ratio
from benchmarks.limit.engine import Batch, assemble
from benchmarks.limit.traces import lognormal

ROOT = Path(__file__).parents[2]
LENGTHS = lognormal(6_000).lengths


def _run(module: str, *arguments: str) -> Any:
    command = [sys.executable, "-m", module, "--smoke", "--json", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert 0 == ran.returncode, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.e2e
def test_the_limit_is_measured_in_all_ways_and_every_answer_is_checked() -> None:
    """Both in-process ways, both servers, both loads; a wrong answer would have ended it."""
    figures = _run("benchmarks.limit", "--trace", "lognormal")["lognormal"]
    assert {"60", "90"} == figures["p99_ratio_vs_single"].keys()
    for name in ("efficiency", "efficiency_64", "speedup_vs_arrival_order", "speedup_vs_single"):
        assert 0 < figures[name]
    assert 0 <= figures["padding_ratio"] < 1
    # Oracle, one at a time and arrival order, two servers with two windows each, and the random arrivals.
    assert figures["answers_checked"] > 6 * figures["requests"]


@pytest.mark.e2e
def test_the_memory_benchmark_runs_without_a_reallocation() -> None:
    """A few thousand requests of random shapes, each answer compared."""
    rows = {row["what"]: row for row in _run("benchmarks.memory")["rows"]}
    assert 0 == rows["input tensors reallocated"]["growth"]
    assert rows.keys() >= {"server, resident", "worker, resident", "client, resident"}


@pytest.mark.e2e
def test_the_growth_benchmark_runs_with_several_clients_and_workers() -> None:
    """A server per number of workers, raw sessions in turns, each answer compared."""
    rows = _run("benchmarks.growth")["rows"]
    assert ["1, 1", "1, 20", "3, 1", "3, 20"] == [row["workers, clients"] for row in rows]


def test_the_scheduler_benchmark_runs_every_scenario() -> None:
    """Real events to the pure core, in a steady state: everything that arrives is delivered."""
    rows = _run("benchmarks.scheduler")["rows"]
    scenarios = {row["scenario"] for row in rows}
    assert 10 == len(scenarios) == len(rows)
    assert all(row["1,000"] > 0 for row in rows)


@pytest.mark.parametrize(
    "batches",
    [
        alone(LENGTHS),
        in_order(LENGTHS, 16),
        by_budget(LENGTHS, 512, 16),
        optimal(
            LENGTHS, CallCosts({(r, s): 1 + r * s for r in (1, 2, 4, 8, 16, 32) for s in (4, 16, 64, 256)})
        ),
    ],
    ids=["alone", "in order", "by budget", "optimal"],
)
def test_every_way_to_cut_runs_each_sentence_once_at_its_length_or_above(batches: list[Batch]) -> None:
    """What the oracle and its rivals run is the whole trace, and nothing is cut off."""
    places = np.concatenate([batch.places for batch in batches])
    assert list(range(len(LENGTHS))) == sorted(places.tolist())
    assert all(LENGTHS[batch.places].max() <= batch.length for batch in batches)
    assert 0 <= padding_ratio(batches, LENGTHS) < 1


def test_batches_are_assembled_with_masks_over_their_own_tokens() -> None:
    """Zeros beyond them, in both inputs."""
    tokens, mask = assemble(Batch(places=np.array([1, 0]), length=3), [np.array([5, 6, 7]), np.array([8])])
    assert [[8, 0, 0], [5, 6, 7]] == tokens.tolist()
    assert [[1, 0, 0], [1, 1, 1]] == mask.tolist()


class _Known(References):
    """References that need no model."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._allowed = np.full_like(rows, 1e-3)
        self.checked = 0


@pytest.mark.parametrize("wrong", [0.5, np.nan])
def test_a_wrong_or_missing_answer_ends_the_benchmark(wrong: float) -> None:
    """One number of one row is enough."""
    known = _Known(np.ones((3, 4)))
    answers = np.ones((3, 4), np.float32)
    known.check(answers, "right")
    assert 3 == known.checked
    answers[2, 1] = wrong
    with pytest.raises(AssertionError, match="nobody: 1 of 3 answers are wrong"):
        known.check(answers, "nobody")
    with pytest.raises(AssertionError, match="2 answers to 3"):
        known.check(answers[:2], "short")
