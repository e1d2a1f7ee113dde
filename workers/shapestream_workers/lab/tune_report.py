"""What a tuning run found, as a table for people, as plain data for scripts, and as the comment of the tuned file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from math import isfinite
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from shapestream_workers.lab.tune_trials import Trial
from shapestream_workers.lab.tune_tuning import Outcome
from shapestream_workers.memory import spell_bytes

__all__ = ["WIDTH", "plain_report", "spell_table", "spell_verdict", "table_of"]

WIDTH = 120
"""Columns of the table where no terminal says how many there are."""


def spell_value(outcome: Outcome, value: float | None) -> str:
    """A goodput or a latency, with its unit."""
    if value is None:
        return ""
    if outcome.options.objective == "throughput":
        return f"{value:.1f}/s"
    return f"{value * 1000:.1f} ms" if isfinite(value) else "never"


def measured(outcome: Outcome, trial: Trial) -> float | None:
    """The median over the rounds of the last contest; None where it had none."""
    return trial.middle(outcome.options.objective)


def table_of(outcome: Outcome) -> Table:
    """One line per candidate: the chosen one, then the others by what was measured, then by what was predicted."""
    what = "goodput" if outcome.options.objective == "throughput" else "p99"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("slots x threads", no_wrap=True)
    table.add_column("shapes", overflow="fold")
    for heading in (f"predicted {what}", f"measured {what}", "memory", "start-up"):
        table.add_column(heading, justify="right")
    table.add_column("", overflow="fold")
    for trial in ordered(outcome):
        table.add_row(
            str(trial.candidate.placement),
            f"{trial.candidate.shapes}{' (as it is)' if trial.candidate.is_baseline else ''}",
            spell_value(outcome, trial.predicted),
            spell_value(outcome, measured(outcome, trial)),
            _memory(trial),
            f"{trial.startup_s:.1f} s" if trial.startup_s else "",
            _remark(outcome, trial),
        )
    return table


def ordered(outcome: Outcome) -> list[Trial]:
    """The most telling first."""
    sign = -1 if outcome.options.objective == "throughput" else 1

    def place(trial: Trial) -> tuple[bool, bool, float, float]:
        value = measured(outcome, trial)
        predicted = trial.predicted
        return (
            trial is not outcome.chosen,
            value is None,
            0.0 if value is None else sign * value,
            float("inf") if predicted is None else sign * predicted,
        )

    return sorted(outcome.trials, key=place)


def _memory(trial: Trial) -> str:
    """Of the whole server; in brackets what the model alone took, where none was served."""
    if not trial.memory_bytes:
        return ""
    return spell_bytes(trial.memory_bytes) if trial.rounds else f"({spell_bytes(trial.memory_bytes)})"


def _remark(outcome: Outcome, trial: Trial) -> str:
    if trial is outcome.chosen:
        return "chosen"
    said = trial.problem or trial.skipped or ""
    return said.splitlines()[0] if said else ""


def spell_verdict(outcome: Outcome) -> list[str]:
    """What was decided, and how sure it is, in sentences."""
    chosen, baseline = outcome.chosen, outcome.baseline
    workload = outcome.workload
    lines = [
        f"{len(workload.requests)} requests of {workload.model!r}"
        + (" (the beginning of the trace)" if workload.cut_off else "")
        + f", {len(workload.counts())} shapes, {outcome.seconds:.0f} s of measuring; "
        f"differences below {outcome.noise:.0%} count as noise."
    ]
    if chosen is baseline:
        lines.append("Nothing that was tried is better than the file as it is, beyond the noise.")
    else:
        gain = _gain(outcome)
        lines.append(
            f"Chosen: {chosen.candidate.label}" + (f", {gain} than the file as it is." if gain else ".")
        )
    return [*lines, *outcome.notes]


def _gain(outcome: Outcome) -> str:
    mine, before = measured(outcome, outcome.chosen), measured(outcome, outcome.baseline)
    if not mine or not before or not isfinite(mine) or not isfinite(before):
        return ""
    if outcome.options.objective == "throughput":
        better = f"{mine / before:.2f} x the throughput"
    else:
        better = f"{mine / before:.2f} x the p99"
    memory = outcome.chosen.memory_bytes / max(1, outcome.baseline.memory_bytes)
    return f"{better} and {memory:.2f} x the memory"


def spell_table(outcome: Outcome, width: int = WIDTH) -> str:
    """The table as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table_of(outcome))
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join(filter(None, lines))


def plain_report(outcome: Outcome, written: str | None) -> dict[str, Any]:
    """For a script."""
    return {
        "model": outcome.workload.model,
        "objective": outcome.options.objective,
        "requests": len(outcome.workload.requests),
        "shapes": len(outcome.workload.counts()),
        "seconds": round(outcome.seconds, 3),
        "noise": round(outcome.noise, 4),
        "written": written,
        "notes": outcome.notes,
        "candidates": [_plain_trial(outcome, trial) for trial in ordered(outcome)],
    }


def _plain_trial(outcome: Outcome, trial: Trial) -> dict[str, Any]:
    place, shapes = trial.candidate.placement, trial.candidate.shapes
    return {
        "placement": {"processes": place.processes, "slots": place.slots, "threads": place.threads},
        "shapes": {
            "strategy": shapes.strategy,
            "sizes": {name: list(sizes) for name, sizes in shapes.sizes.items()},
            "max_prepared": shapes.max_prepared,
            "static": [list(sizes) for sizes in shapes.static],
        },
        "as_it_is": trial.candidate.is_baseline,
        "chosen": trial is outcome.chosen,
        "predicted": _finite(trial.predicted),
        "measured": _finite(measured(outcome, trial)),
        "rounds": [_finite(value) for value in trial.values(outcome.options.objective)],
        "memory_bytes": trial.memory_bytes,
        "startup_s": round(trial.startup_s, 3),
        "problem": trial.problem,
        "skipped": trial.skipped,
    }


def _finite(value: float | None) -> float | None:
    """JSON knows no infinity: a p99 that never came is null."""
    return value if value is not None and isfinite(value) else None


def lines_of(outcome: Outcome, made_from: Sequence[str]) -> str:
    """The comment of a tuned file: from what it was made, and why it is as it is."""
    return "\n".join([*made_from, *spell_verdict(outcome), "", spell_table(outcome), ""])
