"""OpenVINO's inference requests: their own tensors, resized in place and reused; failures, cancellation, types."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo

from shapestream_engine import InferenceError, InputSpec, ModelSpec, ShapeError, compile_model
from shapestream_engine.backends.openvino import OpenVinoRequest
from shapestream_engine.infer_request import InferRequest
from shapestream_engine.tensor import reserved, upper_bounds

# One stream with one thread is a way of its own through OpenVINO: there its `infer` loses errors and cancellations.
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


def test_the_documented_way_of_using_the_engine_alone() -> None:
    """Shape, data, infer, output: by number and by name."""
    request = request_of(relu())
    request.input_tensor("x").shape = (2, 4)
    request.input_tensor(0).data[...] = np.arange(8).reshape(2, 4) - 4
    request.infer()
    assert (2, 4) == request.output_tensor(0).shape
    assert [[0, 0, 0, 0], [0, 1, 2, 3]] == request.output_tensor().data.tolist()
    with pytest.raises(KeyError, match="no input 'z'; model 'm' has x"):
        request.input_tensor("z")


def test_before_the_first_call_everything_dynamic_is_empty() -> None:
    """Inputs and outputs have 0 in each dynamic dimension, and their fixed sizes elsewhere."""
    request = request_of(relu())
    assert (0, 4) == request.input_tensor(0).shape
    assert (0, 4) == request.output_tensor(0).shape


def test_the_tensors_are_the_requests_own_and_stay_where_they_are() -> None:
    """Shapes within a small bound are set in place: OpenVINO's tensor keeps its address, and nothing is counted."""
    request = request_of(relu("batch:1..64, 4"))
    assert isinstance(request, OpenVinoRequest)
    addresses = set()
    for rows in (1, 64, 3, 64, 17):
        run(request, np.ones((rows, 4), np.float32))
        addresses.add(request.engine_request.get_input_tensor(0).data.ctypes.data)
    assert 1 == len(addresses)
    assert 0 == request.reallocations


def test_random_shapes_within_the_bounds_never_reallocate() -> None:
    """After creation no request within the bounds makes a tensor grow."""
    random = np.random.default_rng(0)
    x, y = op.parameter([-1, -1, 4], np.float32, name="x"), op.parameter([-1, -1], np.int64, name="y")
    spec = model_of([op.relu(x), op.add(y, y)], [x, y], x="batch:1..16, seq:1..64, 4", y="batch, seq")
    request = request_of(spec)
    for _ in range(300):
        rows, seq = int(random.integers(1, 17)), int(random.integers(1, 65))
        run(request, np.ones((rows, seq, 4), np.float32), np.ones((rows, seq), np.int64))
    assert 0 == request.reallocations


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


@pytest.mark.parametrize("shape", [(2, 5), (2,), (2, 4, 1), (-1, 4), (65, 4), (2.0, 4), (True, 4)])
def test_a_shape_that_the_port_does_not_take_is_refused_at_once(shape: tuple[Any, ...]) -> None:
    """OpenVINO takes any shape and fails later; the tensor says so when it is set, and stays as it was."""
    request = request_of(relu("batch:2..64, 4"))
    request.input_tensor(0).shape = (3, 4)
    with pytest.raises(ShapeError, match=r"input 'x' takes \[batch:2..64, 4\]"):
        request.input_tensor(0).shape = shape
    assert (3, 4) == request.input_tensor(0).shape


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


def test_outputs_follow_the_shape_of_each_call() -> None:
    """Growing, shrinking and growing again, every element is right."""
    request = request_of(relu())
    for rows in (1, 500, 2, 501, 40_000, 3):
        array = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
        (output,) = run(request, array)
        np.testing.assert_array_equal(array, output)


def test_a_model_that_returns_its_input_is_copied_right() -> None:
    """With nothing in between, the output lies in the input's memory, and follows it when it grows."""
    x = op.parameter([-1, 4], np.float32, name="x")
    request = request_of(model_of([x], [x], x="batch, 4"))
    for rows in (2, 1000, 1, 2000):
        array = np.full((rows, 4), rows, np.float32)
        (output,) = run(request, array)
        np.testing.assert_array_equal(array, output)


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


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_running_call_is_cancelled_from_another_thread(counts: dict[str, int]) -> None:
    """`infer` raises, and the request runs the next call to its end."""
    x = op.parameter([-1, -1], np.float32, name="x")
    node = x
    for _ in range(30):
        node = op.relu(op.matmul(node, node, False, False))
    request = request_of(model_of([node], [x]), **counts)
    request.input_tensor(0).shape = (1200, 1200)
    request.input_tensor(0).data[...] = 0
    failures = []

    def infer() -> None:
        try:
            request.infer()
        except InferenceError as error:
            failures.append(str(error))

    for _ in range(2):
        thread = threading.Thread(target=infer)
        thread.start()
        while thread.is_alive():
            request.cancel()
            thread.join(0.001)
    assert ["Infer Request was canceled"] * 2 == failures
    (output,) = run(request, np.eye(3, dtype=np.float32))
    np.testing.assert_array_equal(np.eye(3), output)


@pytest.mark.parametrize(
    "element_type",
    ["boolean", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "f16", "f32", "f64", "bf16"],
)
def test_element_types_arrive_and_leave_as_they_are(element_type: str) -> None:
    """Every element type that may travel goes through a call unchanged."""
    if element_type == "bf16":
        pytest.importorskip("ml_dtypes")
    x = op.parameter([-1, 3], getattr(ov.Type, element_type), name="x")
    request = request_of(model_of([op.concat([x, x], 1)], [x], x="batch, 3"))
    tensor = request.input_tensor(0)
    assert element_type == tensor.element_type == request.output_tensor(0).element_type
    tensor.shape = (2, 3)
    tensor.data[...] = np.array([[0, 1, 1], [1, 0, 1]]).astype(tensor.data.dtype)
    request.infer()
    output = request.output_tensor(0).data
    assert tensor.data.dtype == output.dtype
    np.testing.assert_array_equal(np.concatenate([tensor.data, tensor.data], 1), output)


def test_a_size_of_zero_is_an_ordinary_size() -> None:
    """No rows in, no rows out; afterwards rows again."""
    request = request_of(relu("batch, seq, 4"))
    assert (0, 3, 4) == run(request, np.ones((0, 3, 4), np.float32))[0].shape
    assert (2, 0, 4) == run(request, np.ones((2, 0, 4), np.float32))[0].shape
    np.testing.assert_array_equal(np.ones((1, 2, 4)), run(request, np.ones((1, 2, 4), np.float32))[0])


def test_scalars_and_fixed_shapes() -> None:
    """A model without any dynamic dimension, and with an input of rank 0."""
    x, factor = op.parameter([3], np.float32, name="x"), op.parameter([], np.float32, name="factor")
    request = request_of(model_of([op.multiply(x, factor)], [x, factor]))
    assert [(3,), ()] == [tensor.shape for tensor in request.input_tensors]
    assert [2, 4, 6] == run(request, np.array([1, 2, 3], np.float32), np.array(2, np.float32))[0].tolist()
    assert 0 == request.reallocations


def test_outputs_whose_shape_depends_on_the_data() -> None:
    """As many rows as there are non-zero elements, none included."""
    x = op.parameter([-1], np.float32, name="x")
    request = request_of(model_of([op.non_zero(x)], [x]))
    assert [[1, 2]] == run(request, np.array([0, 5, 5], np.float32))[0].tolist()
    assert (1, 0) == run(request, np.zeros(100, np.float32))[0].shape
    assert (1, 1000) == run(request, np.ones(1000, np.float32))[0].shape


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
