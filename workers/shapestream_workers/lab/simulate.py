"""`shapestream simulate`: its runs, table, JSON and verdict."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan
from pathlib import Path
from typing import Any, get_args

import typer
from rich.console import Console
from rich.table import Table

from shapestream.errors import ConfigurationError
from shapestream.settings import load_settings
from shapestream.telemetry.logging import configure
from shapestream_engine.errors import EngineError
from shapestream_workers.lab.scenario import (
    PLANNED,
    POLICIES,
    ScenarioOptions,
    Swept,
    make_scenario,
    policy_of,
    varied,
)
from shapestream_workers.lab.simulator import Scenario, simulate
from shapestream_workers.lab.summary import Summary, oracle_rate, summarise
from shapestream_workers.lab.traffic import BadText

__all__ = [
    "Goal",
    "Run",
    "Sweep",
    "fewest_slots",
    "parse_sweep",
    "print_table",
    "run_all",
    "run_simulate",
]

MAX_STEPS = 64
MAX_SLOTS = 100_000
_STEPS = 8
_WHOLE = frozenset({"slots", "in_flight", "max_batch"})


@dataclass(frozen=True, slots=True)
class Sweep:
    """A value of the scenario to vary, and its settings."""

    what: Swept
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation."""

    policy: str
    value: float | None
    """Value of the sweep, if any."""
    summary: Summary
    oracle: float
    """Goodput if all requests were known beforehand."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        value = {} if self.value is None else {"value": self.value}
        oracle = self.oracle if isfinite(self.oracle) else None
        return {"policy": self.policy, **value, "oracle_goodput": oracle, **self.summary.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A goal for the service."""

    p99_s: float
    lost_ratio: float = 0.001
    """Largest permitted share of requests that are refused or late."""

    def met_by(self, summary: Summary) -> bool:
        """Whether the figures reach it, without a queue that only grows."""
        return summary.p99_s <= self.p99_s and summary.lost_ratio <= self.lost_ratio


def run_all(
    scenario: Scenario,
    sweep: Sweep | None,
    *,
    compare: bool,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Run]:
    """Play every policy at every value."""
    runs: list[Run] = []
    policies = POLICIES if compare else (PLANNED,)
    for value in sweep.values if sweep is not None else (None,):
        changed = scenario if sweep is None or value is None else varied(scenario, sweep.what, value)
        oracle = oracle_rate(changed)
        for policy in policies:
            progress(policy if sweep is None else f"{sweep.what} {value:g}: {policy}")
            played = simulate(policy_of(policy, changed), changed)
            runs.append(Run(policy, value, summarise(played), oracle))
    return runs


def fewest_slots(runs: Sequence[Run], goal: Goal) -> Run | None:
    """The planned run of a sweep with the fewest slots that reach the goal, as every larger number does."""
    best: Run | None = None
    planned = sorted((run for run in runs if run.policy == PLANNED), key=lambda run: -(run.value or 0))
    for run in planned:
        if not goal.met_by(run.summary):
            break
        best = run
    return best


def parse_sweep(text: str) -> Sweep:
    """Read `slots=1..16`, `slots=1,2,4`, `rate=50..400` (eight steps) or `rate=50..400:5`; raises `BadText`."""
    what, _, rest = text.partition("=")
    name = what.strip().replace("-", "_")
    try:
        if name not in get_args(Swept):
            raise ValueError(f"what can be swept: {', '.join(get_args(Swept))}")
        values = _values(rest, whole=name in _WHOLE)
        if not values or len(values) > MAX_STEPS or not all(0 < value < float("inf") for value in values):
            raise ValueError(f"1 to {MAX_STEPS} values above 0")
        if name == "slots" and max(values) > MAX_SLOTS:
            raise ValueError(f"at most {MAX_SLOTS:,} slots")
    except (ValueError, OverflowError) as error:
        message = f"--sweep {text}: {error} (expected such as slots=1..16, slots=1,2,4 or rate=50..400:8)"
        raise BadText([message]) from error
    return Sweep(name, values)  # type: ignore[arg-type]  # one of them, as was checked


