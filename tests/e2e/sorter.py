"""Models that sort rows of floats: their entries in a YAML, and one request."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.e2e.conftest import PATIENCE_S

SORT = """\
    models:
      - name: sort
        function: numpy:sort
        inputs: {a: {shape: "batch:1..8, n:0..64", element_type: f32}}
        outputs: {sorted: {shape: "batch, n", element_type: f32, rule: rows}}
"""


def model(name: str, function: str = "numpy:sort", n: str = "0..64") -> str:
    """The entry of a model that takes rows of floats."""
    return (
        f"      - {{name: {name}, function: '{function}', trust: true, calibration_s: 0,"
        f' inputs: {{a: {{shape: "batch:1..8, n:{n}", element_type: f32}}}},'
        ' outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}}\n'
    )


def ask(client: Any, name: str) -> list[float]:
    """One row, sorted, or negated, or whatever the model does."""
    answer: list[float] = client.infer(name, {"a": np.array([[2, 1]], np.float32)}, deadline=PATIENCE_S)["y"][
        0
    ].tolist()
    return answer
