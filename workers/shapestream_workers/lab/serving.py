"""A server under measurement: the real command that serves a candidate's file, a client of it, and its requests.

The requests are those of one model in a trace, with made-up inputs of their sizes.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import trio

from shapestream.client.async_face import Client
from shapestream.client.trio_client import connect
from shapestream.errors import ConfigurationError, RequestError, Unavailable
from shapestream.loading.proof import probe_options
from shapestream.settings import ModelSettings
from shapestream.telemetry.trace import TraceReader, TraceRequest
from shapestream_engine.arrays import arrays_of
from shapestream_engine.probing.examination import values_of
from shapestream_engine.probing.inputs import complete_values, make_request
from shapestream_engine.signature import ModelSignature

GRACE_S = 5.0
"""Time from SIGTERM to SIGKILL."""
LOOK_EVERY_S = 0.02
_SHOWN_LINES = 6


class ServerEnded(Exception):
    """A server ended, or was ended, before it was ready; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that was started, and a client of it."""

    process: subprocess.Popen[bytes]
    log: Path
    client: Client


@asynccontextmanager
async def serving(config: Path, model: str, slots: int, timeout_s: float) -> AsyncIterator[Served]:
    """Run `shapestream serve CONFIG` until the block ends. Raises `ServerEnded` if it is not ready in time."""
    give_up_at = monotonic() + timeout_s
    log, socket = config.with_suffix(".log"), config.parent / "s.sock"
    with _running(config, log) as process:
        try:
            while not socket.exists() and monotonic() < give_up_at:
                await _look(process, log)
            connect_s = max(LOOK_EVERY_S, give_up_at - monotonic())
            async with connect(f"ipc://{socket}", connect_timeout=connect_s) as client:
                while not await _is_complete(client, model, slots):
                    if monotonic() > give_up_at:
                        raise Unavailable(f"not ready within {timeout_s:.0f} s")
                    await _look(process, log)
                yield Served(process=process, log=log, client=client)
        except Unavailable as error:
            raise ServerEnded(f"{error}: {last_words(process, log)}") from error


async def _is_complete(client: Client, model: str, slots: int) -> bool:
    """Tell whether all slots have joined and the model can be opened."""
    try:
        if len((await client.statistics())["slots"]) < slots:
            return False
        await client.signature(model)
    except RequestError:
        return False
    return True


async def _look(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait a moment for a server; raises `ServerEnded` where its process has ended."""
    if process.poll() is not None:
        raise ServerEnded(last_words(process, log))
    await trio.sleep(LOOK_EVERY_S)


def last_words(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the end of a process in words, and the end of its log."""
    status = process.poll()
    if status is None:
        how = "it still ran"
    else:
        how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return "\n".join([how, *log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]])


@contextmanager
@trio.lowlevel.enable_ki_protection
def _running(config: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Serve `config` until the block ends; the server's stdin closes when this process dies.

    Ctrl-C is delayed while the process starts and ends, so that it is always ended. The server has its own session,
    so that Ctrl-C reaches only this command, which then ends it.
    """
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shapestream_workers", "serve", str(config), "--supervised"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=sink,
            start_new_session=True,
        )
    with process:  # closes its stdin at last
        try:
            yield process
        finally:
            end_child(process, GRACE_S)


