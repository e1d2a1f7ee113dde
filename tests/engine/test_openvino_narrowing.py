"""Element types that OpenVINO computes as narrower ones: what would be wrong is refused, and all else is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from shapestream_engine import InvalidInput, ModelLoadError, ModelSpec, compile_model, read_model
from shapestream_engine.infer_request import InferRequest

Build = Callable[..., Any]
LARGE = 2**32 + 1


def model_of(build: Build, *types: Any) -> ov.Model:
    """A graph over vectors of these element types, called x, y, …"""
    inputs = [
        op.parameter([-1], element_type, name=name) for element_type, name in zip(types, "xyz", strict=False)
    ]
    for parameter in inputs:
        parameter.output(0).get_tensor().set_names({parameter.get_friendly_name()})
    return ov.Model([op.result(build(*inputs))], inputs)


def request_of(build: Build, *types: Any) -> InferRequest:
    """A request of that model."""
    return compile_model(ModelSpec(name="m", model=model_of(build, *types))).create_infer_request()


def run(request: InferRequest, *arrays: np.ndarray[Any, Any]) -> list[Any]:
    """Its answer."""
    request.infer(list(arrays))
    numbers: list[Any] = request.outputs()[0].tolist()
    return numbers


@pytest.mark.parametrize("use", [compile_model, read_model])
@pytest.mark.parametrize(
    ("build", "element_type", "words"),
    [
        (lambda x: op.subtract(x, np.float64(1.7e9)), np.float64, "OpenVINO computes f64 as f32"),
        (lambda x: op.reshape(x, [1, -1], False), np.float64, "OpenVINO computes f64 as f32"),
        (lambda x: op.convert(x, "i64"), np.float64, "OpenVINO computes f64 as f32"),
        (lambda x: op.convert(op.convert(x, "f64"), "f32"), np.float32, "OpenVINO computes f64 as f32"),
        (lambda x: op.add(x, x), np.uint64, "OpenVINO computes u64 as i32"),
        (lambda x: op.gather(x, [0], 0), np.uint64, "OpenVINO computes u64 as i32"),
    ],
    ids=["arithmetic", "a copy", "to integers", "within", "u64", "a copy of u64"],
)
def test_values_that_would_be_narrowed_are_refused(
    use: Callable[..., Any], build: Build, element_type: Any, words: str
) -> None:
    """With the engine that computes them as they are."""
    with pytest.raises(ModelLoadError, match=words) as refused:
        use(ModelSpec(name="m", model=model_of(build, element_type)))
    assert "engine: onnxruntime" in str(refused.value)


def test_what_is_passed_on_or_rounded_by_the_model_itself_is_served() -> None:
    """An input that is an output, and one that the model converts to f32."""
    wide = np.array([1.7e9 + 0.125, 1.0])
    assert wide.tolist() == run(request_of(lambda x: x, np.float64), wide)
    assert wide.astype(np.float32).tolist() == run(
        request_of(lambda x: op.convert(x, "f32"), np.float64), wide
    )


def test_values_that_only_shapes_decide_are_served() -> None:
    """The graph computes f64 of the length of its input."""
    request = request_of(
        lambda x: op.convert(op.multiply(op.convert(op.shape_of(x), "f64"), 2.0), "f32"), np.float32
    )
    assert [6.0] == run(request, np.zeros(3, np.float32))


def test_a_constant_of_a_wide_type_beside_a_request_s_values_is_served() -> None:
    """OpenVINO's reader of ONNX gives the Squeeze of an ArgMax its axes as u64."""
    request = request_of(lambda x: op.squeeze(op.unsqueeze(x, [0]), op.constant(np.uint64(0))), np.float32)
    assert [1.0, 2.0] == run(request, np.array([1, 2], np.float32))


@pytest.mark.parametrize("value", [LARGE, -LARGE])
def test_a_request_with_a_large_integer_is_invalid_and_the_next_one_is_answered(value: int) -> None:
    """Its sum would be wrapped; the message names the input and the value."""
    request = request_of(lambda x: op.add(x, x), np.int64)
    with pytest.raises(
        InvalidInput, match=f"input 'x' has the value {value}, and OpenVINO computes i64 as i32"
    ):
        run(request, np.array([1, value]))
    largest = np.iinfo(np.int32)
    for fits in (7, 0, largest.max // 2, largest.min // 2):
        assert [2 * fits] == run(request, np.array([fits]))


def test_a_large_index_is_invalid() -> None:
    """OpenVINO would take row 1."""
    request = request_of(lambda x, y: op.gather(x, y, 0), np.float32, np.int64)
    rows = np.arange(3, dtype=np.float32)
    with pytest.raises(InvalidInput, match=f"input 'y' has the value {LARGE}"):
        run(request, rows, np.array([LARGE]))
    assert [2.0, 0.0] == run(request, rows, np.array([2, 0]))


def test_a_large_integer_that_becomes_a_float_is_answered() -> None:
    """As a mask of the exporters does: it is converted exactly."""
    request = request_of(lambda x: op.convert(x, "f32"), np.int64)
    assert [float(np.float32(LARGE))] == run(request, np.array([LARGE]))
    assert [] == run(request, np.array([], np.int64))
