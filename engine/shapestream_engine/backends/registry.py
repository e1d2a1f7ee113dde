"""The registry of engines: the built-in ones, and those that installed packages add by entry point.

A package adds an engine with an entry point of the group `shapestream.backends`:

    [project.entry-points."shapestream.backends"]
    tensorflow = "acme_tensorflow.backend"

The entry names a module, or an object as `module:object`, that has `compile_spec(spec, *, slots, threads) ->
CompiledModel`. See docs/backends.md.

Of a file that several engines read, the first in a fixed order that is installed and takes it is chosen. An engine takes a
file that it can read, and whose element types it computes as they are (`openvino/narrowing.py`). The file is read and
nothing is compiled, so a choice costs the time of reading. An engine that the configuration names is never replaced by
another one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import PurePath
from typing import Any

from shapestream_engine.errors import EngineError, EngineMissing, ModelLoadError, SignatureError

ENTRY_POINT_GROUP = "shapestream.backends"

_OURS = {
    "openvino": "shapestream_engine.backends.openvino",
    "onnxruntime": "shapestream_engine.backends.onnxruntime",
    "torch": "shapestream_engine.backends.torch",
    "function": "shapestream_engine.backends.function",
    "tokenizer": "shapestream_engine.backends.tokenizer",
}
"""Engine -> module with its `compile_spec`. Modules are imported on demand, because engines are optional."""


def known_engines() -> tuple[str, ...]:
    """Return the names of all engines, built-in ones first; loading shows whether their packages are installed."""
    return (*_OURS, *sorted(point.name for point in _added() if point.name not in _OURS))


def check_engine(engine: str) -> None:
    """Raise `SignatureError` for an unknown engine; the message lists the known ones."""
    if engine not in _OURS and engine not in (known := known_engines()):
        raise SignatureError(f"unknown engine {engine!r}; known are {', '.join(known)}")


def load_backend(engine: str) -> Any:
    """Load the module or object that is the `Backend` of an engine.

    Raises `EngineMissing` with the missing extra, or `ModelLoadError` with the reason.
    """
    check_engine(engine)
    try:
        if engine in _OURS:
            return importlib.import_module(_OURS[engine])
        added = next(point for point in _added() if point.name == engine).load()
    except ModuleNotFoundError as error:
        if error.name != engine or engine not in _OURS:
            raise ModelLoadError(f"the engine {engine!r} cannot be loaded: {error}") from error
        raise EngineMissing(engine) from error
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(f"the engine {engine!r} is installed but cannot be loaded: {error}") from error
    if not callable(getattr(added, "compile_spec", None)):
        raise ModelLoadError(
            f"the engine {engine!r} is installed but is no backend: {added!r} has no compile_spec"
        )
    return added


def _added() -> tuple[EntryPoint, ...]:
    """Read the entry points of installed packages; nothing is cached."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


# ---------------------------------------------------------------- the choice for a file

ENGINES_OF_SUFFIX = {".xml": ("openvino",), ".onnx": ("openvino", "onnxruntime"), ".pt2": ("torch",)}
"""Suffix of a model file -> the engines that read it, in the order in which they are tried."""


def engines_of_path(path: PurePath) -> tuple[str, ...]:
    """Return the engines that may run this file, in their order; OpenVINO's readers ask files of any other suffix."""
    return ENGINES_OF_SUFFIX.get(path.suffix.lower(), ("openvino",))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The engine of a model, and the engines before it that were passed over."""

    engine: str
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Engine -> why it does not run the model: "not installed", or its own message."""

    @property
    def why(self) -> str:
        """The reason of the choice, in words; "" where the first engine took the model, or the configuration names it."""
        return "; ".join(f"{engine}: {reason}" for engine, reason in self.passed_over.items())


def choose_engine(engines: Sequence[str], check: Callable[[str], None]) -> EngineChoice:
    """Return the first of these engines that takes the model.

    `check` raises `EngineError` for an engine that does not. If none takes it, the error of the first installed one is
    raised, with what the others said and the extras of those that are missing; `EngineMissing` if none is installed.
    """
    passed_over: dict[str, str] = {}
    missing: list[EngineMissing] = []
    first: EngineError | None = None
    others: list[str] = []
    for engine in engines:
        try:
            check(engine)
        except EngineMissing as error:
            missing.append(error)
            passed_over[engine] = "not installed"
        except EngineError as error:
            passed_over[engine] = str(error)
            if first is None:
                first = error
            else:
                others.append(f"{engine} does not take it, either: {error}")
        else:
            return EngineChoice(engine=engine, passed_over=passed_over)
    if first is None:
        raise EngineMissing(*engines)
    others += [
        f"{error.engines[0]} is not installed: pip install 'shapestream[{error.extra}]'" for error in missing
    ]
    first.args = ("; ".join((str(first), *others)),)
    raise first
