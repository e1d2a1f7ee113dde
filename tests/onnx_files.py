"""ONNX files for tests: any graph, a classifier as scikit-learn exports it, and one with its weights in another file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Ports = Mapping[str, Sequence[Any]]
"""Sizes of each port's axes by its name: a name is a `dim_param`, None an axis of which the file says nothing."""


def write_onnx(
    path: Path,
    nodes: Sequence[Any],
    inputs: Ports,
    outputs: Ports,
    known: Mapping[str, Any] | None = None,
    *,
    types: Mapping[str, int] | None = None,
    extra: Sequence[Any] = (),
    opset: int = 17,
    domains: Mapping[str, int] | None = None,
) -> Path:
    """Write a graph with the constants `known`. Ports are f32 unless `types` says else; `extra` are other outputs.

    `domains`: versions of operator sets beside ONNX's own.
    """
    found = types or {}

    def infos(ports: Ports) -> list[Any]:
        return [
            helper.make_tensor_value_info(name, found.get(name, TensorProto.FLOAT), sizes)
            for name, sizes in ports.items()
        ]

    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in (known or {}).items()]
    graph = helper.make_graph(list(nodes), "graph", infos(inputs), [*infos(outputs), *extra], constants)
    versions = {"": opset, "ai.onnx.ml": 1, **(domains or {})}
    opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8 if opset < 20 else 9), path)
    return path


def write_classifier(path: Path, *, zipmap: bool) -> Path:
    """A classifier of scikit-learn, as skl2onnx writes it: its first axis has neither a size nor a name.

    The scores are a table, or with `zipmap` one mapping per row.
    """
    table = "scores" if zipmap else "y"
    classifier = helper.make_node(
        "LinearClassifier",
        ["x"],
        ["label", table],
        domain="ai.onnx.ml",
        classlabels_ints=[0, 1],
        coefficients=[0.5, -1.0, 1.0, 0.3],
        intercepts=[0.1, 0.0],
        multi_class=1,
        post_transform="SOFTMAX",
    )
    types = {"label": TensorProto.INT64}
    if not zipmap:
        return write_onnx(
            path, [classifier], {"x": [None, 2]}, {"label": [None], "y": [None, 2]}, types=types
        )
    mapping = helper.make_node("ZipMap", [table], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    numbers = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    rows = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.INT64, numbers))
    extra = [helper.make_value_info("y", rows)]
    return write_onnx(
        path, [classifier, mapping], {"x": [None, 2]}, {"label": [None]}, types=types, extra=extra
    )


def write_forest(path: Path) -> Path:
    """A random forest of scikit-learn, as skl2onnx writes it: each tree votes for one of five classes.

    Votes are often equal. On two threads ONNX Runtime adds them in another order for one row than for several, so the last
    bit of a sum decides the label: for 3 in 100 requests of normal numbers.
    """
    random = np.random.default_rng(0)
    trees, classes, features, inner = 90, 5, 8, 2**4 - 1
    per_tree = 2 * inner + 1
    tree, node = np.repeat(np.arange(trees), per_tree), np.tile(np.arange(per_tree), trees)
    is_inner = node < inner
    leaves = np.flatnonzero(~is_inner)
    attributes = {
        "nodes_treeids": tree,
        "nodes_nodeids": node,
        "nodes_featureids": np.where(is_inner, random.integers(0, features, tree.size), 0),
        "nodes_values": np.where(is_inner, random.normal(size=tree.size), 0.0),
        "nodes_truenodeids": np.where(is_inner, 2 * node + 1, 0),
        "nodes_falsenodeids": np.where(is_inner, 2 * node + 2, 0),
        "class_treeids": tree[leaves],
        "class_nodeids": node[leaves],
        "class_ids": random.integers(0, classes, leaves.size),
        "class_weights": np.full(leaves.size, 1 / trees),
        "classlabels_int64s": np.arange(classes),
    }
    made = helper.make_node(
        "TreeEnsembleClassifier",
        ["x"],
        ["label", "y"],
        domain="ai.onnx.ml",
        nodes_modes=["BRANCH_LEQ" if each else "LEAF" for each in is_inner],
        **{name: value.tolist() for name, value in attributes.items()},
    )
    outputs = {"label": [None], "y": [None, classes]}
    return write_onnx(path, [made], {"x": [None, features]}, outputs, types={"label": TensorProto.INT64})


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
