"""A model whose module is loaded only once the test opens the gate: until then its worker tries models."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

while not (Path(os.environ["E2E_FOLDER"]) / "open").exists():
    time.sleep(0.02)


def same(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Nothing is changed."""
    return x
