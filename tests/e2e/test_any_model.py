"""Any IR or ONNX file is served by naming its path, shapes and bounds in a YAML, without a line of Python.

The models are made here under random names, so nothing in the source can know them, and are served by worker
processes that have the YAML and the files, nothing else. Every answer is compared with NumPy.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino as ov
import pytest
from onnx import TensorProto, helper
from openvino import opset13 as ops

import shapestream
from shapestream import blocking

pytestmark = pytest.mark.e2e

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model: how it is made, what the YAML says of it, and what it must answer."""

    ir: Callable[[], ov.Model]
    onnx: Callable[[], onnx.ModelProto] | None = None
    """Where a file of the other format is read in another way."""
    yaml: str
    """The lines of its entry that say more than its name and path."""
    requests: Callable[[np.random.Generator], Iterator[Arrays]]
    expected: Callable[[Arrays], Arrays]


def _parameter(shape: list[int], kind: Any, name: str | None) -> Any:
    parameter = ops.parameter(shape, kind)
    if name is not None:
        parameter.output(0).get_tensor().set_names({name})
    return parameter


def _ir(results: dict[str | None, Any], parameters: list[Any]) -> ov.Model:
    for name, node in results.items():
        node.output(0).get_tensor().set_names({name} if name is not None else set())
    return ov.Model([ops.result(node) for node in results.values()], parameters)


