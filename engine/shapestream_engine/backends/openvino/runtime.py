"""OpenVINO's runtime: the first import, the one core of a process, and error messages in one line.

With the package `openvino_telemetry`, a dependency of OpenVINO, the import contacts an analytics host and writes a client
id into the home folder. Without the package, OpenVINO uses a stub that does nothing. So the package is hidden during the
import. A program that imported `openvino` earlier keeps its choice.

On the CPU, a call of new sizes generates code for them, by oneDNN. Each dynamic model keeps the code of its sizes, and a
slot has a model of its own. All share oneDNN's cache, which by itself holds 1,024 kernels: too few for a second slot to
find what the first one made. So it is larger here (`KERNELS`), unless the environment says how large it is.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from shapestream_engine.errors import ModelLoadError

KERNELS = 16384
"""Kernels that oneDNN keeps for all models of the process, the most recently used. A detector of 4,225 sizes needs 12,700,
of 46 KB each; its second slot then takes 0.25 ms for a call of new sizes instead of 0.64, and 206 MB instead of 732
(docs/backends.md)."""
_CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
"""The name of that number in the environment, which oneDNN reads before its first kernel:
https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html"""
_WHERE = re.compile(r"^(Exception from \S+:\d+:?|Caught exception:)\s*")
_CHECK = re.compile(r"Check '.*?' failed at (/?[\w.+-]+/)*[\w.+-]+:\d+:?\s*", re.DOTALL)


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Make an installed package unavailable to imports inside the block."""
    known = sys.modules.get(package)
    sys.modules[package] = None  # type: ignore[assignment] # None makes the import fail
    try:
        yield
    finally:
        del sys.modules[package]
        if known is not None:
            sys.modules[package] = known


if not {_CAPACITY, "DNNL_PRIMITIVE_CACHE_CAPACITY"} & os.environ.keys():  # the latter is an older name
    os.environ[_CAPACITY] = str(KERNELS)

with _hidden("openvino_telemetry"):
    import openvino as ov

# The first `data` of a process can deadlock two threads that read it at once (2026.4.1).
_ = ov.Tensor(ov.Type.f32, [1]).data


@cache
def core() -> ov.Core:
    """Return the only `ov.Core` of the process; it is never freed.

    OpenVINO's CPU device gives the compiling thread an alternate signal stack. It frees that memory with the last model
    *and* core, on any thread (2026.4, x86-64). The next signal to the first thread, such as Ctrl-C or SIGTERM, then ends
    the process with a segmentation fault. A core that stays keeps the memory.

    The CPU device runs without fused kernels. The attention kernel gives wrong results from length 16 on, if a stream's
    first call had length 1 (2026.4.1; tests/engine/test_openvino_history.py). The property is set here because `AUTO`,
    `MULTI` and `HETERO` do not pass it to the CPU.

    Raises `ModelLoadError` if OpenVINO refuses the property, because the kernel may still be wrong then.
    """
    runtime = ov.Core()
    # This loads the device; a device that is refused now is refused later as well.
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
    """Return the message of an OpenVINO error in one line, without source locations."""
    text = str(error)
    kept = []
    for line in _CHECK.sub("", text).splitlines():
        while (shorter := _WHERE.sub("", line)) != line:
            line = shorter
        if line.strip():
            kept.append(line.strip().rstrip(":"))
    return "; ".join(kept) or " ".join(text.split()) or type(error).__name__
