"""`python -m benchmarks.ablations`: today's scheduler without each mechanism in turn, against itself.

Every figure is simulated, and depends on the seed alone. docs/decisions.md gives the verdicts.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing import Pool
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.ablations.mechanisms import MECHANISMS
from benchmarks.ablations.play import Played, Task, play
from benchmarks.ablations.scenarios import SCENARIOS

SIMULATION_S = 0.4
"""CPU seconds of one simulation in the mean, on one core of 2026."""
SEEDS, QUICK_SEEDS = 8, 3
SHARES = frozenset({"late", "lost"})
"""Figures that are shares themselves: their differences are in points, not in percent."""

Differences = dict[tuple[str, str, str], list[float]]
"""By mechanism, scenario and figure: without / with it, less one, of each seed in percent; of shares the difference."""


def main(
    only: Annotated[
        str, typer.Option(help="Mechanisms, with semicolons; joined by + they are off together.")
    ] = "",
    scenarios: Annotated[str, typer.Option(help="Parts of scenarios' names, with semicolons.")] = "",
    everywhere: Annotated[
        bool, typer.Option(help="Play all scenarios, not only those of the mechanism.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{QUICK_SEEDS} seeds: enough for large effects.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=2, help="Simulations of each, paired.")] = SEEDS,
    processes: Annotated[int, typer.Option(min=1, help="Simulations at a time.")] = os.cpu_count() or 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Print what changes without each mechanism: without / with it, in %, with the 95 % interval of paired differences."""
    console = Console(stderr=True)
    chosen = [tuple(map(str.strip, names.split("+"))) for names in only.split(";")] if only else [
        (name,) for name in MECHANISMS
    ]  # fmt: skip
    if unknown := {name for names in chosen for name in names} - MECHANISMS.keys():
        raise typer.BadParameter(f"no mechanism {', '.join(unknown)}; there are {', '.join(MECHANISMS)}")
    wanted = [part.strip() for part in scenarios.split(";")]
    pairs = [
        (scenario, off)
        for off in chosen
        for scenario in _scenarios(off, everywhere=everywhere)
        if any(part in scenario for part in wanted)
    ]
    numbers = range(QUICK_SEEDS if quick else seeds)
    tasks = list(
        dict.fromkeys(
            Task(scenario, names, seed) for seed in numbers for scenario, off in pairs for names in ((), off)
        )
    )
    minutes = SIMULATION_S * len(tasks) / processes / 60
    console.print(
        f"{len(tasks)} simulations, {processes} at a time: about {minutes:.0f} minutes of idle cores"
    )
    with Pool(processes) as pool:
        each = track(pool.imap(play, tasks), "simulating", len(tasks), console=console)
        played = dict(zip(tasks, each, strict=True))
    found, fired = _compared(pairs, numbers, played)
    if as_json:
        print(json.dumps([[*key, fired[key[:2]], values] for key, values in found.items()]))
    else:
        Console().print(_table(found, fired))


def _scenarios(off: Sequence[str], *, everywhere: bool) -> list[str]:
    return (
        list(SCENARIOS)
        if everywhere
        else list(dict.fromkeys(s for name in off for s in MECHANISMS[name].scenarios))
    )


def _compared(
    pairs: Sequence[tuple[str, tuple[str, ...]]], seeds: range, played: dict[Task, Played]
) -> tuple[Differences, dict[tuple[str, str], str]]:
    """Return the differences, and by mechanism and scenario how often it was at work with it and without."""
    found: Differences = defaultdict(list)
    fired = {}
    for scenario, off in pairs:
        title, watched = " + ".join(off), MECHANISMS[off[0]].watched
        counts = np.zeros(2, int)
        for seed in seeds:
            with_it, without = played[Task(scenario, (), seed)], played[Task(scenario, off, seed)]
            for figure, value in with_it.figures.items():
                after = without.figures[figure]
                change = after - value if figure in SHARES else after / value - 1
                found[title, scenario, figure].append(round(100 * change, 4))
            counts += with_it.fired.get(watched, 0), without.fired.get(watched, 0)
        fired[title, scenario] = f"{counts[0]} -> {counts[1]}" if watched else ""
    return found, fired


def _table(found: Differences, fired: dict[tuple[str, str], str]) -> Table:
    table = Table(title="Without it, against the same scheduler with it", title_justify="left")
    for column in ("mechanism", "scenario", "at work", "figure", "% (late, lost: points)"):
        table.add_column(column, justify="right" if column.startswith("%") else "left")
    last = ""
    for (title, scenario, figure), values in found.items():
        mean, half = interval(values)
        at_work = fired[title, scenario]
        table.add_row(title if title != last else "", scenario, at_work, figure, f"{mean:+.1f} ± {half:.1f}")
        last = title
    return table


_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired differences, and half of its 95 % interval."""
    quantile = _STUDENT[len(values) - 2] if len(values) - 2 < len(_STUDENT) else 2.0
    return float(np.mean(values)), quantile * float(np.std(values, ddof=1)) / len(values) ** 0.5


if __name__ == "__main__":
    typer.run(main)
