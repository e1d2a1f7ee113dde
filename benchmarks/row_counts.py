"""`python -m benchmarks.row_counts`: which kernels give a row other last bits by the number of rows of its call.

An engine chooses among kernels by the sizes of a call, so sums run in another order for one row than for several, or
beyond some number of rows. docs/backends.md and the advice about labels rely on what this program tells. It depends on
versions, threads and instruction sets, so no test asserts it. The program never fails: each operator is tried in a
process of its own, since some end it.

    python -m benchmarks.row_counts                              # every operator, on both engines, with 1 and 2 threads
    python -m benchmarks.row_counts --only "MatMul, 256 x 10"
    LD_PRELOAD=build/avx2.so python -m benchmarks.row_counts     # as on a CPU with AVX2 alone (make build/avx2.so)
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import onnx
import typer
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from benchmarks.openvino_habits import instructions
from benchmarks.report import Report
from shapestream_engine import EngineError, InputSpec, ModelSpec, compile_model

Array: TypeAlias = np.ndarray[Any, Any]

COUNTS = (*range(1, 34), 50, 51, 64, 129)
"""Rows of a call. ONNX Runtime's trees change at 51; kernels of matrices have blocks of up to 16 rows."""
MOST_S = 120.0
"""An operator that takes longer is told as one that does not end: each takes below 10 s on an idle core."""
ENGINES = ("onnxruntime", "openvino")
THREADS = (1, 2)
TREES = 100
"""More than 80, from which ONNX Runtime divides the trees of a lone row among its threads."""
DEPTH = 6
EQUAL = "equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One operator, or a few, over `x` with rows of one shape; the result is `y`."""

    row: tuple[int, ...]
    nodes: Sequence[onnx.NodeProto]
    known: Mapping[str, Array] = field(default_factory=dict)
    element_type: int = TensorProto.FLOAT
    integers: int | None = None
    """Inputs are whole numbers below this; None: normally distributed."""
    result: int | None = None
    """The element type of `y`; None: that of `x`."""
    result_row: tuple[int, ...] | None = None
    """The shape of a row of `y`, if ONNX does not infer it."""
    engines: tuple[str, ...] = ENGINES

    def write(self, folder: Path) -> Path:
        """Write the ONNX file."""
        result = self.element_type if self.result is None else self.result
        sizes: list[str | int | None] | None = (
            None if self.result_row is None else ["batch", *self.result_row]
        )
        graph = helper.make_graph(
            list(self.nodes),
            "graph",
            [helper.make_tensor_value_info("x", self.element_type, ["batch", *self.row])],
            [helper.make_tensor_value_info("y", result, sizes)],
            [numpy_helper.from_array(value, name) for name, value in self.known.items()],
        )
        versions = {"": 17, "ai.onnx.ml": 3, "com.microsoft": 1}
        opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
        path = folder / "graph.onnx"
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
        return path

    def rows(self, random: np.random.Generator, count: int) -> Array:
        """Draw different rows."""
        shape = (count, *self.row)
        if self.integers is None:
            values: Array = random.normal(size=shape)
        else:
            values = random.integers(0, self.integers, shape)
        return values.astype(helper.tensor_dtype_to_np_dtype(self.element_type))


# ---------------------------------------------------------------- the operators


def _numbers(*shape: int, scale: float = 0.1) -> Array:
    return (scale * np.random.default_rng(sum(shape)).normal(size=shape)).astype(np.float32)


def _one(kind: str, *row: int, more: Mapping[str, Array] | None = None, **attributes: Any) -> Graph:
    """One operator over x, with constants as its further inputs."""
    known = more or {}
    return Graph(row=row, nodes=[helper.make_node(kind, ["x", *known], ["y"], **attributes)], known=known)


def _microsoft(graph: Graph) -> Graph:
    """An operator of ONNX Runtime's own, which OpenVINO does not read."""
    for node in graph.nodes:
        node.domain = "com.microsoft"
    return Graph(row=graph.row, nodes=graph.nodes, known=graph.known, engines=("onnxruntime",))


def _product(inner: int, outer: int, *lead: int, element_type: int = TensorProto.FLOAT) -> Graph:
    weights = _numbers(inner, outer).astype(helper.tensor_dtype_to_np_dtype(element_type))
    return Graph(
        row=(*lead, inner),
        nodes=[helper.make_node("MatMul", ["x", "w"], ["y"])],
        known={"w": weights},
        element_type=element_type,
    )


