"""Plain OpenVINO, with nothing of ours: what a call that failed leaves in a dynamic model.

docs/backends.md draws the consequences. Once this fails, OpenVINO has mended it, and no model has to be compiled anew.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op


@pytest.mark.seeds("S002-21", "S003-34")
def test_a_failed_call_spoils_the_next_one_of_the_shape_before() -> None:
    """A call of that shape fails with the shapes of the failed one; a call of another shape between them heals it."""
    x = node = op.parameter([-1, -1], np.float32)
    for _ in range(30):
        node = op.relu(op.matmul(node, node, False, False))
    model = ov.Model([op.result(node)], [x])
    request = ov.Core().compile_model(model, "CPU", {"NUM_STREAMS": "1"}).create_infer_request()

    def call(array: np.ndarray[Any, Any]) -> list[list[float]]:
        request.start_async([array])
        request.wait()
        numbers: list[list[float]] = request.get_output_tensor(0).data.tolist()
        return numbers

    small, other = np.eye(8, dtype=np.float32), np.eye(2, dtype=np.float32)
    bad = np.ones((3, 4), np.float32)
    assert small.tolist() == call(small)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"shape A: \(3\.4\)"):
            call(bad)
        with pytest.raises(RuntimeError, match=r"shape A: \(3\.4\)"):
            call(small)
        assert other.tolist() == call(other)
        assert small.tolist() == call(small)
