"""The machine, and this process on it: processor, memory, engine versions, CPUs, and the end of the parent process.

Results and costs depend on these besides the model.

A process may use a part of its machine: its affinity, and the limits of its control groups (cgroup v2, v1). A container on a
node of 64 CPUs may be limited to two by a quota of CPU time, which no count of CPUs shows: 64 threads would use up each
period's quota in its first moments, and then all wait for the next one. Limits hold for a group and all groups below it, so
the least one on the way up counts. A file that is absent or cannot be read is no limit.

Kernel's documents: admin-guide/cgroup-v2 (`cpu.max`, `memory.max`), scheduler/sched-bwc and admin-guide/cgroup-v1/memory
(`cpu.cfs_quota_us`, `cpu.cfs_period_us`, `memory.limit_in_bytes`).
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
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


def private_bytes_of(pid: int) -> int:
    """Return the resident memory of another process that is not mapped from files; 0 if it has ended, and without /proc."""
    try:
        words = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(words[1]) - int(words[2])) * _PAGE_BYTES
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


def is_installed(engine: str) -> bool:
    """Tell whether an engine's package is there. Nothing is loaded, so whether it works stays open."""
    if engine not in _MODULES:
        return bool(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=engine))
    return all(importlib.util.find_spec(module) is not None for module in _MODULES[engine][:1])


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


# ---------------------------------------------------------------- the part of it that this process may use

Limit: TypeAlias = Literal["machine", "affinity", "quota", "memory limit", "caller"]


@dataclass(frozen=True, slots=True)
class Allowance:
    """An amount, and what limits it."""

    amount: int
    by: Limit


def allowed_cpus(root: Path = Path("/")) -> Allowance:
    """Return the number of CPUs that this process may use, at least 1; of a quota its whole CPUs."""
    count = len(os.sched_getaffinity(0))
    quotas = [quota for folder in _groups(root, "cpu") if (quota := _cpus_of(folder)) is not None]
    if quotas and (whole := max(1, int(min(quotas)))) < count:
        return Allowance(whole, "quota")
    return Allowance(count, "affinity" if count < (os.cpu_count() or count) else "machine")


def allowed_memory(root: Path = Path("/")) -> Allowance:
    """Return the bytes of memory that this process may use."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [limit for folder in _groups(root, "memory") if (limit := _memory_of(folder)) is not None]
    return (
        Allowance(min(limits), "memory limit")
        if limits and min(limits) < most
        else Allowance(most, "machine")
    )


def free_memory(root: Path = Path("/")) -> Allowance:
    """Return the bytes of memory that new processes beside this one may take. Cached files count as free."""
    told = _numbers(root / "proc/meminfo")
    free = [Allowance(told["MemAvailable"] * 1024, "machine")] if "MemAvailable" in told else []
    for folder in _groups(root, "memory"):
        used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        if (limit := _memory_of(folder)) is not None and used.strip().isdecimal():
            told = _numbers(folder / "memory.stat")
            cached = told.get("total_inactive_file", told.get("inactive_file", 0))
            free.append(Allowance(max(0, limit - int(used) + cached), "memory limit"))
    return min(free, key=lambda one: one.amount, default=allowed_memory(root))


def available_cpus() -> int:
    """Return the number of CPUs that this process may use, at least 1."""
    return allowed_cpus().amount


def memory_bytes() -> int:
    """Return the bytes of memory that this process may use."""
    return allowed_memory().amount


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups, each up to its root: of v2's only hierarchy, and of v1's controller."""
    for line in _words(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            top = root / "sys/fs/cgroup"
        elif controller in names.split(","):
            top = root / "sys/fs/cgroup" / names
            top = top if top.is_dir() else root / "sys/fs/cgroup" / controller
        else:
            continue
        # Where the path is the host's, and the container sees only its own group, that group is the top.
        folder = top / path.strip("/")
        folder = folder if folder.is_dir() else top
        while True:
            yield folder
            if folder == top:
                break
            folder = folder.parent


def _cpus_of(folder: Path) -> float | None:
    """Return the CPUs of a group's quota; None without one."""
    if words := _words(folder / "cpu.max").split():
        quota, period = words[0], words[-1]
    else:
        quota, period = (
            _words(folder / "cpu.cfs_quota_us").strip(),
            _words(folder / "cpu.cfs_period_us").strip(),
        )
    if not (quota.isdecimal() and period.isdecimal() and int(period)):  # "max", "-1", ""
        return None
    return int(quota) / int(period)


def _memory_of(folder: Path) -> int | None:
    """Return a group's limit in bytes; None without one. v1 says that there is none by a number beyond any machine."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        if (words := _words(folder / name).strip()).isdecimal():
            return int(words)
    return None


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    rows = (line.split() for line in _words(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _words(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


# ---------------------------------------------------------------- CPUs for slots

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


# ---------------------------------------------------------------- the parent process


def end_with_parent(stdin: int = 0) -> None:
    """End this process when its parent ends, even by SIGKILL, whatever this process does.

    The parent holds the writing end of `stdin` and never writes. When the parent ends, the kernel closes that end, and a
    read returns. A thread waits for it, so that neither a busy event loop nor a long compilation delays the end. A call
    that holds the interpreter, such as an endless regular expression, stops that thread: then the kernel ends the process.
    The kernel alone does not suffice: it tells of no parent that ended before. Linux' PR_SET_PDEATHSIG is no alternative:
    it fires when the parent's *thread* ends, and trio starts processes from short-lived threads.
    """
    with suppress(OSError):
        fcntl.fcntl(stdin, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(stdin, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(stdin, fcntl.F_SETFL, fcntl.fcntl(stdin, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_end_after, args=(stdin,), name="parent-watch", daemon=True).start()


def _end_after(pipe: int) -> None:
    """End the process when `pipe` has no writer any more.

    No `sys.stdin`: a process that an engine forks (OpenVINO's telemetry at import) would inherit its lock and never end.
    """
    with suppress(OSError):
        while os.read(pipe, 4096):
            pass
    os._exit(1)  # not sys.exit: nothing that this process still holds is of use
