"""A peer to compare with: mosec, an HTTP server of Python workers behind a batching front in Rust.

It runs in an environment of its own, which `make peer` sets up: the product does not depend on it. Its worker processes
serve the same OpenVINO file in f32, one request at a time, or in batches in order of arrival; or an identity. Requests are
raw bytes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import typer
from numpy.typing import NDArray

from benchmarks.http_client import HOST, HttpClient
from benchmarks.processes import START_S, Child, child_process, cpu_s

NAME = "mosec"
PATH = "/inference"
OPTION_HELP = f"{NAME} in the same rounds, in the environment that `make peer` sets up."
"""Of the option --peer."""
_ENVIRONMENT = Path(__file__).parents[1] / ".venv-peer"
READY = _ENVIRONMENT / ".ready"
"""The file that `make peer` leaves."""
_SERVER = Path(__file__).with_name("mosec_server.py")
_POLL_S = 0.05
_TIMEOUT_MS = 60_000
"""After which the peer gives a request up. Its default is 3 s, and random arrivals near the peak may wait longer."""

Kind = Literal["pictures", "rows", "sentences"]


def demand_environment() -> None:
    """Raise typer.BadParameter, which says how to make the environment, where it is missing."""
    if not READY.exists():
        raise typer.BadParameter(f"{NAME} has an environment of its own, which `make peer` sets up")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A running server, and all of its processes."""

    port: int
    processes: tuple[int, ...]

    def connect(self) -> HttpClient:
        """A client without connections yet."""
        return HttpClient(self.port, PATH)

    def cpu_s(self) -> float:
        """CPU time used so far by all processes, in seconds."""
        return sum(cpu_s(pid) for pid in self.processes)


def picture_body(picture: NDArray[np.float32]) -> bytes:
    """The request for a picture [channels, height, width]."""
    return np.array(picture.shape[1:], "<u4").tobytes() + picture.tobytes()


@contextmanager
def serving(
    folder: Path, model: Path | None, kind: Kind, *, workers: int, rows: int, example: bytes
) -> Iterator[Peer]:
    """A mosec server of this model, in batches of at most `rows`, on processes of one thread each. Kind "rows" has no model.

    `example` is asked once the workers are ready.
    """
    label = f"{NAME}-{kind}-{rows}"
    log, ready = folder / f"{label}.log", folder / f"{label}-ready"
    ready.mkdir()
    port = free_port()
    environment = {
        "MOSEC_ADDRESS": HOST,
        "MOSEC_PORT": str(port),
        "MOSEC_PATH": str(folder / label),
        "MOSEC_TIMEOUT": str(_TIMEOUT_MS),
        "MOSEC_LOG_LEVEL": "warning",
        "PEER_READY": str(ready),
        "PEER_MODEL": str(model or ""),
        "PEER_KIND": kind,
        "PEER_ROWS": str(rows),
        "PEER_WORKERS": str(workers),
    }
    # Importing our engine enlarges oneDNN's cache for child processes as well; the peer has the defaults of its engine.
    # -P: else the folder of the file, with all of our modules, would come first in its imports.
    command = ["-u", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_ENVIRONMENT / "bin/python"), "-P", str(_SERVER)]
    family: list[psutil.Process] = []
    try:
        with child_process(command, log=log, environment=environment, python="env") as child:
            _await_workers(child, ready, workers, port, log)
            family += psutil.Process(child.pid).children(recursive=True)
            peer = Peer(port=port, processes=(child.pid, *(process.pid for process in family)))
            with peer.connect() as client:
                list(client.stream([example] * workers, workers))
            yield peer
    finally:
        for process in family:
            # A server that had to be killed leaves them behind.
            with suppress(psutil.NoSuchProcess):
                process.kill()


def free_port() -> int:
    """Return a TCP port of this machine that nothing listens on."""
    with socket.create_server((HOST, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _await_workers(child: Child, ready: Path, workers: int, port: int, log: Path) -> None:
    """Until each of the workers has compiled the model and left a file in `ready`, and the front listens."""
    give_up_at = time.monotonic() + START_S
    while len(list(ready.iterdir())) < workers or not listens(port):
        if child.ended or time.monotonic() > give_up_at:
            raise RuntimeError(f"{NAME} did not start:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(_POLL_S)


def listens(port: int) -> bool:
    """Tell whether somebody accepts connections at this port."""
    # The front starts beside the workers: one without a model may be ready first.
    try:
        socket.create_connection((HOST, port), _POLL_S).close()
    except OSError:
        return False
    return True
