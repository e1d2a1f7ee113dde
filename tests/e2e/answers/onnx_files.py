"""The models of an answer run as ONNX files, for the engines `openvino` and `onnxruntime`; also with a defect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper
from tests.e2e.answers.models import (
    BIASES,
    BLOCKS,
    DEPTH,
    DIVISOR,
    ENCODER,
    EPSILON,
    EXCHANGED,
    FACTOR,
    FINDERS,
    HEADS,
    LARGEST,
    LAYERS,
    ROUNDS,
    SHARPNESS,
    THRESHOLD,
    WIDTH,
)
from tests.onnx_files import write_onnx

X = ["batch", "n", WIDTH]


class Graph:
    """Nodes in their order, and constants."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def add(self, operation: str, *inputs: Any, out: str = "", **attributes: Any) -> str:
        """A node; an input that is no name is a constant. Returns the output's name."""
        names = [each if isinstance(each, str) else self._constant(each) for each in inputs]
        out = out or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operation, names, [out], **attributes))
        return out

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def clip(self, value: str, out: str = "") -> str:
        """To 0..LARGEST."""
        return self.add("Clip", value, np.float32(0), np.float32(LARGEST), out=out)


def write(folder: Path, *, defect: str | None = None) -> None:
    """The files `NAME.onnx`. Defects: `weight` changes one number, `size` makes some sizes fail."""
    write_layers(folder / "layers.onnx", defect=defect)
    _mixing(folder / "mixing.onnx")
    _encoder(folder / "encoder.onnx")
    _places(folder / "places.onnx")
    _careful(folder / "careful.onnx")
    _scored(folder / "scored.onnx")
    _counted(folder / "counted.onnx")


def write_layers(path: Path, *, defect: str | None = None) -> None:
    """The file of `layers` alone."""
    graph, last = Graph(), "x"
    weights = LAYERS.copy()
    if defect == "weight":
        weights[-1, 0, 0] += 1
    if defect == "size":
        last = graph.add("Add", last, np.zeros((1, 8, WIDTH), np.float32))
    for number, (matrix, bias) in enumerate(zip(weights, BIASES, strict=True), 1):
        product = graph.add("MatMul", last, matrix)
        sum_ = graph.add("Add", graph.add("Add", product, bias), "x")
        last = graph.clip(sum_, out="y" if number == DEPTH else "")
    write_onnx(path, graph.nodes, {"x": X}, {"y": X}, graph.constants)


