"""Which engine runs an ONNX file: the first that is installed, reads it, and computes its types as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.onnx_files import write_classifier, write_onnx

from shapestream_engine import (
    EngineMissing,
    ModelLoadError,
    ModelSpec,
    compile_model,
    engine_of,
    read_model,
)
from shapestream_engine.calibration import cost_key
from shapestream_engine.probe import ProbeOptions

MOMENTS = np.array([1.7e9 + 0.125, 1.7e9 + 1, 1.7e9 - 3])


def doubled(path: Path, element_type: int) -> Path:
    """`y` = x + x, in numbers of this type."""
    types = {"x": element_type, "y": element_type}
    node = helper.make_node("Add", ["x", "x"], ["y"])
    return write_onnx(path, [node], {"x": ["n"]}, {"y": ["n"]}, types=types)


def without(monkeypatch: pytest.MonkeyPatch, *engines: str) -> None:
    """As where these engines are not installed."""
    for engine in engines:
        for name in [
            name for name in sys.modules if name.startswith(f"shapestream_engine.backends.{engine}")
        ]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, engine, None)


@pytest.mark.parametrize(
    ("element_type", "x"),
    [(TensorProto.DOUBLE, MOMENTS), (TensorProto.UINT64, np.array([2**33, 2**62], np.uint64))],
)
def test_what_openvino_narrows_is_computed_by_onnx_runtime(
    tmp_path: Path, element_type: int, x: np.ndarray[Any, Any]
) -> None:
    """The answer has every bit; an engine that is named is kept, and refuses."""
    path = doubled(tmp_path / "m.onnx", element_type)
    model = compile_model(path)
    request = model.create_infer_request()
    request.infer([x])
    assert ("onnxruntime", (x + x).tolist()) == (model.engine, request.outputs()[0].tolist())
    with pytest.raises(ModelLoadError, match="OpenVINO computes"):
        compile_model(ModelSpec(path=path, engine="openvino"))


@pytest.mark.parametrize("element_type", [TensorProto.FLOAT, TensorProto.INT64])
def test_what_both_compute_goes_to_openvino(tmp_path: Path, element_type: int) -> None:
    """The first of the order, with nothing passed over and so no reason."""
    choice = engine_of(ModelSpec(path=doubled(tmp_path / "m.onnx", element_type)))
    assert ("openvino", "") == (choice.engine, choice.why)


def test_an_operator_that_openvino_lacks_goes_to_onnx_runtime(tmp_path: Path) -> None:
    """The reason has OpenVINO's words."""
    choice = engine_of(ModelSpec(path=write_classifier(tmp_path / "m.onnx", zipmap=False)))
    assert "onnxruntime" == choice.engine
    assert "ai.onnx.ml.LinearClassifier" in choice.passed_over["openvino"]


def test_an_engine_that_is_not_installed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the extra `onnxruntime` alone, every ONNX file is served."""
    without(monkeypatch, "openvino")
    choice = engine_of(ModelSpec(path=doubled(tmp_path / "m.onnx", TensorProto.FLOAT)))
    assert ("onnxruntime", "openvino: not installed") == (choice.engine, choice.why)


@pytest.mark.parametrize("use", [engine_of, compile_model, read_model])
def test_the_extra_that_would_do_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[ModelSpec], object]
) -> None:
    """Where only OpenVINO is installed, and narrows; and where neither is."""
    spec = ModelSpec(path=doubled(tmp_path / "m.onnx", TensorProto.DOUBLE))
    without(monkeypatch, "onnxruntime")
    with pytest.raises(ModelLoadError, match="OpenVINO computes f64 as f32") as refused:
        use(spec)
    assert str(refused.value).endswith(
        "; onnxruntime is not installed: pip install 'shapestream[onnxruntime]'"
    )
    without(monkeypatch, "openvino")
    with pytest.raises(EngineMissing) as missing:
        use(spec)
    assert (
        "the engine 'openvino' or 'onnxruntime' is not installed; to install it: pip install "
        "'shapestream[openvino]' or pip install 'shapestream[onnxruntime]'"
    ) == str(missing.value)


def test_a_file_that_no_engine_takes_has_the_words_of_each(tmp_path: Path) -> None:
    """Its output is a sequence."""
    path = write_classifier(tmp_path / "m.onnx", zipmap=True)
    with pytest.raises(
        ModelLoadError, match=r"cannot read the model .*; onnxruntime does not take it, either: "
    ):
        engine_of(ModelSpec(path=path))


def test_costs_are_kept_by_the_engine_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extra that is installed later changes the engine, and then the key of what was learned with another."""
    spec = ModelSpec(path=doubled(tmp_path / "m.onnx", TensorProto.FLOAT))
    signature = read_model(spec).signature

    def key() -> str:
        return cost_key(spec, signature, ProbeOptions(), slots=1, threads=1, budget_s=1.0)

    before = key()
    assert before == key()
    without(monkeypatch, "openvino")
    assert before != key()
