"""The pictures of `shapestream simulate`: latencies, and goodput over time or over what was swept.

The only module that imports Matplotlib, which the extra `[plots]` brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from shapestream.errors import ConfigurationError
from shapestream.simulation.distributions import BadText
from shapestream.simulation.experiment import ARRIVAL_ORDER, ONE_AT_A_TIME, PLANNED
from shapestream.simulation.summary import goodput_over_time, latencies_s
from shapestream_workers.simulate.runs import Run, Sweep

__all__ = ["check_plot", "draw"]

_COLOURS = {PLANNED: "#0b6e4f", ONE_AT_A_TIME: "#4472c4", ARRIVAL_ORDER: "#c55a11"}
_SUFFIXES = (".svg", ".png", ".pdf")
_WORDS = {
    "slots": "slots",
    "rate": "offered requests per second",
    "in_flight": "requests in flight",
    "max_batch": "rows in a call, at most",
    "deadline_ms": "deadline, ms",
}


def check_plot(path: Path) -> None:
    """Raises `ConfigurationError` if nothing could be drawn there: better before a long simulation than after it."""
    if path.suffix not in _SUFFIXES:
        raise BadText([f"--plot {path}: expected a name that ends with {', '.join(_SUFFIXES)}"])
    if not path.absolute().parent.is_dir():
        raise BadText([f"--plot {path}: no such folder: {path.parent}"])
    _matplotlib()


def draw(runs: Sequence[Run], sweep: Sweep | None, path: Path) -> None:
    """Two panels side by side, into a file. Raises `ConfigurationError` without Matplotlib, OSError without space."""
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure

    # The same figures give the same file, and text stays text.
    settings = {"svg.hashsalt": "shapestream", "svg.fonttype": "none", "axes.spines.top": False}
    with matplotlib.rc_context({**settings, "axes.spines.right": False, "font.size": 9}):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        if sweep is None:
            _draw_latencies(left, runs)
            _draw_goodput(right, runs)
        else:
            _draw_swept(left, right, runs, sweep)
        for axes in (left, right):
            axes.grid(alpha=0.25)
        # The right panel has a line of every kind.
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def _draw_latencies(axes: Any, runs: Sequence[Run]) -> None:
    for run in runs:
        if run.simulated is None or not len(latencies := latencies_s(run.simulated)):
            continue
        shares = np.linspace(0, 1, 500)
        axes.plot(np.quantile(latencies, shares) * 1e3, shares, color=_COLOURS[run.policy], label=run.policy)
    axes.set(xscale="log", xlabel="latency from intended arrival, ms", ylabel="share of answers", ylim=(0, 1))


def _draw_goodput(axes: Any, runs: Sequence[Run]) -> None:
    for run in runs:
        if run.simulated is not None:
            ends, rates = goodput_over_time(run.simulated, windows=60)
            axes.plot(ends - run.simulated.began_s, rates, color=_COLOURS[run.policy], label=run.policy)
    if runs and isfinite(runs[0].oracle):
        axes.axhline(runs[0].oracle, color="grey", linestyle=":", label="all known beforehand")
    axes.set(xlabel="seconds", ylabel="answered in time, per second")
    axes.set_ylim(bottom=0)


def _draw_swept(left: Any, right: Any, runs: Sequence[Run], sweep: Sweep) -> None:
    for policy in dict.fromkeys(run.policy for run in runs):
        own = [run for run in runs if run.policy == policy]
        values = [run.value for run in own]
        colour = _COLOURS[policy]
        left.plot(values, [run.summary.p99_s * 1e3 for run in own], color=colour)
        left.plot(values, [run.summary.p50_s * 1e3 for run in own], color=colour, linestyle="--")
        right.plot(values, [run.summary.goodput for run in own], color=colour, label=policy)
    oracle = {run.value: run.oracle for run in runs if isfinite(run.oracle)}
    right.plot(list(oracle), list(oracle.values()), color="grey", linestyle=":", label="all known beforehand")
    left.set(yscale="log", xlabel=_WORDS[sweep.what], ylabel="latency, ms: p99 (solid), p50 (dashed)")
    right.set(xlabel=_WORDS[sweep.what], ylabel="answered in time, per second")
    right.set_ylim(bottom=0)


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        message = "--plot needs Matplotlib: pip install 'shapestream[plots]'"
        raise ConfigurationError([message]) from error
    return matplotlib
