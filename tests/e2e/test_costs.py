"""Measured costs, from a worker's start to its server's predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapestream_engine.calibration_cache import ENVIRONMENT

pytestmark = pytest.mark.e2e

CONFIG = """\
    models:
      - name: cleaned
        function: numpy:nan_to_num
        trust: true
        inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32, pad: {n: 0}}}
        outputs: {y: {shape: "batch, n", element_type: f32}}
    workers: [{count: 2, slots: 1, threads: 1}]
"""


def test_of_two_workers_one_measures_and_both_serve(
    workplace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits for the first and reads what it found; requests are answered as ever."""
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "costs"))
    served = workplace.serve(CONFIG)
    measured = served.wait_for("costs measured", 2)
    assert ["cache", "measured"] == sorted(event["source"] for event in measured)
    assert 1 == len({event["points"] for event in measured})
    assert measured[0]["points"] > 5
    served.wait_for("worker joined", 2)
    with served.client() as client:
        for n in (1, 7, 64):
            rows = np.full((2, n), 3.0, np.float32)
            assert np.array_equal(rows, client.infer("cleaned", {"x": rows})["y"])
