"""What `shapestream simulate` does with what it was asked for: runs, table, JSON, plot."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console

from shapestream.errors import ConfigurationError
from shapestream.settings import load_settings
from shapestream.telemetry.logging import configure
from shapestream_engine.errors import EngineError
from shapestream_workers.simulate.plots import check_plot, draw
from shapestream_workers.simulate.report import print_table
from shapestream_workers.simulate.runs import Goal, Run, Sweep, fewest_slots, parse_sweep, run_all
from shapestream_workers.simulate.scenario import ScenarioOptions, make_scenario

__all__ = ["run_simulate"]


def run_simulate(
    options: ScenarioOptions,
    config: Path | None,
    *,
    sweep: str | None,
    compare: bool,
    p99_ms: float | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Simulates and prints. Raises `ConfigurationError` for whatever cannot be meant, before anything runs."""
    if config is not None:
        options = replace(options, loaded=load_settings(config))
        configure("warning", "auto")  # models may be compiled for it, which is no news here
    if plot is not None:
        check_plot(plot)
    scenario = make_scenario(options)
    swept = None if sweep is None else parse_sweep(sweep)
    errors = Console(stderr=True)
    with errors.status("simulating") as status:
        try:
            runs = run_all(
                scenario,
                swept,
                compare=compare,
                keep=plot is not None,
                progress=lambda what: status.update(f"simulating: {what}"),
            )
        except EngineError as error:  # costs that no table can hold: a formula may say anything
            raise ConfigurationError([f"the calls of this traffic cost too much: {error}"]) from error
    if plot is not None:
        draw(runs, swept, plot)
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
