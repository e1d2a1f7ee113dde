"""Answers of one engine beside those of another: what one of them computes wrongly is seen, and rounding is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.onnx_files import write_onnx

from shapestream_engine import InputSpec, ModelSpec
from shapestream_engine.probe import EnginesReport, ProbeOptions, compare_beside
from shapestream_engine.probing.inputs import Integers

WIDE = {"x": TensorProto.INT64, "y": TensorProto.INT64}


def thousandfold(path: Path) -> Path:
    """`y` = 1000 x, of whole numbers."""
    node = helper.make_node("Mul", ["x", "k"], ["y"])
    known = {"k": np.array(1000, np.int64)}
    return write_onnx(path, [node], {"x": ["batch", 4]}, {"y": ["batch", 4]}, known, types=WIDE)


def log_sum(path: Path, opset: int) -> Path:
    """`y` = log of the sum of exp(x) of each row; the axis is an attribute below opset 18, and an input from there on."""
    known = {} if opset < 18 else {"axes": np.array([1], np.int64)}
    attributes = {"axes": [1]} if opset < 18 else {}
    node = helper.make_node("ReduceLogSumExp", ["x", *known], ["y"], keepdims=0, **attributes)
    return write_onnx(path, [node], {"x": ["batch", 4]}, {"y": ["batch"]}, known, opset=opset)


def compared(path: Path, most: int | None = None, other: str = "onnxruntime") -> EnginesReport:
    """OpenVINO beside the other engine, with whole numbers up to `most` as realistic values of `x`."""
    spec = ModelSpec(
        name="m",
        path=path,
        engine="openvino",
        inputs={"x": InputSpec(shape="n, 4")},
        outputs={},
    )
    values = {} if most is None else {"x": Integers(0, most)}
    return compare_beside(spec, other, ProbeOptions(values=values), threads=1)


def test_integers_that_grow_beyond_32_bits_are_seen(tmp_path: Path) -> None:
    """With the request, its values, and those of both engines: OpenVINO wraps 9,999,999,000."""
    report = compared(thousandfold(tmp_path / "m.onnx"), 9_999_999)
    (found,) = report.differences
    assert ("y", "openvino", "onnxruntime", "") == (
        found.output,
        report.engine,
        report.other,
        report.why_not,
    )
    assert int(found.own) != int(found.other)
    assert (int(found.other) - int(found.own)) % 2**32 == 0
    words = found.words("openvino", "onnxruntime")
    assert (
        f"output 'y': openvino answers {found.own} at {list(found.index)} and onnxruntime {found.other} ("
        in words
    )
    assert "; x = [" in words


def test_the_largest_declared_value_is_among_the_requests(tmp_path: Path) -> None:
    """Below it nothing is wrapped: of 0..2,147,484 only the last is."""
    assert 1 == len(compared(thousandfold(tmp_path / "m.onnx"), 2_147_484).differences)
    fits = compared(thousandfold(tmp_path / "m.onnx"), 2_147_483)
    assert ((), "", 0) == (fits.differences, fits.why_not, fits.refused)


def test_an_operator_that_an_engine_reads_wrongly_is_seen(tmp_path: Path) -> None:
    """Below opset 18 OpenVINO reduces all axes (2026.4); from there on both agree."""
    (found,) = compared(log_sum(tmp_path / "m.onnx", 13)).differences
    assert "the shape []" == found.own
    report = compared(log_sum(tmp_path / "m.onnx", 18))
    assert ((), "") == (report.differences, report.why_not)
    assert [
        "beside onnxruntime: no output differs beyond its tolerance on",
        str(report.requests),
        "requests",
    ] == (next(report.lines()).rsplit(" ", 2))


def test_rounding_is_no_difference(tmp_path: Path) -> None:
    """A chain of products and a softmax, whose small classes are all rounding."""
    random = np.random.default_rng(0)
    known = {
        name: random.normal(0, 1, shape).astype(np.float32)
        for name, shape in {"a": (4, 64), "b": (64, 64), "c": (64, 300)}.items()
    }
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("MatMul", ["t", "b"], ["u"]),
        helper.make_node("Tanh", ["u"], ["v"]),
        helper.make_node("MatMul", ["v", "c"], ["z"]),
        helper.make_node("Softmax", ["z"], ["y"], axis=1),
    ]
    path = write_onnx(tmp_path / "m.onnx", nodes, {"x": ["batch", 4]}, {"y": ["batch", 300]}, known)
    report = compared(path)
    assert ((), "") == (report.differences, report.why_not)
    assert report.requests > 8


@pytest.mark.parametrize(
    ("other", "words"),
    [("torch", "torch"), ("function", "the engine function takes a function, not a file")],
)
def test_an_engine_that_takes_no_such_model_is_told(tmp_path: Path, other: str, words: str) -> None:
    """Nothing is compared, and that is no difference."""
    report = compared(thousandfold(tmp_path / "m.onnx"), other=other)
    assert ((), 0) == (report.differences, report.requests)
    assert words in report.why_not
    assert next(report.lines()).startswith(f"beside {other}: not compared: ")
