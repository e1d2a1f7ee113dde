"""`python -m benchmarks.failures`: what failing requests cost their client, and another beside it, on virtual time.

A client has 64 requests in flight, of which a share fails its calls or ends its worker; another has 16, 1 or none. Figures
are multiples of those of the same loops without failures.
"""

from __future__ import annotations

import json
from multiprocessing import Pool
from statistics import fmean
from typing import Annotated, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.ablations.scenarios import lognormal, minilm
from shapestream.scheduling import Scheduler
from shapestream.scheduling.events import ModelProfile
from shapestream.telemetry.trace import TraceRequest
from shapestream_workers.lab.simulator import DONE, Scenario, simulate
from shapestream_workers.lab.true_cost import FormulaCost, TrueCost

COSTS: dict[str, tuple[TrueCost, int]] = {
    "2 ms per call": (FormulaCost(fixed_s=2e-3, per_row_s=2e-5, largest=(64, 256)), 64),
    "MiniLM": (minilm(), 32),
}
"""True costs and `max_batch`: calls that cost the same whatever is in them, and calls that cost what is in them."""
BESIDE = (16, 1, 0)
"""Requests in flight of the other client."""
SHARES = (0.0, 0.001, 0.01, 0.1)
FIGURES = ("rate", "rate beside", "p99 beside")


class Run(NamedTuple):
    """One simulation."""

    costs: str
    beside: int
    share: float
    kills: bool
    seed: int
    requests: int


def play(run: Run) -> list[float]:
    """Rates of both clients per second, and the other's p99 in seconds, until the first of them has no more requests."""
    cost, max_batch = COSTS[run.costs]
    rng = np.random.default_rng(run.seed)
    loops = {0: 64} | ({1: run.beside} if run.beside else {})
    mixed = run.costs == "MiniLM"
    sizes = lognormal(rng, run.requests) if mixed else [(1, 16)] * run.requests
    profile = ModelProfile(
        name="m", dimensions=("batch", "seq"), has_batch=True, paddable=(False, mixed), max_batch=max_batch,
        bounds=(None, 256),
    )  # fmt: skip
    scenario = Scenario(
        profiles=[profile],
        costs={"m": cost},
        traffic=[TraceRequest(0.0, 0, client, size) for size in sizes for client in loops],
        believed={"m": cost},
        slots=4 if run.kills else 1,
        in_flight_of=loops,
        failing={} if run.kills else {0: run.share},
        killing={0: run.share} if run.kills else {},
        way_s=0.25e-3,
        noise=0.1,
        seed=run.seed,
    )
    requests = simulate(Scheduler(8192, 1 << 62), scenario).requests
    client = np.array(requests.client)
    arrived, ended = requests.column(requests.arrived), requests.column(requests.ended)
    until = min(arrived[client == number].max() for number in loops)
    done = (requests.outcomes() == DONE) & (ended <= until)
    figures = [float((done & (client == number)).sum() / until) for number in loops]
    if run.beside:
        figures.append(float(np.percentile((ended - arrived)[done & (client == 1)], 99)))
    return figures


def main(
    killing: Annotated[
        bool, typer.Option(help="Requests end one of four workers, instead of a call.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1)] = 2,
    requests: Annotated[int, typer.Option(min=100, help="Of each client.")] = 3000,
    processes: Annotated[int, typer.Option(min=1)] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Prints, by costs, company and share of failing requests, figures / those without failures."""
    runs = [
        Run(costs, beside, share, killing, seed, requests)
        for costs in COSTS
        for beside in BESIDE
        for share in SHARES
        for seed in range(seeds)
    ]
    with Pool(processes) as pool:
        played = dict(zip(runs, pool.map(play, runs, chunksize=1), strict=True))
    table = Table(title="With failing requests / without", title_justify="left")
    for column in ("costs", "in flight beside", "failing", *FIGURES):
        table.add_column(column)
    rows = []
    for run in runs:
        if run.seed or not run.share:
            continue
        pairs = [
            (played[run._replace(seed=seed)], played[run._replace(seed=seed, share=0.0)])
            for seed in range(seeds)
        ]
        ratios = [
            fmean(after[number] / before[number] for after, before in pairs)
            for number in range(len(pairs[0][0]))
        ]
        rows.append([run.costs, run.beside, run.share, *ratios])
        table.add_row(run.costs, str(run.beside), f"{run.share:.1%}", *[f"{ratio:.2f}" for ratio in ratios])
    if as_json:
        print(json.dumps(rows))
    else:
        Console().print(table)


if __name__ == "__main__":
    typer.run(main)
