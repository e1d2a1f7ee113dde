"""Plain OpenVINO, with nothing of ours: how MulticlassNms orders scores that differ by less than 1e-6.

docs/backends.md draws the consequences. Once this fails, OpenVINO has mended it.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

BEST = np.float32(0.9)


@pytest.mark.seeds("S003-08")
@pytest.mark.parametrize(("step", "is_sorted"), [(6e-8, False), (9e-7, False), (1.2e-6, True)])
def test_close_scores_come_in_no_order(step: float, is_sorted: bool) -> None:
    """Two scores are sorted, best first, only if they differ by 1e-6; with 17 in a picture such a sort leaves its memory."""
    boxes = op.parameter([1, 2, 4], np.float32)
    scores = op.parameter([1, 1, 2], np.float32)
    found = op.multiclass_nms(
        boxes, scores, sort_result_type="score", output_type="i32", iou_threshold=0.4
    ).output(0)
    model = ov.Model([op.result(found)], [boxes, scores])
    request = ov.Core().compile_model(model, "CPU").create_infer_request()
    apart = np.array([[[0, 0, 1, 1], [2, 2, 3, 3]]], np.float32)
    request.infer([apart, np.array([[[BEST - step, BEST]]], np.float32)])
    column = request.get_output_tensor(0).data[:, 1]
    assert is_sorted == (column[0] > column[1]), column
