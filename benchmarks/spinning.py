"""A process that computes for as long as stdin says, in seconds per line: `python benchmarks/spinning.py`."""

from __future__ import annotations

import sys
import time


def spin(seconds: float) -> None:
    """Use so many seconds of CPU in this thread."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def main() -> None:
    """Work until stdin ends."""
    for line in sys.stdin:
        spin(float(line))


if __name__ == "__main__":
    main()
