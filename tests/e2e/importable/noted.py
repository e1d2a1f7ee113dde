"""A model that the tests serve: it writes down each request that it is given, with the time, before it answers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

RUN_S = 0.004


def noted(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Twice the input and one.

    A row begins with the request's number and its deadline by the clock that all processes of a host share, 0 for none.
    """
    now = time.monotonic()
    lines = "".join(f"{number:.0f} {now:.6f} {deadline:.6f}\n" for number, deadline in x[:, :2])
    journal = os.open(Path(os.environ["E2E_FOLDER"]) / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(journal, lines.encode())
    finally:
        os.close(journal)
    time.sleep(RUN_S)
    return x * 2 + 1
