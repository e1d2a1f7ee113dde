"""Processes that were started with closed streams, and what they keep."""

from __future__ import annotations

import gc
import re
import subprocess
import sys

import pytest

from shapestream_workers.process import keep_what_is_loaded, name_of_start

SCRIPT = """
import os, sys
from shapestream_workers.process import open_standard_streams
open_standard_streams()
assert os.open(os.devnull, os.O_RDONLY) > 2
print("a line", file=sys.stdout, flush=True)
print("a line", file=sys.stderr, flush=True)
sys.exit(0 if sys.stdin is not None else 9)
"""


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams_are_opened_on_nothing(closed: str) -> None:
    """Their numbers go to nobody else, and what is written there goes nowhere."""
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, SCRIPT]
    assert 0 == subprocess.run(command, check=False, timeout=60).returncode


def test_no_two_starts_have_the_same_name() -> None:
    """Neither with the same pid on hosts of the same name, as containers are, nor with one that has come again."""
    names = {name_of_start("worker-box") for _ in range(100)}
    assert 100 == len(names)
    assert all(re.fullmatch("worker-box-[0-9a-f]{8}", name) for name in names)


def test_what_is_loaded_is_looked_at_no_more() -> None:
    """A full collection sees what came later."""
    try:
        keep_what_is_loaded()
        later: list[object] = [[]]
        assert [later[0]] == [one for one in gc.get_objects() if one is later[0]]
        assert len(gc.get_objects()) < gc.get_freeze_count()
    finally:
        gc.unfreeze()
