"""`shapestream serve CONFIG` for `shapestream tune`: the same command, which also ends when its parent does."""

from __future__ import annotations

import sys

from shapestream_workers.cli import app
from shapestream_workers.process import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    app(["serve", *sys.argv[1:]])