def _attention(length: int, width: int) -> Graph:
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "t"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "x"], ["y"]),
    ]
    return Graph(row=(length, width), nodes=nodes)


def _convolution(channels: int, size: int, out: int, kernel: int, group: int = 1) -> Graph:
    weights = _numbers(out, channels // group, kernel, kernel)
    pads = [kernel // 2] * 4
    return _one("Conv", channels, size, size, more={"w": weights}, group=group, pads=pads)


def _recurrent(kind: str, gates: int) -> Graph:
    """Sequence first, as ONNX has it: x is [batch, time, width], so it is transposed."""
    hidden, width = 32, 16
    known = {"w": _numbers(1, gates * hidden, width), "r": _numbers(1, gates * hidden, hidden)}
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        helper.make_node(kind, ["t", "w", "r"], ["all", "last"], hidden_size=hidden),
        helper.make_node("Transpose", ["last"], ["y"], perm=[1, 0, 2]),
    ]
    return Graph(row=(7, width), nodes=nodes, known=known)


def _decision(kind: str, **attributes: Any) -> Graph:
    """Whole numbers below 4, so that many scores are equal: which index wins?"""
    outputs = ["values", "y"] if kind == "TopK" else ["y"]
    known = {"k": np.array([5], np.int64)} if kind == "TopK" else {}
    return Graph(
        row=(50,),
        nodes=[helper.make_node(kind, ["x", *known], outputs, axis=1, **attributes)],
        known=known,
        integers=4,
        result=TensorProto.INT64,
    )


def _quantized() -> Graph:
    weights = np.random.default_rng(5).integers(-127, 128, (256, 64)).astype(np.int8)
    return Graph(
        row=(256,),
        nodes=[helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        known={"w": weights},
        element_type=TensorProto.UINT8,
        integers=256,
        result=TensorProto.INT32,
    )


def _suppressed() -> Graph:
    """Boxes and scores from one row of numbers: what is kept, of each row by itself, as a mask."""
    known: dict[str, Array] = {
        "first": np.array([0], np.int64),
        "split": np.array([4], np.int64),
        "end": np.array([5], np.int64),
        "axis": np.array([2], np.int64),
        "most": np.array([64], np.int64),
        "iou": np.array([0.4], np.float32),
        "score": np.array([0.5], np.float32),
    }
    nodes = [
        helper.make_node("Abs", ["x"], ["positive"]),
        helper.make_node("Slice", ["positive", "first", "split", "axis"], ["boxes"]),
        helper.make_node("Slice", ["positive", "split", "end", "axis"], ["column"]),
        helper.make_node("Transpose", ["column"], ["scores"], perm=[0, 2, 1]),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "iou", "score"], ["kept"]),
        # As a table of the batch's own shape: which scores were kept.
        helper.make_node("Sub", ["scores", "scores"], ["zeros"]),
        helper.make_node("Shape", ["kept"], ["size"]),
        helper.make_node("Gather", ["size", "first"], ["number"]),
        helper.make_node(
            "ConstantOfShape", ["number"], ["ones"], value=helper.make_tensor("one", 1, [1], [1.0])
        ),
        helper.make_node("ScatterND", ["zeros", "kept", "ones"], ["y"]),
    ]
    return Graph(row=(64, 5), nodes=nodes, known=known)


