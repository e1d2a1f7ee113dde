"""Real model files for the tests of this folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def write_scaling(path: Path, factor: float) -> None:
    """An ONNX file whose output is the input times `factor`; its weights are in a file beside it.

    Files that are there are replaced as a deployment should: by others of their names, never written into.
    """
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 64]) for name in ("x", "y")]
    weights = numpy_helper.from_array(np.full(64, factor, np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"])], "m", ports[:1], ports[1:], [weights]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    folder = path.parent / "new"
    folder.mkdir()
    data = f"{path.stem}.weights"
    onnx.save(model, str(folder / path.name), save_as_external_data=True, location=data, size_threshold=0)
    for name in (data, path.name):
        os.replace(folder / name, path.parent / name)
    folder.rmdir()
