"""`python -m benchmarks`: everything that `make bench` prints."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import cheap_calls, endless, large_tensors, lone, scheduler, tiny_tensors
from benchmarks.report import Report


def main(
    smoke: Annotated[
        bool, typer.Option(help="Seconds instead of minutes: answers are checked, figures mean little.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 5,
) -> None:
    """Measures shapestream against bare pyzmq in interleaved rounds, and checks every answer; and the scheduler alone."""
    console = Console(stderr=as_json)
    rounds = 1 if smoke else rounds
    with tempfile.TemporaryDirectory(prefix="ss-bench-") as name:
        folder = Path(name)
        reports: list[Report] = []
        measurements: list[tuple[str, Callable[[], list[Report]]]] = [
            (
                "tiny tensors",
                lambda: [tiny_tensors.measure(folder, requests=400 if smoke else 16_000, rounds=rounds)],
            ),
            (
                "a lone request",
                lambda: lone.measure(folder, requests=50 if smoke else 1000, rounds=rounds),
            ),
            (
                "large tensors",
                lambda: [large_tensors.measure(folder, requests=24 if smoke else 300, rounds=rounds)],
            ),
            (
                "endless shapes",
                lambda: endless.measure(folder, requests=64 if smoke else 1000, rounds=rounds),
            ),
            (
                "cheap calls",
                lambda: cheap_calls.measure_all(folder, smoke=smoke),
            ),
            ("the scheduler", lambda: [scheduler.measure(scheduler.SMOKE if smoke else scheduler.FULL)]),
        ]
        for title, measure in measurements:
            with console.status(f"measuring {title}"):
                measured = measure()
            reports += measured
            for report in measured:
                console.print(report.table())
    if smoke:
        console.print(
            "A smoke run: every answer was checked; the figures come from too few requests to mean anything."
        )
    if as_json:
        print(json.dumps([report.plain() for report in reports], indent=2))


if __name__ == "__main__":
    typer.run(main)
