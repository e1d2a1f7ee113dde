"""Options of `shapestream simulate` and `tune`, as typer reads them from the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

MAX_SLOTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of `shapestream simulate`, unread."""

    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="The YAML whose models and batching are simulated.", show_default=False
        ),
    ] = None
    cost: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[MODEL/]FORMULA",
            help="Cost of a call by a formula, such as fixed_ms=3,ms_per_element=0.13. Other terms: ms_per_row, "
            "ms_per_pair, full_rows, step_rows, prepare_ms.",
        ),
    ] = None
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measured costs, as `models CONFIG --costs --json` prints them. Default: measured for CONFIG.",
        ),
    ] = None
    max_batch: Annotated[
        int, typer.Option(min=1, metavar="N", help="As batching.max_batch; without CONFIG.")
    ] = 64
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recorded traffic, from `serve --record-trace`."),
    ] = None
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[MODEL[*WEIGHT]/]DIM=DIST[;...]",
            help="Sizes of made-up requests: seq=lognormal:24,0.9,4..256 or seq=uniform:1..9 or seq=choice:1,2,8.",
        ),
    ] = None
    rate: Annotated[
        float | None,
        typer.Option(min=1e-6, metavar="PER_SECOND", help="Requests per second, also of a stretched trace."),
    ] = None
    arrivals: Annotated[str, typer.Option(metavar="HOW", help="poisson, constant or bursts:SIZE.")] = (
        "poisson"
    )
    in_flight: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Requests under way at any time, instead of a rate."),
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of requests. Default: the trace's, or 20000."),
    ] = None
    clients: Annotated[int, typer.Option(min=1, max=1 << 31, metavar="N", help="Number of clients.")] = 1
    deadline_ms: Annotated[
        float | None, typer.Option(min=0.0, metavar="MS", help="Deadline of every request.")
    ] = None
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_SLOTS,
            metavar="N",
            help="Calls at a time, over all workers. Default: CONFIG's, or 1.",
        ),
    ] = None
    slots_of: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL=N", help="Further slots that serve this model alone; may be repeated."),
    ] = None
    slots_per_worker: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Slots that share prepared shapes. Default: CONFIG's, or 1."),
    ] = None
    wide: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="TIMES",
            help="Workers have wide slots, on which a lone call is so many times as fast as beside others.",
        ),
    ] = None
    noise: Annotated[
        float,
        typer.Option(min=0.0, max=3.0, metavar="SIGMA", help="Lognormal noise of the time of each call."),
    ] = 0.0
    way_ms: Annotated[
        float, typer.Option(min=0.0, metavar="MS", help="Time to a slot; the way back takes the same.")
    ] = 0.0
    round_trip_ms: Annotated[
        float,
        typer.Option(min=0.0, metavar="MS", help="With --in-flight: from an answer to the next request."),
    ] = 1.0
    queue: Annotated[int, typer.Option(min=1, metavar="N", help="As server.max_queued_requests.")] = 8192
    uncalibrated: Annotated[
        bool, typer.Option("--uncalibrated", help="Learn the costs from the traffic alone.")
    ] = False
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="The same seed gives the same run.")] = 0
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT=VALUES",
            help="Simulate several values: slots=1..16 or rate=50,100,200; also in_flight, max_batch, deadline_ms.",
        ),
    ] = None
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Also simulate one request at a time, and batches of 16 in arrival order."
        ),
    ] = False
    p99_ms: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="MS", help="Name the runs that reach this p99 with at most 0.1 % lost."
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """Options of `shapestream tune`, unread."""

    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.", show_default=False)]
    trace: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Recorded traffic, from `serve --record-trace`.", show_default=False
        ),
    ]
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The model to tune. Default: the one that CONFIG and the trace share."
        ),
    ] = None
    budget: Annotated[float, typer.Option(min=5.0, metavar="SECONDS", help="Time for everything.")] = 120.0
    in_flight: Annotated[
        int,
        typer.Option(
            min=1, max=4096, metavar="N", help="Requests under way at a time; 1: latency of lone requests."
        ),
    ] = 64
    precision: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also try this precision: bf16 or f16 of OpenVINO, high or medium of PyTorch. It rounds answers more.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The tuned YAML. Default: CONFIG.tuned.yaml beside CONFIG."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False
