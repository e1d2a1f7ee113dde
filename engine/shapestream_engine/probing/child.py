"""A proof in a child process: the parent starts it and listens, the child tries one model.

The child reads a pickled `Task` from stdin. It writes one JSON object per line to its original stdout; the model's own
prints go to stderr. It ends when its parent ends, even inside a call that never returns.

Before each call the child sends the phase and the case; a `Watch` hears them. If the child dies, or is silent for too long,
the last case is refuted or, if it was not about sharing calls, skipped. Another child continues with the rest.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import IO, Any

from shapestream_engine.backends.registry import EngineChoice, choose_engine
from shapestream_engine.batch_axis import with_shared_rules
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.errors import EngineError, ModelLoadError, SignatureError
from shapestream_engine.machine import end_with_parent
from shapestream_engine.model import ModelSpec, check_reads, compile_model
from shapestream_engine.ports import OutputPort
from shapestream_engine.probing.beside import EnginesReport, compare_engines
from shapestream_engine.probing.evidence import Finding, Treatment, finding_from_dict, refuted
from shapestream_engine.probing.examination import ProbeOptions, computed_in, examine, values_of
from shapestream_engine.probing.model_calls import Announce
from shapestream_engine.probing.rule_guess import guess_rules
from shapestream_engine.strategy import Strategy

_STDIN = 0
_LENGTH = struct.Struct("<Q")
"""The length of the pickle, which comes first. Stdin stays open, so that its end shows the parent's end."""
_LAST_WORDS_BYTES = 2000
_COMPILE = "compile"
"""The phase that compiles the model; `compile ENGINE` where the engine is being chosen."""
_COMPILATION = 20
"""Starting the process and compiling may take this many times as long as a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of a child. Verdicts are kept under all of its fields."""

    spec: ModelSpec
    options: ProbeOptions
    threads: int | None
    skip: frozenset[str] = frozenset()
    """Phases that ended an earlier child."""
    guess: bool = False
    """True: find the rules that the specification lacks; nothing is proved."""
    beside: str = ""
    """Another engine: its answers are compared with the model's; nothing is proved."""
    choose: bool = False
    """True: find the engine that runs the model; nothing is proved."""


# ---------------------------------------------------------------- the parent

_TOLD_EVERY_S = 1.0
"""Seconds after which the watch of a silent child is told again what it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What the parent does while children prove a model."""

    told: Callable[[str, str], None] = lambda phase, case: None
    """Callback for the phase and the case of a child: with each message, and each second without one."""
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context in which the parent waits for children, or for another process that proves the same."""
    at_once: int = 1
    """Children that run side by side: calls take so many times as long, before they count as hanging."""


UNWATCHED = Watch()
"""Nobody is told, and nothing else is done meanwhile."""


@dataclass(slots=True)
class Heard:
    """The messages of one child, and its end."""

    findings: list[Finding] = field(default_factory=list)
    outcome: dict[str, Any] | None = None
    error: EngineError | None = None
    """The engine's error, if the model could not be compiled."""
    phase: str = ""
    case: str = ""
    end: str | None = None
    """How the child ended too early: `the process was ended by SIGABRT`; None if it finished."""


def run_child(task: Task, hang_s: float, watch: Watch = UNWATCHED) -> Heard:
    """Run one child to its end; raises `EngineError` if no process can be started."""
    heard = Heard()
    hang_s *= watch.at_once
    with tempfile.TemporaryFile() as errors, _started(errors) as child:
        assert child.stdin is not None
        pickled = pickle.dumps(task)
        try:
            child.stdin.write(_LENGTH.pack(len(pickled)) + pickled)
            child.stdin.flush()
        except BrokenPipeError:
            pass  # the child has died; its status is read below
        hangs = _listen(child, heard, hang_s, watch)
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
    # The child has the parent's import path, so that it finds functions by name.
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


