"""Servers under measurement: a candidate's file, the real command that serves it, and a client.

The file is the user's, cut down to one model. All other settings stay (queue bounds, batching, probe, device
properties), so that the tuned file behaves as measured.
"""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import trio
import yaml

from shapestream.client.async_face import Client
from shapestream.client.trio_client import connect
from shapestream.errors import RequestError, Unavailable
from shapestream.settings import LoadedSettings, Location, ModelSettings, WorkerGroupSettings
from shapestream_engine.machine import divide_cpus, resident_bytes
from shapestream_workers.lab.candidates import Candidate, Placement, edits_of
from shapestream_workers.lab.edited_yaml import apply_edits, relocated

MOST_CALIBRATION_S = 1.0
"""Calibration of each server, which would take most of the budget otherwise; the warm-up replaces the rest."""
GRACE_S = 5.0
"""Time from SIGTERM to SIGKILL."""
LOOK_EVERY_S = 0.02
_SHOWN_LINES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model to tune, in its file."""

    loaded: LoadedSettings
    model: int
    """Index of the model in `models`."""
    group: int | None
    """The entry of `workers` that serves it; None: in process, or the one worker that there is by default."""
    cpus: int

    @property
    def settings(self) -> ModelSettings:
        """Settings of the model."""
        return self.loaded.settings.models[self.model]

    @property
    def in_process(self) -> bool:
        """True if the model runs in the server."""
        return self.loaded.settings.in_process is not None

    @property
    def is_alone(self) -> bool:
        """True if no other model or worker shares the CPUs, so that tuning may divide them."""
        return len(self.loaded.settings.models) == 1 and len(self.loaded.settings.worker_groups) <= 1

    def baseline(self) -> Candidate:
        """The file as it is."""
        settings = self.loaded.settings
        if settings.in_process is not None:
            slots, threads = divide_cpus(self.cpus, 1, settings.in_process.slots, settings.in_process.threads)
            place = Placement(processes=None, slots=slots, threads=threads)
        else:
            groups = settings.worker_groups
            group = groups[self.group] if self.group is not None and groups else WorkerGroupSettings()
            processes = sum(each.count for each in groups) or 1
            slots, threads = divide_cpus(self.cpus, processes, group.slots, group.threads)
            place = Placement(processes=group.count, slots=slots, threads=threads)
        shapes = self._values()["models"][self.model].get("shapes") or {}
        return Candidate(placement=place, shapes=shapes, is_baseline=True)

    def edits(self, candidate: Candidate) -> dict[Location, Any]:
        """Edits of the user's file for this candidate."""
        edits = edits_of(candidate, model=self.model, group=self.group)
        return {where: said for where, said in edits.items() if self.is_alone or where[0] == "models"}

    def write(self, candidate: Candidate, folder: Path) -> Path:
        """Write a file in `folder` that serves this model alone, at `s.sock` there, as this candidate."""
        values = self._values()
        relocated(values, self.loaded.path.parent, None)
        model = values["models"][self.model]
        calibration_s = min(self.settings.calibration_s, MOST_CALIBRATION_S)
        values["models"] = [{**model, "calibration_s": calibration_s}]
        # Other addresses, their keys and the trace belong to the server that users talk to.
        unwanted = ("worker_listen", "record_trace", "security", "admin")
        server = {key: said for key, said in (values.get("server") or {}).items() if key not in unwanted}
        values["server"] = {**server, "listen": [f"ipc://{folder}/s.sock"], "grace_s": 1.0}
        values["logging"] = {"level": "info", "format": "json"}
        if not self.in_process:
            group = dict((values.get("workers") or [{}])[self.group or 0])
            group.pop("models", None)
            values["workers"] = [group]
        # Counts are written even where they are the user's: `auto` could mean another number in a file cut down.
        explicit = Candidate(placement=candidate.placement, shapes=candidate.shapes)
        apply_edits(values, edits_of(explicit, model=0, group=0))
        path = folder / "server.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        return path

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = copy.deepcopy(self.loaded.source.values)
        return values


def subject_of(loaded: LoadedSettings, model: int, cpus: int) -> Subject:
    """The model of that number, and the group of workers that serves it."""
    name = loaded.settings.models[model].name
    serving = (
        number
        for number, group in enumerate(loaded.settings.workers or ())
        if group.models is None or name in group.models
    )
    return Subject(loaded=loaded, model=model, group=next(serving, None), cpus=cpus)


# ---------------------------------------------------------------- the server's process


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
    return sum(map(_held_bytes, [pid, *_descendants(pid)]))


def _held_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        return resident_bytes(Path(f"/proc/{pid}/statm"))
    except OSError:
        return 0


def _descendants(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []  # it has ended
    return [*children, *(below for child in children for below in _descendants(child))]
