"""The plot that justifies a choice: what was measured of each candidate, its rounds, what was predicted, its memory."""

from __future__ import annotations

import textwrap
from pathlib import Path
from statistics import median
from typing import Any

from shapestream.errors import ConfigurationError
from shapestream_workers.lab.tune_report import ordered
from shapestream_workers.lab.tune_tuning import Outcome

__all__ = ["require_plots", "write_plot"]

_KINDS = (".svg", ".png", ".pdf")
_CHOSEN, _OTHER, _PALE = "#1b7f4d", "#4c72b0", "#c9d3e6"
_MEBIBYTE = 1 << 20
_LABEL_WIDTH = 48


def require_plots(path: Path) -> None:
    """Raises `ConfigurationError` unless `path` can be drawn: better before an hour of measuring than after it."""
    if path.suffix.lower() not in _KINDS:
        raise ConfigurationError([f"{path}: a plot is a file called {', '.join(_KINDS)}"])
    try:
        import matplotlib  # noqa: F401 - whether it is there
    except ImportError as error:
        message = "plots are drawn with matplotlib, which is not installed (pip install 'shapestream[plots]')"
        raise ConfigurationError([message]) from error


def write_plot(outcome: Outcome, path: Path) -> None:
    """Draws all candidates of which something is known, the chosen one on top."""
    require_plots(path)
    from matplotlib.figure import Figure

    trials = [trial for trial in ordered(outcome) if trial.prediction is not None or trial.rounds]
    figure = Figure(figsize=(11, 1.6 + 0.55 * len(trials)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    objective = outcome.options.objective
    scale = 1.0 if objective == "throughput" else 1000.0
    for place, trial in enumerate(trials):
        color = _CHOSEN if trial is outcome.chosen else _OTHER
        values = [scale * value for value in trial.values(objective)]
        predicted = trial.predicted
        if values:
            left.barh(place, median(values), color=color, height=0.6)
            left.plot(values, [place] * len(values), "o", color="black", markersize=3, alpha=0.6)
        if predicted is not None and predicted != float("inf"):
            left.plot([scale * predicted], [place], "D", color="#c44e52", markersize=5)
        right.barh(place, trial.memory_bytes / _MEBIBYTE, color=color if trial.rounds else _PALE, height=0.6)
    left.set_yticks(range(len(trials)), [_wrapped(trial.candidate.label) for trial in trials], fontsize=8)
    left.invert_yaxis()
    left.set_xlim(left=0)
    left.set_xlabel(
        "results per second" if objective == "throughput" else "p99 in ms, at the trace's own times"
    )
    right.set_xlabel("memory in MiB")
    left.set_title(
        f"{outcome.workload.model}: {len(outcome.workload.requests)} recorded requests", fontsize=10
    )
    _legend(figure)
    figure.savefig(path)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure.legend(
        handles=[
            Patch(color=_CHOSEN, label="chosen (median of its rounds)"),
            Patch(color=_OTHER, label="others that were served"),
            Patch(color=_PALE, label="memory of the model alone"),
            Line2D([], [], marker="o", color="black", linestyle="", markersize=3, label="one round"),
            Line2D([], [], marker="D", color="#c44e52", linestyle="", markersize=5, label="predicted"),
        ],
        fontsize=8,
        ncols=5,
        loc="outside lower center",
    )


def _wrapped(label: str) -> str:
    """In lines that leave room for the bars."""
    return "\n".join(textwrap.wrap(label, _LABEL_WIDTH))
