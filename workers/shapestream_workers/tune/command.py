"""`shapestream tune`, as words: what it is asked for. What it does is in `assignment.py`, imported when it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from shapestream_workers.exit_status import reported

__all__ = ["tune"]

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.", show_default=False)]


def tune(
    config: Config,
    trace: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Recorded shapes: see `record_trace` of the server.", show_default=False
        ),
    ],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Default: the one that the file and the trace share.")
    ] = None,
    objective: Annotated[
        Literal["throughput", "latency"],
        typer.Option(help="Results per second, or the p99 at the trace's own times."),
    ] = "throughput",
    budget: Annotated[float, typer.Option(min=5.0, metavar="SECONDS", help="For everything.")] = 120.0,
    in_flight: Annotated[
        int, typer.Option(min=1, max=4096, help="Requests under way at a time, for throughput.")
    ] = 64,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The tuned YAML. Default: CONFIG.tuned.yaml beside CONFIG."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A plot of the candidates: .svg, .png or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Measure strategies, roundings, static shapes, slots and threads on the model and a trace; write the best YAML."""
    with reported(as_json=as_json):
        from shapestream_workers.tune.assignment import Assignment
        from shapestream_workers.tune.tuning import Options

        target = out or config.with_name(f"{config.stem}.tuned{config.suffix}")
        Assignment(config=config, trace=trace, model=model, target=target, plot=plot).carry_out(
            Options(objective=objective, budget_s=budget, in_flight=in_flight), as_json=as_json
        )
