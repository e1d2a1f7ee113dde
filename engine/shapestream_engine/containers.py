"""The part of its machine that this process may use: its affinity, and the limits of its control groups (cgroup v2, v1).

A container on a node of 64 CPUs may be limited to two by a quota of CPU time, which no count of CPUs shows: 64 threads would
use up each period's quota in its first moments, and then all wait for the next one. Limits hold for a group and all groups
below it, so the least one on the way up counts. A file that is absent or cannot be read is no limit.

Kernel's documents: admin-guide/cgroup-v2 (`cpu.max`, `memory.max`), scheduler/sched-bwc and admin-guide/cgroup-v1/memory
(`cpu.cfs_quota_us`, `cpu.cfs_period_us`, `memory.limit_in_bytes`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Limit: TypeAlias = Literal["machine", "affinity", "quota", "memory limit"]


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


def _words(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
