"""`python -m benchmarks.memory_shapes`: does a worker's memory stay where it is, however many shapes come?

A small OpenVINO model in a worker process, served over real sockets: resident memory of the worker after 20,000 requests
of random shapes against that after 500, with every shape run exactly as it comes and with late ones rounded up to a few
(`max_prepared`). Every answer is compared with NumPy's.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import psutil
import typer
from rich.console import Console

from benchmarks.processes import Child, child_process
from benchmarks.report import Figure, Report
from shapestream import blocking

WARM_UP = 500
REQUESTS = 20_000
MOST_ROWS, MOST_SEQ, WIDTH = 4, 128, 32
MAX_PREPARED = 64
OUTSTANDING = 64
# Two runs, with their starts, end within two minutes on a machine of any speed; the table says how far they came.
RUN_S = 48.0
MODEL = "mlp"

SHAPES = {
    # Without padding: where it is allowed, a new shape often runs in a larger one that the device knows.
    "every shape as it comes": ("shapes: {strategy: native}", ""),
    f"max_prepared: {MAX_PREPARED}": (
        f"shapes: {{strategy: native, max_prepared: {MAX_PREPARED}}}",
        ", pad: {seq: 0}",
    ),
}
"""The way to treat shapes, and what is added to the input."""


class Memory(NamedTuple):
    """Resident memory of the worker, in megabytes, before and after; and how many requests lay between."""

    early_mb: float
    late_mb: float
    requests: int
    preparations: int


def main(
    smoke: Annotated[bool, typer.Option(help="Seconds: answers are checked, figures mean little.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measures the memory of a worker over requests of random shapes, and checks every answer."""
    console = Console(stderr=as_json)
    with tempfile.TemporaryDirectory(prefix="ss-bench-") as name, console.status("measuring memory"):
        report = measure(Path(name), requests=800 if smoke else REQUESTS, run_s=10.0 if smoke else RUN_S)
    console.print(report.table())
    if as_json:
        print(json.dumps(report.plain(), indent=2))


def measure(folder: Path, *, requests: int, run_s: float) -> Report:
    """One row per way to treat shapes; the ratio is that of the resident memory late and early."""
    report = Report(title=f"Resident memory of a worker after {requests} requests against after {WARM_UP}")
    report.columns = ("shapes", f"after {WARM_UP}, MB", "at the end, MB", "ratio", "requests", "new shapes")
    write_model(folder)
    for number, (title, (shapes, pad)) in enumerate(SHAPES.items()):
        memory = _run(folder, f"m{number}", shapes, pad, requests, run_s)
        ratio = memory.late_mb / memory.early_mb
        report.rows.append(
            (
                title,
                Figure(memory.early_mb, "MB"),
                Figure(memory.late_mb, "MB"),
                Figure(ratio, "x", at_most=1.1) if number else Figure(ratio, "x"),
                Figure(memory.requests, ""),
                Figure(memory.preparations, ""),
            )
        )
    return report


def _run(folder: Path, label: str, shapes: str, pad: str, requests: int, run_s: float) -> Memory:
    address = f"ipc://{folder}/{label}.sock"
    config = folder / f"{label}.yaml"
    config.write_text(
        f"server: {{listen: ['{address}']}}\n"
        f"models:\n  - {{name: {MODEL}, path: mlp.xml, {shapes},\n"
        f"     inputs: {{x: {{shape: 'batch:1..16, seq:1..{MOST_SEQ}, {WIDTH}'{pad}}}}},\n"
        "     probe: {x: {normal: [0, 1]}}, batching: {max_batch: 16}}\n"
        "workers: [{count: 1, slots: 1, threads: 1}]\nlogging: {level: warning}\n"
    )
    with ExitStack() as stack:
        command = ["-m", "shapestream_workers", "serve", str(config)]
        server = stack.enter_context(child_process(command, log=folder / f"{label}.log"))
        client = stack.enter_context(blocking.connect(address, connect_timeout=60))
        client.signature(MODEL)  # waits for the worker
        give_up_at = time.monotonic() + run_s
        inputs = _inputs(random.Random(0))
        _send(client, inputs, WARM_UP)
        early_mb, sent = worker_resident_mb(server), WARM_UP
        while sent < requests and time.monotonic() < give_up_at:
            sent += _send(client, inputs, min(WARM_UP, requests - sent))
        late_mb = worker_resident_mb(server)
        statistics = client.statistics()
    return Memory(early_mb, late_mb, statistics["results"], statistics["preparations"])


def _send(
    client: blocking.Client, inputs: Iterator[tuple[np.ndarray, dict[str, np.ndarray]]], count: int
) -> int:
    """Sends so many requests and checks their answers; returns their number."""
    received = 0
    with client.stream(MODEL, islice(inputs, count), max_in_flight=OUTSTANDING) as results:
        for result in results:
            np.testing.assert_allclose(result["y"], reference(result.key), rtol=1e-3, atol=1e-4)
            received += 1
    if received != count:
        raise AssertionError(f"{received} answers to {count} requests")
    return received


def _inputs(chance: random.Random) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Endless requests of random shapes; few different numbers, since making them costs more than running them."""
    pool = np.random.default_rng(0).standard_normal((MOST_ROWS, 2 * MOST_SEQ, WIDTH)).astype(np.float32)
    while True:
        rows, seq, start = (
            chance.randint(1, MOST_ROWS),
            chance.randint(1, MOST_SEQ),
            chance.randrange(MOST_SEQ),
        )
        x = np.ascontiguousarray(pool[:rows, start : start + seq])
        yield x, {"x": x}


@functools.cache
def _weights() -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    sizes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    return [(draw.standard_normal(size) / np.sqrt(size[0])).astype(np.float32) for size in sizes]


def reference(x: np.ndarray) -> np.ndarray:
    """What the model gives, by NumPy."""
    first, second = _weights()
    hidden: np.ndarray = np.maximum(x @ first, 0) @ second
    exponentials = np.exp(hidden - hidden.max(axis=-1, keepdims=True))
    answer: np.ndarray = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return answer


def write_model(folder: Path) -> None:
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
    ov.save_model(ov.Model([y], [x], MODEL), folder / "mlp.xml", compress_to_fp16=False)


def worker_resident_mb(server: Child) -> float:
    """Of the server's one worker, once it has nothing to do."""
    (worker,) = [
        child for child in psutil.Process(server.pid).children(recursive=True) if "worker" in child.cmdline()
    ]
    return float(worker.memory_info().rss) / 1e6


if __name__ == "__main__":
    typer.run(main)
