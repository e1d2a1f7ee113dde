"""The engines and their loading: ours, and those that installed packages bring by entry point.

A package adds an engine with an entry point of the group `shapestream.backends`:

    [project.entry-points."shapestream.backends"]
    tensorflow = "acme_tensorflow.backend"

whose module (or object, `module:object`) has `compile_spec(spec, *, slots, threads) -> CompiledModel`. See docs/backends.md.
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
}
"""Engine -> the module with its `compile_spec`. Imported when it is asked for: engines are optional."""


def known_engines() -> tuple[str, ...]:
    """The names of all engines, ours first. Whether what they need is installed shows when one is loaded."""
    return (*_OURS, *sorted(point.name for point in _added() if point.name not in _OURS))


def check_engine(engine: str) -> None:
    """Raises `SignatureError` that lists the engines if there is none of this name."""
    if engine not in _OURS and engine not in (known := known_engines()):
        raise SignatureError(f"unknown engine {engine!r}; known are {', '.join(known)}")


def load_backend(engine: str) -> Any:
    """The module or object that is the `Backend` of an engine.

    Raises `EngineMissing`, naming its extra, or `ModelLoadError`, naming the reason.
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
    """Asked anew each time: it is read from what is installed, and only for names that are not ours."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))
