"""An actor of Ray that has a worker process, which dials in to the server and shares its one queue."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import ray

WORKERS = "workers: []"
"""Of the server's YAML. A worker's copy has what Ray assigned instead: Ray pins no process to CPUs."""
STOP_S = 60.0


@ray.remote(num_cpus=1, max_restarts=-1)
class Worker:
    """A worker for as long as the actor lives. Ray starts a killed actor again, and the new worker dials in.

    The process is a child, since a worker owns its process: signals, memory limit, threads of the engine.
    """

    def __init__(self, config: str, folder: str) -> None:
        context = ray.get_runtime_context()
        cpus = max(1, int(context.get_assigned_resources().get("CPU", 1)))
        name = f"ray-{context.get_actor_id()[:8]}"
        text = Path(config).read_text().replace(WORKERS, f"workers: [{{threads: {cpus}}}]")
        own = Path(folder) / f"{name}.yaml"
        own.write_text(text)
        command = [sys.executable, "-m", "shapestream_workers", "worker", str(own), "--name", name]
        log = (Path(folder) / f"{name}.log").open("ab")
        # A worker whose actor was killed would go on, beside the one of the next actor.
        self._process = subprocess.Popen(["setpriv", "--pdeathsig", "TERM", *command], stdout=log, stderr=log)

    def pid(self) -> int:
        """The worker's process."""
        return self._process.pid

    def is_running(self) -> bool:
        """Whether the worker runs; an actor whose worker has ended is to be killed."""
        return self._process.poll() is None

    def stop(self) -> int:
        """Let the worker answer what it has, and return its status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_S)
