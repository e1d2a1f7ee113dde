"""`python -m benchmarks.memory`: does memory stay where it is over a million requests of random shapes?

Half of them go through an identity, half through a small OpenVINO model, from one client through one server to one
worker process. Warm-up is the first tenth: by then every buffer has met its largest request, and nearly every shape has
come. After it no input tensor may be reallocated, and no process may grow by more than 5 %. Every answer is compared.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
import psutil
import trio
import typer
from rich.console import Console

import shapestream
from benchmarks.processes import Child, child_process, wait_for_slots
from benchmarks.report import Figure, Report

REQUESTS = 1_000_000
CHUNKS = 40
WARM_UP_CHUNKS = 4
AIM_GROWTH = 1.05
IN_FLIGHT = 128
MLP = "mlp"
MOST_ROWS, MOST_SEQ, WIDTH = 4, 128, 32
MODELS = ("identity", MLP)
IDENTITY_ROWS, IDENTITY_WIDTH = 16, 128
DIFFERENT_IDENTITY = 1024
TOLERANCE = 2e-5

Pair: TypeAlias = tuple[np.ndarray, np.ndarray]
"""An input, and what the model gives for it."""


@dataclass(slots=True)
class Samples:
    """Resident megabytes after each part of the requests, and counters of the server."""

    server_mb: list[float] = field(default_factory=list)
    worker_mb: list[float] = field(default_factory=list)
    client_mb: list[float] = field(default_factory=list)
    reallocations: list[int] = field(default_factory=list)
    preparations: list[int] = field(default_factory=list)
    results: int = 0
    elapsed_s: float = 0.0


def main(
    requests: Annotated[int, typer.Option(min=CHUNKS * 2, help="Of both models together.")] = REQUESTS,
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measures the memory of client, server and worker over requests of random shapes; checks every answer."""
    console = Console(stderr=as_json)
    requests = 4_000 if smoke else requests
    with tempfile.TemporaryDirectory(prefix="ss-bench-") as name:
        report = measure(Path(name), requests)
    console.print(report.table())
    if as_json:
        print(json.dumps(report.plain(), indent=2))


def measure(folder: Path, requests: int) -> Report:
    """A row per process, and one for the input tensors."""
    samples = trio.run(_run, folder, requests)
    warm = WARM_UP_CHUNKS - 1
    report = Report(
        title=f"{samples.results:,} requests of random shapes in {samples.elapsed_s:.0f} s",
        columns=("what", "after warm-up", "at the end", "growth"),
    )
    for process in ("server", "worker", "client"):
        megabytes: list[float] = getattr(samples, f"{process}_mb")
        # What is freed at one moment is taken again at the next: the larger of two neighbours says more than either.
        early_mb, late_mb = max(megabytes[warm - 1 : warm + 1]), max(megabytes[-2:])
        row = (
            Figure(early_mb, "MB"),
            Figure(late_mb, "MB"),
            Figure(late_mb / early_mb, "x", at_most=AIM_GROWTH),
        )
        report.rows.append((f"{process}, resident", *row))
    grown = samples.reallocations[-1] - samples.reallocations[warm]
    report.rows.append(
        (
            "input tensors reallocated",
            Figure(samples.reallocations[warm], ""),
            Figure(samples.reallocations[-1], ""),
            Figure(grown, "", at_most=0),
        )
    )
    report.rows.append(
        (
            "calls of new shapes",
            Figure(samples.preparations[warm], ""),
            Figure(samples.preparations[-1], ""),
            Figure(samples.preparations[-1] - samples.preparations[warm], ""),
        )
    )
    return report


async def _run(folder: Path, requests: int) -> Samples:
    _write_model(folder)
    address = f"ipc://{folder}/memory.sock"
    config = folder / "memory.yaml"
    config.write_text(_yaml(address))
    samples = Samples()
    pools = dict(zip(MODELS, (_identity_pool(), _mlp_pool()), strict=True))
    with ExitStack() as stack:
        command = ["-m", "shapestream_workers", "serve", str(config)]
        log = folder / "memory.log"
        server = stack.enter_context(child_process(command, log=log))
        wait_for_slots(server, address, 1, log)
        started = time.perf_counter()
        for number in range(CHUNKS):
            share = requests // CHUNKS // len(MODELS)
            # A new session for each part: leaving nothing behind is part of the question.
            async with shapestream.connect(address) as client:
                async with trio.open_nursery() as nursery:
                    for name, pool in pools.items():
                        nursery.start_soon(_ask, client, name, pool, share, number)
                counters = await client.statistics()
            _sample(samples, server, counters)
        samples.elapsed_s = time.perf_counter() - started
    return samples