def _forest(kind: str, targets: int) -> Graph:
    """Complete trees over 8 numbers; their leaves have random votes for one target each."""
    random = np.random.default_rng(targets)
    inner = 2**DEPTH - 1
    nodes_per_tree = 2 * inner + 1
    many = TREES * nodes_per_tree
    tree = np.repeat(np.arange(TREES), nodes_per_tree)
    node = np.tile(np.arange(nodes_per_tree), TREES)
    is_inner = node < inner
    leaves = np.flatnonzero(~is_inner)
    target = "class" if kind == "TreeEnsembleClassifier" else "target"
    attributes: dict[str, Any] = {
        "nodes_treeids": tree,
        "nodes_nodeids": node,
        "nodes_featureids": np.where(is_inner, random.integers(0, 8, many), 0),
        "nodes_values": np.where(is_inner, random.normal(size=many), 0.0),
        "nodes_truenodeids": np.where(is_inner, 2 * node + 1, 0),
        "nodes_falsenodeids": np.where(is_inner, 2 * node + 2, 0),
        f"{target}_treeids": tree[leaves],
        f"{target}_nodeids": node[leaves],
        f"{target}_ids": random.integers(0, targets, leaves.size),
        f"{target}_weights": random.random(leaves.size) / TREES,
    }
    plain = {name: value.tolist() for name, value in attributes.items()}
    plain["nodes_modes"] = ["BRANCH_LEQ" if flag else "LEAF" for flag in is_inner]
    outputs = ["y"]
    if target == "class":
        plain |= {"classlabels_int64s": list(range(targets))}
        outputs = ["label", "y"]
    else:
        plain |= {"n_targets": targets}
    made = helper.make_node(kind, ["x"], outputs, domain="ai.onnx.ml", **plain)
    return Graph(row=(8,), nodes=[made], engines=("onnxruntime",))


def _linear() -> Graph:
    """Logistic regression as scikit-learn's converter writes it."""
    made = helper.make_node(
        "LinearClassifier",
        ["x"],
        ["label", "y"],
        domain="ai.onnx.ml",
        classlabels_ints=list(range(4)),
        coefficients=_numbers(4, 30).ravel().tolist(),
        intercepts=[0.0] * 4,
        post_transform="SOFTMAX",
    )
    return Graph(row=(30,), nodes=[made], engines=("onnxruntime",))


def _neighbours() -> Graph:
    """Squared distances to 200 known points."""
    made = helper.make_node("CDist", ["x", "points"], ["y"], domain="com.microsoft", metric="sqeuclidean")
    return Graph(
        row=(16,),
        nodes=[made],
        known={"points": _numbers(200, 16, scale=1)},
        engines=("onnxruntime",),
        result_row=(200,),
    )


def _support_vectors() -> Graph:
    """A radial kernel over 60 support vectors of three classes."""
    made = helper.make_node(
        "SVMClassifier",
        ["x"],
        ["label", "y"],
        domain="ai.onnx.ml",
        classlabels_ints=[0, 1, 2],
        coefficients=_numbers(2, 60).ravel().tolist(),
        support_vectors=_numbers(60, 16, scale=1).ravel().tolist(),
        vectors_per_class=[20, 20, 20],
        rho=[0.1, 0.2, 0.3],
        kernel_params=[0.05, 0.0, 3.0],
        kernel_type="RBF",
    )
    return Graph(row=(16,), nodes=[made], engines=("onnxruntime",), result_row=(3,))


