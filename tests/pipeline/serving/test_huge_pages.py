"""Huge pages for what is loaded, in a process of its own, as the kernel counts them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import gc, json, re, sys
from pathlib import Path
from shapestream.serving.allocator import HUGE_BYTES, join_pages

def count():
    told = Path("/proc/self/smaps_rollup").read_text()
    return {name: int(re.search(rf"^{name}: +(\\d+) kB", told, re.M)[1]) * 1024 for name in ("AnonHugePages", "Rss")}

kept = [[number, str(number)] for number in range(100_000)]
gc.collect()
before = count()
joined = join_pages(map(id, gc.get_objects()))
after = count()
assert kept == [[number, str(number)] for number in range(100_000)]
print(json.dumps({"joined": joined, "grown": {name: after[name] - before[name] for name in after}, "bytes": HUGE_BYTES}))
"""


def test_what_is_loaded_moves_into_huge_pages() -> None:
    """Most of them, the objects are as they were, and little memory is added."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120
    )
    told = json.loads(ran.stdout)
    if not told["joined"]:
        pytest.skip("this kernel joins no pages on demand")
    asked = told["joined"] * told["bytes"]
    assert asked // 2 < told["grown"]["AnonHugePages"] <= asked
    assert told["grown"]["Rss"] <= asked // 4 + (4 << 20)


def test_addresses_without_memory_are_passed_over() -> None:
    """They may be of objects that are gone."""
    program = "from shapestream.serving.allocator import join_pages; print(join_pages([0, 1 << 46, 1 << 20]))"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert "0" == ran.stdout.strip()
