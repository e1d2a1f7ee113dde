"""`python -m benchmarks.jobs`: the first table of README, three real jobs beside what people use for them today.

Runs three commands, one after the other, and takes their figures: each has the ways of one job take turns in one run, and
compares every answer. Their environments are set up by `make text-peer`, `make peer` and `make .venv-ocr/.ready`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.peer import NAME as MOSEC
from benchmarks.text import CALLERS, TEXTS

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = {"text-peer": ".venv-text-peer", "peer": ".venv-peer", ".venv-ocr/.ready": ".venv-ocr"}
"""The environment that each target of the Makefile sets up."""


class Way(NamedTuple):
    """One way to do a job: a row of the table."""

    name: str
    per_s: float
    cpu_ms: float
    """Milliseconds of CPU of all its processes, per item; the client's are left out where it is not part of the way."""


class Job(NamedTuple):
    """A job, the ways to do it, ours first, and the command that measured them."""

    name: str
    item: str
    ways: Sequence[Way]
    command: str


def _reports(module: str, *options: str) -> list[dict[str, Any]]:
    """Run a benchmark, whose tables go to the terminal; return its figures."""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--json", *options]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    reports: list[dict[str, Any]] = json.loads(ran.stdout)
    return reports


def _texts(rounds: int) -> Job:
    (report,) = _reports("text", "--peer", "--rounds", str(rounds))
    ways = [Way(row["way"], row["texts per s"], row["CPU us per text"] / 1e3) for row in report["rows"]]
    name = f"embed sentences: MiniLM, {CALLERS} callers with {TEXTS} docstrings each"
    return Job(name, "texts", [ways[0], *ways[2:]], "python -m benchmarks.text --peer")


def _pages(rounds: int) -> Job:
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "ocr.json"
        command = [".venv-ocr/bin/python", "-m", "examples.ocr.run", "--json", str(figures)]
        subprocess.run([*command, "--rounds", str(rounds)], cwd=ROOT, stdout=sys.stderr, check=True)
        rows = json.loads(figures.read_text())
    known = {row["way"]: Way(row["way"], row["pages per s"], 1e3 * row["CPU s per page"]) for row in rows}
    ours = next(way for name, way in known.items() if name.startswith("chain ocr,"))
    theirs = [way for name, way in known.items() if name.startswith("rapidocr")]
    ways = [ours._replace(name="shapestream, a chain"), *theirs]
    return Job("read pages: three models, 16 pages of 0 to 200 lines", "pages", ways, "make ocr")


def _pictures(rounds: int) -> Job:
    (report,) = _reports("endless", "--peer", "--rounds", str(rounds))
    known = {
        row["way"]: Way(row["way"], row["per s"], (row["CPU"] or row["client"]) / 1e3)
        for row in report["rows"]
    }
    ours = known["in process, padded"]._replace(name="shapestream, padding proved")
    theirs = [known["model, each alone"]._replace(name="OpenVINO in one process, each alone")]
    theirs += [way for name, way in known.items() if MOSEC in name]
    name = "detect in pictures: 4,225 sizes, a small detector, 64 in flight"
    return Job(name, "pictures", [ours, *theirs], "python -m benchmarks.endless --peer")


def table(jobs: Sequence[Job]) -> str:
    """The table, in Markdown."""
    lines = ["| job | way | per second | CPU, ms each | command |", "|---|---|---:|---:|---|"]
    for job in jobs:
        for number, way in enumerate(job.ways):
            per_s = f"{way.per_s:,.0f}" if way.per_s >= 10 else f"{way.per_s:.2f}"
            cpu = f"{way.cpu_ms:,.1f}" if way.cpu_ms < 100 else f"{way.cpu_ms:,.0f}"
            cells = [way.name, per_s, cpu]
            ours = [job.name, *(f"**{cell}**" for cell in cells), f"`{job.command}`"]
            cells = ["", *cells, ""] if number else ours
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds of each job.")] = 3,
    only: Annotated[str, typer.Option(help="texts, pages or pictures; empty: all.")] = "",
) -> None:
    """Print the table of README."""
    for target, environment in ENVIRONMENTS.items():
        if not (ROOT / environment / ".ready").exists():
            raise typer.BadParameter(f"an environment is missing, which `make {target}` sets up")
    jobs = {"texts": _texts, "pages": _pages, "pictures": _pictures}
    if only not in ("", *jobs):
        raise typer.BadParameter(f"the jobs are {', '.join(jobs)}")
    print(table([job(rounds) for name, job in jobs.items() if only in ("", name)]))


if __name__ == "__main__":
    typer.run(main)
