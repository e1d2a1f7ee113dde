"""Device, properties and threads of a model that is given by its file alone, and specs with little in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from shapestream_engine import (
    InputSpec,
    ModelLoadError,
    ModelSpec,
    compile_model,
    read_model,
)
from shapestream_engine.strategy import Strategy


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A model's file, by a str as callers have it."""
    x = op.parameter([-1, 4], ov.Type.f32, name="x")
    x.output(0).tensor.names = {"x"}
    ov.save_model(ov.Model([op.result(op.relu(x))], [x]), tmp_path / "relu.xml")
    return f"{tmp_path}/relu.xml"


def test_threads_and_properties_reach_the_engine(path: str) -> None:
    """As the compiled model shows them in the end."""
    model = read_model(path).compile(threads=2, properties={"PERFORMANCE_HINT": "LATENCY"})
    assert "2" == str(model.properties["INFERENCE_NUM_THREADS"])
    assert "LATENCY" in str(model.properties["PERFORMANCE_HINT"])


def test_a_device_that_there_is_not_is_refused_by_name(path: str) -> None:
    """`compile` takes the device of a model that was read; the error lists those that there are."""
    with pytest.raises(ModelLoadError, match="no device 'NPU7' here; there are CPU"):
        read_model(path).compile(device="NPU7")


def test_what_the_spec_says_holds_unless_compile_says_otherwise(path: str) -> None:
    """None is: as the spec says."""
    spec = ModelSpec(path=Path(path), properties={"PERFORMANCE_HINT": "LATENCY"})
    assert "LATENCY" in str(read_model(spec).compile().properties["PERFORMANCE_HINT"])
    throughput = read_model(spec).compile(properties={"PERFORMANCE_HINT": "THROUGHPUT"})
    assert "THROUGHPUT" in str(throughput.properties["PERFORMANCE_HINT"])


@pytest.mark.parametrize("as_given", [str, Path], ids=["str", "Path"])
def test_a_path_may_be_a_str(path: str, as_given: Any) -> None:
    """In a spec, whose name is that of the file where none is given, and for `compile_model` by itself."""
    spec = ModelSpec(path=as_given(path))
    assert ("relu", Path(path)) == (spec.name, spec.path)
    for model in (compile_model(spec), compile_model(as_given(path)), read_model(as_given(path)).compile()):
        assert "relu" == model.signature.name
        assert (1, 4) == model.create_infer_request().infer([np.ones((1, 4))])[model.outputs[0].name].shape


def test_a_spec_without_a_name_takes_that_of_the_function() -> None:
    """By its import path, or as it is."""

    def twice(x: Any) -> Any:
        return x * 2

    assert "twice" == ModelSpec(model=twice).name
    assert "join" == ModelSpec(function="os.path:join").name
    assert "model" == ModelSpec(model=b"bytes", engine="onnxruntime").name
    assert "mine" == ModelSpec(name="mine", model=twice).name


def test_a_closed_model_that_prepares_shapes_makes_no_requests(path: str) -> None:
    """It would have compiled its dynamic model for one."""
    spec = ModelSpec(
        path=Path(path),
        inputs={"x": InputSpec(shape="batch:1..8, 4")},
        strategy=Strategy({"batch": (4, 8)}),
    )
    model = compile_model(spec)
    assert model.prepares
    model.close()
    with pytest.raises(RuntimeError, match="is closed and makes no requests"):
        model.create_infer_request()
