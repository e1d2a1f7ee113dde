"""Verdicts on disk, so that a restart need not prove again what has not changed.

A file per question (model, settings, versions and processor), in the folder that `SHAPESTREAM_PROBE_CACHE` names, else in
`$XDG_CACHE_HOME/shapestream/probe` (`~/.cache/shapestream/probe`); `SHAPESTREAM_PROBE_CACHE=off` switches it off.
Processes that want the same proof at the same time wait for the first, which holds a lock on the entry.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shapestream_engine.kept_files import KeptFiles, read_plain, write_plain
from shapestream_engine.machine import cpu_name, runtime_of
from shapestream_engine.model import ModelSpec
from shapestream_engine.model_files import files_of_model
from shapestream_engine.probing.child import Task
from shapestream_engine.probing.report import ProbeReport
from shapestream_engine.regular_files import open_regular
from shapestream_engine.signature import ModelSignature

ENVIRONMENT = "SHAPESTREAM_PROBE_CACHE"
_FORMAT = 4
"""Format of the entries and of the trials: raised when either changes, so that no old verdict is taken for a new one."""
_READ_BYTES = 1 << 20


class ProofCache(KeptFiles):
    """A folder of verdicts; None: none are kept."""

    VARIABLE = ENVIRONMENT
    NAME = "probe"

    def kept(
        self, task: Task, signature: ModelSignature | None, make: Callable[[], ProbeReport]
    ) -> ProbeReport:
        """The verdict on this task, else what `make` makes of it, kept if it is conclusive.

        Without a signature the task is a guess at rules. Other processes wait meanwhile.
        """
        if self.folder is None:
            return make()
        with self.locked(proof_key(task, signature)) as path:
            plain = read_plain(path)
            with suppress(
                ValueError, TypeError, KeyError
            ):  # what cannot be read is proved again, and written anew
                if plain is not None:
                    return replace(ProbeReport.from_dict(plain), from_cache=True)
            report = make()
            if report.conclusive:
                write_plain(path, report.to_dict())
            return report


def identity(asked: object, spec: ModelSpec, signature: ModelSignature | None) -> dict[str, Any]:
    """Plain data that changes with all that is asked about a model, with its files, and with what runs it.

    `asked` is the value that describes the question, `spec` included: every field of it counts, whatever fields it has.
    """
    return {
        "asked": _plain(asked),
        "signature": None if signature is None else {**signature.to_dict(), "name": ""},
        "model": _model_digest(spec),
        "versions": _versions(spec.effective_engine),
        "cpu": cpu_name(),
        # The engine's choice of threads, where none are asked for.
        "cpus": len(os.sched_getaffinity(0)),
    }


def proof_key(task: Task, signature: ModelSignature | None) -> str:
    """Names a verdict: changes with everything that it may depend on, as far as can be known."""
    plain = {"format": _FORMAT, **identity(task, task.spec, signature)}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:40]


def _plain(value: object) -> Any:
    """JSON that is equal for equal values only."""
    match value:
        case Path():
            return _digest([value])
        case np.ndarray():
            return [value.dtype.str, list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        case Mapping():
            return [[_plain(key), _plain(value[key])] for key in sorted(value, key=repr)]
        case frozenset() | set():
            return [_plain(each) for each in sorted(value, key=repr)]
        case list() | tuple():
            return [_plain(each) for each in value]
        case _ if is_dataclass(value):
            # What a model is called, and where it lies, says nothing about it; its files are digested.
            ignored = {"name", "path", "model"} if isinstance(value, ModelSpec) else set()
            names = [each.name for each in fields(value) if each.name not in ignored]
            return [type(value).__qualname__, {name: _plain(getattr(value, name)) for name in names}]
        case _:
            # With its type: `True`, `1` and `1.0` are equal, and no property of an engine takes one for another.
            return [type(value).__qualname__, repr(value)]


def _model_digest(spec: ModelSpec) -> str:
    if spec.path is not None:
        return _digest(files_of_model(spec.path))
    top = (spec.function or "").partition(":")[0].partition(".")[0]
    try:
        found: Any = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return top
    if found is None or found.submodule_search_locations is None:
        return _digest([] if found is None or found.origin is None else [Path(found.origin)])
    # A function may call anything in its package: any change there counts.
    return _stats([Path(folder) for folder in found.submodule_search_locations])


def _stats(folders: list[Path]) -> str:
    """Changes when any Python file below does."""
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    stats = [(str(path), (info := path.stat()).st_size, info.st_mtime_ns) for path in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        if not path.is_file():
            continue
        digest.update(path.name.encode() + b"\0" + str(path.stat().st_size).encode())
        with open_regular(path) as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


def _versions(engine: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "engine": _stats([Path(__file__).parents[1]]),
        "runtime": runtime_of(engine),
    }
    with suppress(importlib.metadata.PackageNotFoundError):
        found["shapestream"] = importlib.metadata.version("shapestream")
    return found
