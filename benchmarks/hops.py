"""`python -m benchmarks.hops`: how many Python calls, and files, a warm lone request takes, server and client together.

The server serves the tiny model in this process; a thread is its client. A profiler in every thread counts the calls
of functions of the three packages while so many requests are answered, one after another. The median is told, and the files
that most requests touch: a few hold a heartbeat. What follows an answer counts for the next request.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import numpy as np
import typer

import shapestream_engine
from benchmarks.models import TINY, TINY_WIDTH, write_configuration
from shapestream import blocking
from shapestream_workers.cli import app

PRODUCT = tuple(
    str(Path(str(package.__file__)).parent)
    for package in (shapestream_engine, sys.modules["shapestream"], sys.modules["shapestream_workers"])
)
WARM_UP = 50


class Calls:
    """Calls of the product's functions, by file, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.by_file: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Count a call; comprehensions, and what other packages call, are left out."""
        if not self.on:
            return
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<") and code.co_filename.startswith(PRODUCT):
            self.by_file[code.co_filename] += 1


def count(calls: Calls, address: str, requests: int) -> list[Counter[str]]:
    """The calls of each request, by file."""
    counted = []
    socket = Path(address.removeprefix("ipc://"))
    while not socket.exists():
        time.sleep(0.05)
    with blocking.connect(address) as client:
        row = {"x": np.zeros((1, TINY_WIDTH), np.float32)}
        for _ in range(WARM_UP):
            client.infer(TINY, row)
        calls.on = True
        for _ in range(requests):
            calls.by_file = Counter()
            client.infer(TINY, row)
            counted.append(calls.by_file)
        calls.on = False
    return counted


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests that are counted.")] = 200,
    files: Annotated[bool, typer.Option(help="List the files.")] = False,
) -> None:
    """Prints the calls and the files of one warm request, in process."""
    os.environ.setdefault("SHAPESTREAM_ANY_FUNCTION", "1")
    with tempfile.TemporaryDirectory(prefix="ss-hops-") as name:
        path, address = write_configuration(Path(name), label="hops")
        counted: list[Counter[str]] = []

        def ask() -> None:
            try:
                counted.extend(count(calls, address, requests))
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        calls = Calls()
        threading.setprofile(calls)
        sys.setprofile(calls)
        client = threading.Thread(target=ask)
        client.start()
        app(["serve", str(path)], standalone_mode=False)
        client.join()
    touched = Counter(file for by_file in counted for file in by_file)
    usual = [file for file, number in touched.items() if 2 * number > len(counted)]
    print(f"{statistics.median(map(Counter.total, counted)):.0f} calls in {len(usual)} files")
    if files:
        for file in sorted(usual):
            print(f"{statistics.median([by_file[file] for by_file in counted]):5.0f} {file}")


if __name__ == "__main__":
    typer.run(main)
