"""Which engine runs an ONNX file: the first that is installed, reads it, and computes its types as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.onnx_files import write_classifier, write_onnx

from shapestream_engine import (
    EngineMissing,
    InputSpec,
    ModelLoadError,
    ModelSpec,
    compile_model,
    engine_of,
    read_model,
)
from shapestream_engine.calibration import cost_key
from shapestream_engine.probe import ProbeOptions, ProofCache, choose

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


def write_gru(path: Path) -> Path:
    """A layer whose activation OpenVINO reads, and its CPU device does not compile (2026.4)."""
    known = {name: np.ones((1, 6, 2), np.float32) for name in ("w", "r")}
    node = helper.make_node("GRU", ["x", *known], ["", "y"], hidden_size=2, activations=["Relu", "Elu"])
    return write_onnx(path, [node], {"x": ["seq", "batch", 2]}, {"y": [1, "batch", 2]}, known)


def test_a_file_that_an_engine_cannot_compile_goes_to_the_next(tmp_path: Path) -> None:
    """The reason is kept with the choice, which other settings of the YAML do not change."""
    spec = ModelSpec(path=write_gru(tmp_path / "m.onnx"))
    cache = ProofCache(tmp_path / "kept")
    choice = choose(spec, cache=cache)
    assert "onnxruntime" == choice.engine
    assert "CPU cannot compile it" in choice.passed_over["openvino"]
    (kept,) = (path for path in (tmp_path / "kept").iterdir() if path.suffix == ".json")
    stated = replace(spec, inputs={"x": InputSpec(shape="seq, batch, 2")})
    assert choice == choose(stated, cache=cache)
    assert [kept] == [path for path in (tmp_path / "kept").iterdir() if path.suffix == ".json"]


def test_an_engine_that_ends_the_process_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a library that finds no instruction that it needs does; such a choice is not kept."""
    (tmp_path / "openvino").mkdir()
    (tmp_path / "openvino" / "__init__.py").write_text("import os\nos.abort()\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = ModelSpec(path=doubled(tmp_path / "m.onnx", TensorProto.FLOAT))
    choice = choose(spec, cache=ProofCache(tmp_path / "kept"))
    assert ("onnxruntime", "openvino: the process was ended by SIGABRT") == (choice.engine, choice.why)
    assert [] == [path.name for path in (tmp_path / "kept").iterdir() if path.suffix == ".json"]


def test_shapes_that_the_file_leaves_open_pass_no_engine_over(tmp_path: Path) -> None:
    """The configuration states them, for whichever engine it is."""
    node = helper.make_node("Relu", ["x"], ["y"])
    path = write_onnx(tmp_path / "m.onnx", [node], {"x": None}, {"y": None})
    assert ("openvino", "") == ((choice := choose(ModelSpec(path=path))).engine, choice.why)


def test_a_damaged_file_is_no_engines_fault(tmp_path: Path) -> None:
    """The first one says what is wrong when it compiles."""
    path = tmp_path / "m.onnx"
    path.write_bytes(b"no model")
    assert "openvino" == choose(ModelSpec(path=path)).engine