def end_child(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process by SIGTERM, and if it is still there after `grace_s` seconds by SIGKILL."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def family_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants, with shared pages counted once; 0 once it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        held = re.search(r"^Pss:\s*(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
        children = " ".join([each.read_text() for each in folder.glob("task/*/children")])
    except OSError:
        return 0
    own = int(held[1]) * 1024 if held else 0
    return own + sum(family_bytes(int(child)) for child in children.split())


MOST_REQUESTS = 200_000
"""Requests read from the beginning of a trace: more than any budget replays."""
MAX_KEPT_BYTES = 256 << 20
"""Bytes of inputs that are kept for their next use."""
_SHOWN = 3


def read_requests(path: Path, signature: ModelSignature) -> list[TraceRequest]:
    """Return the first `MOST_REQUESTS` requests of the signature's model in the trace at `path`, in the order of their
    times.

    Raises `ConfigurationError` for a file that is no trace, a trace without requests of the model or with other
    dimensions, and for sizes that the model does not take.
    """
    reader, model = TraceReader(path), signature.name
    found = list(islice(_of_model(reader, model), MOST_REQUESTS))
    if not found:
        known = ", ".join(name for name in reader.models if name != model)
        hint = f"; it is about {known} (name the model by --model)" if known else ""
        raise ConfigurationError([f"{path}: has no request of the model {model!r}{hint}"])
    dimensions = reader.models[model]
    if dimensions != signature.dimensions:
        recorded, expected = (f"[{', '.join(names)}]" for names in (dimensions, signature.dimensions))
        message = f"recorded {model!r} with the dimensions {recorded}, but the model has {expected}"
        hint = "(a trace of another model, or of other names in its inputs' shapes)"
        raise ConfigurationError([f"{path}: {message} {hint}"])
    _check_bounds(path, found, signature)
    return found


def _of_model(reader: TraceReader, model: str) -> Iterator[TraceRequest]:
    for request in reader:
        # Looked up for each: a model may join the trace's list while it is read.
        if model in reader.models and request.model == list(reader.models).index(model):
            yield request


def _check_bounds(path: Path, requests: Sequence[TraceRequest], signature: ModelSignature) -> None:
    problems: list[str] = []
    for number, (name, bounds) in enumerate(zip(signature.dimensions, signature.bounds, strict=True)):
        outside = sorted({each.sizes[number] for each in requests if each.sizes[number] not in bounds})
        if outside:
            shown = ", ".join(map(str, outside[:_SHOWN])) + (", ..." if len(outside) > _SHOWN else "")
            problems.append(f"{path}: {name} {shown}: the model takes {bounds} (a trace of another model?)")
    if problems:
        raise ConfigurationError(problems)


class InputMaker:
    """Make inputs of given sizes, the same for the same sizes, with values as the probe draws them.

    Traces hold shapes, never data. Inputs are kept, so that making them does not weigh on measurements.
    """

    def __init__(self, settings: ModelSettings, signature: ModelSignature) -> None:
        self._values = complete_values(signature, values_of(signature, probe_options(settings)))
        self._signature = signature
        self._kept: dict[tuple[int, ...], dict[str, np.ndarray[Any, Any]]] = {}
        self._kept_bytes = 0

    def arrays(self, sizes: tuple[int, ...]) -> dict[str, np.ndarray[Any, Any]]:
        """Return inputs as a client takes them, by name. Masks that the server generates are left out."""
        if (known := self._kept.get(sizes)) is not None:
            return known
        tensors = make_request(self._signature, self._values, sizes)
        made = {
            self._signature.inputs[number].name: array
            for (number, *_), array in zip(tensors.layout, arrays_of(tensors), strict=True)
        }
        nbytes = sum(memoryview(buffer).nbytes for buffer in tensors.buffers)
        if self._kept_bytes + nbytes > MAX_KEPT_BYTES:
            self._kept.clear()
            self._kept_bytes = 0
        self._kept[sizes] = made
        self._kept_bytes += nbytes
        return made


async def replay(
    client: Client,
    model: str,
    requests: Iterable[TraceRequest],
    maker: InputMaker,
    *,
    in_flight: int,
    most_s: float,
) -> float:
    """Return the results per second of `requests`, `in_flight` at a time; none is sent after `most_s` seconds.

    Their times and deadlines are left out. Raises the `RequestError` of the first request that fails.
    """

    async def inputs() -> AsyncIterator[dict[str, np.ndarray[Any, Any]]]:
        for request in requests:
            arrays = maker.arrays(request.sizes)
            if perf_counter() - began > most_s:
                return
            yield arrays

    began, count = perf_counter(), 0
    async with client.stream(model, inputs(), max_in_flight=in_flight, ordered=False) as results:
        async for _ in results:
            count += 1
    return count / (perf_counter() - began)
