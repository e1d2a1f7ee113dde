"""Text encoders for tests, as ONNX files: ids and a mask in, a vector per token out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper
from tests.onnx_files import write_onnx

IDS, MASK, TYPES, POSITIONS = "input_ids", "attention_mask", "token_type_ids", "position_ids"


def table(vocabulary: int, hidden: int) -> np.ndarray:
    """The vector of each token, f32 [vocabulary, hidden]."""
    return np.random.default_rng(7).standard_normal((vocabulary, hidden)).astype(np.float32)


def write_encoder(
    path: Path,
    *,
    vocabulary: int = 50,
    hidden: int = 6,
    inputs: Sequence[str] = (IDS, MASK),
    outputs: Sequence[str] = ("last_hidden_state",),
    leaks: bool = False,
) -> Path:
    """Write an encoder: each token's vector, plus half of the mean of all vectors of its text under the mask.

    `leaks`: the mean is over all positions, padding included.
    """
    nodes = [
        helper.make_node("Gather", ["table", IDS], ["words"]),
        helper.make_node("Cast", [MASK], ["present"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["present", "last"], ["column"]),
        helper.make_node("Mul", ["words", "column"], ["own"]),
        helper.make_node("ReduceSum", ["words" if leaks else "own", "middle"], ["total"], keepdims=1),
        helper.make_node("ReduceSum", ["column", "middle"], ["count"], keepdims=1),
        helper.make_node("Div", ["total", "count"], ["mean"]),
        helper.make_node("Mul", ["mean", "half"], ["context"]),
        helper.make_node("Add", ["words", "context"], ["seen"]),
    ]
    last = "seen"
    for name in inputs:
        if name in (TYPES, POSITIONS):
            nodes += [
                helper.make_node("Cast", [name], [f"{name}.f"], to=TensorProto.FLOAT),
                helper.make_node("Unsqueeze", [f"{name}.f", "last"], [f"{name}.column"]),
                helper.make_node("Add", [last, f"{name}.column"], [f"{name}.added"]),
            ]
            last = f"{name}.added"
    ports: dict[str, list[str | int]] = {}
    for name in outputs:
        if name == "sentence_embedding":
            nodes.append(helper.make_node("ReduceMax", [last], [name], axes=[1], keepdims=0))
            ports[name] = ["batch", hidden]
        else:
            nodes.append(helper.make_node("Identity", [last], [name]))
            ports[name] = ["batch", "seq", hidden]
    return write_onnx(
        path,
        nodes,
        {name: ["batch", "seq"] for name in inputs},
        ports,
        {
            "table": table(vocabulary, hidden),
            "last": np.array([2], np.int64),
            "middle": np.array([1], np.int64),
            "half": np.array(0.5, np.float32),
        },
        types=dict.fromkeys(inputs, TensorProto.INT64),
    )
