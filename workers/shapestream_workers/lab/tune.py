"""`shapestream tune`: measure candidates on the model and a trace, write the best YAML, and report.

1. Heats: the file as it is, then other placements (slots, threads, processes), each served alone for one round.
2. Heats: other choices of shapes, at the best placement so far.
3. The final: the file as it is and the best of the heats, side by side. Only the final decides.
"""

from __future__ import annotations

import io
import json
import signal
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
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
from shapestream_workers.lab.candidates import Candidate, Placement, placements, propose
from shapestream_workers.lab.options import Objective, TuneOptions
from shapestream_workers.lab.race import Race, Say, Trial, choose, finalists
from shapestream_workers.lab.replay import InputMaker, Workload, read_workload
from shapestream_workers.lab.subject import Subject, require_editor
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

    workload: Workload
    objective: Objective
    trials: list[Trial]
    """The file as it is, then the others."""
    chosen: Trial
    seconds: float
    notes: list[str]
    """Candidates that were left out, with the reasons."""

    def value_of(self, score: float | None) -> float | None:
        """Results per second, or p99 in seconds, of a score; None for none, and for an infinite p99."""
        if self.objective == "throughput":
            return score
        return 1.0 / score if score else None


def tune_file(options: TuneOptions) -> None:
    """Tune, write the file and print. Raises `ConfigurationError` before anything is measured, and `TuningFailed`."""
    config, trace = options.config, options.trace
    target = options.out or config.with_name(f"{config.stem}.tuned{config.suffix}")
    configure("warning", "auto")
    loaded = load_settings(config)
    require_editor()
    for read in (config, trace):
        if target.exists() and read.exists() and target.samefile(read):
            message = "is the input, which is never overwritten (choose another file)"
            raise ConfigurationError([f"{target}: {message}"])
    if not target.parent.is_dir():
        raise ConfigurationError([f"{target}: no such folder: {target.parent}"])
    number = _model_number(loaded, TraceReader(trace), options.model)
    subject = Subject(loaded=loaded, model=number, cpus=available_cpus())
    if loaded.settings.in_process is None and loaded.settings.workers == ():
        message = "none are started, so none can be measured (tune with a file that starts them)"
        raise ConfigurationError([loaded.problem(("workers",), message)])
    (signature,) = read_signatures(loaded, [subject.settings]).signatures
    workload = read_workload(trace, signature.name, signature)
    outcome = run_tuning(subject, workload, signature, options, lambda line: typer.echo(line, err=True))
    header = [f"Made by `shapestream tune` from {config.name} and {trace.name}.", *verdict(outcome), ""]
    plain = io.StringIO()
    Console(file=plain, width=WIDTH, color_system=None).print(table_of(outcome))
    header += [line.rstrip() for line in plain.getvalue().splitlines() if line.strip()]
    subject.write_tuned(outcome.chosen.candidate, target, "\n".join([*header, ""]))
    if options.as_json:
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
    subject: Subject, workload: Workload, signature: ModelSignature, options: TuneOptions, say: Say
) -> Outcome:
    """Measure candidates and choose one; all started processes are ended.

    Raises `TuningFailed`, and KeyboardInterrupt for SIGINT and SIGTERM.
    """
    # The path of a socket must be short: not below the user's TMPDIR.
    with TemporaryDirectory(prefix="shapestream-tune-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        maker = InputMaker(subject.settings, signature)
        return trio.run(_run, Race(subject, workload, maker, options, Path(folder), say), signature)


async def _run(race: Race, signature: ModelSignature) -> Outcome:
    subject, workload = race.subject, race.workload
    notes: list[str] = []
    baseline = Trial(candidate=subject.baseline())
    trials = [baseline]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_obey_sigterm)
        await race.heat(baseline, kept_share=0.0)
        for place in _placements(subject, notes):
            if place != baseline.candidate.placement:
                trials.append(Trial(candidate=Candidate(placement=place, shapes=baseline.candidate.shapes)))
                await race.heat(trials[-1], kept_share=PLACEMENTS_UNTIL)
        best = max(trials, key=lambda trial: trial.standing).candidate.placement
        max_batch = ServedModel(0, signature.name, signature, subject.settings).profile.max_batch
        choices, left_out = propose(workload, signature, baseline.candidate.shapes, max_batch=max_batch)
        notes += [f"not tried: {what}" for what in left_out]
        for shapes in choices:
            trials.append(Trial(candidate=Candidate(placement=best, shapes=shapes)))
            await race.heat(trials[-1], kept_share=SHAPES_UNTIL)
        entrants = finalists(trials, race.left_s())
        if entrants:
            await race.final(entrants)
        nursery.cancel_scope.cancel()
    for trial in trials:
        if trial.problem is None and trial.skipped is None and not trial.rounds:
            trial.skipped = "not in the final: others were better alone"
    chosen = choose(trials)
    if chosen is None:
        said = [f"{trial.candidate.label}: {trial.problem}" for trial in trials if trial.problem]
        raise TuningFailed("\n".join(["nothing could be served", *said, *notes]))
    return Outcome(
        workload=workload,
        objective=race.options.objective,
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


def _measured(trial: Trial) -> float | None:
    """The median score over the rounds of the final; None where it had none."""
    return median(trial.rounds) if trial.rounds else None


def _ordered(outcome: Outcome) -> list[Trial]:
    """The chosen one, then the others by the final, then by their heats."""

    def place(trial: Trial) -> tuple[bool, bool, float]:
        score = _measured(trial)
        return trial is outcome.chosen, score is not None, trial.standing if score is None else score

    return sorted(outcome.trials, key=place, reverse=True)


def table_of(outcome: Outcome) -> Table:
    """One line per candidate, the chosen one first."""
    what = "goodput" if outcome.objective == "throughput" else "p99"
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
            _spelled(outcome, trial.alone),
            _spelled(outcome, _measured(trial)),
            spell_bytes(trial.memory_bytes) if trial.memory_bytes else "",
            f"{trial.startup_s:.1f} s" if trial.startup_s else "",
            remark.partition("\n")[0],
        )
    return table


def _spelled(outcome: Outcome, score: float | None) -> str:
    if score is None:
        return ""
    if outcome.objective == "throughput":
        return f"{score:.1f}/s"
    return f"{1000 / score:.1f} ms" if score else "never"


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
    mine, before = (outcome.value_of(_measured(trial)) for trial in (chosen, baseline))
    gain = "."
    if mine and before:
        what = "the throughput" if outcome.objective == "throughput" else "the p99"
        memory = chosen.memory_bytes / max(1, baseline.memory_bytes)
        gain = f", {mine / before:.2f} x {what} and {memory:.2f} x the memory of the file as it is."
    return [*lines, f"Chosen: {chosen.candidate.label}{gain}", *outcome.notes]


def plain_report(outcome: Outcome, written: str) -> dict[str, Any]:
    """The report for scripts."""
    return {
        "model": outcome.workload.model,
        "objective": outcome.objective,
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
        "alone": outcome.value_of(trial.alone),
        "measured": outcome.value_of(_measured(trial)),
        "rounds": [outcome.value_of(score) for score in trial.rounds],
        "memory_bytes": trial.memory_bytes,
        "startup_s": round(trial.startup_s, 3),
        "problem": trial.problem,
        "skipped": trial.skipped,
    }
