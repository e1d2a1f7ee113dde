"""`shapestream tune`: measure candidates on the model and a trace, write the best YAML, and report.

1. Heats: the file as it is, then other placements (slots, threads, processes), each served alone for one round.
2. Heats: other choices of shapes, at the best placement so far.
3. The final: the file as it is and the best of the heats, side by side. Only the final decides.
"""

from __future__ import annotations

import io
import json
import shutil
import signal
import tempfile
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import trio
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from shapestream.errors import ConfigurationError, ShapestreamError
from shapestream.serving.models import ServedModel
from shapestream.settings import LoadedSettings, load_settings
from shapestream.telemetry.logging import configure
from shapestream.telemetry.trace import TraceReader
from shapestream_engine.signature import ModelSignature
from shapestream_workers.lab.bench import Subject, subject_of
from shapestream_workers.lab.candidates import Candidate, Placement, placements, propose
from shapestream_workers.lab.edited_yaml import require_editor, write_tuned
from shapestream_workers.lab.race import Options, Race, Say, Trial, choose, finalists, rank, value_of
from shapestream_workers.lab.replay import InputMaker, Workload, read_workload
from shapestream_workers.memory import spell_bytes
from shapestream_workers.models import available_cpus, read_signatures

PLACEMENTS_UNTIL, SHAPES_UNTIL = 0.65, 0.35
"""Shares of the budget that must be left after the heats of placements, and of shapes."""
WIDTH = 120
"""Columns of the table where no terminal says their number."""


class TuningFailed(ShapestreamError):
    """Failure of all measurements; the message has the reason for each candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Findings of a tuning run."""

    subject: Subject
    workload: Workload
    options: Options
    trials: list[Trial]
    """The file as it is, then the others."""
    chosen: Trial
    seconds: float
    notes: list[str] = field(default_factory=list)
    """Candidates that were left out, with the reasons."""


