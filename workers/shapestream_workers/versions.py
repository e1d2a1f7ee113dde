"""The versions of this program and of the libraries that decide how it behaves."""

from __future__ import annotations

import platform
from importlib import metadata

__all__ = ["versions"]

_LIBRARIES = ("trio", "pyzmq", "msgpack", "numpy", "openvino", "onnxruntime", "torch", "torch_xla")


def versions() -> dict[str, str]:
    """Name -> version; an optional library that is absent is `not installed`."""
    found = {"shapestream": _version("shapestream"), "protocol": "1", "python": platform.python_version()}
    return found | {name: _version(name) for name in _LIBRARIES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
