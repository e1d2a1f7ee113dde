"""OpenVINO's inference requests: their own tensors, resized in place and reused; failures, types."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo

from shapestream_engine import InferenceError, InputSpec, ModelSpec, ShapeError, compile_model
from shapestream_engine.infer_request import InferRequest
from shapestream_engine.tensor import reserved, upper_bounds

ROOT = Path(__file__).resolve().parents[2]
# Without streams, one stream of several threads, and two requests without streams.
COUNTS = [{"slots": 1, "threads": 1}, {"slots": 1, "threads": 2}, {"slots": 2, "threads": 2}]


def model_of(nodes: list[Any], parameters: list[Any], **shapes: str) -> ModelSpec:
    """A model in memory, its inputs with these shapes."""
    model = ov.Model([op.result(node) for node in nodes], parameters)
    return ModelSpec(
        name="m", model=model, inputs={name: InputSpec(shape=text) for name, text in shapes.items()}
    )


def request_of(spec: ModelSpec, **counts: int) -> InferRequest:
    """The request of a freshly compiled model."""
    return compile_model(spec, **counts).create_infer_request()


def relu(shape: str = "batch, 4", element_type: Any = np.float32) -> ModelSpec:
    """max(x, 0)"""
    x = op.parameter([-1] * (shape.count(",") + 1), element_type, name="x")
    return model_of([op.relu(x)], [x], x=shape)


def run(request: InferRequest, *arrays: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Resizes, fills, runs, and copies the outputs."""
    for tensor, array in zip(request.input_tensors, arrays, strict=True):
        tensor.shape = array.shape
        tensor.data[...] = array
    request.infer()
    return [output.copy() for output in request.outputs()]


def test_without_a_bound_the_capacity_doubles() -> None:
    """Growth costs a constant per byte: a thousand ever larger shapes move the data a dozen times."""
    request = request_of(relu("batch, 4"))
    for rows in range(1, 1001):
        request.input_tensor(0).shape = (rows, 4)
    assert 5 <= request.reallocations <= 12
    request.input_tensor(0).shape = (1, 4)
    before = request.reallocations
    request.input_tensor(0).shape = (1000, 4)
    assert before == request.reallocations


def test_a_large_bound_is_not_reserved_but_limits_the_growth() -> None:
    """Beyond the budget the tensor starts small, doubles, and never takes more than the bound."""
    request = request_of(relu("batch:1..5000000, 4"))
    tensor: Any = request.input_tensor(0)
    assert 0 == tensor.capacity_bytes
    for rows in (1_000_000, 1_500_000, 3_000_000):
        tensor.shape = (rows, 4)
    # Counted by the data's address, and an allocator may give the same one again.
    assert 64_000_000 == tensor.capacity_bytes
    assert 1 <= request.reallocations <= 3
    tensor.shape = (4_000_001, 4)
    assert 80_000_000 == tensor.capacity_bytes
    assert request.reallocations <= 4


def test_the_budget_of_a_request_is_shared_by_its_inputs() -> None:
    """Inputs are reserved in their order while their upper bounds fit the budget together."""
    assert (True, False, True, False) == reserved([60, 50, 40, None], budget=100)
    x, y = op.parameter([-1, 4], np.float32, name="x"), op.parameter([-1], np.float16, name="y")
    spec = model_of([op.relu(x), op.relu(y)], [x, y], x="batch:1..8, 4", y="batch:2..5")
    assert (5 * 4 * 4, 5 * 2) == upper_bounds(compile_model(spec).signature)


def test_a_shape_that_cannot_be_allocated_leaves_the_tensor_usable() -> None:
    """After a failed allocation OpenVINO's own tensor would have a capacity without memory."""
    request = request_of(relu("batch, 4"))
    run(request, np.ones((1000, 4), np.float32))
    with pytest.raises(MemoryError, match="input 'x' of shape"):
        request.input_tensor(0).shape = (2**45, 4)
    with pytest.raises(ShapeError, match="more bytes than any machine"):
        request.input_tensor(0).shape = (2**62, 4)
    array = np.arange(4000, dtype=np.float32).reshape(1000, 4)
    (output,) = run(request, array)
    np.testing.assert_array_equal(array, output)


def test_a_running_request_cannot_be_resized() -> None:
    """OpenVINO would let it, and corrupt memory."""
    request = request_of(relu())
    run(request, np.ones((2, 4), np.float32))
    request.start_async()
    with pytest.raises(InferenceError, match="while its request runs"):
        request.input_tensor(0).shape = (3, 4)
    request.wait()
    request.input_tensor(0).shape = (3, 4)
    assert (3, 4) == request.input_tensor(0).shape


def test_calls_of_one_thread_need_no_other() -> None:
    """They compute in the thread that calls, so no thread has to wake up. In a process without other tests' threads."""
    code = "from tests.engine.test_openvino_request import threads_of_calls; threads_of_calls()"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert 0 == ran.returncode, ran.stderr


