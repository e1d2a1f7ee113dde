"""The machine: processor, memory, engine versions, and the division of CPUs among slots.

Results and costs depend on these besides the model.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from shapestream_engine.backends.registry import ENTRY_POINT_GROUP

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MODULES = {
    "openvino": ("openvino",),
    "onnxruntime": ("onnxruntime",),
    "torch": ("torch", "torch_xla"),
    "function": (),
    "tokenizer": ("tokenizers",),
}
"""Engine -> the modules that it uses besides NumPy."""


@cache
def cpu_name() -> str:
    """Return the processor's model name, if the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "Processor"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def resident_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """Return the resident memory of this process in bytes; raises `OSError` without /proc."""
    return int(statm.read_text().split()[1]) * _PAGE_BYTES


def resident_bytes_of(pid: int) -> int:
    """Return the resident memory of another process in bytes; 0 if it has ended, and without /proc."""
    try:
        return resident_bytes(Path(f"/proc/{pid}/statm"))
    except (OSError, IndexError):
        return 0


def thread_times(tasks: Path = Path("/proc/self/task")) -> tuple[int, int]:
    """Nanoseconds that the living threads of this process ran, and that they waited for a CPU; 0 where unknown."""
    ran = waited = 0
    for path in tasks.glob("*/schedstat"):
        try:
            own = path.read_text().split()
        except OSError:
            continue  # the thread has ended
        ran, waited = ran + int(own[0]), waited + int(own[1])
    return ran, waited


def runtime_of(engine: str) -> dict[str, list[str]]:
    """Return the distributions of NumPy and of an engine's modules, each as `name==version`.

    Several distributions may provide a module, as `onnxruntime-gpu` provides `onnxruntime`, so versions alone do not
    suffice. A module without a distribution is identified by its file's size and time.
    """
    modules = ("numpy", *_MODULES.get(engine, ()))
    found = {module: _distributions_of(module) for module in modules}
    if engine not in _MODULES:
        points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=engine)
        found[engine] = sorted(f"{point.dist.name}=={point.dist.version}" for point in points if point.dist)
    return found


def engine_and_versions(engine: str) -> str:
    """Return the name of an engine and the versions of its own packages, `openvino openvino==2026.4.1`."""
    found = (name for module, names in runtime_of(engine).items() if module != "numpy" for name in names)
    return " ".join((engine, *found))


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
    """Return the distributions of each module on this path; reading them all is slow."""
    return dict(importlib.metadata.packages_distributions())


Count: TypeAlias = "int | Literal['auto']"

MAX_SLOTS = 256
"""Largest number of slots (threads) of one process; 256 slots join within 10 ms of a server's event loop."""
CPUS_PER_SLOT = 2
"""CPUs per slot for `auto`. With 1, a CPU is idle whenever its slot gathers or splits. With many, small calls spend
their time on passing work between threads. It is a starting point for measurements; both counts can be set."""


def divide_cpus(cpus: int, workers: int, slots: Count = "auto", threads: Count = "auto") -> tuple[int, int]:
    """Divide CPUs: return the slots of each worker, and the inference threads that its slots share.

    Each of `workers` equal processes gets `cpus // workers` CPUs, at least one. `threads` auto is that share, and at least
    one per slot. `slots` auto is one per `CPUS_PER_SLOT` threads, rounded up, limited to `MAX_SLOTS`. Given counts are
    kept even if they exceed the machine.

        divide_cpus(2, 2)   # (1, 1)
        divide_cpus(16, 1)  # (8, 16)

    Raises `ValueError` for counts below 1.
    """
    given = [count for count in (cpus, workers, slots, threads) if count != "auto"]
    if any(type(count) is not int or count < 1 for count in given):
        raise ValueError(
            f"CPUs, workers, slots and threads are counts from 1 (or auto): {cpus}, {workers}, {slots}, {threads}"
        )
    share = max(1, cpus // workers)
    own_threads = share if threads == "auto" else threads
    own_slots = min(MAX_SLOTS, -(-own_threads // CPUS_PER_SLOT)) if slots == "auto" else slots
    return own_slots, max(own_threads, own_slots) if threads == "auto" else own_threads
