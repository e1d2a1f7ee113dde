"""The registry of engines: the built-in ones, and those that installed packages add by entry point.

A package adds an engine with an entry point of the group `shapestream.backends`:

    [project.entry-points."shapestream.backends"]
    tensorflow = "acme_tensorflow.backend"

The entry names a module, or an object as `module:object`, that has `compile_spec(spec, *, slots, threads) ->
CompiledModel`. See docs/backends.md.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from shapestream_engine.errors import EngineMissing, ModelLoadError, SignatureError

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


def is_installed(engine: str) -> bool:
    """Tell whether an engine's packages are installed and can be loaded."""
    try:
        load_backend(engine)
    except (EngineMissing, ModelLoadError):
        return False
    return True


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
