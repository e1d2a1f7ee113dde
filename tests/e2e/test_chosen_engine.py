"""The engine of an ONNX file, as `serve` chooses and tells it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.onnx_files import write_onnx

from shapestream import blocking

pytestmark = pytest.mark.e2e

MOMENTS = np.array([[1.7e9 + 0.125, 1.7e9 + 1, 1.7e9 - 3]])
"""Neighbours of f32 lie 128 apart there."""


def test_a_model_that_openvino_narrows_is_served_with_every_bit(workplace: Any) -> None:
    """By ONNX Runtime; another one beside it by OpenVINO. The log has engine and reason, and what the worker announced."""
    difference = helper.make_node("Sub", ["x", "moment"], ["y"])
    for name, element_type, moment in (
        ("clock", TensorProto.DOUBLE, np.array(1.7e9)),
        ("plain", TensorProto.FLOAT, np.array(1, np.float32)),
    ):
        types = {"x": element_type, "y": element_type}
        ports = {"x": ["batch", 3]}, {"y": ["batch", 3]}
        write_onnx(workplace.folder / f"{name}.onnx", [difference], *ports, {"moment": moment}, types=types)
    served = workplace.serve(
        "    server: {listen: [ipc://s.sock]}\n"
        "    models:\n"
        "      - {name: clock, path: clock.onnx, calibration_s: 0}\n"
        "      - {name: plain, path: plain.onnx, calibration_s: 0}\n"
    )
    served.wait_for("workers ready")
    with blocking.connect(f"ipc://{workplace.folder}/s.sock") as client:
        assert [[0.125, 1.0, -3.0]] == client.infer("clock", {"x": MOMENTS})["y"].tolist()
        assert [[0.0, 1.0]] == client.infer("plain", {"x": np.array([[1, 2, 3]], np.float32)})["y"][
            :, :2
        ].tolist()
    (chosen,) = served.events("engine chosen")
    assert ("clock", "onnxruntime") == (chosen["model"], chosen["engine"])
    assert chosen["why"].startswith("openvino: model 'clock': OpenVINO computes f64 as f32")
    compiled = {event["model"]: event["engine"] for event in served.events("model compiled")}
    assert {"clock": "onnxruntime", "plain": "openvino"} == compiled
    (joined,) = served.events("worker joined")
    announced = {model: engine.split("==")[0] for model, engine in joined["engines"].items()}
    assert {"clock": "onnxruntime onnxruntime", "plain": "openvino openvino"} == announced
