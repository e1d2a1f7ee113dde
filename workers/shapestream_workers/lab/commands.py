"""The commands `shapestream simulate` and `tune`. Their work is imported when they run."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from shapestream_workers.exit_status import reported
from shapestream_workers.lab.options import SimulateOptions, TuneOptions


def simulate(**options: Any) -> None:
    """Play traffic to the server's own scheduler on virtual time: goodput, latencies, how many slots it takes."""
    read = SimulateOptions(**options)
    with reported(as_json=read.as_json):
        from shapestream_workers.lab.simulate import run_simulate
        from shapestream_workers.lab.traffic import BadText

        try:
            run_simulate(read)
        except BadText as error:
            raise typer.BadParameter("; ".join(error.problems)) from error


def tune(**options: Any) -> None:
    """Measure strategies, roundings, static shapes, slots and threads on the model and a trace; write the best YAML."""
    read = TuneOptions(**options)
    with reported(as_json=read.as_json):
        from shapestream_workers.lab.tune import tune_file

        tune_file(read)


# typer reads the options of a command from its signature.
for command, read in ((simulate, SimulateOptions), (tune, TuneOptions)):
    command.__signature__ = inspect.signature(read, eval_str=True)  # type: ignore[attr-defined]
