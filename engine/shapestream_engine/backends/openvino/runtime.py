"""OpenVINO's runtime: its first import, without its telemetry, the one core per process, and its errors in one line.

The import looks up an analytics host and writes a client id into the home folder, where the package `openvino_telemetry`
is installed (it is a dependency of OpenVINO's). Without that package OpenVINO uses a stub of its own, which does
nothing. So the package is hidden for as long as the import takes. A program that imported `openvino` before keeps
its choice.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from shapestream_engine.errors import ModelLoadError

_WHERE = re.compile(r"^(Exception from \S+:\d+:?|Caught exception:)\s*")
_CHECK = re.compile(r"Check '.*?' failed at (/?[\w.+-]+/)*[\w.+-]+:\d+:?\s*", re.DOTALL)


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
    import openvino as ov

# Two threads that read the first `data` of a process at once were seen to wait for each other for ever (2026.4.1).
_ = ov.Tensor(ov.Type.f32, [1]).data


@cache
def core() -> ov.Core:
    """The process's one `ov.Core`, which lives as long as the process.

    Its CPU device gives the thread that compiles a model a signal stack of its own, and takes the memory back when
    the last model *and* core are gone, on whichever thread that happens (seen on OpenVINO 2026.4, on x86-64).
    The next signal to the first thread, a Ctrl-C or SIGTERM, then ends the process with a segmentation fault. With a
    core that stays, the memory stays.

    The CPU device runs without its fused kernels. The kernel for attention answers lengths from 16 wrongly for ever, where
    a stream's first call had length 1 (2026.4.1; tests/engine/test_openvino_history.py). The property is set here because
    `AUTO`, `MULTI` and `HETERO` do not hand it on to the CPU.

    Raises `ModelLoadError` if OpenVINO refuses the property: its kernel may still be wrong then.
    """
    runtime = ov.Core()
    # This loads the device. What it refuses before, it refuses at every later use.
    runtime.get_property("CPU", "SUPPORTED_PROPERTIES")
    try:
        runtime.set_property("CPU", {"SNIPPETS_MODE": "DISABLE"})
    except RuntimeError as error:
        raise ModelLoadError(
            f"OpenVINO {ov.__version__} cannot switch off its fused kernels, of which that for attention was wrong in "
            f"2026.4.1: {engine_words(error)}; install openvino 2026.4.1"
        ) from error
    return runtime


def engine_words(error: BaseException) -> str:
    """One line that says what OpenVINO said, without places in its source, which its errors are wrapped in."""
    text = str(error)
    kept = []
    for line in _CHECK.sub("", text).splitlines():
        while (shorter := _WHERE.sub("", line)) != line:
            line = shorter
        if line.strip():
            kept.append(line.strip().rstrip(":"))
    return "; ".join(kept) or " ".join(text.split()) or type(error).__name__
