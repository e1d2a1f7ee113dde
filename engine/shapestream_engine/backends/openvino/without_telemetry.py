"""The first import of `openvino`, without its telemetry.

The import looks up an analytics host and writes a client id into the home folder, where the package `openvino_telemetry`
is installed (it is a dependency of OpenVINO's). Without that package OpenVINO uses a stub of its own, which does
nothing. So the package is hidden for as long as the import takes. A program that imported `openvino` before keeps
its choice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__: list[str] = []


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """An installed package that cannot be imported meanwhile."""
    known = sys.modules.get(package)
    sys.modules[package] = None  # type: ignore[assignment] # Python's way to say that there is none
    try:
        yield
    finally:
        del sys.modules[package]
        if known is not None:
            sys.modules[package] = known


with _hidden("openvino_telemetry"):
    import openvino  # noqa: F401 - for its first import
