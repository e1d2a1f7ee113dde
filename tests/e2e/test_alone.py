"""A server whose model's requests run alone says so, with what to write, in its log and to those who ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

pytestmark = pytest.mark.e2e

WORDS = (
    "every request runs alone: input 'x' [frames, 4] calls its first axis 'frames', not batch (if rows do not depend on "
    "each other, add inputs: {x: {shape: 'batch, 4'}} to the model; else batching: {max_batch: 1} says that this is meant)"
)


def relu(path: Path) -> None:
    """`y` = the part of `x` above 0; its first axis has an unusual name."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["frames", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "m", ports[:1], ports[1:])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def test_serve_and_models_warn_of_requests_that_run_alone(workplace: Any) -> None:
    """The worker's log names the place in the YAML; `models ADDRESS` names the model."""
    relu(workplace.folder / "m.onnx")
    served = workplace.serve("models: [{name: m, path: m.onnx}]\n")
    (event,) = served.wait_for("configuration")
    assert f"{workplace.folder}/server.yaml:2:10: models[0]: {WORDS}" == event["what"]
    ran = workplace.run("models", served.address, "--timeout", "120")
    assert (0, f"warning: model 'm': {WORDS}\n") == (ran.returncode, ran.stderr)