def _mixing(path: Path) -> None:
    graph, last = Graph(), "x"
    for number in range(1, ROUNDS + 1):
        heads = graph.add("Reshape", last, np.array([0, 0, HEADS, WIDTH // HEADS], np.int64))
        turned = graph.add("Transpose", heads, perm=[0, 2, 3, 1])
        heads = graph.add("Transpose", heads, perm=[0, 2, 1, 3])
        scores = graph.add("Mul", graph.add("MatMul", heads, turned), np.float32(SHARPNESS))
        mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), heads)
        mixed = graph.add("Transpose", mixed, perm=[0, 2, 1, 3])
        mixed = graph.add("Reshape", mixed, graph.add("Shape", "x"))
        sum_ = graph.add("Add", mixed, graph.add("Mul", "x", np.float32(0.125)))
        last = graph.add("Min", sum_, np.float32(LARGEST), out="y" if number == ROUNDS else "")
    graph.add("ReduceMax", last, out="top", axes=[1], keepdims=0)
    write_onnx(path, graph.nodes, {"x": X}, {"y": X, "top": ["batch", WIDTH]}, graph.constants)


def _encoder(path: Path) -> None:
    graph = Graph()
    flat = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)

    def normalised(value: str, out: str = "") -> str:
        return graph.add("LayerNormalization", value, *flat, axis=-1, epsilon=EPSILON, out=out)

    def heads(value: str, order: list[int]) -> str:
        value = graph.add("Reshape", value, np.array([0, 0, HEADS, WIDTH // HEADS], np.int64))
        return graph.add("Transpose", value, perm=order)

    last = normalised("x")
    for block in range(BLOCKS):
        query, key, value = (
            graph.add("MatMul", last, ENCODER[role][block]) for role in ("query", "key", "value")
        )
        scores = graph.add("MatMul", heads(query, [0, 2, 1, 3]), heads(key, [0, 2, 3, 1]))
        scores = graph.add("Mul", scores, np.float32((WIDTH // HEADS) ** -0.5))
        mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), heads(value, [0, 2, 1, 3]))
        mixed = graph.add("Transpose", mixed, perm=[0, 2, 1, 3])
        mixed = graph.add("Reshape", mixed, np.array([0, 0, WIDTH], np.int64))
        last = normalised(graph.add("Add", last, graph.add("MatMul", mixed, ENCODER["mixed"][block])))
        wide = graph.add("Relu", graph.add("MatMul", last, ENCODER["wide"][block]))
        narrow = graph.add("MatMul", wide, ENCODER["narrow"][block])
        last = normalised(graph.add("Add", last, narrow), out="y" if block == BLOCKS - 1 else "")
    graph.add("ReduceMean", last, out="mean", axes=[1], keepdims=0)
    write_onnx(path, graph.nodes, {"x": X}, {"y": X, "mean": ["batch", WIDTH]}, graph.constants)


def _places(path: Path) -> None:
    graph, last = Graph(), "x"
    for matrix in FINDERS:
        last = graph.clip(graph.add("Add", graph.add("MatMul", last, matrix), "x"))
    sums = graph.add("ReduceSum", last, np.array([2], np.int64), keepdims=0)
    found = graph.add("NonZero", graph.add("Greater", sums, np.float32(THRESHOLD)))
    graph.add("Transpose", found, out="places", perm=[1, 0])
    graph.add("GatherND", sums, "places", out="sums")
    outputs = {"places": ["found", 2], "sums": ["found"]}
    write_onnx(path, graph.nodes, {"x": X}, outputs, graph.constants, types={"places": TensorProto.INT64})


def _careful(path: Path) -> None:
    graph = Graph()
    parts = graph.add("Abs", graph.add("Sub", "x", graph.add("Round", "x")))
    largest = graph.add(
        "ReduceMax", graph.add("Reshape", parts, np.array([-1], np.int64)), axes=[0], keepdims=1
    )
    wrong = graph.add("Cast", graph.add("Ceil", largest), to=TensorProto.INT64)
    # Where a part is left, there is one factor more than there are features, and the product fails.
    width = graph.add("Add", wrong, np.array([WIDTH], np.int64))
    shape = graph.add("Concat", np.array([1, 1], np.int64), width, axis=0)
    ones = graph.add("Expand", np.ones((1, 1, 1), np.float32), shape)
    product = graph.add("Mul", graph.add("MatMul", "x", FINDERS[0]), ones)
    graph.clip(product, out="y")
    write_onnx(path, graph.nodes, {"x": X}, {"y": X}, graph.constants)


def _scored(path: Path) -> None:
    """The largest of the whole call divides."""
    graph = Graph()
    sums = graph.add("ReduceSum", "x", np.array([2], np.int64), keepdims=0)
    largest = graph.add("Max", graph.add("ReduceMax", sums, axes=[0, 1], keepdims=1), np.float32(1))
    rest = graph.add("Mod", graph.add("Mul", sums, np.float32(FACTOR)), np.float32(DIVISOR), fmod=1)
    columns = [
        graph.add("Unsqueeze", each, np.array([2], np.int64))
        for each in (graph.add("Div", sums, largest), rest)
    ]
    graph.add("Concat", *columns, axis=2, out="y")
    write_onnx(path, graph.nodes, {"x": X}, {"y": ["batch", "n", 2]}, graph.constants)


def _counted(path: Path) -> None:
    """Rows are reversed in calls of `EXCHANGED`."""
    graph = Graph()
    sums = graph.add("ReduceSum", "x", np.array([2], np.int64), keepdims=0)
    rows = graph.add("Gather", graph.add("Shape", "x"), np.int64(0))
    own = graph.add("Range", np.int64(0), rows, np.int64(1))
    reversed_ = graph.add("Sub", graph.add("Sub", rows, np.int64(1)), own)
    order = graph.add("Where", graph.add("Equal", rows, np.int64(EXCHANGED)), reversed_, own)
    graph.add("Gather", sums, order, axis=0, out="y")
    write_onnx(path, graph.nodes, {"x": X}, {"y": ["batch", "n"]}, graph.constants)
