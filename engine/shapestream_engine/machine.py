"""The machine, on which results and costs depend beside the model: the processor and an engine's runtime."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from functools import cache
from pathlib import Path

from shapestream_engine.backends.registry import ENTRY_POINT_GROUP

__all__ = ["cpu_name", "runtime_of"]

_MODULES = {
    "openvino": ("openvino",),
    "onnxruntime": ("onnxruntime",),
    "torch": ("torch", "torch_xla"),
    "function": (),
}
"""Engine -> the modules that it computes with, beside NumPy."""


@cache
def cpu_name() -> str:
    """The model of the processor as its maker calls it, where the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "Processor"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def runtime_of(engine: str) -> dict[str, list[str]]:
    """The distributions, each as `name==version`, that bring the modules of an engine, and NumPy.

    One module may come from one of several, as `onnxruntime` does from `onnxruntime-gpu`: their versions alone are equal.
    Of a module that lies on the path without a distribution, its file's size and time are told.
    """
    modules = ("numpy", *_MODULES.get(engine, ()))
    found = {module: _distributions_of(module) for module in modules}
    if engine not in _MODULES:
        points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=engine)
        found[engine] = sorted(f"{point.dist.name}=={point.dist.version}" for point in points if point.dist)
    return found


def _distributions_of(module: str) -> list[str]:
    names = set(_installed(tuple(sys.path)).get(module, ()))
    if names:
        return sorted(f"{name}=={importlib.metadata.version(name)}" for name in names)
    try:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            return []
        stat = os.stat(spec.origin)
    except (OSError, ImportError, ValueError):
        return []
    return [f"{spec.origin} {stat.st_size} {stat.st_mtime_ns}"]


@cache
def _installed(_path: tuple[str, ...]) -> dict[str, list[str]]:
    """Module -> the distributions that bring it, on this path; it takes a while to read them all."""
    return dict(importlib.metadata.packages_distributions())
