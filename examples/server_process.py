"""A server as a real process: `shapestream serve CONFIG`, for as long as the examples use it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

import trio

import shapestream
from examples.coverage import worker_of
from shapestream.errors import ShapestreamError
from shapestream.settings import load_settings

T = TypeVar("T")
# Compiling a model and starting the workers takes a second or two; a loaded machine may need far more.
START_TIMEOUT_S = 600.0
STOP_GRACE_S = 30.0
_PROOFS = Path(__file__).parents[1] / ".cache" / "proofs"
_POLL_S = 0.1
_LOG_LINES_SHOWN = 30


class ServerFailed(Exception):
    """The server ended, or did not come up; the message ends with its last log lines."""


async def with_server(
    config: Path, model: str, *, workers: int, log: Path, use: Callable[[str], Awaitable[T]]
) -> T:
    """Starts the server, waits until so many workers serve `model`, returns `use(address)`, stops the server.

    The server's log goes to the file `log`. Raises `ServerFailed` if the server ends meanwhile, or the error of the
    first request that failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    address = load_settings(config).settings.server.listen[0]
    failures: list[Exception] = []
    try:
        with log.open("wb") as sink:
            async with trio.open_nursery() as nursery:
                process = await nursery.start(_run_server, config, sink)
                nursery.start_soon(_watch, process, log)
                nursery.start_soon(_fail_on_signal)
                await _wait_for_workers(address, model, workers, log)
                result = await use(address)
                nursery.cancel_scope.cancel()
            return result
    except* (ServerFailed, ShapestreamError) as group:
        failures.extend(_leaves(group))
    raise failures[0]


def page_of(log: Path) -> str | None:
    """The address of the page of the server that writes this log; None for a server without an admin port."""
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{") and (event := json.loads(line)).get("event") == "admin port ready":
            return str(event["address"])
    return None


async def _run_server(
    config: Path, sink: IO[bytes], *, task_status: trio.TaskStatus[trio.Process] = trio.TASK_STATUS_IGNORED
) -> None:
    command = [sys.executable, "-m", "shapestream_workers", "serve", str(config)]
    # What was proved of the models is kept beside them, not in the user's own cache.
    # Functions of the examples are in no installed package.
    environment = {**os.environ, "SHAPESTREAM_PROBE_CACHE": str(_PROOFS), "SHAPESTREAM_ANY_FUNCTION": "1"}
    await trio.run_process(
        command,
        stdout=sink,
        stderr=sink,
        env=environment,
        check=False,
        deliver_cancel=_stop,
        task_status=task_status,
    )


async def _stop(process: trio.Process) -> None:
    """SIGTERM drains the server and stops its workers."""
    process.terminate()
    with trio.move_on_after(STOP_GRACE_S):
        await process.wait()
        return
    process.kill()


async def _watch(process: trio.Process, log: Path) -> None:
    status = await process.wait()
    raise ServerFailed(f"the server ended with status {status}\n{_end_of(log)}")


async def _fail_on_signal() -> None:
    """Without this, SIGTERM would leave the server behind, and Ctrl-C would show a traceback."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            raise ServerFailed(f"ended by {signal.Signals(number).name}")


async def _wait_for_workers(address: str, model: str, workers: int, log: Path) -> None:
    with trio.move_on_after(START_TIMEOUT_S):
        async with shapestream.connect(address, connect_timeout=START_TIMEOUT_S) as client:
            # A client is not told of workers, so it has to ask.
            while len({worker_of(slot) for slot in (await client.statistics())["slots"]}) < workers:  # noqa: ASYNC110
                await trio.sleep(_POLL_S)
            await client.signature(model)
        return
    raise ServerFailed(f"no {workers} workers within {START_TIMEOUT_S:.0f} s\n{_end_of(log)}")


def _leaves(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:])
