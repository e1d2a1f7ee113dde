"""A model with a scalar, as `check`, `serve`, the SDK and `why` have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.onnx_files import write_onnx

from shapestream import blocking
from shapestream.errors import InvalidRequest

pytestmark = pytest.mark.e2e

YAML = """\
    server: {listen: [ipc://s.sock]}
    models:
      - {name: free, path: m.onnx, engine: onnxruntime, calibration_s: 0, probe: {k: {integers: [1, 9]}}}
      - {name: fixed, path: m.onnx, engine: onnxruntime, calibration_s: 0, inputs: {k: {value: 5}}}
"""


def test_requests_share_calls_by_their_scalars(workplace: Any) -> None:
    """Each gets the answer of its own scalar; a fixed one need not be sent, and another one than that is invalid."""
    types = {"x": TensorProto.INT64, "k": TensorProto.INT64, "y": TensorProto.INT64}
    node = helper.make_node("Mul", ["x", "k"], ["y"])
    write_onnx(
        workplace.folder / "m.onnx", [node], {"x": ["batch", 3], "k": []}, {"y": ["batch", 3]}, types=types
    )
    served = workplace.serve(YAML)
    served.wait_for("workers ready")
    inputs = [{"x": np.full((1, 3), n), "k": np.int64(1 + n % 3)} for n in range(300)]
    with blocking.connect(f"ipc://{workplace.folder}/s.sock") as client:
        with client.stream("free", inputs, max_in_flight=64) as results:
            answers = [int(result["y"][0, 0]) for result in results]
        assert [n * (1 + n % 3) for n in range(300)] == answers
        counted = client.statistics()
        assert 300 > counted["batches"], "requests of one scalar share calls"
        assert 0 == counted["batches_failed"], "requests of two do not"
        x = np.ones((1, 3), np.int64)
        assert [[5, 5, 5]] == client.infer("fixed", {"x": x})["y"].tolist()
        assert [[5, 5, 5]] == client.infer("fixed", {"x": x, "k": np.int64(5)})["y"].tolist()
        with pytest.raises(InvalidRequest, match=r"input 'k' is always 5 \(leave it out, or send that\)"):
            client.infer("fixed", {"x": x, "k": np.int64(6)})
