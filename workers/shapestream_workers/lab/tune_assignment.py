"""One call of `shapestream tune`: what it reads and writes, checked before anything is measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from shapestream.errors import ConfigurationError
from shapestream.settings import LoadedSettings, load_settings
from shapestream.telemetry.logging import configure
from shapestream.telemetry.trace import TraceReader
from shapestream_workers.lab.tune_bench_file import subject_of
from shapestream_workers.lab.tune_edited_file import require_editor, write_tuned
from shapestream_workers.lab.tune_plot import require_plots, write_plot
from shapestream_workers.lab.tune_report import WIDTH, lines_of, plain_report, spell_verdict, table_of
from shapestream_workers.lab.tune_tuning import Options, Outcome, run_tuning
from shapestream_workers.lab.tune_workload import read_workload
from shapestream_workers.models import available_cpus, read_signatures

__all__ = ["Assignment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What is read, and where what is found goes."""

    config: Path
    trace: Path
    model: str | None
    """None: the one that the file and the trace share."""
    target: Path
    plot: Path | None

    def carry_out(self, options: Options, *, as_json: bool) -> None:
        """Tunes, writes and prints. Raises `ConfigurationError` and `TuningFailed`."""
        configure("warning", "auto")
        loaded = load_settings(self.config)
        self._check_targets()
        outcome = self._tuned(loaded, options)
        edits = outcome.subject.edits(outcome.chosen.candidate)
        made_from = f"Made by `shapestream tune` from {self.config.name} and {self.trace.name}."
        write_tuned(self.config, self.target, edits, lines_of(outcome, [made_from]))
        if self.plot is not None:
            write_plot(outcome, self.plot)
        if as_json:
            typer.echo(json.dumps(plain_report(outcome, str(self.target)), indent=2))
            return
        console = Console()
        if not console.is_terminal:
            console.width = WIDTH
        console.print(table_of(outcome))
        for line in spell_verdict(outcome):
            typer.echo(line)
        typer.echo(f"written: {self.target}" + (f", {self.plot}" if self.plot is not None else ""))

    def _check_targets(self) -> None:
        """What could only fail after minutes of measuring fails now."""
        require_editor()
        if self.plot is not None:
            require_plots(self.plot)
        for written in filter(None, (self.target, self.plot)):
            for read in (self.config, self.trace):
                if written.exists() and read.exists() and written.samefile(read):
                    message = "is the input, which is never overwritten (choose another file)"
                    raise ConfigurationError([f"{written}: {message}"])
            if not written.parent.is_dir():
                raise ConfigurationError([f"{written}: no such folder: {written.parent}"])

    def _tuned(self, loaded: LoadedSettings, options: Options) -> Outcome:
        number = _model_number(loaded, TraceReader(self.trace), self.model)
        settings = loaded.settings.models[number]
        if loaded.settings.in_process is None and loaded.settings.workers == ():
            message = "none are started, so none can be measured (tune with a file that starts them)"
            raise ConfigurationError([loaded.problem(("workers",), message)])
        (signature,) = read_signatures(loaded, [settings]).signatures
        workload = read_workload(self.trace, settings.name, signature)
        subject = subject_of(loaded, number, signature.dimensions, available_cpus())
        return run_tuning(subject, workload, signature, options, lambda line: typer.echo(line, err=True))


def _model_number(loaded: LoadedSettings, reader: TraceReader, wanted: str | None) -> int:
    """Which model of the file is tuned; raises `ConfigurationError` where that is not clear."""
    names = [model.name for model in loaded.settings.models]
    if wanted is not None:
        if wanted not in names:
            message = f"there is no model {wanted!r}; the models are {', '.join(names) or 'none'}"
            raise ConfigurationError([loaded.problem(("models",), message)])
        return names.index(wanted)
    # A trace may name more models later on; those of a file with one model need no name.
    shared = [name for name in names if name in reader.models] if len(names) > 1 else names
    if len(shared) != 1:
        said = f"{', '.join(names) or 'none'}; the trace has {', '.join(reader.models) or 'none'}"
        message = f"which model is tuned is not clear: the file has {said} (name one by --model)"
        raise ConfigurationError([f"{loaded.path}: {message}"])
    return names.index(shared[0])
