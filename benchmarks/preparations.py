"""`python -m benchmarks.preparations`: what a device does the first time it meets a shape, and what fewer shapes save.

Every run is a process of its own, in interleaved rounds; medians are printed. XLA is measured where torch_xla is
installed: in this environment, or in the one that `make test-engines ENGINES=torch-xla` makes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.prepared_runs import CAP, Figures
from benchmarks.report import Figure, Report

ROOT = Path(__file__).parents[1]
XLA_ENVIRONMENT = ROOT / ".venv-xla"
RUN_S = 600


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 3,
) -> None:
    """Measures preparations on XLA and OpenVINO, and checks every answer."""
    console = Console(stderr=as_json)
    rounds = 1 if smoke else rounds
    reports = []
    xla = _xla_python()
    if xla is None:
        console.print("XLA: skipped, torch_xla is not installed (make test-engines ENGINES=torch-xla)")
    else:
        with console.status("measuring XLA"):
            reports.append(xla_report(xla, iterations=10 if smoke else 100, rounds=rounds))
        console.print(reports[-1].table())
    if find_spec("openvino") is None:
        console.print("OpenVINO: skipped, it is not installed")
    else:
        with console.status("measuring OpenVINO"):
            reports.append(first_report(shapes=5 if smoke else 100, rounds=rounds))
            console.print(reports[-1].table())
            reports.append(memory_report(shapes=100 if smoke else 2000, rounds=1))
            console.print(reports[-1].table())
    if as_json:
        print(json.dumps([report.plain() for report in reports], indent=2))


def xla_report(python: str, *, iterations: int, rounds: int) -> Report:
    """Time, compilations and cache hits for every shape as it comes, and for a few."""
    exact, bucketed = _rounds(["xla-exact", "xla-bucketed"], iterations, rounds, python)
    ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(exact, bucketed, strict=True))
    report = Report(title=f"XLA: an MLP, {iterations} requests of random row counts")
    report.columns = ("shapes", "time", "compilations", "cache hits", "speed-up")
    report.rows.append(
        (
            f"every one as it comes ({_median(exact, 'shapes'):.0f})",
            Figure(_median(exact, "seconds"), "s"),
            Figure(_median(exact, "compilations"), ""),
            Figure(_median(exact, "hits"), ""),
            "1",
        )
    )
    report.rows.append(
        (
            "bounded and bucketed",
            Figure(_median(bucketed, "seconds"), "s"),
            Figure(_median(bucketed, "compilations"), "", at_most=6),
            Figure(_median(bucketed, "hits"), ""),
            Figure(ratio, "x", at_least=1.47),
        )
    )
    return report


def first_report(*, shapes: int, rounds: int) -> Report:
    """A call of a new shape against repeated ones."""
    (runs,) = _rounds(["openvino-first"], shapes, rounds, sys.executable)
    report = Report(title=f"OpenVINO, CPU: what a new shape costs ({shapes} shapes)")
    report.columns = ("call", "median")
    report.rows.append(("the first of its shape", Figure(_median(runs, "first_ms"), "ms")))
    report.rows.append(("a repeated one", Figure(_median(runs, "repeated_ms"), "ms")))
    report.rows.append(("the difference, shape by shape", Figure(_median(runs, "extra_ms"), "ms")))
    return report


def memory_report(*, shapes: int, rounds: int) -> Report:
    """Resident memory over distinct shapes, exact and rounded."""
    names = {"openvino-native": "native", "openvino-rounded": f"native, max_prepared: {CAP}"}
    report = Report(title=f"OpenVINO, CPU: resident memory over {shapes} distinct shapes")
    report.columns = ("strategy", "after a hundredth", "after a quarter", "at the end", "time")
    for name, runs in zip(names, _rounds(list(names), shapes, rounds, sys.executable), strict=True):
        megabytes = [Figure(_median(runs, key), "MB") for key in ("start_mb", "quarter_mb", "end_mb")]
        report.rows.append((names[name], *megabytes, Figure(_median(runs, "seconds"), "s")))
    return report


def _rounds(names: Sequence[str], count: int, rounds: int, python: str) -> list[list[Figures]]:
    """Per name its figures of each round; the names take turns."""
    figures: list[list[Figures]] = [[] for _ in names]
    for _ in range(rounds):
        for number, name in enumerate(names):
            figures[number].append(_run(name, count, python))
    return figures


def _run(name: str, count: int, python: str) -> Figures:
    environ = {"PJRT_DEVICE": "CPU", **os.environ}
    command = [python, "-m", "benchmarks.prepared_runs", name, str(count)]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, timeout=RUN_S, check=True
    )
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def _median(runs: Sequence[Figures], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def _xla_python() -> str | None:
    """An interpreter that has torch_xla."""
    if find_spec("torch_xla") is not None:
        return sys.executable
    ready = (XLA_ENVIRONMENT / ".ready").exists()
    return str(XLA_ENVIRONMENT / "bin/python") if ready else None


if __name__ == "__main__":
    typer.run(main)
