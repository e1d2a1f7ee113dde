"""What a container allows: quotas and limits of control groups, as the kernel writes them down."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from shapestream_engine.machine import Allowance, allowed_cpus, allowed_memory, free_memory

V2, V1 = "0::{}\n", "4:memory:{0}\n3:cpu,cpuacct:{0}\n2:name=systemd:/\n"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of 64 CPUs, and of 256 GiB in pages of 4 KiB."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    pages = {"SC_PHYS_PAGES": 256 * GIB >> 12, "SC_PAGE_SIZE": 1 << 12}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)


def tree(root: Path, group: str, files: Mapping[str, str]) -> Path:
    """A system whose processes are in a group, with files below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(group)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize(
    ("group", "files", "cpus"),
    [
        (V2.format("/"), {"cpu.max": "200000 100000\n"}, 2),
        (V2.format("/"), {"cpu.max": "250000 100000\n"}, 2),
        (V2.format("/"), {"cpu.max": "50000 100000\n"}, 1),
        (V2.format("/a/b"), {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        (V2.format("/a/b"), {"a/b/cpu.max": "800000 100000\n", "a/cpu.max": "3200000 100000\n"}, 8),
        # Without a namespace of its own, a container is told a path of its host, and sees its own group at the top.
        (V2.format("/kubepods/x"), {"cpu.max": "400000 100000\n"}, 4),
        (V1.format("/"), {"cpu,cpuacct/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/cpu.cfs_period_us": "50000\n"}, 3),
        (V1.format("/x"), {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)  # fmt: skip
def test_a_quota_limits_the_cpus(tmp_path: Path, group: str, files: dict[str, str], cpus: int) -> None:
    """Whole CPUs, at least one; the least of the groups above counts."""
    assert Allowance(cpus, "quota") == allowed_cpus(tree(tmp_path, group, files))


@pytest.mark.parametrize(
    ("group", "files"),
    [
        ("", {}),
        (V2.format("/"), {"cpu.max": "max 100000\n"}),
        (V2.format("/"), {"cpu.max": "nonsense\n"}),
        (V2.format("/"), {"cpu.max": "12800000 100000\n"}),
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}),
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "0\n"}),
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "100000\n"}),
    ],
)
def test_without_a_quota_the_affinity_counts(tmp_path: Path, group: str, files: dict[str, str]) -> None:
    """Also where a file cannot be read, or the quota is more than there are CPUs."""
    assert Allowance(64, "machine") == allowed_cpus(tree(tmp_path, group, files))


def test_the_affinity_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that may run on some CPUs only; a smaller quota counts nevertheless."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 9})
    root = tree(tmp_path, V2.format("/"), {})
    assert Allowance(3, "affinity") == allowed_cpus(root)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text("200000 100000\n")
    assert Allowance(2, "quota") == allowed_cpus(root)


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        (V2.format("/"), {"memory.max": f"{2 * GIB}\n"}, Allowance(2 * GIB, "memory limit")),
        (
            V2.format("/a/b"),
            {"a/b/memory.max": f"{9 * GIB}\n", "a/memory.max": f"{4 * GIB}\n"},
            Allowance(4 * GIB, "memory limit"),
        ),
        (V2.format("/"), {"memory.max": "max\n"}, Allowance(256 * GIB, "machine")),
        (V1.format("/"), {"memory/memory.limit_in_bytes": f"{GIB}\n"}, Allowance(GIB, "memory limit")),
        (V1.format("/"), {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, Allowance(256 * GIB, "machine")),
    ],
)  # fmt: skip
def test_a_limit_of_memory_counts(
    tmp_path: Path, group: str, files: dict[str, str], expected: Allowance
) -> None:
    """The least of the groups above; v1 says by a number beyond any machine that there is none."""
    assert expected == allowed_memory(tree(tmp_path, group, files))


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        (V2.format("/"), {"memory.max": "max\n", "memory.current": f"{GIB}\n"}, Allowance(6 * GIB, "machine")),
        (V2.format("/"), {"memory.max": f"{64 * GIB}\n", "memory.current": f"{GIB}\n"}, Allowance(6 * GIB, "machine")),
        (
            V2.format("/a"),
            {
                "a/memory.max": f"{4 * GIB}\n",
                "a/memory.current": f"{3 * GIB}\n",
                "a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            Allowance(2 * GIB, "memory limit"),
        ),
        (
            V1.format("/"),
            {
                "memory/memory.limit_in_bytes": f"{4 * GIB}\n",
                "memory/memory.usage_in_bytes": f"{3 * GIB}\n",
                "memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
            },
            Allowance(2 * GIB, "memory limit"),
        ),
        (V2.format("/"), {"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}, Allowance(0, "memory limit")),
    ],
)  # fmt: skip
def test_what_is_free_is_what_the_system_calls_so_or_what_a_limit_leaves(
    tmp_path: Path, group: str, files: dict[str, str], expected: Allowance
) -> None:
    """Files in the cache are no use of memory."""
    root = tree(tmp_path, group, files)
    (root / "proc/meminfo").write_text(f"MemTotal: {256 * GIB >> 10} kB\nMemAvailable:  {6 * GIB >> 10} kB\n")
    assert expected == free_memory(root)


@pytest.fixture
def quota_of_one() -> Iterator[Path]:
    """A real control group with the CPU time of one CPU, where this process may make one."""
    for folder, files in (
        ("/sys/fs/cgroup/cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}),
        ("/sys/fs/cgroup", {"cpu.max": "100000 100000"}),
    ):
        group = Path(folder) / f"shapestream-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            for name, content in files.items():
                (group / name).write_text(content)
            yield group
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no control group with a quota can be made here")


def test_a_real_quota_counts(quota_of_one: Path) -> None:
    """A process that is put into the group sees it."""
    code = "from shapestream_engine.machine import allowed_cpus; print(allowed_cpus())"
    ran = subprocess.run(
        [
            "/bin/sh",
            "-c",
            'echo $$ > "$0/cgroup.procs" && exec "$1" -c "$2"',
            quota_of_one,
            sys.executable,
            code,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Allowance(amount=1, by='quota')" == ran.stdout.strip()