def tune_file(
    config: Path, trace: Path, *, model: str | None, target: Path, options: Options, as_json: bool
) -> None:
    """Tune, write `target` and print. Raises `ConfigurationError` before anything is measured, and `TuningFailed`."""
    configure("warning", "auto")
    loaded = load_settings(config)
    require_editor()
    for read in (config, trace):
        if target.exists() and read.exists() and target.samefile(read):
            message = "is the input, which is never overwritten (choose another file)"
            raise ConfigurationError([f"{target}: {message}"])
    if not target.parent.is_dir():
        raise ConfigurationError([f"{target}: no such folder: {target.parent}"])
    number = _model_number(loaded, TraceReader(trace), model)
    settings = loaded.settings.models[number]
    if loaded.settings.in_process is None and loaded.settings.workers == ():
        message = "none are started, so none can be measured (tune with a file that starts them)"
        raise ConfigurationError([loaded.problem(("workers",), message)])
    (signature,) = read_signatures(loaded, [settings]).signatures
    workload = read_workload(trace, settings.name, signature)
    subject = subject_of(loaded, number, available_cpus())
    outcome = run_tuning(subject, workload, signature, options, lambda line: typer.echo(line, err=True))
    header = [f"Made by `shapestream tune` from {config.name} and {trace.name}.", *verdict(outcome), ""]
    plain = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    plain.print(table_of(outcome))
    assert isinstance(plain.file, io.StringIO)
    header += [line.rstrip() for line in plain.file.getvalue().splitlines() if line.strip()]
    write_tuned(config, target, subject.edits(outcome.chosen.candidate), "\n".join([*header, ""]))
    if as_json:
        typer.echo(json.dumps(plain_report(outcome, str(target)), indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table_of(outcome))
    for line in [*verdict(outcome), f"written: {target}"]:
        typer.echo(line)


def _model_number(loaded: LoadedSettings, reader: TraceReader, wanted: str | None) -> int:
    """The number of the model to tune; raises `ConfigurationError` where that is not clear."""
    names = [model.name for model in loaded.settings.models]
    if wanted is not None:
        if wanted not in names:
            message = f"there is no model {wanted!r}; the models are {', '.join(names) or 'none'}"
            raise ConfigurationError([loaded.problem(("models",), message)])
        return names.index(wanted)
    # A trace may name more models later on; the only model of a file needs no name.
    shared = [name for name in names if name in reader.models] if len(names) > 1 else names
    if len(shared) != 1:
        said = f"{', '.join(names) or 'none'}; the trace has {', '.join(reader.models) or 'none'}"
        message = f"which model is tuned is not clear: the file has {said} (name one by --model)"
        raise ConfigurationError([f"{loaded.path}: {message}"])
    return names.index(shared[0])


# ---------------------------------------------------------------- the run


def run_tuning(
    subject: Subject, workload: Workload, signature: ModelSignature, options: Options, say: Say
) -> Outcome:
    """Measure candidates and choose one; all started processes are ended.

    Raises `TuningFailed`, and KeyboardInterrupt for SIGINT and SIGTERM.
    """
    # The path of a socket must be short: not below the user's TMPDIR.
    folder = Path(tempfile.mkdtemp(prefix="shapestream-tune-", dir="/tmp"))
    try:
        return trio.run(_run, subject, workload, signature, options, say, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _run(
    subject: Subject, workload: Workload, signature: ModelSignature, options: Options, say: Say, folder: Path
) -> Outcome:
    objective, notes = options.objective, list[str]()
    race = Race(subject, workload, InputMaker(subject.settings, signature), options, folder, say)
    baseline = Trial(candidate=subject.baseline())
    trials = [baseline]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_obey_sigterm)
        await race.heat(baseline, kept_share=0.0)
        for place in _placements(subject, notes):
            if place != baseline.candidate.placement:
                trials.append(Trial(candidate=Candidate(placement=place, shapes=baseline.candidate.shapes)))
                await race.heat(trials[-1], kept_share=PLACEMENTS_UNTIL)
        best = min(trials, key=lambda trial: rank(trial, objective)).candidate.placement
        max_batch = ServedModel(0, signature.name, signature, subject.settings).profile.max_batch
        choices, left_out = propose(workload, signature, baseline.candidate.shapes, max_batch=max_batch)
        notes += [f"not tried: {what}" for what in left_out]
        for shapes in choices:
            trials.append(Trial(candidate=Candidate(placement=best, shapes=shapes)))
            await race.heat(trials[-1], kept_share=SHAPES_UNTIL)
        entrants = finalists(trials, objective, race.left_s())
        if entrants:
            await race.final(entrants)
        nursery.cancel_scope.cancel()
    for trial in trials:
        if trial.problem is None and trial.skipped is None and not trial.rounds:
            trial.skipped = "not in the final: others were better alone"
    chosen = choose(trials, objective)
    if chosen is None:
        said = [f"{trial.candidate.label}: {trial.problem}" for trial in trials if trial.problem]
        raise TuningFailed("\n".join(["nothing could be served", *said, *notes]))
    return Outcome(
        subject=subject,
        workload=workload,
        options=options,
        trials=trials,
        chosen=chosen,
        seconds=race.spent_s(),
        notes=notes,
    )


def _placements(subject: Subject, notes: list[str]) -> list[Placement]:
    if not subject.is_alone:
        notes.append("slots and threads are kept: other models or workers share the CPUs")
        return []
    if subject.settings.device != "CPU":
        notes.append(f"slots and threads are kept: the device is {subject.settings.device}")
        return []
    return placements(subject.cpus, workers=not subject.in_process)


async def _obey_sigterm() -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            raise KeyboardInterrupt


# ---------------------------------------------------------------- the report


def _alone(outcome: Outcome, trial: Trial) -> float | None:
    return None if trial.heat is None else value_of(trial.heat, outcome.options.objective)


def _measured(outcome: Outcome, trial: Trial) -> float | None:
    """The median over the rounds of the final; None where it had none."""
    values = trial.values(outcome.options.objective)
    return float(median(values)) if values else None


def _ordered(outcome: Outcome) -> list[Trial]:
    """The chosen one, then the others by the final, then by their heats."""
    sign = -1 if outcome.options.objective == "throughput" else 1

    def place(trial: Trial) -> tuple[bool, bool, float]:
        value = _measured(outcome, trial)
        known = rank(trial, outcome.options.objective) if value is None else sign * value
        return trial is not outcome.chosen, value is None, known

    return sorted(outcome.trials, key=place)


def table_of(outcome: Outcome) -> Table:
    """One line per candidate, the chosen one first."""
    what = "goodput" if outcome.options.objective == "throughput" else "p99"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("slots x threads", no_wrap=True)
    table.add_column("shapes", overflow="fold")
    for heading in (f"{what} alone", f"{what} in the final", "memory", "start-up"):
        table.add_column(heading, justify="right")
    table.add_column("", overflow="fold")
    for trial in _ordered(outcome):
        remark = "chosen" if trial is outcome.chosen else trial.problem or trial.skipped or ""
        table.add_row(
            str(trial.candidate.placement),
            trial.candidate.shapes_label,
            _spelled(outcome, _alone(outcome, trial)),
            _spelled(outcome, _measured(outcome, trial)),
            spell_bytes(trial.memory_bytes) if trial.memory_bytes else "",
            f"{trial.startup_s:.1f} s" if trial.startup_s else "",
            remark.partition("\n")[0],
        )
    return table


def _spelled(outcome: Outcome, value: float | None) -> str:
    if value is None:
        return ""
    if outcome.options.objective == "throughput":
        return f"{value:.1f}/s"
    return f"{value * 1000:.1f} ms" if isfinite(value) else "never"


def verdict(outcome: Outcome) -> list[str]:
    """The decision and its reasons, in sentences."""
    workload, chosen, baseline = outcome.workload, outcome.chosen, outcome.trials[0]
    cut_off = " (the beginning of the trace)" if workload.cut_off else ""
    lines = [
        f"{len(workload.requests)} requests of {workload.model!r}{cut_off}, {len(workload.counts())} shapes,"
        f" {outcome.seconds:.0f} s of measuring."
    ]
    if chosen is baseline:
        return [*lines, "No candidate was better than the file as it is in every round.", *outcome.notes]
    mine, before = _measured(outcome, chosen), _measured(outcome, baseline)
    gain = "."
    if mine and before and isfinite(mine) and isfinite(before):
        what = "the throughput" if outcome.options.objective == "throughput" else "the p99"
        memory = chosen.memory_bytes / max(1, baseline.memory_bytes)
        gain = f", {mine / before:.2f} x {what} and {memory:.2f} x the memory of the file as it is."
    return [*lines, f"Chosen: {chosen.candidate.label}{gain}", *outcome.notes]


def plain_report(outcome: Outcome, written: str) -> dict[str, Any]:
    """The report for scripts."""
    return {
        "model": outcome.workload.model,
        "objective": outcome.options.objective,
        "requests": len(outcome.workload.requests),
        "shapes": len(outcome.workload.counts()),
        "seconds": round(outcome.seconds, 3),
        "written": written,
        "notes": outcome.notes,
        "candidates": [_plain_trial(outcome, trial) for trial in _ordered(outcome)],
    }


def _plain_trial(outcome: Outcome, trial: Trial) -> dict[str, Any]:
    place = trial.candidate.placement
    return {
        "placement": {"processes": place.processes, "slots": place.slots, "threads": place.threads},
        "shapes": dict(trial.candidate.shapes),
        "as_it_is": trial.candidate.is_baseline,
        "chosen": trial is outcome.chosen,
        "alone": _finite(_alone(outcome, trial)),
        "measured": _finite(_measured(outcome, trial)),
        "rounds": [_finite(value) for value in trial.values(outcome.options.objective)],
        "memory_bytes": trial.memory_bytes,
        "startup_s": round(trial.startup_s, 3),
        "problem": trial.problem,
        "skipped": trial.skipped,
    }


def _finite(value: float | None) -> float | None:
    """The value; None for an infinite p99, which JSON cannot hold."""
    return value if value is not None and isfinite(value) else None
