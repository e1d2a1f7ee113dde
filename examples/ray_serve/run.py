"""One server with one queue; its workers are Ray's actors, which are started, killed and started again by Ray.

    python -m examples.ray_serve.run [--quick] [--serve]

Streams rows of many lengths while an actor is killed. Each answer is compared with NumPy's, and no request may fail. A
service of Ray's has its own queue in each replica; here requests of all callers share calls, wherever they come from.
`--serve` measures what a deployment of Ray Serve in front adds to a request: it needs `ray[serve]`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

os.environ.update(  # before Ray is imported
    RAY_USAGE_STATS_ENABLED="0",  # it reports nothing of this run
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # as on machines without clusters, it listens at the loopback alone
)

import numpy as np
import openvino as ov
import ray
from openvino import opset13 as ops

from examples.coverage import worker_of
from examples.ray_serve.workers import Worker
from shapestream import blocking

YAML = Path(__file__).with_name("server.yaml")
ACTORS = 2
WIDTH = 64
PATIENCE_S = 300.0
Row = np.ndarray[Any, Any]


def save_model(path: Path) -> None:
    """A model: the sum over the steps of tanh(x W)."""
    x = ops.parameter([-1, -1, WIDTH], np.float32)
    x.output(0).get_tensor().set_names({"x"})
    node = ops.tanh(ops.matmul(x, ops.constant(weights()), False, False))
    total = ops.reduce_sum(node, ops.constant(np.array([1])))
    total.output(0).get_tensor().set_names({"total"})
    ov.save_model(ov.Model([ops.result(total)], [x]), path, compress_to_fp16=False)


def weights() -> Row:
    """Of the model."""
    drawn = np.random.default_rng(1).standard_normal((WIDTH, WIDTH), np.float32)
    return drawn / np.float32(WIDTH**0.5)


def rows(count: int) -> Iterator[tuple[int, dict[str, Row]]]:
    """Rows of lognormal lengths, by number."""
    drawn = np.random.default_rng(2)
    for number in range(count):
        length = int(np.clip(drawn.lognormal(3.0, 0.9), 1, 200))
        yield number, {"x": drawn.standard_normal((1, length, WIDTH), np.float32)}


def until(what: str, condition: Callable[[], Any]) -> Any:
    """Wait for processes; raises TimeoutError."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.05)
    return found


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """`shapestream serve` for as long as the block lasts; gives its address."""
    config = shutil.copy(YAML, folder)
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "shapestream_workers", "serve", config], stdout=log, stderr=log
        )
        try:
            yield f"ipc://{folder}/run/server.sock"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


@contextmanager
def local_ray(folder: Path) -> Iterator[None]:
    """A Ray of this machine, with a token of its own."""
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder / "r"),
        object_store_memory=128 << 20,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


def workers_of(client: blocking.Client) -> set[str]:
    """The names of the workers that are connected."""
    return {worker_of(slot) for slot in client.statistics()["slots"]}


def stream(client: blocking.Client, count: int, at_half: Callable[[], None]) -> int:
    """Stream the rows, with a deed at half; returns the number of wrong answers. Any failure is raised."""
    wrong, matrix, by_worker = 0, weights(), Counter[str]()
    asked = dict(rows(count))
    with client.stream("steps", iter(asked.items()), max_in_flight=128) as results:
        for seen, result in enumerate(results):
            if seen == count // 2:
                at_half()
            expected = np.tanh(asked[result.key]["x"] @ matrix).sum(1)
            wrong += not np.allclose(result["total"], expected, rtol=1e-3, atol=1e-3)
            by_worker[worker_of(result.timings.worker)] += 1
    print(f"{count} rows, {wrong} wrong, by worker: {dict(by_worker)}")
    return wrong


def measure_serve(address: str) -> None:
    """Milliseconds of a lone request, asked of the server itself, and through a deployment of Ray Serve."""
    from ray import serve

    @serve.deployment(num_replicas=1, max_ongoing_requests=64, ray_actor_options={"num_cpus": 1})
    class Front:
        """A replica that is a client of the server."""

        def __init__(self, address: str) -> None:
            self._client = blocking.connect(address)

        def __call__(self, x: Row) -> Row:
            return np.array(self._client.infer("steps", {"x": x})["total"])

    x = np.ones((1, 20, WIDTH), np.float32)
    front: Any = Front
    handle = serve.run(front.bind(address), route_prefix=None)
    with blocking.connect(address) as client:
        ways: dict[str, Callable[[], Any]] = {
            "the server itself": lambda: client.infer("steps", {"x": x}),
            "through Ray Serve": lambda: handle.remote(x).result(),
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(5):
            for way, ask in ways.items():
                for turn in range(120):
                    began = time.perf_counter()
                    ask()
                    if turn >= 20:
                        found[way].append(time.perf_counter() - began)
    serve.shutdown()
    print(", ".join(f"{way}: {median(times) * 1e3:.2f} ms" for way, times in found.items()))


def main() -> int:
    """Runs the example; 0 if every answer was right, and none failed."""
    count = 400 if "--quick" in sys.argv[1:] else 4000
    # A short name: the path of a socket holds 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-") as name:
        folder = Path(name)
        (folder / "run").mkdir(mode=0o700)
        save_model(folder / "steps.xml")
        with local_ray(folder), server(folder) as address:
            make: Any = Worker
            actors = [make.remote(str(folder / YAML.name), name) for _ in range(ACTORS)]
            with blocking.connect(address, connect_timeout=PATIENCE_S) as client:
                until("the workers", lambda: len(workers_of(client)) == ACTORS)
                first = workers_of(client)
                victim = ray.get(actors[0].pid.remote())

                def kill() -> None:
                    print("a worker is killed, then its actor")
                    os.kill(victim, signal.SIGKILL)
                    ray.kill(actors[0], no_restart=False)

                wrong = stream(client, count, kill)
                until(
                    "a new worker", lambda: len(workers_of(client)) == ACTORS and workers_of(client) != first
                )
                wrong += stream(client, count, lambda: None)
                if "--serve" in sys.argv[1:]:
                    measure_serve(address)
            print(f"workers ended with {ray.get([actor.stop.remote() for actor in actors])}")
    print("FAILED" if wrong else "OK: one queue, every answer right, none failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