def _two_inputs(inner: int, outer: int) -> Graph:
    """Weights that the graph computes, so that the engine cannot pack them beforehand."""
    nodes = [
        helper.make_node("Slice", ["x", "first", "last", "axis"], ["row"]),
        helper.make_node("ReduceSum", ["row", "axes"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["sum", "zero"], ["nothing"]),
        helper.make_node("Add", ["w", "nothing"], ["weights"]),
        helper.make_node("MatMul", ["x", "weights"], ["y"]),
    ]
    known: dict[str, Array] = {
        "first": np.array([0], np.int64),
        "last": np.array([1], np.int64),
        "axis": np.array([0], np.int64),
        "axes": np.array([0, 1], np.int64),
        "zero": np.array(0, np.float32),
        "w": _numbers(inner, outer),
    }
    return Graph(row=(inner,), nodes=nodes, known=known)


_AXES = np.array([1], np.int64)
GRAPHS: Mapping[str, Callable[[], Graph]] = {
    "MatMul, 256 x 1": lambda: _product(256, 1),
    "MatMul, 256 x 10": lambda: _product(256, 10),
    "MatMul, 256 x 256": lambda: _product(256, 256),
    "MatMul, 2000 x 64": lambda: _product(2000, 64),
    "MatMul, 256 x 10, weights computed": lambda: _two_inputs(256, 10),
    "MatMul of f64, 256 x 10": lambda: _product(256, 10, element_type=TensorProto.DOUBLE),
    "MatMul of f16, 256 x 64": lambda: _product(256, 64, element_type=TensorProto.FLOAT16),
    "MatMul of 7 tokens, 64 x 64": lambda: _product(64, 64, 7),
    "MatMulInteger, 256 x 64": _quantized,
    "Gemm, 256 x 10, weights transposed": lambda: _one(
        "Gemm", 256, more={"w": _numbers(10, 256), "b": _numbers(10)}, transB=1
    ),
    "attention, 16 x 32": lambda: _attention(16, 32),
    "Conv 1 x 1, 16 channels, 14 x 14": lambda: _convolution(16, 14, 16, 1),
    "Conv 3 x 3, 3 channels, 32 x 32": lambda: _convolution(3, 32, 16, 3),
    "Conv 3 x 3, 64 channels, 7 x 7": lambda: _convolution(64, 7, 64, 3),
    "Conv 3 x 3, depthwise, 14 x 14": lambda: _convolution(32, 14, 32, 3, 32),
    "LSTM, 7 x 16": lambda: _recurrent("LSTM", 4),
    "GRU, 7 x 16": lambda: _recurrent("GRU", 3),
    "Softmax, 13": lambda: _one("Softmax", 13, axis=-1),
    "Softmax, 1000": lambda: _one("Softmax", 1000, axis=-1),
    "LogSoftmax, 100": lambda: _one("LogSoftmax", 100, axis=-1),
    "LayerNormalization, 384": lambda: _one(
        "LayerNormalization", 384, more={"scale": np.ones(384, np.float32)}, axis=-1
    ),
    "InstanceNormalization, 8 x 100": lambda: _one(
        "InstanceNormalization", 8, 100, more={"s": np.ones(8, np.float32), "b": np.zeros(8, np.float32)}
    ),
    "ReduceSum, 1000": lambda: _one("ReduceSum", 1000, more={"axes": _AXES}),
    "ReduceSum over time, 50 x 8": lambda: _one("ReduceSum", 50, 8, more={"axes": _AXES}),
    "ReduceMean, 33 x 33": lambda: _one("ReduceMean", 33, 33, axes=[1, 2]),
    "ReduceL2, 100": lambda: _one("ReduceL2", 100, axes=[1]),
    "GlobalAveragePool, 8 x 7 x 7": lambda: _one("GlobalAveragePool", 8, 7, 7),
    "CumSum, 50": lambda: _one("CumSum", 50, more={"axis": np.array(1, np.int64)}),
    "Exp, 7": lambda: _one("Exp", 7),
    "Tanh, 7": lambda: _one("Tanh", 7),
    "Sigmoid, 7": lambda: _one("Sigmoid", 7),
    "Erf, 7": lambda: _one("Erf", 7),
    "Gelu, 7": lambda: _microsoft(_one("Gelu", 7)),
    "Pow 1.7 of Abs, 7": lambda: Graph(
        row=(7,),
        nodes=[helper.make_node("Abs", ["x"], ["a"]), helper.make_node("Pow", ["a", "e"], ["y"])],
        known={"e": np.array(1.7, np.float32)},
    ),
    "Einsum, bi,io->bo": lambda: _one("Einsum", 100, more={"w": _numbers(100, 20)}, equation="bi,io->bo"),
    "ArgMax of equal scores": lambda: _decision("ArgMax", keepdims=0),
    "TopK of equal scores": lambda: _decision("TopK"),
    "NonMaxSuppression, 64 boxes": _suppressed,
    "TreeEnsembleClassifier, 100 trees, 3 classes": lambda: _forest("TreeEnsembleClassifier", 3),
    "TreeEnsembleRegressor, 100 trees, 1 target": lambda: _forest("TreeEnsembleRegressor", 1),
    "TreeEnsembleRegressor, 100 trees, 2 targets": lambda: _forest("TreeEnsembleRegressor", 2),
    "LinearClassifier, 30 x 4": _linear,
    "SVMClassifier, 60 x 16": _support_vectors,
    "CDist, 200 x 16": _neighbours,
}
"""What is tried, by its name in docs/backends.md."""


# ---------------------------------------------------------------- the comparison


def _caller(path: Path, graph: Graph, engine: str, threads: int) -> Callable[[Array], Array]:
    """Return the model as this product compiles it, for a process with one slot; but trees have all threads."""
    row = "".join(f", {size}" for size in graph.row)
    spec = ModelSpec(
        name="graph",
        path=path,
        engine=engine,
        inputs={"x": InputSpec(shape=f"batch:0..{COUNTS[-1]}{row}")},
        properties={"intra_op_num_threads": threads} if engine == "onnxruntime" else {},
    )
    request = compile_model(spec, slots=1, threads=threads).create_infer_request()

    def call(x: Array) -> Array:
        return np.array(request.infer([x])["y"])

    return call


def words_of(call: Callable[[Array], Array], rows: Array) -> str:
    """Say which numbers of rows give equal bits: `equal`, or `1 | 2 to 33`: one row differs from more.

    Every number is compared with the least of each group before it, at the rows that both have; a number that equals none
    begins a group. Also: whether a row's place in the call matters, and whether a call repeats its own bits.
    """
    lone = np.concatenate([call(rows[number : number + 1]) for number in range(len(rows))])
    found = {1: lone}
    groups: list[list[int]] = [[1]]
    by_place = repeats = False
    for count in COUNTS[1:]:
        found[count] = call(rows[:count])
        repeats |= not _same(found[count], call(rows[:count]))
        by_place |= not _same(found[count], call(rows[:count][::-1])[::-1])
        for group in groups:
            least = group[0]
            shared = count if least == 1 else least
            if _same(found[least][:shared], found[count][:shared]):
                group.append(count)
                break
        else:
            groups.append([count])
    words = EQUAL if len(groups) == 1 else " | ".join(_ranges(group) for group in groups)
    return words + ", by place" * by_place + ", does not repeat itself" * repeats


def _same(one: Array, other: Array) -> bool:
    return one.tobytes() == other.tobytes()


def _ranges(group: Sequence[int]) -> str:
    """Write neighbours in `COUNTS` as one range."""
    places = [COUNTS.index(count) for count in group]
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return ", ".join(
        str(COUNTS[run[0]]) if len(run) == 1 else f"{COUNTS[run[0]]} to {COUNTS[run[-1]]}" for run in runs
    )


def tried(name: str) -> list[str]:
    """Return what comes of one operator, in this process: for each engine, with each number of threads."""
    graph = GRAPHS[name]()
    rows = graph.rows(np.random.default_rng(0), COUNTS[-1])
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = graph.write(Path(folder))
        for engine in ENGINES:
            for threads in THREADS:
                if engine not in graph.engines:
                    found.append("-")
                    continue
                try:
                    found.append(words_of(_caller(path, graph, engine, threads), rows))
                except (EngineError, RuntimeError) as error:
                    found.append(f"cannot be tried: {' '.join(str(error).split())[:80]}")
    return found


def told(name: str) -> list[str]:
    """Try one operator in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.row_counts", "--only", name, "--json"]
    many = len(ENGINES) * len(THREADS)
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S, check=False)
    except subprocess.TimeoutExpired:
        return [f"does not end within {MOST_S:.0f} s"] * many
    if ran.returncode < 0:
        return [f"ends the process ({signal.Signals(-ran.returncode).name})"] * many
    lines = ran.stdout.splitlines()
    if ran.returncode == 0 and lines:
        return [str(words) for words in json.loads(lines[-1])]
    error = ran.stderr.strip().splitlines()
    return [f"cannot be tried: {error[-1] if error else 'no word'}"] * many


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
    only: Annotated[str, typer.Option(help="Try this operator alone, in this process.")] = "",
) -> None:
    """Tells which operators give a row other bits by the number of rows of its call; a minute or two."""
    columns = ("operator", *(f"{engine}, {threads}" for engine in ENGINES for threads in THREADS))
    if only:
        found = tried(only)
        print(
            json.dumps(found) if as_json else "\n".join(map(" : ".join, zip(columns[1:], found, strict=True)))
        )
        return
    answers: dict[str, list[str]] = {}
    with Console(stderr=True).status("") as status:
        for name in GRAPHS:
            status.update(name)
            answers[name] = told(name)
    title = f"bits of a row by the rows of its call, 1 to 33, 50, 51, 64, 129; OpenVINO on {instructions()}"
    if as_json:
        print(json.dumps({"title": title, "columns": columns, "rows": answers}))
        return
    report = Report(title=title, columns=columns, rows=[(name, *found) for name, found in answers.items()])
    Console(width=200).print(report.table())


if __name__ == "__main__":
    typer.run(main)
