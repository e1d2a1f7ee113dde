"""`python -m benchmarks.ablations`: each mechanism off in turn, against the baseline, and what it was worth.

The baseline is the commit from which the mechanisms were removed, checked out beside this one: the table of
docs/decisions.md can be made again, and needs no care when the mechanisms are gone.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import versus
from benchmarks.ablations.mechanisms import MECHANISMS, THIS, Mechanism
from benchmarks.checkouts import ROOT, Checkout, checked_out

BASELINE = "18c4c98"

Differences = dict[tuple[str, str, str], list[float]]
"""By mechanism, scenario and figure: of each seed, without / with it, less one; of shares, the difference."""

_TURN_OFF = f"""
import importlib.util, os
if off := os.environ.get("SHAPESTREAM_ABLATED"):
    spec = importlib.util.spec_from_file_location("ablated", {str(Path(__file__).with_name("mechanisms.py"))!r})
    ablated = importlib.util.module_from_spec(spec)
    import sys
    sys.modules["ablated"] = ablated
    spec.loader.exec_module(ablated)
    ablated.turn_off(off.split("+"))
"""


def main(
    only: Annotated[
        str, typer.Option(help="Mechanisms, with commas; joined by + they are off together.")
    ] = "",
    scenarios: Annotated[str, typer.Option(help="Parts of scenarios' names, with semicolons.")] = "",
    seeds: Annotated[int, typer.Option(min=2, help="Simulations of each, paired.")] = 10,
    processes: Annotated[int, typer.Option(min=1, help="Simulations at a time.")] = 2,
    real: Annotated[
        str, typer.Option(help="Real servers instead: benchmarks of `versus`, with commas.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Of real ones, interleaved.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Prints what each mechanism is worth: without it / with it, in %, with the 95 % interval of paired differences."""
    console = Console(stderr=as_json)
    chosen = (
        [name.strip().split("+") for name in only.split(",")] if only else [[name] for name in MECHANISMS]
    )
    if unknown := {name for names in chosen for name in names} - MECHANISMS.keys():
        raise typer.BadParameter(f"no mechanism {', '.join(unknown)}; there are {', '.join(MECHANISMS)}")
    with checked_out(BASELINE) as baseline:
        if real:
            _measure(console, baseline, chosen, versus.chosen(real), rounds)
            return
        wanted = [part.strip() for part in scenarios.split(";")]
        found, fired = _simulate(baseline, chosen, wanted, seeds, processes)
    console.print(_table(found, fired))
    if as_json:
        print(json.dumps([[*key, values] for key, values in found.items()]))


def _simulate(
    baseline: Checkout, chosen: Sequence[Sequence[str]], wanted: Sequence[str], seeds: int, processes: int
) -> tuple[Differences, dict[tuple[str, str], tuple[int, int]]]:
    """Differences, and by mechanism and scenario how often it was at work with it and without."""
    pairs = [
        (scenario, off)
        for off in chosen
        for scenario in dict.fromkeys(s for name in off for s in MECHANISMS[name].scenarios)
        if any(part in scenario for part in wanted)
    ]
    tasks: list[tuple[str, tuple[str, ...], int]] = list(
        dict.fromkeys(
            (scenario, tuple(names), seed)
            for seed in range(seeds)
            for scenario, off in pairs
            for names in (_with(off), off)
        )
    )
    # This checkout's benchmarks, beside the packages of either.
    environment = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    by_task: dict[tuple[str, tuple[str, ...], int], Any] = {}
    for root, own in (
        (baseline.root, [task for task in tasks if not _is_here(task[1])]),
        (ROOT, [task for task in tasks if _is_here(task[1])]),
    ):
        checkout = Checkout(name=str(root), root=root, environment=environment)
        played = checkout.run(["-m", "benchmarks.ablations.play", str(processes)], json.dumps(own))
        by_task |= dict(zip(own, played, strict=True))
    differences: Differences = defaultdict(list)
    fired: dict[tuple[str, str], tuple[int, int]] = {}
    for scenario, off in pairs:
        title = " + ".join(off)
        counts = np.zeros(2, int)
        for seed in range(seeds):
            (before, at_work), (after, still) = (
                by_task[scenario, _with(off), seed],
                by_task[scenario, tuple(off), seed],
            )
            for figure, value in before.items():
                change = after[figure] - value if figure == "late" else after[figure] / value - 1
                differences[title, scenario, figure].append(100 * change)
            watched = MECHANISMS[off[0]].watched
            counts += at_work.get(watched, 0), still.get(watched, 0)
        fired[title, scenario] = int(counts[0]), int(counts[1])
        _check(title, MECHANISMS[off[0]], fired[title, scenario])
    return differences, fired


def _is_here(off: Sequence[str]) -> bool:
    return bool(off) and MECHANISMS[off[0]].is_here


def _with(off: Sequence[str]) -> tuple[str, ...]:
    """Return what stands for the scheduler that has the mechanisms: the baseline, or this checkout."""
    return (THIS,) if _is_here(off) and tuple(off) != (THIS,) else ()


def _check(title: str, mechanism: Mechanism, counts: tuple[int, int]) -> None:
    """Raises RuntimeError where something is still at work that was turned off."""
    if counts[1] and not mechanism.replaced:
        raise RuntimeError(f"{title}: {mechanism.watched} is off, and was at work {counts[1]} times")


def _table(found: Differences, fired: Mapping[tuple[str, str], tuple[int, int]]) -> Table:
    table = Table(title=f"Without it, against {BASELINE}", title_justify="left")
    for column in ("mechanism", "scenario", "at work", "figure", "%", "95 %"):
        table.add_column(column, justify="right" if column in ("at work", "%", "95 %") else "left")
    last = ""
    for (title, scenario, figure), values in found.items():
        mean = float(np.mean(values))
        half = _student(len(values)) * float(np.std(values, ddof=1)) / len(values) ** 0.5
        at_work = "{} -> {}".format(*fired[title, scenario])
        table.add_row(
            title if title != last else "", scenario, at_work, figure, f"{mean:+.1f}", f"± {half:.1f}"
        )
        last = title
    return table


_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def _student(count: int) -> float:
    """The quantile for 95 % with so many values."""
    return _STUDENT[count - 2] if count - 2 < len(_STUDENT) else 2.0


def _measure(
    console: Console,
    baseline: Checkout,
    chosen: Sequence[Sequence[str]],
    benchmarks: Sequence[str],
    rounds: int,
) -> None:
    """Prints the ratios without / with, of real servers; every process of a benchmark is patched as it starts."""
    with tempfile.TemporaryDirectory(prefix="ss-ablated-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(_TURN_OFF)
        for off in chosen:
            environment: dict[str, Any] = {"PYTHONPATH": folder, "SHAPESTREAM_ABLATED": "+".join(off)}
            ablated = Checkout(name="ablated", root=baseline.root, environment=environment)
            for name in benchmarks:
                ratios, thrown_away = versus.compare(
                    baseline, ablated, versus.BENCHMARKS[name], rounds=rounds, folder=Path(folder)
                )
                title = f"{name}: without {' + '.join(off)} / with"
                console.print(versus.table(title, ratios, thrown_away))


if __name__ == "__main__":
    typer.run(main)
