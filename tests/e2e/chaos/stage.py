"""The processes of a chaos run: a ledger, a server with its workers, one that lies, clients. Started, watched, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil
from tests.e2e.chaos.model import FOLDER_VARIABLE
from tests.e2e.chaos.witness import SOCKET_VARIABLE, Witness

ROOT = Path(__file__).parents[3]
LEDGER = Path(__file__).with_name("ledger.py")
PATIENCE_S = 120.0
CONFIG = """\
server:
  listen: [ipc://s.sock]
  worker_listen: ipc://w.sock
  heartbeat_s: 0.5
  client_silence_s: 4
  worker_silence_s: 1.5
  grace_s: 5
  hang_grace_s: 0.5
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
workers: [{count: 2, slots: 1, threads: 1}]
logging: {format: json}
"""


class Broken(Exception):
    """Something ended, or did not begin, that nobody had meant to."""


def until(what: str, condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Polls real processes; raises `Broken` when it takes too long."""
    give_up_at = time.monotonic() + patience_s
    while time.monotonic() < give_up_at:
        if value := condition():
            return value
        time.sleep(0.01)
    raise Broken(f"not within {patience_s:g} s: {what}")


class Stage:
    """Use it as a context manager: nothing is left behind."""

    def __init__(self, seed: int, *, defective: bool = False) -> None:
        self._seed = seed
        self._defective = defective
        self._temporary = tempfile.TemporaryDirectory(prefix="chaos-")
        self.folder = Path(self._temporary.name)
        self.config = self.folder / "server.yaml"
        self.log = self.folder / "log"
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            SOCKET_VARIABLE: str(self.folder / "ledger"),
            FOLDER_VARIABLE: str(self.folder),
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
        self._witness: Witness | None = None

    def __enter__(self) -> Stage:
        self.config.write_text(CONFIG)
        path = self._environment[SOCKET_VARIABLE]
        ledger = self._start([sys.executable, "-I", "-S", str(LEDGER), path], "ledger.log")
        until("the ledger listens", lambda: Path(path).exists() or ledger.poll() is not None)
        self._witness = Witness(path)
        return self

    @property
    def ledger(self) -> Witness:
        """The connection to the ledger."""
        assert self._witness is not None  # from `__enter__` on
        return self._witness

    def __exit__(self, *_: object) -> None:
        if self._witness is not None:
            self._witness.close()
        self.workers()
        for process in self._started.values():
            for number in (signal.SIGKILL, signal.SIGCONT):
                try:
                    process.send_signal(number)
                except psutil.NoSuchProcess:
                    break
        for popen in self._all:
            popen.wait(PATIENCE_S)
        psutil.wait_procs(list(self._started.values()), PATIENCE_S)
        self._temporary.cleanup()

    def _start(self, command: list[str], log: str | IO[bytes]) -> subprocess.Popen[bytes]:
        stderr = (self.folder / log).open("ab") if isinstance(log, str) else log
        with stderr:
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
        serve = ["shapestream_workers", "serve"]
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
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, or is a zombie
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
