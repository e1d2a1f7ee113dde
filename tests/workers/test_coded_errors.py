"""What no engine says clearly: the command's own sentence, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op
from tests.engine.slot_bench import SlotBench
from typer.testing import CliRunner

from shapestream_engine import InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.backends.openvino.compiling import NEWEST_OPSET
from shapestream_workers.cli import app

onnx = pytest.importorskip("onnx")


def relu(path: Path, opset: int) -> None:
    """An ONNX file that asks for this version of the operators, and for one of another domain."""
    ports = [onnx.helper.make_tensor_value_info(name, 1, ["batch", 4]) for name in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "m", ports[:1], ports[1:])
    opsets = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("com.microsoft", 999)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_operators_of_a_version_that_does_not_exist_are_refused(tmp_path: Path, engine: str) -> None:
    """OpenVINO would run them by the meaning of an older version."""
    relu(tmp_path / "m.onnx", 99)
    (tmp_path / "x.yaml").write_text(f"models:\n  - {{name: m, path: m.onnx, engine: {engine}}}\n")
    ran = CliRunner().invoke(app, ["check", str(tmp_path / "x.yaml")])
    assert 3 == ran.exit_code
    assert "models[0].path: cannot read the model" in ran.stderr
    assert "opset 99" in ran.stderr.lower()
    if engine == "openvino":
        assert "(export it with an older opset, or try engine: onnxruntime)" in ran.stderr


def test_the_newest_operators_are_those_of_the_package_onnx(tmp_path: Path) -> None:
    """The pinned versions of both packages are of the same months; operators of that version are read."""
    assert onnx.defs.onnx_opset_version() == NEWEST_OPSET
    relu(tmp_path / "m.onnx", NEWEST_OPSET)
    compile_model(tmp_path / "m.onnx").close()


def test_a_request_without_elements_is_told_how_to_be_refused(capfd: pytest.CaptureFixture[str]) -> None:
    """OpenVINO's convolution ends in an overflow there: the shape and the bounds to state are in the error."""
    x = op.parameter([-1, 3, -1, -1], np.float32, name="x")
    weights: Any = [op.constant(np.ones(shape, np.float32)) for shape in ((16, 3, 3, 3), (32, 16, 3, 3))]
    y = op.convolution(x, weights[0], [2, 2], [1, 1], [1, 1], [1, 1])
    y = op.convolution(y, weights[1], [1, 1], [1, 1], [1, 1], [1, 1])
    y.output(0).get_tensor().set_names({"y"})
    spec = ModelSpec(
        name="m",
        model=ov.Model([op.result(y)], [x]),
        inputs={"x": InputSpec(shape="batch, 3, height, width")},
        outputs={"y": OutputSpec(rule={"rule": "rows"})},
    )
    report = SlotBench(compile_model(spec)).run({"x": np.ones((1, 3, 0, 40), np.float32)})
    assert "model_error" == report.code
    assert report.message.endswith(
        "(input 'x' has no elements, [1, 3, 0, 40]; if the model takes no such sizes, height:1.. in its shape refuses "
        "them on arrival)"
    )