def _onnx(
    nodes: list[Any], inputs: dict[str, tuple[int, list[Any]]], outputs: dict[str, tuple[int, list[Any]]]
) -> Any:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, *port) for name, port in inputs.items()],
        [helper.make_tensor_value_info(name, *port) for name, port in outputs.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def _floats(random: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    """Small whole numbers: sums and products of a few are exact in any order and in f16."""
    return random.integers(-8, 8, shape).astype(np.float32)


# ---------------------------------------------------------------- two inputs with different dynamic dimensions


def _two_inputs_ir() -> ov.Model:
    left, right = _parameter([-1, -1], np.float32, "left"), _parameter([-1, -1, 2], np.float32, "right")
    row = ops.constant(np.array([1], np.int64))
    sums = ops.reduce_sum(left, row, keep_dims=True)
    most = ops.reduce_max(right, row, keep_dims=False)
    return _ir({"both": ops.concat([sums, most], 1)}, [left, right])


def _two_inputs_onnx() -> onnx.ModelProto:
    axes = helper.make_node(
        "Constant", [], ["axes"], value=onnx.numpy_helper.from_array(np.array([1], np.int64))
    )
    nodes = [
        axes,
        helper.make_node("ReduceSum", ["left", "axes"], ["sums"], keepdims=1),
        helper.make_node("ReduceMax", ["right"], ["most"], axes=[1], keepdims=0),
        helper.make_node("Concat", ["sums", "most"], ["both"], axis=1),
    ]
    inputs = {"left": (TensorProto.FLOAT, ["rows", "l"]), "right": (TensorProto.FLOAT, ["rows", "r", 2])}
    return _onnx(nodes, inputs, {"both": (TensorProto.FLOAT, ["rows", 3])})


def _two_inputs_requests(random: np.random.Generator) -> Iterator[Arrays]:
    for _ in range(40):
        rows, left, right = (int(random.integers(1, high)) for high in (4, 4, 5))
        yield {"left": _floats(random, rows, left), "right": _floats(random, rows, right, 2)}


TWO_INPUTS = Case(
    ir=_two_inputs_ir,
    onnx=_two_inputs_onnx,
    yaml="""\
    inputs:
      left: {shape: "batch:1..16, width_of_left:1..32"}
      right: {shape: "batch, width_of_right:1..32, 2"}
""",
    requests=_two_inputs_requests,
    expected=lambda given: {
        "both": np.concatenate([given["left"].sum(1, keepdims=True), given["right"].max(1)], axis=1)
    },
)

# ---------------------------------------------------------------- no batch axis


def _no_batch_ir() -> ov.Model:
    signal = _parameter([-1], np.float32, "signal")
    return _ir({"total": ops.cum_sum(signal, ops.constant(np.int64(0)))}, [signal])


NO_BATCH = Case(
    ir=_no_batch_ir,
    yaml="""\
    inputs: {signal: {shape: "samples:0..1000"}}
""",
    requests=lambda random: ({"signal": _floats(random, n)} for n in (5, 1, 0, 999, 5, 0, 17)),
    expected=lambda given: {"total": np.cumsum(given["signal"], dtype=np.float32)},
)

# ---------------------------------------------------------------- the batch axis second


def _second_ir() -> ov.Model:
    series = _parameter([-1, -1, 3], np.float32, "series")
    return _ir(
        {
            "last": ops.reduce_sum(series, ops.constant(np.array([0], np.int64))),
            "twice": ops.add(series, series),
        },
        [series],
    )


def _second_onnx() -> onnx.ModelProto:
    axes = helper.make_node(
        "Constant", [], ["axes"], value=onnx.numpy_helper.from_array(np.array([0], np.int64))
    )
    nodes = [
        axes,
        helper.make_node("ReduceSum", ["series", "axes"], ["last"], keepdims=0),
        helper.make_node("Add", ["series", "series"], ["twice"]),
    ]
    outputs = {"last": (TensorProto.FLOAT, ["n", 3]), "twice": (TensorProto.FLOAT, ["t", "n", 3])}
    return _onnx(nodes, {"series": (TensorProto.FLOAT, ["t", "n", 3])}, outputs)


SECOND = Case(
    ir=_second_ir,
    onnx=_second_onnx,
    yaml="""\
    inputs: {series: {shape: "time:1..50, batch:1..12, 3"}}
""",
    requests=lambda random: (
        {"series": _floats(random, int(random.integers(1, 4)), int(random.integers(1, 5)), 3)}
        for _ in range(40)
    ),
    expected=lambda given: {"last": given["series"].sum(0), "twice": given["series"] * 2},
)

# ---------------------------------------------------------------- no dynamic dimension


def _static_ir() -> ov.Model:
    table = _parameter([2, 3], np.float32, "table")
    return _ir({"turned": ops.transpose(table, ops.constant(np.array([1, 0], np.int64)))}, [table])


STATIC = Case(
    ir=_static_ir,
    yaml="",
    requests=lambda random: ({"table": _floats(random, 2, 3)} for _ in range(10)),
    expected=lambda given: {"turned": given["table"].T},
)

# ---------------------------------------------------------------- int64, boolean and f16


def _types_ir() -> ov.Model:
    ids, keep = _parameter([-1, -1], np.int64, "ids"), _parameter([-1, -1], bool, "keep")
    weights = _parameter([-1, -1], np.float16, "weights")
    zero, nothing = ops.constant(np.int64(0)), ops.constant(np.float16(0))
    return _ir(
        {
            "kept_ids": ops.select(keep, ids, zero),
            "dropped": ops.logical_not(keep),
            "kept_weights": ops.select(keep, weights, nothing),
        },
        [ids, keep, weights],
    )


def _types_requests(random: np.random.Generator) -> Iterator[Arrays]:
    for _ in range(40):
        shape = int(random.integers(1, 4)), int(random.integers(0, 4))
        yield {
            # Not beyond 32 bits: OpenVINO's CPU device computes i64 as i32 (docs/configuration.md).
            "ids": random.integers(-(2**31), 2**31, shape),
            "keep": random.integers(0, 2, shape).astype(bool),
            "weights": _floats(random, *shape).astype(np.float16),
        }


TYPES = Case(
    ir=_types_ir,
    yaml="""\
    inputs:
      ids: {shape: "batch:1..16, seq:0..64", element_type: i64}
      keep: {shape: "batch, seq"}
      weights: {shape: "batch, seq"}
""",
    requests=_types_requests,
    expected=lambda given: {
        "kept_ids": np.where(given["keep"], given["ids"], 0),
        "dropped": ~given["keep"],
        "kept_weights": np.where(given["keep"], given["weights"], np.float16(0)),
    },
)

# ---------------------------------------------------------------- unnamed ports


def _unnamed_ir() -> ov.Model:
    first, second = _parameter([-1, 4], np.float32, None), _parameter([-1, 4], np.float32, None)
    return _ir({None: ops.subtract(first, second)}, [first, second])


UNNAMED = Case(
    ir=_unnamed_ir,
    yaml="""\
    inputs:
      input0: {shape: "batch:1..16, 4"}
      input1: {shape: "batch, 4"}
    outputs:
      output0: {rule: rows}
""",
    requests=lambda random: (
        {"input0": _floats(random, rows, 4), "input1": _floats(random, rows, 4)}
        for rows in (1, 2, 3, 1, 1, 2) * 5
    ),
    expected=lambda given: {"output0": given["input0"] - given["input1"]},
)

# ---------------------------------------------------------------- rows in a number that depends on the data


def _found_ir() -> ov.Model:
    values = _parameter([-1, -1], np.float32, "values")
    places = ops.transpose(ops.non_zero(values, "i64"), ops.constant(np.array([1, 0], np.int64)))
    return _ir({"places": places, "found": ops.gather_nd(values, places)}, [values])


def _found_requests(random: np.random.Generator) -> Iterator[Arrays]:
    for number in range(40):
        shape = int(random.integers(1, 4)), int(random.integers(1, 4))
        nothing = number % 5 == 0
        yield {"values": np.zeros(shape, np.float32) if nothing else _floats(random, *shape).clip(-1, 1)}


FOUND = Case(
    ir=_found_ir,
    yaml="""\
    inputs: {values: {shape: "batch:1..16, width:1..64"}}
    outputs:
      places: {rule: index_column, column: 0}
      found: {rule: with, output: places}
""",
    requests=_found_requests,
    expected=lambda given: {
        "places": np.argwhere(given["values"]).astype(np.int64),
        "found": given["values"][np.nonzero(given["values"])],
    },
)

CASES = {
    "two_inputs": TWO_INPUTS,
    "no_batch": NO_BATCH,
    "batch_second": SECOND,
    "static": STATIC,
    "types": TYPES,
    "unnamed": UNNAMED,
    "data_dependent": FOUND,
}


@dataclass(frozen=True)
class ServedCases:
    """A running server with every case as IR and as ONNX, each under a random name."""

    client: blocking.Client
    names: dict[tuple[str, str], str]


@pytest.fixture(scope="module")
def served(module_workplace: Any) -> Iterator[ServedCases]:
    """One `shapestream serve`, one YAML, two worker processes, all models."""
    names: dict[tuple[str, str], str] = {}
    text = "models:\n"
    for case_name, case in CASES.items():
        for kind in ("ir", "onnx") if case.onnx is not None else ("ir",):
            name = f"m{uuid.uuid4().hex}"
            names[case_name, kind] = name
            text += f"  - name: {name}\n    path: {_save(case, kind, module_workplace.folder / name)}\n{case.yaml}"
    text += "workers: [{count: 2, slots: 1, threads: 1}]\n"
    server = module_workplace.serve(text)
    with server.client() as client:
        yield ServedCases(client, names)


def _save(case: Case, kind: str, stem: Path) -> str:
    if kind == "ir":
        ov.save_model(case.ir(), stem.with_suffix(".xml"), compress_to_fp16=False)
        return f"{stem.name}.xml"
    assert case.onnx is not None
    onnx.save(case.onnx(), stem.with_suffix(".onnx"))
    return f"{stem.name}.onnx"


@pytest.mark.parametrize(
    ("case_name", "kind"),
    [(name, kind) for name, case in CASES.items() for kind in ("ir", "onnx") if kind == "ir" or case.onnx],
)
def test_a_model_that_nobody_knows_is_served_by_yaml_alone(
    served: ServedCases, case_name: str, kind: str
) -> None:
    """Many requests of changing shapes at a time: each gets what NumPy says of it alone, bit by bit."""
    case, name = CASES[case_name], served.names[case_name, kind]
    requests = list(case.requests(np.random.default_rng(7)))
    with served.client.stream(name, requests, max_in_flight=32, deadline=60) as results:
        for given, result in zip(requests, results, strict=True):
            expected = case.expected(given)
            assert expected.keys() == result.keys()
            for output, array in expected.items():
                assert (array.dtype, array.shape) == (result[output].dtype, result[output].shape)
                np.testing.assert_array_equal(array, result[output])


def test_requests_of_those_models_did_share_calls(served: ServedCases) -> None:
    """Otherwise the test above would have proved nothing about batching."""
    name = served.names["batch_second", "ir"]
    given = {"series": np.ones((2, 1, 3), np.float32)}
    with served.client.stream(name, [given] * 64, max_in_flight=64, deadline=60) as results:
        assert max(result.timings.batch_requests for result in results) > 1


@pytest.mark.parametrize(
    ("case_name", "inputs", "words"),
    [
        (
            "two_inputs",
            {"left": np.ones((2, 3), np.float32), "right": np.ones((1, 3, 2), np.float32)},
            "batch",
        ),
        ("two_inputs", {"left": np.ones((2, 33), np.float32), "right": np.ones((2, 3, 2), np.float32)}, "32"),
        ("types", {"ids": np.ones((1, 1), np.int64)}, "keep"),
        ("static", {"table": np.ones((2, 4), np.float32)}, "table"),
        ("no_batch", {"sgnal": np.ones(3, np.float32)}, "sgnal"),
        ("unnamed", {"input0": np.ones((1, 4), np.float32), "input1": np.array([["a"] * 4])}, "input1"),
    ],
)
def test_what_does_not_fit_a_model_is_refused_with_its_own_words(
    served: ServedCases, case_name: str, inputs: Arrays, words: str
) -> None:
    """The error names the port or the dimension that is wrong."""
    with pytest.raises(shapestream.InvalidRequest, match=words):
        served.client.infer(served.names[case_name, "ir"], inputs, deadline=120)
