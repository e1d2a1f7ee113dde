"""Verdicts on disk, so that a restart need not prove again what has not changed.

A file per model, settings and versions, in the folder that `SHAPESTREAM_PROBE_CACHE` names, else in
`$XDG_CACHE_HOME/shapestream/probe` (`~/.cache/shapestream/probe`); `SHAPESTREAM_PROBE_CACHE=off` switches it off.
Processes that want the same proof at the same time wait for the first, which holds a lock on the entry.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shapestream_engine.kept_files import KeptFiles, read_plain, write_plain
from shapestream_engine.model import ModelSpec
from shapestream_engine.probing.examination import ProbeOptions
from shapestream_engine.probing.report import ProbeReport
from shapestream_engine.probing.values import Samples
from shapestream_engine.signature import ModelSignature

__all__ = ["ENVIRONMENT", "Entry", "ProofCache", "identity"]

ENVIRONMENT = "SHAPESTREAM_PROBE_CACHE"
_FORMAT = 1
"""Of the entries, and of what is tried: raised when either changes, so that old verdicts are not taken for new ones."""
_READ_BYTES = 1 << 20
_LOCATION = re.compile(rb"\n\x08location\x12([\x00-\x7f]|[\x80-\xff][\x00-\x7f])", re.DOTALL)
"""The key and the length of `external_data`'s entry in ONNX's protobuf; the name follows."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The place of one verdict; None: there is no cache."""

    path: Path | None

    def read(self) -> ProbeReport | None:
        """The verdict, if there is one that can be read."""
        plain = read_plain(self.path)
        try:
            return None if plain is None else ProbeReport.from_dict(plain)
        except (ValueError, TypeError, KeyError):
            return None  # it is proved again, and written anew

    def write(self, report: ProbeReport) -> None:
        """Keeps a verdict."""
        write_plain(self.path, report.to_dict())


class ProofCache:
    """A folder of verdicts; None: none are kept."""

    def __init__(self, folder: Path | None) -> None:
        self._files = KeptFiles(folder)

    @property
    def folder(self) -> Path | None:
        """Where the verdicts are."""
        return self._files.folder

    @classmethod
    def of_environment(cls) -> ProofCache:
        """Where the environment says."""
        return cls(KeptFiles.of_environment(ENVIRONMENT, "probe").folder)

    @contextmanager
    def entry(
        self, spec: ModelSpec, options: ProbeOptions, signature: ModelSignature | None
    ) -> Iterator[Entry]:
        """The entry for this proof, which nobody else has meanwhile; without a signature, for a guess at rules."""
        with self._files.locked(_key(spec, options, signature)) as path:
            yield Entry(path)


def identity(spec: ModelSpec, options: ProbeOptions, signature: ModelSignature | None) -> dict[str, Any]:
    """Plain data that changes with the model, its settings, its realistic inputs, and the versions that run it."""
    settled = asdict(spec)
    for ignored in ("name", "path", "model"):
        settled.pop(ignored)
    return {
        "spec": settled,
        "signature": None if signature is None else {**signature.to_dict(), "name": ""},
        "values": {name: _values(values) for name, values in options.values.items()},
        "samples": {name: _digest([path]) for name, path in options.samples.items()},
        "options": [options.max_batch, options.seed],
        "model": _model_digest(spec),
        "versions": _versions(spec.effective_engine),
    }


def _key(spec: ModelSpec, options: ProbeOptions, signature: ModelSignature | None) -> str:
    """Changes with everything that the verdict may depend on, as far as can be known."""
    plain = {"format": _FORMAT, **identity(spec, options, signature)}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:40]


def _values(values: object) -> str:
    if isinstance(values, Samples):
        rows = [row.tobytes() for row in values.rows]
        return hashlib.sha256(b"".join(rows)).hexdigest()
    return repr(values)


def _model_digest(spec: ModelSpec) -> str:
    if spec.path is not None:
        # Weights lie beside the graph, under names that begin alike: m.xml and m.bin, m.onnx and m.onnx.data.
        beside = set(spec.path.parent.glob(f"{glob.escape(spec.path.stem)}*"))
        return _digest(sorted(beside | _external(spec.path)))
    top = (spec.function or "").partition(":")[0].partition(".")[0]
    try:
        found: Any = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return top
    if found is None or found.submodule_search_locations is None:
        return _digest([] if found is None or found.origin is None else [Path(found.origin)])
    # A function may call anything in its package: any change there counts.
    return _stats([Path(folder) for folder in found.submodule_search_locations])


def _external(path: Path) -> set[Path]:
    """The files in which an ONNX file says that its weights are, under any name."""
    if path.suffix.lower() != ".onnx" or not path.is_file() or not path.stat().st_size:
        return set()
    found = set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as graph:
        for match in _LOCATION.finditer(graph):
            first, second = match[1][0], match[1][-1]
            length = first if len(match[1]) == 1 else first - 128 + 128 * second
            found.add(os.fsdecode(graph[match.end() : match.end() + length]))
    return {path.parent / name for name in found if name and "\0" not in name}


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
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


def _versions(engine: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": platform.machine()}
    found["engine"] = _stats([Path(__file__).parents[1]])
    for name in ("shapestream", "numpy", engine):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
