"""Processes that were started with closed streams, and what they keep."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from shapestream_workers.process import keep_what_is_loaded

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


def test_what_is_loaded_is_looked_at_no_more() -> None:
    """A full collection sees what came later."""
    try:
        keep_what_is_loaded()
        later: list[object] = [[]]
        assert [later[0]] == [one for one in gc.get_objects() if one is later[0]]
        assert len(gc.get_objects()) < gc.get_freeze_count()
    finally:
        gc.unfreeze()
