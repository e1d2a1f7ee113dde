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
