"""A server under measurement: the real command that serves a candidate's file, and a client of it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import trio

from shapestream.client.async_face import Client
from shapestream.client.trio_client import connect
from shapestream.errors import RequestError, Unavailable

GRACE_S = 5.0
"""Time from SIGTERM to SIGKILL."""
LOOK_EVERY_S = 0.02
_SHOWN_LINES = 6


class ServerEnded(Exception):
    """A server ended, or was ended, before it was ready; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A ready server, and a client of it."""

    process: subprocess.Popen[bytes]
    log: Path
    client: Client
    startup_s: float
    """Time from its start until its last slot had joined."""


@asynccontextmanager
async def serving(config: Path, model: str, slots: int, timeout_s: float) -> AsyncIterator[Served]:
    """`shapestream serve CONFIG` until the block ends. Raises `ServerEnded` if it is not ready in time."""
    began = monotonic()
    log = config.with_suffix(".log")
    with _running(config, log) as process:
        try:
            with trio.move_on_after(timeout_s) as scope:
                while not (config.parent / "s.sock").exists():
                    _check_alive(process, log)
                    await trio.sleep(LOOK_EVERY_S)
            if scope.cancelled_caught:
                raise ServerEnded(f"not listening within {timeout_s:.0f} s: {last_words(process, log)}")
            async with connect(f"ipc://{config.parent}/s.sock", connect_timeout=timeout_s) as client:
                with trio.move_on_after(timeout_s - (monotonic() - began)) as scope:
                    await _complete(process, log, client, model, slots)
                if scope.cancelled_caught:
                    raise ServerEnded(f"not ready within {timeout_s:.0f} s: {last_words(process, log)}")
                yield Served(process=process, log=log, client=client, startup_s=monotonic() - began)
        except Unavailable as error:
            raise ServerEnded(f"{error}: {last_words(process, log)}") from error


async def _complete(
    process: subprocess.Popen[bytes], log: Path, client: Client, model: str, slots: int
) -> None:
    """Return when all slots have joined and the model can be opened."""
    while True:
        _check_alive(process, log)
        try:
            if len((await client.statistics())["slots"]) >= slots:
                await client.signature(model)
                return
        except RequestError:
            pass  # not yet
        await trio.sleep(LOOK_EVERY_S)


def _check_alive(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        raise ServerEnded(last_words(process, log))


def last_words(process: subprocess.Popen[bytes], log: Path) -> str:
    """The end of a process in words, and the end of its log."""
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
            [sys.executable, "-P", "-m", "shapestream_workers.lab.served", str(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=sink,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None  # a pipe, as asked for
        process.stdin.close()


def family_bytes(pid: int) -> int:
    """Memory of a process and its descendants, with shared pages counted once; 0 once it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        held = re.search(r"^Pss:\s*(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
        children = " ".join([each.read_text() for each in folder.glob("task/*/children")])
    except OSError:
        return 0
    own = int(held[1]) * 1024 if held else 0
    return own + sum(family_bytes(int(child)) for child in children.split())
