"""What a model spec says, and which engine it gets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapestream_engine import (
    EngineMissing,
    InputSpec,
    ModelLoadError,
    ModelSpec,
    OutputSpec,
    SignatureError,
    compile_model,
)


def double(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A model."""
    return x * 2


FUNCTION_PORTS: dict[str, Any] = {
    "inputs": {"x": InputSpec(shape="batch, 2", element_type="f32")},
    "outputs": {"y": OutputSpec(shape="batch, 2", element_type="f32")},
}


@pytest.mark.parametrize(
    ("given", "engines"),
    [
        ({"path": Path("m.xml")}, ("openvino",)),
        ({"path": Path("m.onnx")}, ("openvino", "onnxruntime")),
        ({"path": Path("m.pt2")}, ("torch",)),
        ({"path": Path("m.onnx"), "engine": "onnxruntime"}, ("onnxruntime",)),
        ({"function": "package.module:name"}, ("function",)),
        ({"model": double}, ("function",)),
        ({"model": object()}, ("openvino",)),
        ({"model": double, "engine": "openvino"}, ("openvino",)),
    ],
)
def test_the_engines_follow_from_what_is_given(given: dict[str, Any], engines: tuple[str, ...]) -> None:
    """Two read ONNX; other files and models in memory are for one, and references and callables are functions."""
    assert engines == ModelSpec(name="m", **given).engines


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "give one of path, function and model, not 0"),
        ({"path": Path("m.xml"), "function": "a:b"}, "give one of path, function and model, not 2"),
        (
            {"model": double, "engine": "tensorflow"},
            "unknown engine 'tensorflow'; known are openvino, onnxruntime, torch, function",
        ),
    ],
)
def test_a_spec_that_means_nothing_is_refused(given: dict[str, Any], complaint: str) -> None:
    """A spec describes exactly one model, for an engine that there is."""
    with pytest.raises(SignatureError, match=complaint):
        ModelSpec(name="m", **given)


@pytest.mark.parametrize("counts", [{"slots": 0}, {"threads": 0}, {"slots": -1, "threads": 4}])
def test_counts_begin_at_one(counts: dict[str, int]) -> None:
    """No slots and no threads are mistakes of the caller."""
    with pytest.raises(ValueError, match="counts from 1"):
        compile_model(ModelSpec(name="m", model=double, **FUNCTION_PORTS), **counts)


def test_reshape_keeps_what_else_is_known_of_an_input() -> None:
    """Other shapes, the same padding; the spec that was reshaped stays as it is."""
    spec = ModelSpec(name="m", model=double, inputs={"x": InputSpec(shape="batch, n", pad={"n": 0})})
    reshaped = spec.reshape({"x": "batch:1..4, n:1..9"})
    assert InputSpec(shape="batch:1..4, n:1..9", pad={"n": 0}) == reshaped.inputs["x"]
    assert "batch, n" == spec.inputs["x"].shape


def forget_the_engine(monkeypatch: pytest.MonkeyPatch, engine: str = "openvino") -> None:
    """Make the backend be imported anew."""
    for name in [name for name in sys.modules if name.startswith(f"shapestream_engine.backends.{engine}")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime", "torch"])
def test_a_missing_engine_names_its_extra(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """Without its package the bare install says what to install."""
    forget_the_engine(monkeypatch, engine)
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(EngineMissing, match=rf"pip install 'shapestream\[{engine}\]'"):
        compile_model(ModelSpec(name="m", path=Path("m"), engine=engine))


def test_an_engine_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken installation is not called a missing one."""
    forget_the_engine(monkeypatch)
    monkeypatch.setitem(sys.modules, "openvino", type(sys)("openvino"))
    with pytest.raises(ModelLoadError, match="'openvino' is installed but cannot be loaded: "):
        compile_model(ModelSpec(name="m", path=Path("m.xml")))
