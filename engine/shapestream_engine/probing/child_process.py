"""Runs a proof in a child process, and makes a verdict of a crash or a hang.

A child that dies, or says nothing for too long, has said before what it was about to try. That is refuted, or left out
where it was no matter of batching, and another child goes on with the rest.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import IO, Any

from shapestream_engine.errors import EngineError, SignatureError
from shapestream_engine.probing.child import LENGTH, Task
from shapestream_engine.probing.report import Finding, Treatment, finding_from_dict

__all__ = ["Heard", "run_child"]

_LAST_WORDS_BYTES = 2000
_COMPILATION = 20
"""How many times longer than a call it may take to start the process and compile the model."""


@dataclass(slots=True)
class Heard:
    """What one child said, and how it ended."""

    findings: list[Finding] = field(default_factory=list)
    outcome: dict[str, Any] | None = None
    error: EngineError | None = None
    """The engine's complaint, if the model could not even be compiled."""
    phase: str = ""
    case: str = ""
    end: str | None = None
    """How it ended before it was done: `the process was ended by SIGABRT`; None if it was done."""


def run_child(task: Task, hang_s: float) -> Heard:
    """One child, to its end. Raises `EngineError` where none can be started."""
    heard = Heard()
    with tempfile.TemporaryFile() as errors, _started(errors) as child:
        assert child.stdin is not None
        pickled = pickle.dumps(task)
        try:
            child.stdin.write(LENGTH.pack(len(pickled)) + pickled)
            child.stdin.flush()
        except BrokenPipeError:
            pass  # it has died; how is said below
        hangs = _listen(child, heard, hang_s)
        if hangs:
            child.kill()
        status = child.wait()
        if heard.outcome is None and heard.error is None:
            heard.end = f"no answer within {hang_s:g} s" if hangs else _ending(status, errors)
    return heard


@contextmanager
def _started(errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    # -P: a file in the current folder must not shadow a module, which -m alone would allow.
    command = [sys.executable, "-P", "-m", "shapestream_engine.probing.child"]
    # What the parent may import, the child may: a function is looked up by name there.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
        )
    except OSError as error:
        raise EngineError(f"cannot start a process to try the model in: {error}") from error
    with child:
        try:
            yield child
        finally:
            if child.poll() is None:
                child.kill()


def _listen(child: subprocess.Popen[bytes], heard: Heard, hang_s: float) -> bool:
    """Reads until the child has ended; True if it said nothing for `hang_s`."""
    assert child.stdout is not None
    channel = child.stdout.fileno()
    # Not until the pipe is closed: a process that the engine has forked off may hold it open.
    ended = os.pidfd_open(child.pid)
    unread = b""
    heard_at = monotonic()
    try:
        while True:
            patience_s = hang_s * (_COMPILATION if heard.phase in ("", "compile") else 1)
            left_s = max(0.0, heard_at + patience_s - monotonic())
            ready, _, _ = select.select([channel, ended], [], [], left_s)
            if channel in ready and (data := os.read(channel, 1 << 16)):
                heard_at = monotonic()
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    _take(heard, json.loads(line))
            else:
                return not ready
    finally:
        os.close(ended)


def _take(heard: Heard, message: dict[str, Any]) -> None:
    match message:
        case {"phase": str(phase), "case": str(case)}:
            heard.phase, heard.case = phase, case
        case {"findings": [*findings]}:
            heard.findings += [finding_from_dict(finding) for finding in findings]
        case {"outcome": dict(outcome)}:
            heard.outcome = outcome
        case {"error": str(error), "key": [*key]}:
            heard.error = SignatureError(error, key=tuple(key))


def _ending(status: int, errors: IO[bytes]) -> str:
    how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - _LAST_WORDS_BYTES))
    said = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    return f"the process was {how}" + (f": {said[-1]}" if said else "")


def blamed(heard: Heard, wanted: list[Treatment]) -> Finding | None:
    """The verdict on what a child died of; None where it was no matter of how requests are put together."""
    for treatment in wanted:
        if heard.phase == str(treatment):
            return Finding(
                treatment=treatment, output=None, verdict="refuted", why=heard.end or "", case=heard.case
            )
    return None
