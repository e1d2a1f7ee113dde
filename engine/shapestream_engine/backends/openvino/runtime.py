"""OpenVINO's runtime, once per process."""

from __future__ import annotations

from functools import cache

import openvino as ov

__all__ = ["core"]


@cache
def core() -> ov.Core:
    """The process's one `ov.Core`, which lives as long as the process.

    Its CPU device gives the thread that compiles a model a signal stack of its own, and takes the memory back when
    the last model *and* core are gone, on whichever thread that happens (seen on OpenVINO 2026.4, on x86-64).
    The next signal to the first thread, a Ctrl-C or SIGTERM, then ends the process with a segmentation fault. With a
    core that stays, the memory stays.
    """
    return ov.Core()