def _listen(child: subprocess.Popen[bytes], heard: Heard, hang_s: float, watch: Watch) -> bool:
    """Read messages until the child ends; True if it was silent for `hang_s`."""
    assert child.stdout is not None
    channel = child.stdout.fileno()
    # Wait for the process, not for the pipe: a process that the engine forks may keep the pipe open.
    ended = os.pidfd_open(child.pid)
    unread = b""
    heard_at = monotonic()
    try:
        while True:
            patience_s = hang_s * (_COMPILATION if heard.phase.startswith(_COMPILE) or not heard.phase else 1)
            left_s = max(0.0, heard_at + patience_s - monotonic())
            ready, _, _ = select.select([channel, ended], [], [], min(left_s, _TOLD_EVERY_S))
            watch.told(heard.phase, heard.case)
            if not ready and left_s > _TOLD_EVERY_S:
                continue
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
    """Return the verdict on the case that ended a child; None if the case was not about sharing calls."""
    for treatment in wanted:
        if heard.phase == str(treatment):
            return refuted(treatment, heard.end or "", heard.case)
    return None


# ---------------------------------------------------------------- the child


def main() -> None:
    """Run the task; exit status 0 means that it is complete."""
    (length,) = _LENGTH.unpack(_read(_LENGTH.size))
    # Only the parent writes to this pipe, so unpickling is safe.
    task: Task = pickle.loads(_read(length))
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    end_with_parent(_STDIN)
    _work(task, channel)
    # No sys.exit: an engine's threads could delay it, and all messages are sent.
    os._exit(0)


def _work(task: Task, channel: IO[str]) -> None:
    def say(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    def emit(findings: Sequence[Finding]) -> None:
        say(findings=[asdict(finding) for finding in findings])

    def announce(phase: str, words: str) -> None:
        say(phase=phase, case=words)

    announce(_COMPILE, "compiling the model")
    try:
        if task.choose:
            say(outcome=asdict(_choose(task, announce)))
            return
        if task.guess:
            ports, unruled = _guess(task, announce)
            found = {name: port.to_dict() for name, port in ports.items()}
            say(outcome={"ports": found, "unruled": unruled})
            return
        # Alone, requests run unpadded, whatever the strategy does in service.
        plain = replace(task.spec, strategy=Strategy())
        model = compile_model(plain, slots=1, threads=task.threads)
        if task.beside:
            say(outcome=asdict(_compare(task, model, announce)))
            return
        served = None
        if task.spec.strategy != replace(plain.strategy, most_rows=task.spec.strategy.most_rows):
            served = compile_model(task.spec, slots=1, threads=task.threads)
        outcome = examine(
            model,
            task.options,
            emit,
            served=served,
            announce=announce,
            skip=task.skip,
            threads=task.threads,
        )
    except EngineError as error:
        say(error=str(error), key=error.key)
        return
    say(outcome=asdict(outcome))


def compilation_by(engine: str) -> str:
    """Return the phase that compiles a model by this engine, to choose one."""
    return f"{_COMPILE} {engine}"


def _choose(task: Task, announce: Announce) -> EngineChoice:
    """Return the first engine that reads, computes and compiles the model. Raises what `choose_engine` raises."""

    def check(engine: str) -> None:
        phase = compilation_by(engine)
        if phase in task.skip:
            raise ModelLoadError(f"it ended the process that tried model {task.spec.name!r}")
        announce(phase, f"compiling the model by {engine}")
        check_reads(task.spec, engine)
        try:
            tried, _ = with_shared_rules(
                replace(task.spec, engine=engine), lambda spec: compile_model(spec, threads=task.threads)
            )
        except SignatureError:
            return  # shapes or rules that the file leaves open are for the configuration to state
        tried.close()

    return choose_engine(task.spec.engines, check)


def _guess(task: Task, announce: Announce) -> tuple[dict[str, OutputPort], dict[str, str]]:
    model, unknown = with_shared_rules(
        task.spec, lambda spec: compile_model(spec, slots=1, threads=task.threads)
    )
    return guess_rules(
        model,
        unknown,
        values_of(model.signature, task.options),
        max_batch=task.options.max_batch,
        seed=task.options.seed,
        announce=announce,
        skip=task.skip,
    )


def _compare(task: Task, model: CompiledModel, announce: Announce) -> EnginesReport:
    return compare_engines(
        task.spec,
        model,
        task.beside,
        values_of(model.signature, task.options),
        seed=task.options.seed,
        computed_in=computed_in(model.properties),
        threads=task.threads,
        announce=announce,
    )


def _read(length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = os.read(_STDIN, length - len(data))
        if not more:
            os._exit(1)  # the parent is gone
        data += more
    return data


if __name__ == "__main__":
    main()