def threads_of_calls() -> None:
    """A model of two slots adds none, in a process that has compiled and called one before."""
    run(request_of(relu(), slots=2, threads=2), np.ones((2, 4), np.float32))
    before = threading.active_count(), len(os.listdir("/proc/self/task"))
    request = request_of(relu(), slots=2, threads=2)
    for rows in (1, 7, 3):
        run(request, np.ones((rows, 4), np.float32))
    assert before == (threading.active_count(), len(os.listdir("/proc/self/task")))


class SlowRequest:
    """An OpenVINO request whose call ends when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def infer(self, *, share_outputs: bool) -> None:
        """Wait."""
        assert self.go.wait(10)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_started_call_returns_at_once_although_openvino_would_compute_in_the_caller(threads: int) -> None:
    """The caller goes on, the request is busy until `wait`, and a second start is refused."""
    request: Any = request_of(relu(), threads=threads)
    slow = request.engine_request = SlowRequest()
    request.start_async()
    assert request.running
    with pytest.raises(RuntimeError, match="not waited for"):
        request.start_async()
    slow.go.set()
    request.wait()
    assert not request.running


@pytest.mark.parametrize(
    ("counts", "properties", "streams"),
    [
        ({"slots": 1, "threads": 1}, {}, 0),
        ({"slots": 2, "threads": 2}, {}, 0),
        ({"slots": 1, "threads": 2}, {}, 1),
        ({"slots": 1, "threads": 1}, {"NUM_STREAMS": "1"}, 1),
        ({"slots": 1, "threads": 1}, {"INFERENCE_NUM_THREADS": "2"}, 1),
    ],
    ids=str,
)
def test_errors_are_raised_whatever_threads_compute(
    counts: dict[str, int], properties: dict[str, str], streams: int
) -> None:
    """Also where OpenVINO's own `infer` would hide them: on one stream of one thread, which a user may ask for."""
    model = compile_model(replace(reshape_by_data(), properties=properties), **counts)
    assert streams == model.properties["NUM_STREAMS"]
    request = model.create_infer_request()
    for _ in range(3):
        with pytest.raises(InferenceError, match="conflicts"):
            request.infer([np.ones((2, 3), np.float32), np.array([4, 7])])
        request.infer([np.ones((2, 3), np.float32), np.array([3, 2])])
        assert (3, 2) == request.outputs()[0].shape


def reshape_by_data() -> ModelSpec:
    """A model that fails for some data: x in the shape that another input asks for."""
    x, wanted = op.parameter([-1, -1], np.float32, name="x"), op.parameter([2], np.int64, name="wanted")
    return model_of([op.reshape(x, wanted, False)], [x, wanted])


def start_and_wait(request: InferRequest) -> None:
    """The asynchronous way."""
    request.start_async()
    request.wait()


def infer(request: InferRequest) -> None:
    """The synchronous way."""
    request.infer()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("way", [infer, start_and_wait])
def test_a_call_that_fails_says_why_and_leaves_the_request_usable(way: Any, counts: dict[str, int]) -> None:
    """The error holds OpenVINO's words without places in its source; the next call runs."""
    request = request_of(reshape_by_data(), **counts)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for wanted in ([3, 2], [4, 7], [6, 1], [5, 5], [1, 6]):
        for tensor, values in zip(request.input_tensors, (array, np.array(wanted)), strict=True):
            tensor.shape = values.shape
            tensor.data[...] = values
        if wanted[0] * wanted[1] == 6:
            way(request)
            np.testing.assert_array_equal(array.reshape(wanted), request.outputs()[0])
            continue
        with pytest.raises(InferenceError, match=r"the shape of input data \(2.3\) conflicts") as caught:
            way(request)
        assert ".cpp" not in str(caught.value)


def test_a_stateful_model_starts_afresh_in_every_call() -> None:
    """What one request left in a model's variables never reaches the next."""
    request = request_of(ModelSpec(name="m", model=accumulator()))
    ones = np.ones((1, 2), np.float32)
    assert [[[1, 1]]] * 2 == [run(request, ones)[0].tolist() for _ in range(2)]
    request.start_async()
    request.wait()
    assert [[1, 1]] == request.outputs()[0].tolist()


def accumulator() -> ov.Model:
    """A model that adds its input to the sum of all earlier ones."""
    info = VariableInfo()
    info.data_shape = ov.PartialShape([1, 2])
    info.data_type = ov.Type.f32
    info.variable_id = "sum"
    variable = Variable(info)
    x = op.parameter([1, 2], np.float32, name="x")
    total = op.add(op.read_value(op.constant(np.zeros((1, 2), np.float32)), variable), x)
    return ov.Model([op.result(total)], [op.assign(total, variable)], [x], "accumulator")
