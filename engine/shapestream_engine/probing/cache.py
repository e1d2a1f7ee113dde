"""Verdicts on disk: a restart proves a model again only if something has changed.

Each question (model, settings, versions and processor) has one file. `KeptFiles` describes the folder and the variable
`SHAPESTREAM_PROBE_CACHE`. Processes that need the same proof at the same time wait for the first, which holds a lock on
the entry.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from time import time
from typing import Any

import numpy as np

from shapestream_engine.files import KeptFiles, open_regular, read_plain, write_plain
from shapestream_engine.machine import available_cpus, cpu_name, runtime_of
from shapestream_engine.model import ModelSpec, engine_of
from shapestream_engine.model_files import files_of_model
from shapestream_engine.probing.child import Task
from shapestream_engine.probing.evidence import ProbeReport
from shapestream_engine.signature import ModelSignature

ENVIRONMENT = "SHAPESTREAM_PROBE_CACHE"
_FORMAT = 7
"""Version of the entries and of the proof; it is raised when either changes, so that old verdicts become void."""
BRIEF_S = 600.0
"""Seconds for which a verdict is kept that time cut short. The other workers of the same start have it; a later start, on a
machine that may be less busy, tries again."""
_UNTIL = "until"
"""Key of an entry: the Unix time at which it becomes void."""
_READ_BYTES = 1 << 20


class ProofCache(KeptFiles):
    """A folder of verdicts; with the folder None, nothing is kept."""

    VARIABLE = ENVIRONMENT
    NAME = "probe"

    def kept(
        self, task: Task, signature: ModelSignature | None, make: Callable[[], ProbeReport]
    ) -> ProbeReport:
        """Return the kept verdict on this task; otherwise call `make`, and keep its verdict if it is conclusive.

        A verdict that time cut short is kept for `BRIEF_S`.

        Without a signature, the task guesses rules. Other processes wait for the lock meanwhile.
        """
        if self.folder is None:
            return make()
        with self.locked(proof_key(task, signature)) as path:
            plain = read_plain(path)
            # An unreadable entry is proved again and replaced.
            with suppress(ValueError, TypeError, KeyError, AttributeError):
                if plain is not None and time() < plain.pop(_UNTIL, math.inf):
                    return replace(ProbeReport.from_dict(plain), from_cache=True)
            report = make()
            if report.conclusive:
                write_plain(path, report.to_dict())
            elif report.ran_short:
                write_plain(path, {**report.to_dict(), _UNTIL: time() + BRIEF_S})
            return report


def key_of(
    version: int,
    asked: object,
    spec: ModelSpec,
    signature: ModelSignature | None,
    engines: Sequence[str] | None = None,
) -> str:
    """Return the key of a kept entry: it changes with the question, the model's files, and everything that runs the model.

    `version` is the version of the entries. `asked` is the value that describes the question; every field of it counts.
    `engines` are those that are asked about; None: the one that runs the model.
    """
    plain = {
        "format": version,
        "asked": _plain(asked),
        "signature": None if signature is None else {**signature.to_dict(), "name": ""},
        "model": _model_digest(spec),
        "versions": _versions(engines or (engine_of(spec).engine,)),
        "cpu": cpu_name(),
        # Without a number of threads, the engine chooses by the number of CPUs.
        "cpus": available_cpus(),
    }
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:40]


def proof_key(task: Task, signature: ModelSignature | None) -> str:
    """Return the key of a verdict: it changes with everything known to influence the verdict."""
    return key_of(_FORMAT, task, task.spec, signature, task.spec.engines if task.choose else None)


def code_of(spec: ModelSpec) -> str | None:
    """Return a digest of what runs a model besides its settings and files; None where it cannot be known.

    It changes with the versions of Python, of shapestream and of the engines that may run the model, and with the files of a
    function's package, as a verdict does. Raises `OSError`.
    """
    if spec.path is None and spec.function is not None and not (files := _model_digest(spec)):
        return None
    parts = [None if spec.path is not None or spec.function is None else files, _versions(spec.engines)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _plain(value: object) -> Any:
    """Make JSON data that is equal for equal values only."""
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
            # Name and path do not influence results; the files are digested.
            ignored = {"name", "path", "model"} if isinstance(value, ModelSpec) else set()
            names = [each.name for each in fields(value) if each.name not in ignored]
            return [type(value).__qualname__, {name: _plain(getattr(value, name)) for name in names}]
        case _:
            # The type counts: `True`, `1` and `1.0` are equal, but engine properties distinguish them.
            return [type(value).__qualname__, repr(value)]


def _model_digest(spec: ModelSpec) -> str:
    if spec.path is not None:
        return _digest(files_of_model(spec.path))
    top = (spec.function or "").partition(":")[0].partition(".")[0]
    try:
        found: Any = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return ""
    if found is None or (found.submodule_search_locations is None and found.origin is None):
        return ""
    if found.submodule_search_locations is None:
        return _digest([Path(found.origin)])
    # A function may call anything in its package, so any change there counts.
    return _stats([Path(folder) for folder in found.submodule_search_locations])


def _stats(folders: list[Path]) -> str:
    """Return a digest of the path, size and time of each Python file below the folders."""
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


def _versions(engines: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "engine": _stats([Path(__file__).parents[1]]),
        "runtime": {engine: runtime_of(engine) for engine in engines},
    }
    with suppress(importlib.metadata.PackageNotFoundError):
        found["shapestream"] = importlib.metadata.version("shapestream")
    return found
