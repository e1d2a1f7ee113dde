"""`python -m benchmarks.cheap_calls`: calls from 50 us up, against arrival order and a known window.

Traffic is a closed loop of 64 requests with lognormal lengths, over one slot. A call takes a fixed part, and a part of
that per element: a 25th, as MiniLM does, or a 350th, so that company pays more. What is possible is worked out apart from
the scheduler: 64 lengths that are all known are cut into batches at the least sum of seconds, and the slot never waits.
The scheduler sees those that no slot holds, about half of them, and counts a millisecond for the hand-over of each batch.

For real, a function takes just as long in a worker process, and a plain client asks for it. The other server is the same
one with its batches in arrival order (`arrival_order.py`). Below half a millisecond the server's own CPU is the limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.processes import child_process, wait_for_slots
from benchmarks.raw_client import RawClient
from benchmarks.report import Figure, Report, median_ratio, print_reports
from shapestream_engine.layout import Tensors

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


# ------------------------------------------------------------ for real


def spinning(seq: NDArray[np.float32]) -> NDArray[np.float32]:
    """The sum of each row, after the time that the environment says a call takes."""
    end = time.perf_counter() + _CALL_S + _ELEMENT_S * seq.size
    sums: NDArray[np.float32] = seq.sum(axis=1, dtype=np.float32, keepdims=True)
    while time.perf_counter() < end:
        pass
    return sums


_CALL_S, _ELEMENT_S = (float(os.environ.get(f"BENCHMARK_{part}_S", "0")) for part in ("CALL", "ELEMENT"))


@dataclass(slots=True, kw_only=True)
class _Served:
    """A server with the spinning function, and the rate of each round."""

    address: str
    per_s: list[float] = field(default_factory=list)


def _serve(stack: ExitStack, folder: Path, module: str, fixed_ms: float, part: int) -> _Served:
    label = f"{module.rpartition('.')[2]}-{part}-{fixed_ms:g}"
    address, log, path = f"ipc://{folder}/{label}.sock", folder / f"{label}.log", folder / f"{label}.yaml"
    path.write_text(
        f"server: {{listen: ['{address}']}}\n"
        "models:\n"
        "  - {name: spinning, engine: function, function: benchmarks.cheap_calls:spinning, trust: true,\n"
        f"     batching: {{max_batch: {MAX_BATCH}}},\n"
        f"     inputs: {{seq: {{shape: 'batch:1..{MAX_BATCH}, seq:1..{LONGEST}', element_type: f32, pad: {{seq: 0}}}}}},\n"
        f"     outputs: {{sums: {{shape: 'batch:1..{MAX_BATCH}, 1', element_type: f32, rule: rows}}}}}}\n"
        "workers: [{count: 1, models: [spinning], slots: 1}]\n"
        "logging: {level: warning}\n"
    )
    prices = {"CALL": fixed_ms / 1e3, "ELEMENT": fixed_ms / 1e3 / part}
    environment = {f"BENCHMARK_{name}_S": str(seconds) for name, seconds in prices.items()}
    child = stack.enter_context(
        child_process(["-m", module, "serve", str(path)], log=log, environment=environment)
    )
    wait_for_slots(child, address, 1, log)
    return _Served(address=address)


def _ask(served: _Served, lengths: Sequence[int]) -> None:
    """Send a request of each length, 64 at a time; compare every answer."""
    requests = [
        Tensors(layout=((0, "f32", (1, length)),), buffers=(np.ones((1, length), np.float32).tobytes(),))
        for length in lengths
    ]
    with RawClient(served.address, "spinning") as client:
        began = time.perf_counter()
        for number, tensors in client.stream(requests, IN_FLIGHT):
            if np.frombuffer(tensors.buffers[0], np.float32)[0] != lengths[number]:
                raise AssertionError(f"the answer to request {number} differs")
        served.per_s.append(len(lengths) / (time.perf_counter() - began))


def measure_real(
    folder: Path, *, requests: int, rounds: int, prices_ms: Sequence[float] = FIXED_MS
) -> Report:
    """A row per price of a call: rates of both servers, which take turns."""
    report = Report(
        title="Cheap calls, for real: 64 in flight, lognormal lengths, a worker of one slot",
        columns=("fixed part", "per element", "requests/s", "/ arrival order by 16"),
    )
    rng = np.random.default_rng(0)
    drawn = np.rint(MEDIAN * np.exp(SIGMA * rng.standard_normal(requests)))
    lengths = np.clip(drawn, SHORTEST, LONGEST).astype(int).tolist()
    for part, fixed_ms in product(PARTS, prices_ms):
        with ExitStack() as stack:
            own, other = (
                _serve(stack, folder, module, fixed_ms, part)
                for module in ("shapestream_workers", "benchmarks.arrival_order")
            )
            for served in (own, other) * (1 + rounds):
                _ask(served, lengths)
        own_per_s, other_per_s = own.per_s[1:], other.per_s[1:]
        report.rows.append(
            (
                f"{fixed_ms:g} ms",
                f"{1e3 * fixed_ms / part:.3g} us",
                Figure(float(np.median(own_per_s)), "/s"),
                Figure(median_ratio(own_per_s, other_per_s), "x", at_least=1.0),
            )
        )
    return report


def measure_all(folder: Path, *, smoke: bool, rounds: int = 3) -> list[Report]:
    """Simulated and real; of a smoke test, the cheapest call of each."""
    if smoke:
        prices_ms = FIXED_MS[:1]
        return [
            measure(requests=200, rounds=1, prices_ms=prices_ms),
            measure_real(folder, requests=200, rounds=1, prices_ms=prices_ms),
        ]
    return [
        measure(requests=3000, rounds=rounds),
        measure_real(folder, requests=3000, rounds=rounds, prices_ms=FIXED_MS[:-1]),
    ]


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Seeds, and rounds; medians are printed.")] = 3,
) -> None:
    """Plays cheap calls in simulation, where no clock of this machine takes part, and for real."""
    print_reports(lambda folder: measure_all(folder, smoke=smoke, rounds=rounds), as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
