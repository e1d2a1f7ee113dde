"""`python -m benchmarks.day`: one page of one machine and one day, as Markdown.

It runs the benchmarks below one after the other, each in a process of its own, and writes their tables with what the
machine is, and with how much of its time others had during each (*stolen* by the host, and used by other processes
before the start). Ratios of contenders that take turns in one run can be compared between pages; absolute figures cannot.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from benchmarks import peer

ROOT = Path(__file__).parents[1]
PACKAGES = ("openvino", "pyzmq", "trio", "msgpack", "numpy")
LOOK_S = 2.0
"""How long other processes are looked at before a part begins."""
PATIENCE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Part:
    """One benchmark."""

    module: str
    question: str
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    """Options of a quick page."""
    with_peer: bool = False
    """The peer can take part."""


PARTS = (
    Part(
        "moderate",
        "Texts at random times, by the same arrivals for all",
        quick=("--rounds", "5", "--seconds", "4"),
        with_peer=True,
    ),
    Part("limit", "Texts of all lengths, saturated", ("--saturated",), ("--rounds", "1")),
    Part("bulk", "Single texts beside a call of 64 from the same address", quick=("--rounds", "3")),
    Part("endless", "Pictures whose size is new each time", quick=("--rounds", "3"), with_peer=True),
    Part("lone", "One small request", quick=("--rounds", "3"), with_peer=True),
    Part("tiny_tensors", "Tiny tensors, 64 in flight", quick=("--rounds", "3"), with_peer=True),
    Part("cheap_calls", "Calls from 50 us up", quick=("--rounds", "1")),
)


@dataclass(slots=True)
class Measured:
    """The figures of one part."""

    part: Part
    reports: list[dict[str, Any]]
    seconds: float
    stolen: float
    """Share of the cores' time that the host gave to others."""
    others: float
    """Share that other processes used before."""

    def lines(self) -> list[str]:
        """Return its section of the page."""
        told = f"{self.seconds:.0f} s; stolen {self.stolen:.1%}; others before {self.others:.0%}"
        lines = [
            "",
            f"## {self.part.question}",
            "",
            f"`python -m benchmarks.{self.part.module}`: {told}.",
            "",
        ]
        for report in self.reports:
            lines += [f"*{report['title']}*", "", *_table(report["rows"]), ""]
        return lines[:-1]


def run(part: Part, options: Sequence[str]) -> Measured:
    """Run a part, with a look at the machine before and during it."""
    others = psutil.cpu_percent(LOOK_S) / 100
    before, began = psutil.cpu_times(), time.monotonic()
    command = [sys.executable, "-m", f"benchmarks.{part.module}", "--json", *part.options, *options]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"benchmarks.{part.module} failed:\n{ran.stderr[-4000:]}")
    seconds, after = time.monotonic() - began, psutil.cpu_times()
    stolen = (getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)) / seconds / (os.cpu_count() or 1)
    found = json.loads(ran.stdout)
    if isinstance(found, dict):  # of `limit`, by trace
        found = [table for trace in found.values() for table in trace["tables"]]
    return Measured(part, found, seconds, stolen, others)


def machine() -> list[str]:
    """Return the machine and the software, as lines of the page."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return [
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit or 'unknown'}. {os.cpu_count()} cores ({model}), Linux "
        f"{platform.release()}; Python {platform.python_version()}, {packages}."
    ]


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table in Markdown."""
    if not rows:
        return ["(no rows)"]
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return [*lines, *["| " + " | ".join(_cell(row[column]) for column in columns) + " |" for row in rows]]


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main(
    output: Annotated[Path | None, typer.Option(help="Write the page there, part by part.")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer rounds: some 20 minutes.")] = False,
    smoke: Annotated[bool, typer.Option(help="Answers are checked, figures mean little.")] = False,
    with_peer: Annotated[bool, typer.Option("--peer", help=peer.OPTION_HELP)] = False,
    only: Annotated[list[str] | None, typer.Option(help="A part by its module; may be given again.")] = None,
) -> None:
    """Measure all regimes on this machine, and write one page."""
    if with_peer:
        peer.demand_environment()
    known = [part.module for part in PARTS]
    if unknown := sorted(set(only or ()) - set(known)):
        raise typer.BadParameter(f"no part is called {unknown[0]!r}; there are: {', '.join(known)}")
    lines = ["# One machine, one day", "", *machine()]
    for part in PARTS:
        if only and part.module not in only:
            continue
        options = [*(part.quick if quick else ()), *(["--smoke"] if smoke else [])]
        if with_peer and part.with_peer:
            options.append("--peer")
        typer.echo(f"benchmarks.{part.module} {' '.join(options)}", err=True)
        lines += run(part, options).lines()
        if output is not None:
            output.write_text("\n".join(lines) + "\n")
    if output is None:
        typer.echo("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
