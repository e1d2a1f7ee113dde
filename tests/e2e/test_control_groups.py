"""Servers in real control groups: a limit of memory ends nothing, and a quota of CPUs decides slots and threads.

Where a test may make no control group, it is skipped. Version 1 has a folder for each controller, version 2 one for all.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from tests.e2e import conftest
from tests.e2e.conftest import PATIENCE_S, ROOT, Workplace, until

from shapestream.errors import Overloaded

pytestmark = pytest.mark.e2e

GROUPS = Path("/sys/fs/cgroup")
MIB = 1 << 20
MEMORY, CLIENTS, LARGE = 900 * MIB, 100, 48 * MIB
TOTALS = """\
    models:
      - name: m
        function: totals:of_rows
        inputs: {x: {shape: "batch:1..16, n:1..100000000", element_type: f32}}
        outputs: {y: {shape: "batch, 1", element_type: f32, rule: rows}}
        trust: true
        calibration_s: 0
    workers: [{count: 1, slots: 1, threads: 1}]
"""

Limit = Callable[[str, dict[str, str]], Path]
"""Makes a group of a controller with these files, in which commands run from then on."""


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Limit]:
    """Groups are removed when their processes have ended."""
    made: list[Path] = []

    def make(controller: str, files: dict[str, str]) -> Path:
        own = GROUPS / controller if (GROUPS / controller).is_dir() else GROUPS
        group = own / f"shapestream-{uuid4().hex[:8]}"
        try:
            group.mkdir()
            made.append(group)
            for name, text in files.items():
                if (group / name).exists():
                    (group / name).write_text(text)
            if not any((group / name).exists() for name in files):
                pytest.skip(f"no controller {controller} here")
        except OSError as error:
            pytest.skip(f"no control group may be made here: {error}")
        enter = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]
        monkeypatch.setattr(conftest, "COMMAND", [*enter, *conftest.COMMAND])
        return group

    yield make
    for group in made:
        until(f"nothing runs in {group}", lambda group=group: not (group / "cgroup.procs").read_text())
        group.rmdir()


def kills(group: Path) -> int:
    """How often the kernel has killed a process of a group for its memory."""
    for name in ("memory.oom_control", "memory.events"):
        with suppress(OSError):
            counts = dict(line.split() for line in (group / name).read_text().splitlines())
            return int(counts["oom_kill"])
    raise AssertionError(f"{group} counts no kills")


@pytest.mark.thorough
def test_large_requests_of_many_clients_end_nothing(limit: Limit, workplace: Workplace) -> None:
    """100 clients with one request of 48 MiB each, in 900 MiB: each is answered or refused, and nobody is killed."""
    group = limit("memory", {"memory.limit_in_bytes": str(MEMORY), "memory.max": str(MEMORY)})
    served = workplace.serve(TOTALS)
    served.wait_for("workers ready")
    (told,) = served.events("memory for requests")
    assert told
    x = np.ones((1, LARGE // 4), np.float32)
    ends: Counter[str] = Counter()

    def send_one() -> None:
        with served.client() as client:
            try:
                (y,) = client.infer("m", {"x": x}, deadline=PATIENCE_S)["y"].reshape(-1).tolist()
                ends["answered" if y == 2.0 else f"wrong: {y}"] += 1
            except Overloaded:
                ends["refused"] += 1

    threads = [threading.Thread(target=send_one) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert CLIENTS == ends["answered"] + ends["refused"], ends
    assert ends["answered"] > CLIENTS // 2
    assert 0 == kills(group)
    assert [] == served.events("worker ended")
    assert served.process.poll() is None


def test_a_quota_decides_slots_and_threads(limit: Limit, workplace: Workplace) -> None:
    """One CPU of those that there are: one slot, and calls in its own thread, without a pool of the engine's."""
    limit("cpu", {"cpu.cfs_quota_us": "100000", "cpu.max": "100000 100000"})
    model = ROOT / "tests" / "zoo" / "torch" / "cnn.onnx"
    served = workplace.serve(f"models: [{{name: m, path: {model}, trust: true, calibration_s: 0}}]\n")
    (starts,) = served.wait_for("worker starts")
    assert (1, 1, 1, "quota") == (starts["slots"], starts["threads"], starts["cpus"], starts["cpus_by"])
    (compiled,) = served.wait_for("model compiled")
    assert 0 == compiled["properties"]["NUM_STREAMS"]
