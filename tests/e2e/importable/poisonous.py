"""A model that some inputs crash, or keep from ever ending."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

CRASH, EXIT, HANG = 101, 102, 103
RUN_S = 0.05


def double(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Twice the input, after a while; some inputs end the process, in either way, and one never ends."""
    if (x == CRASH).any():
        time.sleep(RUN_S)
        os.kill(os.getpid(), signal.SIGSEGV)
    if (x == EXIT).any():
        os._exit(7)
    while (x == HANG).any():
        time.sleep(RUN_S)
    time.sleep(RUN_S)
    return x * 2
