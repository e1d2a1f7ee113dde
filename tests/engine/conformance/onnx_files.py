"""The models of the suite as ONNX files, for the engines that read these."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tests.engine.conformance.models import POWERS, Model

from shapestream_engine.shapes import NamedShape

_TYPES = {
    "boolean": TensorProto.BOOL,
    "i8": TensorProto.INT8,
    "i16": TensorProto.INT16,
    "i32": TensorProto.INT32,
    "i64": TensorProto.INT64,
    "u8": TensorProto.UINT8,
    "u16": TensorProto.UINT16,
    "u32": TensorProto.UINT32,
    "u64": TensorProto.UINT64,
    "f16": TensorProto.FLOAT16,
    "f32": TensorProto.FLOAT,
    "f64": TensorProto.DOUBLE,
    "bf16": TensorProto.BFLOAT16,
}


def write(model: Model, folder: Path) -> Path:
    """The model's file; dynamic dimensions have their names as symbols."""
    nodes, constants = _NODES[model.name.partition("_")[0]]
    graph = helper.make_graph(
        nodes,
        model.name,
        _values(model.inputs),
        _values(model.outputs),
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    path = folder / f"{model.name}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return path


def _values(ports: Mapping[str, tuple[str, str]]) -> list[Any]:
    values = []
    for name, (element_type, shape) in ports.items():
        parsed = NamedShape.parse(shape)
        sizes = [
            axis.minimum if axis.is_static else axis_name
            for axis_name, axis in zip(parsed.names, parsed.dimensions, strict=True)
        ]
        values.append(helper.make_tensor_value_info(name, _TYPES[element_type], sizes))
    return values


def _powers() -> list[Any]:
    nodes, last = [], "x"
    for number in range(POWERS):
        result = "y" if number == POWERS - 1 else f"r{number}"
        nodes += [
            helper.make_node("MatMul", [last, last], [f"p{number}"]),
            helper.make_node("Relu", [f"p{number}"], [result]),
        ]
        last = result
    return nodes


_NODES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "affine": (
        [helper.make_node("Mul", ["x", "two"], ["m"]), helper.make_node("Add", ["m", "one"], ["y"])],
        {"two": np.float32(2), "one": np.float32(1)},
    ),
    "pair": (
        [
            helper.make_node("Add", ["a", "b"], ["total"]),
            helper.make_node("ReduceSum", ["a", "axes"], ["sums"], keepdims=0),
        ],
        {"axes": np.array([1], np.int64)},
    ),
    "doubled": ([helper.make_node("Concat", ["x", "x"], ["y"], axis=1)], {}),
    "places": (
        [
            helper.make_node("NonZero", ["x"], ["found"]),
            helper.make_node("Transpose", ["found"], ["places"], perm=[1, 0]),
        ],
        {},
    ),
    "scaled": ([helper.make_node("Mul", ["x", "factor"], ["y"])], {}),
    "powers": (_powers(), {}),
}