def _yaml(address: str) -> str:
    return (
        f"server: {{listen: ['{address}']}}\n"
        "models:\n"
        "  - {name: identity, function: 'benchmarks.models:identity', trust: true,\n"
        f"     inputs: {{x: {{shape: 'batch:1..64, width:1..{IDENTITY_WIDTH}', element_type: f32}}}},\n"
        "     outputs: {y: {shape: 'batch, width', element_type: f32, rule: rows}}}\n"
        f"  - {{name: {MLP}, path: mlp.xml, shapes: {{max_prepared: 64}},\n"
        f"     inputs: {{x: {{shape: 'batch:1..16, seq:1..{MOST_SEQ}, {WIDTH}', pad: {{seq: 0}}}}}},\n"
        "     probe: {x: {uniform: [-1, 1]}}, batching: {max_batch: 16}}\n"
        "workers: [{count: 1, slots: 1, threads: 1}]\nlogging: {level: warning}\n"
    )


async def _ask(client: shapestream.Client, model: str, pool: list[Pair], count: int, seed: int) -> None:
    """So many requests of one model, each with its answer compared."""
    chance = random.Random(seed)
    chosen = chance.choices(range(len(pool)), k=count)

    def source() -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        for place in chosen:
            yield place, {"x": pool[place][0]}

    received = 0
    async with client.stream(model, source(), max_in_flight=IN_FLIGHT, ordered=False) as results:
        async for result in results:
            expected = pool[result.key][1]
            given = result["y"]
            if given.shape != expected.shape or not np.abs(given - expected).max() <= TOLERANCE:
                raise AssertionError(f"{model}: a wrong answer to {pool[result.key][0].shape}")
            received += 1
    if received != count:
        raise AssertionError(f"{model}: {received} answers to {count} requests")


def _sample(samples: Samples, server: Child, counters: dict[str, int]) -> None:
    samples.server_mb.append(psutil.Process(server.pid).memory_info().rss / 1e6)
    samples.worker_mb.append(_worker_resident_mb(server))
    samples.client_mb.append(psutil.Process().memory_info().rss / 1e6)
    samples.reallocations.append(int(counters["reallocations"]))
    samples.preparations.append(int(counters["preparations"]))
    samples.results = int(counters["results"])


def _identity_pool() -> list[Pair]:
    chance, pool = random.Random(1), []
    for number in range(DIFFERENT_IDENTITY):
        shape = (chance.randint(1, IDENTITY_ROWS), chance.randint(1, IDENTITY_WIDTH))
        x = np.full(shape, number, np.float32)
        pool.append((x, x))
    return pool


def _mlp_pool() -> list[Pair]:
    """Every shape once, with its reference."""
    numbers = np.random.default_rng(0).standard_normal((MOST_ROWS, MOST_SEQ, WIDTH)).astype(np.float32)
    inputs = [
        np.ascontiguousarray(numbers[:rows, :seq])
        for rows in range(1, MOST_ROWS + 1)
        for seq in range(1, MOST_SEQ + 1)
    ]
    return [(x, _reference(x)) for x in inputs]


@functools.cache
def _weights() -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    sizes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    return [(draw.standard_normal(size) / np.sqrt(size[0])).astype(np.float32) for size in sizes]


def _reference(x: np.ndarray) -> np.ndarray:
    """Return the model's answer, computed by NumPy."""
    first, second = _weights()
    hidden: np.ndarray = np.maximum(x @ first, 0) @ second
    exponentials = np.exp(hidden - hidden.max(axis=-1, keepdims=True))
    answer: np.ndarray = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return answer


def _write_model(folder: Path) -> None:
    """Writes `mlp.xml`: two layers and a softmax for each position."""
    import shapestream_engine.backends.openvino  # noqa: F401 - imports openvino without its telemetry

    # isort: split
    import openvino as ov
    from openvino import opset15 as ops

    x = ops.parameter([-1, -1, WIDTH], np.float32, name="x")
    x.output(0).set_names({"x"})
    first, second = (ops.constant(weight) for weight in _weights())
    hidden = ops.relu(ops.matmul(x, first, False, False))
    y = ops.softmax(ops.matmul(hidden, second, False, False), -1)
    y.output(0).set_names({"y"})
    ov.save_model(ov.Model([y], [x], MLP), folder / "mlp.xml", compress_to_fp16=False)


def _worker_resident_mb(server: Child) -> float:
    """Return the resident megabytes of the server's one worker, which has nothing to do."""
    (worker,) = [
        child for child in psutil.Process(server.pid).children(recursive=True) if "worker" in child.cmdline()
    ]
    return float(worker.memory_info().rss) / 1e6


if __name__ == "__main__":
    typer.run(main)
