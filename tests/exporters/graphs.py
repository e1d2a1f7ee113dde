"""ONNX files that both engines read: two detectors with NonMaxSuppression inside, and MiniLM from its safetensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from examples.embeddings.weights import BertWeights
from onnx import NodeProto, TensorProto, helper
from tests.onnx_files import write_onnx

SIZE, STRIDE, CLASSES, ROOM = 24, 4, 2, 10
"""Pixels of a picture's side, pixels between anchors, classes of boxes, and boxes that a table has room for."""
ANCHORS = (SIZE // STRIDE) ** 2
IOU, SCORE = 0.4, 0.55


class _Nodes:
    """A graph under construction; each operator returns the name of its first output."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.known: dict[str, np.ndarray] = {}

    def constant(self, value: np.ndarray) -> str:
        """A tensor."""
        name = f"c{len(self.known)}"
        self.known[name] = value
        return name

    def integers(self, *values: int) -> str:
        """An i64 vector."""
        return self.constant(np.array(values, np.int64))

    def floats(self, *values: float) -> str:
        """An f32 vector."""
        return self.constant(np.array(values, np.float32))

    def __call__(self, kind: str, *inputs: str, outputs: tuple[str, ...] = (), **attributes: object) -> str:
        """Add an operator."""
        names = outputs or (f"n{len(self.nodes)}",)
        self.nodes.append(helper.make_node(kind, list(inputs), list(names), **attributes))
        return names[0]


def _heads(add: _Nodes) -> tuple[str, str]:
    """Boxes [batch, anchors, 4] and scores [batch, classes, anchors] of `image` [batch, 1, SIZE, SIZE]."""
    random = np.random.default_rng(5)

    def convolution(data: str, *shape: int, scale: float, stride: int = 1) -> str:
        weights = add.constant((scale * random.normal(size=shape)).astype(np.float32))
        return add("Conv", data, weights, strides=[stride, stride])

    features = add("Relu", convolution("image", 8, 1, STRIDE, STRIDE, scale=0.5, stride=STRIDE))
    moves = add("Tanh", convolution(features, 4, 8, 1, 1, scale=0.3))
    logits = convolution(features, CLASSES, 8, 1, 1, scale=0.5)
    flat = add.integers(0, 0, -1)
    per_anchor = add("Transpose", add("Reshape", moves, flat), perm=[0, 2, 1])
    places = np.stack(np.divmod(np.arange(ANCHORS), SIZE // STRIDE), axis=1)
    anchors = add.constant(np.concatenate([places, places + 2], axis=1).astype(np.float32))
    boxes = add("Add", anchors, add("Mul", per_anchor, add.floats(0.4)))
    return boxes, add("Sigmoid", add("Reshape", logits, flat))


def _kept(add: _Nodes, boxes: str, scores: str, output: str) -> str:
    """Rows of (batch, class, box)."""
    limits = (add.integers(100), add.floats(IOU), add.floats(SCORE))
    return add("NonMaxSuppression", boxes, scores, *limits, outputs=(output,))


def write_rows(path: Path) -> Path:
    """A detector with one row per box of all pictures: `selected` [n, 3] with the picture in column 0, `scores` [n, 1]."""
    add = _Nodes()
    boxes, scores = _heads(add)
    selected = _kept(add, boxes, scores, "selected")
    add("Unsqueeze", add("GatherND", scores, selected), add.integers(1), outputs=("scores",))
    return write_onnx(
        path,
        add.nodes,
        {"image": ["batch", 1, SIZE, SIZE]},
        {"selected": ["n", 3], "scores": ["n", 1]},
        add.known,
        types={"selected": TensorProto.INT64},
    )


def write_tables(path: Path) -> Path:
    """A detector with a table per picture: the best `ROOM` anchors after suppression: `boxes`, `anchors`, `scores`."""
    add = _Nodes()
    boxes, scores = _heads(add)
    selected = _kept(add, boxes, scores, "selected")
    zeros = add("Mul", scores, add.floats(0))
    updates = add("GatherND", scores, selected)
    masked = add("ScatterND", zeros, selected, updates)
    best = add("ReduceMax", masked, axes=[1], keepdims=0)
    add("TopK", best, add.integers(ROOM), outputs=("scores", "anchors"), axis=1)
    index = add("Unsqueeze", "anchors", add.integers(2))
    add("GatherND", boxes, index, outputs=("boxes",), batch_dims=1)
    return write_onnx(
        path,
        add.nodes,
        {"image": ["batch", 1, SIZE, SIZE]},
        {"boxes": ["batch", ROOM, 4], "anchors": ["batch", ROOM], "scores": ["batch", ROOM]},
        add.known,
        types={"anchors": TensorProto.INT64},
    )


def write_minilm(path: Path, weights: BertWeights) -> Path:
    """MiniLM as exporters write it: `input_ids` [batch, seq] to `embedding` [batch, 384], the mean of all tokens."""
    add = _Nodes()

    def tensor(name: str) -> str:
        add.known[name] = weights.tensors[name]
        return name

    def linear(name: str, data: str) -> str:
        matrix = add.constant(np.ascontiguousarray(weights.tensors[f"{name}.weight"].T))
        return add("Add", add("MatMul", data, matrix), tensor(f"{name}.bias"))

    def norm(name: str, data: str) -> str:
        scale, bias = tensor(f"{name}.weight"), tensor(f"{name}.bias")
        return add("LayerNormalization", data, scale, bias, axis=-1, epsilon=weights.layer_norm_eps)

    def heads(name: str, data: str, perm: list[int]) -> str:
        split = add("Reshape", linear(name, data), add.integers(0, 0, weights.heads, -1))
        return add("Transpose", split, perm=perm)

    words = add("Gather", tensor("embeddings.word_embeddings.weight"), "input_ids")
    length = add("Gather", add("Shape", "input_ids"), add.integers(1))
    every = tensor("embeddings.position_embeddings.weight")
    positions = add("Slice", every, add.integers(0), length, add.integers(0))
    segment = add.constant(weights.tensors["embeddings.token_type_embeddings.weight"][0])
    hidden = norm("embeddings.LayerNorm", add("Add", add("Add", words, positions), segment))
    width = weights.tensors["embeddings.LayerNorm.weight"].size
    for number in range(weights.layers):
        layer = f"encoder.layer.{number}"
        query = heads(f"{layer}.attention.self.query", hidden, [0, 2, 1, 3])
        key = heads(f"{layer}.attention.self.key", hidden, [0, 2, 3, 1])
        value = heads(f"{layer}.attention.self.value", hidden, [0, 2, 1, 3])
        scaled = add("Div", add("MatMul", query, key), add.floats(np.sqrt(width / weights.heads)))
        mixed = add("MatMul", add("Softmax", scaled, axis=-1), value)
        mixed = add("Reshape", add("Transpose", mixed, perm=[0, 2, 1, 3]), add.integers(0, 0, -1))
        attended = linear(f"{layer}.attention.output.dense", mixed)
        hidden = norm(f"{layer}.attention.output.LayerNorm", add("Add", hidden, attended))
        wide = linear(f"{layer}.intermediate.dense", hidden)
        error = add("Add", add("Erf", add("Div", wide, add.floats(np.sqrt(2)))), add.floats(1))
        expanded = add("Mul", add("Mul", wide, error), add.floats(0.5))
        hidden = norm(
            f"{layer}.output.LayerNorm", add("Add", hidden, linear(f"{layer}.output.dense", expanded))
        )
    mean = add("ReduceMean", hidden, axes=[1], keepdims=0)
    length = add("ReduceL2", mean, axes=[1], keepdims=1)
    add("Div", mean, length, outputs=("embedding",))
    return write_onnx(
        path,
        add.nodes,
        {"input_ids": ["batch", "seq"]},
        {"embedding": ["batch", width]},
        add.known,
        types={"input_ids": TensorProto.INT64},
    )
