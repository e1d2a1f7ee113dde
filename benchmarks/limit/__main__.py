"""`python -m benchmarks.limit`: how much of the possible the pipeline reaches."""

from __future__ import annotations

import gc
import json
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.limit import account
from benchmarks.limit.contest import ALONE, Contest
from benchmarks.limit.engine import read_minilm
from benchmarks.limit.figures import BEST, HOT, WORKERS, latency, plain, throughput
from benchmarks.limit.pipeline_run import TWO_WORKERS, ServerSetting, serving
from benchmarks.limit.traces import Trace, docstrings, lognormal
from benchmarks.report import Report

TOKENS_PER_S = 9_000
"""About what two cores do, to make runs of about so many seconds: a trace is the same on every machine."""
PRACTICE_SHARE = 0.5
"""Of a run: the slice on which settings are found and servers warmed up."""

STATIC = "{static: [{batch: [1, 4], seq: [8, 16, 24, 32, 48]}]}"
"""Sizes that come often; each takes most of a second to prepare, and about 75 MB of weights of its own."""

SERVERS = {
    BEST: ServerSetting(label="slots"),
    WORKERS: ServerSetting(label="workers", placement=TWO_WORKERS),
    HOT: ServerSetting(label="static", shapes=STATIC),
    ALONE: ServerSetting(label="alone", batching="{max_batch: 1}"),
}
SMOKE_CALIBRATION_S = 0.3


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of one run of one way, about.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are printed.")] = 3,
    saturated: Annotated[bool, typer.Option("--saturated", help="Rates only, no latencies.")] = False,
    trace: Annotated[str, typer.Option(help="Only this one: lognormal or docstrings.")] = "",
    with_account: Annotated[
        bool,
        typer.Option(
            "--account", help="The parts of the lognormal trace's way against the oracle, by replay alone."
        ),
    ] = False,
) -> None:
    """Measures the pipeline against an oracle, one at a time and arrival order, and checks every answer."""
    console = Console(stderr=as_json)
    if smoke:
        seconds, rounds = 0.05, 1
    if with_account:
        reports, counts = _account(seconds, rounds, smoke=smoke)
        for each in reports:
            console.print(each.table())
        if as_json:
            print(json.dumps({"reports": [each.plain() for each in reports], **counts}, indent=2))
        return
    figures = {}
    with tempfile.TemporaryDirectory(prefix="ss-limit-") as name, ExitStack() as stack:
        minilm = read_minilm()
        servers = {}
        for way, setting in _settings(smoke=smoke).items():
            with console.status(f"starting a server: {way}"):
                servers[way] = stack.enter_context(serving(setting, Path(name)))
        for whole in _traces(trace, (1 + PRACTICE_SHARE) * seconds):
            measured, practice = _divide(whole)
            with console.status(f"{measured.name}: finding the oracle's best settings") as status:
                contest = Contest(minilm, measured, practice, servers, thorough=not smoke)
                status.update(f"{measured.name}: warming up")
                contest.warm_up()
                gc.collect()
                for number in range(rounds):
                    status.update(f"{measured.name}: round {number + 1} of {rounds}")
                    contest.round(number, 0.0 if saturated else seconds)
            reports = [throughput(contest.outcome), *([] if saturated else [latency(contest.outcome)])]
            for each in reports:
                console.print(each.table())
            for way, words in contest.outcome.settings.items():
                console.print(f"  {way}: {words}", highlight=False, markup=False)
            tables = [each.plain() for each in reports]
            figures[measured.name] = {**plain(contest.outcome), "tables": tables}
    if as_json:
        print(json.dumps(figures, indent=2))


def _account(seconds: float, rounds: int, *, smoke: bool) -> tuple[list[Report], dict[str, int]]:
    """The slots' way against the oracle's."""
    measured, practice = _divide(lognormal(round((1 + PRACTICE_SHARE) * seconds * TOKENS_PER_S)))
    with tempfile.TemporaryDirectory(prefix="ss-limit-") as name:
        return account.measure(
            read_minilm(),
            _settings(smoke=smoke)[BEST],
            measured,
            practice,
            Path(name),
            rounds=rounds,
            thorough=not smoke,
        )


def _settings(*, smoke: bool) -> dict[str, ServerSetting]:
    """The servers; in a smoke run without static shapes, and hardly calibrated."""
    if not smoke:
        return SERVERS
    return {
        way: replace(setting, calibration_s=SMOKE_CALIBRATION_S)
        for way, setting in SERVERS.items()
        if way != HOT
    }


def _traces(only: str, seconds: float) -> list[Trace]:
    made = {"lognormal": lognormal, "docstrings": docstrings}
    if only and only not in made:
        raise typer.BadParameter(f"no trace {only!r}; there are {', '.join(made)}")
    return [make(round(seconds * TOKENS_PER_S)) for name, make in made.items() if not only or name == only]


def _divide(whole: Trace) -> tuple[Trace, Trace]:
    """The measured part and the slice for practice."""
    at = round(len(whole) / (1 + PRACTICE_SHARE))
    return whole.cut(0, at), whole.cut(at, len(whole))


if __name__ == "__main__":
    typer.run(main)
