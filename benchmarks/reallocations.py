"""Input tensors of the InferRequests, resized in place: how many grow once warm, over requests of random shapes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.models import RANDOM, write_configuration
from benchmarks.processes import child_process
from benchmarks.report import Figure, Report
from shapestream import blocking

WARM_UP = 500
OUTSTANDING = 64


def _inputs(count: int, seed: int) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    chance = random.Random(seed)
    for number in range(count):
        shape = (chance.randint(1, 16), chance.randint(1, 512))
        array = np.full(shape, number % 1000, np.float32)
        yield array, {"x": array}


def measure(folder: Path, *, requests: int) -> Report:
    """Sends `requests` requests of random shapes within the bounds, after a warm-up; checks every answer."""
    report = Report(title=f"Reallocations of input tensors over {requests} requests of random shapes")
    report.columns = ("engine", "while warming up", "afterwards", "distinct request shapes")
    for engine in ("function", "openvino"):
        with ExitStack() as stack:
            path, address = write_configuration(folder, label=f"random-{engine}", engine=engine)
            log = folder / f"random-{engine}.log"
            stack.enter_context(child_process(["-m", "shapestream_workers", "serve", str(path)], log=log))
            client = stack.enter_context(blocking.connect(address, connect_timeout=60))
            counts = [_reallocations(client)]
            for count, seed in ((WARM_UP, 1), (requests, 2)):
                shapes = _send(client, count, seed)
                counts.append(_reallocations(client))
        warming, after = counts[1] - counts[0], counts[2] - counts[1]
        report.rows.append((engine, Figure(warming, ""), Figure(after, "", at_most=0), Figure(shapes, "")))
    return report


def _reallocations(client: blocking.Client) -> int:
    return int(client.statistics()["reallocations"])


def _send(client: blocking.Client, count: int, seed: int) -> int:
    shapes = set()
    with client.stream(RANDOM, _inputs(count, seed), max_in_flight=OUTSTANDING) as results:
        received = 0
        for result in results:
            np.testing.assert_array_equal(result.key, result["y"])
            shapes.add(result["y"].shape)
            received += 1
    if received != count:
        raise AssertionError(f"{received} answers to {count} requests")
    return len(shapes)
