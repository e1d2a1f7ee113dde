"""`python -m benchmarks.cheap_calls`: calls from 50 us up, in simulation, against arrival order and a known window.

Traffic is a closed loop of 64 requests with lognormal lengths, over one slot. A call takes a fixed part, and a part of
that per element: a 25th, as MiniLM does, or a 350th, so that company pays more. What is possible is worked out apart from
the scheduler: 64 lengths that are all known are cut into batches at the least sum of seconds, and the slot never waits.
The scheduler sees those that no slot holds, about half of them, and counts a millisecond for the hand-over of each batch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from benchmarks.report import Figure, Report

FIXED_MS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
PARTS = (25, 350)
"""Elements that take as long as the fixed part."""
IN_FLIGHT = 64
MAX_BATCH = 16
WAY_MS = 0.05
MEDIAN, SIGMA, SHORTEST, LONGEST = 24, 0.9, 4, 256
WINDOWS = 200
"""Windows of 64 lengths over which the best cuts are averaged: their mean is within 1 %."""


def simulated(fixed_ms: float, element_ms: float, *, requests: int, seed: int) -> dict[str, float]:
    """Requests per second by policy, from `shapestream simulate --compare`."""
    command = [
        sys.executable, "-m", "shapestream_workers", "simulate", "--compare", "--json",
        "--requests", str(requests), "--seed", str(seed), "--noise", "0.1",
        "--cost", f"fixed_ms={fixed_ms},ms_per_element={element_ms}", "--max-batch", str(MAX_BATCH),
        "--sizes", f"seq=lognormal:{MEDIAN},{SIGMA},{SHORTEST}..{LONGEST}", "--in-flight", str(IN_FLIGHT),
        "--way-ms", str(WAY_MS), "--round-trip-ms", "0",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return {run["policy"]: run["goodput"] for run in json.loads(done.stdout)["runs"]}


def possible(fixed_ms: float, element_ms: float) -> float:
    """Requests per second where the lengths of each window are known, and it is cut at the least sum of seconds."""
    rng = np.random.default_rng(0)
    drawn = np.rint(MEDIAN * np.exp(SIGMA * rng.standard_normal((WINDOWS, IN_FLIGHT))))
    windows = np.sort(np.clip(drawn, SHORTEST, LONGEST)).tolist()
    total_ms = sum(_least_ms(window, fixed_ms, element_ms) for window in windows)
    return 1e3 * IN_FLIGHT * WINDOWS / total_ms


def _least_ms(lengths: Sequence[float], fixed_ms: float, element_ms: float) -> float:
    """Least milliseconds of batches that cover sorted lengths: neighbours share a batch, as long as its longest."""
    best = [0.0]
    for end in range(1, len(lengths) + 1):
        longest_ms = element_ms * lengths[end - 1]
        best.append(
            min(best[end - rows] + fixed_ms + rows * longest_ms for rows in range(1, min(MAX_BATCH, end) + 1))
        )
    return best[-1]


def measure(*, requests: int, rounds: int, prices_ms: Sequence[float] = FIXED_MS) -> Report:
    """A row per price of a call; medians of several seeds."""
    report = Report(
        title="Cheap calls, simulated: 64 in flight, lognormal lengths, one slot",
        columns=(
            "fixed part",
            "per element",
            "requests/s",
            "/ arrival order by 16",
            "/ one at a time",
            "/ window known",
        ),
    )
    for part, fixed_ms in product(PARTS, prices_ms):
        element_ms = fixed_ms / part
        runs = [simulated(fixed_ms, element_ms, requests=requests, seed=seed) for seed in range(rounds)]
        per_s = {policy: float(np.median([run[policy] for run in runs])) for policy in runs[0]}
        own = per_s["shapestream"]
        report.rows.append(
            (
                f"{fixed_ms:g} ms",
                f"{1e3 * element_ms:.3g} us",
                Figure(own, "/s"),
                Figure(own / per_s["arrival order, 16"], "x", at_least=1.0),
                Figure(own / per_s["one at a time"], "x"),
                Figure(own / possible(fixed_ms, element_ms), "x", at_least=0.8),
            )
        )
    return report


def measure_smoke() -> Report:
    """A row for each part: figures mean little."""
    return measure(requests=200, rounds=1, prices_ms=FIXED_MS[:1])


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Seeds; medians are printed.")] = 3,
) -> None:
    """Simulates cheap calls; no clock of this machine takes part."""
    console = Console(stderr=as_json)
    report = measure_smoke() if smoke else measure(requests=3000, rounds=rounds)
    console.print(report.table())
    if as_json:
        print(json.dumps(report.plain(), indent=2))


if __name__ == "__main__":
    typer.run(main)
