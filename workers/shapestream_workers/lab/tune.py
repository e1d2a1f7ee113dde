"""`shapestream tune`: measure candidates on the model and a trace, write the best YAML, and report.

Heats of other placements (slots, threads, processes) come first, then those of the precisions that the user accepts and
of shapes at the best placement, then the final, which alone decides.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trio
import typer

from shapestream.errors import ConfigurationError, ShapestreamError
from shapestream.loading.models import model_spec, read_signatures, slots_and_threads
from shapestream.loading.proof import chosen_engine, try_model
from shapestream.serving.served_models import ServedModel
from shapestream.settings import LoadedSettings, load_settings
from shapestream.settings.values import spell_bytes
from shapestream.telemetry.logging import configure
from shapestream.telemetry.trace import TraceReader
from shapestream_engine.machine import available_cpus
from shapestream_engine.signature import ModelSignature
from shapestream_workers.advice import advise_precision, faster_precision
from shapestream_workers.lab.candidates import (
    PRECISIONS,
    Candidate,
    Placement,
    Subject,
    placements,
    propose,
    require_editor,
)
from shapestream_workers.lab.options import TuneOptions
from shapestream_workers.lab.race import CandidateRun, Race, choose, finalists
from shapestream_workers.lab.serving import InputMaker, read_requests
from shapestream_workers.printing import table_of

PRECISION_S = 2.0
"""Seconds that a precision is measured that no option names."""
PLACEMENTS_UNTIL, SHAPES_UNTIL = 0.65, 0.35
"""Shares of the budget that must be left after the heats of placements, and of shapes."""


def tune_file(options: TuneOptions) -> None:
    """Tune, write the file and print; all started processes are ended.

    Raises `ConfigurationError` before anything is measured, `ShapestreamError` where nothing could be served, and
    KeyboardInterrupt for SIGINT and SIGTERM.
    """
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
    subject = Subject(loaded=loaded, model=number)
    if loaded.settings.in_process is None and loaded.settings.workers == ():
        message = "none are started, so none can be measured (tune with a file that starts them)"
        raise ConfigurationError([loaded.problem(("workers",), message)])
    (signature,) = read_signatures(loaded, [subject.settings]).signatures
    precisions = _precisions(subject, options.precision or ())
    requests = read_requests(trace, signature)
    maker = InputMaker(subject.settings, signature)
    # The path of a socket must be short: not below the user's TMPDIR.
    with TemporaryDirectory(prefix="shapestream-tune-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        race = Race(subject, requests, maker, options, Path(folder), lambda line: typer.echo(line, err=True))
        chosen = trio.run(_run, race, signature, precisions)
    race.notes += [] if precisions else _precision_to_try(subject)
    lines = verdict(race, chosen)
    made_of = f"Made by `shapestream tune` from {config.name} and {trace.name}."
    header = "\n".join([made_of, *left_out(race), *lines, "", report_table(race, chosen), ""])
    subject.write_tuned(chosen.candidate, target, header)
    if options.as_json:
        typer.echo(json.dumps({**plain_report(race, chosen), "written": str(target)}, indent=2))
    else:
        table = report_table(race, chosen)
        typer.echo("\n".join([*left_out(race), table, *lines, f"written: {target}"]))


def _model_number(loaded: LoadedSettings, reader: TraceReader, wanted: str | None) -> int:
    """Return the number of the model to tune; raises `ConfigurationError` where that is not clear."""
    names = [model.name for model in loaded.settings.models]
    if wanted is not None:
        if wanted not in names:
            message = f"there is no model {wanted!r}; the models are {', '.join(names) or 'none'}"
            for index, chain in enumerate(loaded.settings.chains):
                if chain.name == wanted:
                    stages = ", ".join(dict.fromkeys(stage.model for stage in chain.stages))
                    message = f"{wanted!r} is a chain; tune one of its models: {stages}"
                    raise ConfigurationError([loaded.problem(("chains", index), message)])
            raise ConfigurationError([loaded.problem(("models",), message)])
        return names.index(wanted)
    # A trace may name more models later on; the only model of a file needs no name.
    shared = [name for name in names if name in reader.models] if len(names) > 1 else names
    if len(shared) != 1:
        said = f"{', '.join(names) or 'none'}; the trace has {', '.join(reader.models) or 'none'}"
        message = f"which model is tuned is not clear: the file has {said} (name one by --model)"
        raise ConfigurationError([f"{loaded.path}: {message}"])
    return names.index(shared[0])


def _precisions(subject: Subject, wanted: Sequence[str]) -> list[dict[str, str]]:
    """Return the properties of each precision to try; raises `ConfigurationError` for an engine that has none."""
    if not wanted:
        return []
    engine = chosen_engine(model_spec(subject.settings)).engine
    if engine not in PRECISIONS:
        message = f"the engine {engine} has no choice of precisions; {', '.join(PRECISIONS)} have (leave out --precision)"
        raise ConfigurationError([subject.loaded.problem(("models", subject.model), message)])
    return [{PRECISIONS[engine]: name} for name in wanted]


def _precision_to_try(subject: Subject) -> list[str]:
    """Return what a faster precision of the device would give, in a sentence; nothing is tuned for it unless the user
    asks."""
    model, spec = subject.settings, model_spec(subject.settings)
    spec = replace(spec, engine=chosen_engine(spec).engine)
    if not faster_precision(spec):
        return []
    slots, threads = slots_and_threads(subject.loaded.settings, model.name)
    tried = try_model(model, spec, slots=slots, threads=threads)
    with closing(tried.compiled):
        advice = advise_precision(model, tried, slots=slots, threads=threads, budget_s=PRECISION_S)
    return [] if advice is None else [*advice.lines()]


async def _run(
    race: Race, signature: ModelSignature, precisions: Sequence[Mapping[str, str]]
) -> CandidateRun:
    """Measure candidates and choose one. Raises as `tune_file` does."""
    subject, trials = race.subject, race.trials
    baseline = subject.baseline()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_obey_sigterm)
        await race.heat(baseline)
        for place in _placements(subject, race.notes):
            if place != baseline.placement:
                candidate = Candidate(placement=place, shapes=baseline.shapes)
                await race.heat(candidate, kept_share=PLACEMENTS_UNTIL)
        place = max(trials, key=lambda trial: trial.heat_rate).candidate.placement
        for properties in precisions:
            candidate = Candidate(placement=place, shapes=baseline.shapes, properties=properties)
            await race.heat(candidate, kept_share=SHAPES_UNTIL)
        best = max(trials, key=lambda trial: trial.heat_rate).candidate
        max_batch = ServedModel(0, signature.name, signature, subject.settings).profile.max_batch
        choices, left_out = propose(race.requests, signature, baseline.shapes, max_batch=max_batch)
        race.notes += [f"not tried: {what}" for what in left_out]
        for shapes in choices:
            await race.heat(replace(best, shapes=shapes, is_baseline=False), kept_share=SHAPES_UNTIL)
        await race.final(finalists(trials, race.left_s()))
        nursery.cancel_scope.cancel()
    for trial in trials:
        if trial.problem is None and trial.skipped is None and not trial.rounds:
            trial.skipped = "not in the final: others were better alone"
    chosen = choose(trials)
    if chosen is None:
        said = [f"{trial.candidate.label}: {trial.problem}" for trial in trials if trial.problem]
        raise ShapestreamError("\n".join(["nothing could be served", *said, *race.notes]))
    # The chosen one first, then the others by the final, then by their heats.
    trials.sort(key=lambda each: (each is chosen, each.measured or -1.0, each.heat_rate), reverse=True)
    return chosen


def _placements(subject: Subject, notes: list[str]) -> list[Placement]:
    if not subject.is_alone:
        notes.append("slots and threads are kept: other models or workers share the CPUs")
        return []
    if subject.settings.device != "CPU":
        notes.append(f"slots and threads are kept: the device is {subject.settings.device}")
        return []
    return placements(available_cpus(), workers=not subject.in_process)


async def _obey_sigterm() -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            raise KeyboardInterrupt


# ---------------------------------------------------------------- the report


def left_out(race: Race) -> list[str]:
    """Return what the time did not suffice for, to be said before anything else; empty where it did."""
    found = [trial.candidate.label for trial in race.trials if trial.lacks_time]
    if not found:
        return []
    count = f"{len(found)} of {len(race.trials)} candidates"
    return [
        f"Not measured, or not in all rounds, for lack of time: {count} (raise --budget): {' | '.join(found)}"
    ]


def report_table(race: Race, chosen: CandidateRun) -> str:
    """Return one line per candidate, the chosen one first."""
    rows = []
    for trial in race.trials:
        remark = "chosen" if trial is chosen else trial.problem or trial.skipped or ""
        rows.append(
            {
                "slots x threads": str(trial.candidate.placement),
                "shapes": trial.candidate.shapes_label,
                "alone": "" if trial.alone is None else f"{trial.alone:.1f}/s",
                "in the final": "" if trial.measured is None else f"{trial.measured:.1f}/s",
                "memory": spell_bytes(trial.memory_bytes) if trial.memory_bytes else "",
                "start-up": f"{trial.startup_s:.1f} s" if trial.startup_s else "",
                "": remark.partition("\n")[0],
            }
        )
    return table_of(rows, words=("slots x threads", "shapes", ""))


def verdict(race: Race, chosen: CandidateRun) -> list[str]:
    """Return the decision and its reasons, in sentences."""
    (baseline,) = [trial for trial in race.trials if trial.candidate.is_baseline]
    shapes = len({request.sizes for request in race.requests})
    model = race.subject.settings.name
    count = (
        f"{len(race.requests)} requests of {model!r}, {shapes} shapes, {race.spent_s():.0f} s of measuring."
    )
    if chosen is baseline:
        return [count, "No candidate was better than the file as it is in every round.", *race.notes]
    gain = "."
    if chosen.measured and baseline.measured:
        memory = chosen.memory_bytes / max(1, baseline.memory_bytes)
        times = chosen.measured / baseline.measured
        gain = f", {times:.2f} x the throughput and {memory:.2f} x the memory of the file as it is."
    return [count, f"Chosen: {chosen.candidate.label}{gain}", *race.notes]


def plain_report(race: Race, chosen: CandidateRun) -> dict[str, Any]:
    """Return the report for scripts."""
    return {
        "model": race.subject.settings.name,
        "requests": len(race.requests),
        "shapes": len({request.sizes for request in race.requests}),
        "seconds": round(race.spent_s(), 3),
        "notes": race.notes,
        "lacked_time": sum(trial.lacks_time for trial in race.trials),
        "candidates": [
            {
                "placement": asdict(trial.candidate.placement),
                "shapes": dict(trial.candidate.shapes),
                "properties": dict(trial.candidate.properties),
                "as_it_is": trial.candidate.is_baseline,
                "chosen": trial is chosen,
                "alone": trial.alone,
                "measured": trial.measured,
                "rounds": trial.rounds,
                "memory_bytes": trial.memory_bytes,
                "startup_s": round(trial.startup_s, 3),
                "problem": trial.problem,
                "skipped": trial.skipped,
            }
            for trial in race.trials
        ],
    }
