"""The process that a proof runs in: one model, tried for the process that started it, which a crash must not take along.

Reads a pickled `Task` from stdin and writes one JSON object per line to what was stdout; what the model prints goes to
stderr. Ends when its parent does, also in the middle of a call that never returns.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from shapestream_engine.errors import EngineError, RuleMissing
from shapestream_engine.model import CompiledModel, ModelSpec, OutputSpec, compile_model
from shapestream_engine.parent_pipe import die_with_writer
from shapestream_engine.probing.bench import Announce
from shapestream_engine.probing.examination import ProbeOptions, examine, values_of
from shapestream_engine.probing.report import Finding
from shapestream_engine.probing.rule_guess import guess_rules
from shapestream_engine.signature import OutputPort
from shapestream_engine.strategy import Strategy

__all__ = ["LENGTH", "Task", "main"]

_STDIN = 0
LENGTH = struct.Struct("<Q")
"""Stands before the pickle: stdin stays open, so that its end tells that the parent is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the child is to do. A verdict is kept under all of it."""

    spec: ModelSpec
    options: ProbeOptions
    threads: int | None
    skip: frozenset[str] = frozenset()
    """Phases that have ended a process before."""
    guess: bool = False
    """Find the rules that the specification leaves out, instead of proving anything."""


def main() -> None:
    """Runs the task. Exit status 0 says that all of it was done."""
    (length,) = LENGTH.unpack(_read(LENGTH.size))
    # Nobody but the parent writes to this pipe, and it could as well run whatever a pickle can.
    task: Task = pickle.loads(_read(length))
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    die_with_writer(_STDIN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work(task, channel)
    # Not by sys.exit: threads of an engine could hold it up, and all has been said.
    os._exit(0)


def _work(task: Task, channel: IO[str]) -> None:
    def say(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    def emit(findings: Sequence[Finding]) -> None:
        say(findings=[asdict(finding) for finding in findings])

    def announce(phase: str, words: str) -> None:
        say(phase=phase, case=words)

    announce("compile", "compiling the model")
    try:
        if task.guess:
            say(outcome={"ports": {name: port.to_dict() for name, port in _guess(task, announce).items()}})
            return
        # Alone, requests run in the shapes that they have, whatever they are padded to in service.
        plain = replace(task.spec, strategy=Strategy())
        model = compile_model(plain, slots=1, threads=task.threads)
        served = None
        if task.spec.strategy != replace(plain.strategy, most_rows=task.spec.strategy.most_rows):
            served = compile_model(task.spec, slots=1, threads=task.threads)
        outcome = examine(model, task.options, emit, served=served, announce=announce, skip=task.skip)
    except EngineError as error:
        say(error=str(error))
        return
    say(outcome=asdict(outcome))


def _guess(task: Task, announce: Announce) -> dict[str, OutputPort]:
    model, unknown = compile_without_rules(task.spec, task.threads)
    return guess_rules(
        model,
        unknown,
        values_of(model.signature, task.options),
        max_batch=task.options.max_batch,
        seed=task.options.seed,
        announce=announce,
        skip=task.skip,
    )


def compile_without_rules(spec: ModelSpec, threads: int | None) -> tuple[CompiledModel, list[str]]:
    """The model with the rule `shared` for each output that has none, and which these are."""
    unknown: list[str] = []
    plain = replace(spec, strategy=Strategy())
    while True:
        try:
            return compile_model(plain, slots=1, threads=threads), unknown
        except RuleMissing as error:
            if error.output in unknown:
                raise
            unknown.append(error.output)
            stated = plain.outputs.get(error.output, OutputSpec())
            outputs = {**plain.outputs, error.output: replace(stated, rule={"rule": "shared"})}
            plain = replace(plain, outputs=outputs)


def _read(length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = os.read(_STDIN, length - len(data))
        if not more:
            os._exit(1)  # the parent is gone
        data += more
    return data


def _end_with_parent() -> None:
    # Not through sys.stdin: its lock would be held for ever in a process that an engine forks off, as OpenVINO's
    # telemetry does at import, which could then never end.
    while os.read(_STDIN, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
