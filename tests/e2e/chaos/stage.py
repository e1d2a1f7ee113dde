"""The processes of a chaos run: a ledger, a server with its workers, one that lies, clients. Started, watched, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from tests.e2e.answers.onnx_files import write_layers
from tests.e2e.chaos.defective_server import CONSTANTS
from tests.e2e.chaos.model import FOLDER_VARIABLE
from tests.e2e.chaos.witness import SOCKET_VARIABLE, Witness
from tests.e2e.conftest import PATIENCE_S, PYTHONPATH, Broken, until

LEDGER = Path(__file__).with_name("ledger.py")
CONFIG = """\
server:
  listen: [ipc://s.sock]
  worker_listen: ipc://w.sock
  heartbeat_s: 0.5
  client_silence_s: 4
  worker_silence_s: 1.5
  grace_s: 5
models:
  - name: checked
    function: tests.e2e.chaos.model:checked
    inputs: {x: {shape: "batch:1..16, n:8..4096", element_type: i64, pad: {n: 0}}}
    outputs: {y: {shape: "batch, n", element_type: i64, rule: rows}}
    batching: {max_batch: 16, hang_after_s: 2}
    trust: true
    calibration_s: 0
  - name: once
    function: tests.e2e.chaos.model:checked
    inputs: {x: {shape: "batch:1..16, n:8..4096", element_type: i64}}
    outputs: {y: {shape: "batch, n", element_type: i64, rule: rows}}
    batching: {hang_after_s: 2}
    idempotent: false
    trust: true
    calibration_s: 0
  - name: layers
    path: layers.onnx
    engine: openvino
    inputs: {x: {shape: "batch:1..16, n:1..256, 64", pad: {n: 0}}}
    outputs: {y: {rule: rows}}
    batching: {max_batch: 16}
    trust: true
    calibration_s: 0
  - name: split
    function: tests.e2e.chaos.model:split
    inputs: {x: {shape: "rows:1..16, n:8..4096", element_type: i64}}
    outputs: {rows: {rule: list, shape: "n", element_type: i64}}
    batching: {max_batch: 1, hang_after_s: 2}
    trust: true
    calibration_s: 0
  - name: restore
    function: tests.e2e.chaos.model:restore
    inputs: {y: {shape: "rows:1..16, n:8..4096", element_type: i64}}
    outputs: {x: {shape: "rows, n", element_type: i64}}
    batching: {max_batch: 1, hang_after_s: 2}
    trust: true
    calibration_s: 0
chains:
  - name: chained
    inputs: {x: split.x}
    stages:
      - {name: split, model: split, inputs: {x: x}}
      - {name: check, model: checked, inputs: {x: split.rows}, each: item of split.rows, at_most: 16}
      - {name: restore, model: restore, inputs: {y: check.y}, each: batch of check.y}
    outputs: {x: restore.x}
workers: [{count: 2, slots: 1, threads: 1}]
logging: {format: json}
"""


@contextmanager
def running_ledger(path: str) -> Iterator[Witness]:
    """Runs a ledger at this path, where whatever is started meanwhile finds it; gives a connection to it."""
    with subprocess.Popen([sys.executable, "-I", "-S", str(LEDGER), path]) as ledger:
        os.environ[SOCKET_VARIABLE] = path
        try:
            until("the ledger listens", lambda: Path(path).exists() or ledger.poll() is not None)
            witness = Witness()
            yield witness
            witness.close()
        finally:
            del os.environ[SOCKET_VARIABLE]
            ledger.kill()


@contextmanager
def staged(seed: int, *, defective: bool = False) -> Iterator[Stage]:
    """A stage with its ledger; afterwards nothing is left of its processes and files."""
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
        running_ledger(f"{folder}/ledger") as ledger,
    ):
        stage = Stage(Path(folder), ledger, seed, defective=defective)
        try:
            yield stage
        finally:
            stage.close()


class Stage:
    """The processes of a run."""

    def __init__(self, folder: Path, ledger: Witness, seed: int, *, defective: bool) -> None:
        self._seed = seed
        self._defective = defective
        self.folder = folder
        self.ledger = ledger
        self.config = folder / "server.yaml"
        self.config.write_text(CONFIG)
        write_layers(folder / "layers.onnx")
        self.log = folder / "log"
        self._environment = {
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            FOLDER_VARIABLE: str(folder),
            "SHAPESTREAM_ANY_FUNCTION": "1",
        }
        self._all: list[subprocess.Popen[bytes]] = []
        self._started: dict[int, psutil.Process] = {}
        """Every process that was ever seen, its server's workers included."""
        self.expected_to_end: set[int] = set()
        self.server: subprocess.Popen[bytes]
        self.liar: subprocess.Popen[bytes] | None = None
        self.clients: dict[int, subprocess.Popen[bytes]] = {}
        self._last_client = 0

    def close(self) -> None:
        """Ends every process that was ever seen."""
        self.workers()
        for process in self._started.values():
            for number in (signal.SIGKILL, signal.SIGCONT):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        for popen in self._all:
            popen.wait(PATIENCE_S)
        psutil.wait_procs(list(self._started.values()), PATIENCE_S)

    def _start(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as stderr:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=self._environment,
                cwd=self.folder,
                start_new_session=True,
            )
        self._all.append(popen)
        self._started[popen.pid] = psutil.Process(popen.pid)
        return popen

    # ---------------------------------------------------------------- the server and its workers

    def start_server(self, *, log: str = "log") -> None:
        """Starts a server; its clients find it by themselves."""
        serve = ["tests.e2e.changed_server", json.dumps(CONSTANTS), "serve"]
        if self._defective:
            serve = ["tests.e2e.chaos.defective_server"]
        self.server = self._start([sys.executable, "-P", "-m", *serve, str(self.config)], log)

    def workers(self) -> dict[int, psutil.Process]:
        """The server's own worker processes that are alive now."""
        try:
            children = psutil.Process(self.server.pid).children()
        except (AttributeError, psutil.NoSuchProcess):
            return {}
        found = {}
        for child in children:
            with suppress(psutil.NoSuchProcess):  # it has ended, or is a zombie
                if "--supervised" in child.cmdline():
                    found[child.pid] = child
        self._started.update(found)
        return found

    def start_liar(self, first: int) -> subprocess.Popen[bytes]:
        """Starts the worker that lies; `first` says which lie comes first."""
        command = [sys.executable, "-P", "-m", "tests.e2e.chaos.liar", str(self.config), str(first)]
        self.liar = self._start(command, "liar.log")
        return self.liar

    # ---------------------------------------------------------------- clients

    def start_client(self, *arguments: str) -> int:
        """Starts a client; returns its number."""
        self._last_client += 1
        number = self._last_client
        address = f"ipc://{self.folder}/s.sock"
        module = "tests.e2e.chaos.client"
        command = [sys.executable, "-P", "-m", module, address, str(number), str(self._seed), *arguments]
        self.clients[number] = self._start(command, f"client{number}.log")
        return number

    def start_served_clients(self, count: int = 1) -> None:
        """Starts so many clients together; returns once the model has run a request of each."""
        for number in [self.start_client() for _ in range(count)]:
            served = partial(self.ledger.ask, "runs_of", client=number)
            self.until(f"client {number} is served", served)

    def stop_clients(self, patience_s: float) -> None:
        """Lets all clients end; who still waits for an answer then is ended, and its requests count as lost."""
        for client in self.clients.values():
            client.send_signal(signal.SIGTERM)
        give_up_at = time.monotonic() + patience_s
        for client in self.clients.values():
            try:
                client.wait(max(0.1, give_up_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                client.kill()

    # ---------------------------------------------------------------- watching

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """The same as the function, and at once when a process has ended that was not to."""

        def met() -> Any:
            if ends := self.unexpected_ends():
                raise Broken(f"ended by itself: {', '.join(ends)}, while waiting for: {what}")
            return condition()

        return until(what, met)

    def unexpected_ends(self) -> list[str]:
        """Processes that ended without having been asked to, or badly when they were."""
        ends = []
        for name, popen in [("server", self.server), ("liar", self.liar), *self.clients.items()]:
            if popen is not None and popen.poll() not in (None, 0) and popen.pid not in self.expected_to_end:
                ends.append(f"{name} {popen.pid}: status {popen.returncode}")
        return ends

    def tail(self, name: str = "log", lines: int = 30) -> str:
        """The end of a log."""
        try:
            return "\n".join((self.folder / name).read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""
