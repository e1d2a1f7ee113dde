"""A model of three workers: `w2` comes up when the file `go` is there, and `w1` dies where there is a file `broken`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

_FOLDER = Path(os.environ["E2E_FOLDER"])
_ROLE = sys.argv[sys.argv.index("--name") + 1] if "--name" in sys.argv else ""

if _ROLE == "w1" and (_FOLDER / "broken").exists():
    os._exit(9)
while _ROLE == "w2" and not (_FOLDER / "go").exists():
    time.sleep(0.01)


def negated(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Answers otherwise than `numpy:sort` does."""
    return -np.sort(a)
