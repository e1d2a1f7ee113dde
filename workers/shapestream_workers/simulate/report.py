"""The table of `shapestream simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from rich.console import Console
from rich.table import Table

from shapestream_workers.simulate.runs import Run, Sweep

__all__ = ["print_table"]


def print_table(runs: Sequence[Run], sweep: Sweep | None, console: Console) -> None:
    """One row per simulation; times in milliseconds."""
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
