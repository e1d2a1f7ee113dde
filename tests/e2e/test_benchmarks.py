"""The benchmarks of docs/performance.md run, check every answer, and report what they promise; figures are not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from benchmarks.limit.answers import References
from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.thorough


def limit(figures: Any) -> None:
    """Both in-process ways, both servers, both loads; a wrong answer would have ended it."""
    figures = figures["lognormal"]
    assert {"60", "90"} == figures["p99_ratio_vs_single"].keys()
    for name in (
        "efficiency",
        "efficiency_64",
        "speedup_vs_arrival_order",
        "speedup_vs_by_length",
        "speedup_vs_single",
    ):
        assert 0 < figures[name]
    assert 0 <= figures["padding_ratio"] < 1
    # Four ways of one process, two servers with two windows each, and the random arrivals.
    assert figures["answers_checked"] > 6 * figures["requests"]


def account(figures: Any) -> None:
    """The parts of the way add up to ours; a wrong answer would have ended it."""
    (report,) = figures["reports"]
    figure_of = {row["part"]: row["ms per request"] for row in report["rows"]}
    ms = [value for value in figure_of.values() if isinstance(value, float)]
    assert figure_of["ours"] == ms[-1] == pytest.approx(sum(ms[:-1]))
    assert 0 < figure_of["oracle"]
    # Those of the server, and of each replay that does not even out the rows.
    assert figures["answers_checked"] >= 7 * figures["requests"]


def memory(figures: Any) -> None:
    """A few thousand requests of random shapes, each answer compared, without a reallocation."""
    rows = {row["what"]: row for row in figures["rows"]}
    assert 0 == rows["input tensors reallocated"]["growth"]
    assert rows.keys() >= {"server, resident", "worker, resident", "client, resident"}


def gateway(figures: Any) -> None:
    """Echoes, the SDK and gateways in turns, each answer compared; idle connections."""
    alone, together, server_alone, server_together, rates, large, idle, _ = figures
    front = ["echo, trio", "echo, asyncio", "SDK, callers in step", "SDK, by sockets", "gateway"]
    for table in (alone, together):
        assert front == [row["way"] for row in table["rows"]]
    for table in (server_alone, server_together):
        assert front[2:] == [row["way"] for row in table["rows"]]
    assert ["two gateways"] == [row["way"] for row in rates["rows"]]
    assert all(row["per s"] > 0 for table in (rates, large) for row in table["rows"])
    assert "50" == idle["rows"][0]["connections"]


def chains(figures: Any) -> None:
    """One at a time, together, rows, and small requests beside large chains; each answer is compared."""
    alone, together, rows, mixed = figures
    assert ["one model", "chain of two", "chain of four", "two calls"] == [
        row["way"] for row in alone["rows"]
    ]
    assert ["chain of two", "two-step client"] == [row["way"] for row in together["rows"]]
    assert all(row["rows per s"] > 0 for row in rows["rows"])
    assert ["without a pause", "at leisure"] == [row["small clients"] for row in mixed["rows"]]
    assert all(row["p99 beside"] > 0 for row in mixed["rows"])


def moderate(figures: Any) -> None:
    """Saturated, and five loads by the same arrivals; each answer is compared."""
    peak, *loads = figures
    ways = ["in process", "two workers", "plain OpenVINO"]
    assert ways == [row["way"] for row in peak["rows"]]
    assert 5 == len(loads)
    for load in loads:
        assert [*ways, *(f"{way} / plain OpenVINO" for way in ways[:2])] == [
            row["way"] for row in load["rows"]
        ]
        assert all(0 < float(row["p50, ms"]) <= float(row["p99, ms"]) for row in load["rows"][:3])


def cold(figures: Any) -> None:
    """What a lone request touches where pages are small, and its time, beside a floor's."""
    pages, times = figures
    for table in (pages, times):
        assert ["floor", "ours", "small pages"] == [row["way"] for row in table["rows"]]
    least, _, ours = pages["rows"]
    assert 0 < least["heap"] < ours["heap"] < ours["all"]
    assert all(row["p50 cold"] > 0 for row in times["rows"])


def attacks(figures: Any) -> None:
    """Honest callers over HTTP and gRPC beside attackers, each answer compared, and one that shares its slot."""
    apart, shared = figures
    assert ["two MB of numbers", "checks of health", "calls without messages"] == [
        row["attack"] for row in apart["rows"]
    ]
    assert ["2,048 texts, on the same slot"] == [row["attack"] for row in shared["rows"]]
    for row in apart["rows"] + shared["rows"]:
        assert all(row[f"{figure}, 1 conn."] > 0 for figure in ("p99", "rate", "longest turn"))


def scheduler(figures: Any) -> None:
    """Real events to the pure core, in a steady state: everything that arrives is delivered."""
    rows = figures["rows"]
    assert 11 == len({row["scenario"] for row in rows}) == len(rows)
    assert all(row["100"] > 0 for row in rows)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "promises", [limit, account, memory, chains, gateway, moderate, scheduler, attacks, cold]
)
def test_a_benchmark_runs_and_reports(promises: Callable[[Any], None]) -> None:
    """As a smoke run, in a process of its own."""
    more = {limit: ("limit", "--trace", "lognormal"), account: ("limit", "--account")}
    module, *options = more.get(promises, (promises.__name__,))
    command = [sys.executable, "-m", f"benchmarks.{module}", "--smoke", "--json", *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert 0 == ran.returncode, ran.stderr
    promises(json.loads(ran.stdout))


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