def _values(text: str, *, whole: bool) -> tuple[float, ...]:
    bounds, colon, steps = text.partition(":")
    low, dots, high = bounds.partition("..")
    if not dots:
        return tuple(float(int(word)) if whole else float(word) for word in text.split(","))
    if whole and not colon:
        return tuple(float(number) for number in range(int(low), min(int(high), int(low) + MAX_STEPS) + 1))
    count = int(steps) if colon else _STEPS
    if not 2 <= count <= MAX_STEPS or float(low) >= float(high):
        raise ValueError(f"LOW..HIGH:STEPS needs LOW below HIGH, and 2 to {MAX_STEPS} steps")
    values = [float(low) + (float(high) - float(low)) * step / (count - 1) for step in range(count)]
    return tuple(dict.fromkeys(float(round(value)) if whole else value for value in values))


def print_table(runs: Sequence[Run], sweep: Sweep | None, console: Console) -> None:
    """Print one row per simulation; times in milliseconds."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    if sweep is not None:
        table.add_column(sweep.what, justify="right")
    table.add_column("policy")
    columns = ["answered/s", "elements/s", "p50 ms", "p95 ms", "p99 ms", "lost %", "padding %", "busy %"]
    for name in (*columns, "per batch", "CPU us"):
        table.add_column(name, justify="right")
    previous = None
    for run in runs:
        cells = [run.policy, *_figures(run)]
        if sweep is not None:
            cells.insert(0, f"{run.value:g}" if run.value != previous else "")
            previous = run.value
        table.add_row(*cells)
    if sweep is None and runs and not isnan(runs[0].oracle):
        table.add_row("all known beforehand", _number(runs[0].oracle))
    console.print(table)


def _figures(run: Run) -> list[str]:
    summary = run.summary
    return [
        _number(summary.goodput),
        _number(summary.elements_per_s),
        *(_number(seconds * 1e3) for seconds in (summary.p50_s, summary.p95_s, summary.p99_s)),
        f"{summary.lost_ratio * 100:.1f}",
        f"{summary.padding_ratio * 100:.1f}",
        f"{summary.utilisation * 100:.0f}",
        f"{summary.mean_batch:.1f}",
        f"{summary.decide_us:.1f}",
    ]


def _number(value: float) -> str:
    if isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def run_simulate(
    options: ScenarioOptions,
    config: Path | None,
    *,
    sweep: str | None,
    compare: bool,
    p99_ms: float | None,
    as_json: bool,
) -> None:
    """Simulate and print. Raises `ConfigurationError` for wrong options before anything runs."""
    if config is not None:
        options = replace(options, loaded=load_settings(config))
        configure("warning", "auto")  # models may be compiled for it, which is no news here
    scenario = make_scenario(options)
    swept = None if sweep is None else parse_sweep(sweep)
    errors = Console(stderr=True)
    with errors.status("simulating") as status:
        try:
            runs = run_all(
                scenario,
                swept,
                compare=compare,
                progress=lambda what: status.update(f"simulating: {what}"),
            )
        except EngineError as error:  # costs that no table can hold: a formula may say anything
            raise ConfigurationError([f"the calls of this traffic cost too much: {error}"]) from error
    goal = None if p99_ms is None else Goal(p99_s=p99_ms / 1000)
    if as_json:
        typer.echo(json.dumps(_plain(runs, swept, goal), indent=2))
        return
    # A file or a pipe has no width of its own; the table is not to be folded for that.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    print_table(runs, swept, console)
    if goal is not None:
        typer.echo(_verdict(runs, swept, goal))


def _plain(runs: list[Run], sweep: Sweep | None, goal: Goal | None) -> dict[str, object]:
    plain: dict[str, object] = {"runs": [run.to_dict() for run in runs]}
    if sweep is not None:
        plain["sweep"] = sweep.what
    if goal is not None:
        plain["p99_ms"] = goal.p99_s * 1000
        plain["met"] = [goal.met_by(run.summary) for run in runs]
        if sweep is not None and sweep.what == "slots":
            best = fewest_slots(runs, goal)
            plain["fewest_slots"] = None if best is None else best.value
    return plain


def _verdict(runs: list[Run], sweep: Sweep | None, goal: Goal) -> str:
    words = f"p99 <= {goal.p99_s * 1000:g} ms and at most {goal.lost_ratio:.1%} lost"
    if sweep is None:
        met = [run.policy for run in runs if goal.met_by(run.summary)]
        return f"{words}: {', '.join(met) if met else 'not reached'}"
    if sweep.what == "slots":
        best = fewest_slots(runs, goal)
        return f"{words}: " + ("not with these slots" if best is None else f"{best.value:g} slots are enough")
    met = [f"{run.value:g} ({run.policy})" for run in runs if goal.met_by(run.summary)]
    return f"{words}: {sweep.what} {', '.join(met) if met else 'at none of these'}"
