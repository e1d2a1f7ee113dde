"""The seeds' claims about input tensors, got and resized or set from outside, on the real OpenVINO.

The numbers are those of tests/engine/seeds.md, which says what each claim is and how it fares.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from openvino import opset13 as op
from tests.engine.seed_models import in_memory, one_request, plus_one, two_by_two

from shapestream_engine import ArrayTensor, ElementTypeError, ShapeError, Tensor


def address(array: np.ndarray[Any, Any]) -> int:
    """Where the data is."""
    return int(array.ctypes.data)


@pytest.mark.seeds("S003-13", "S003-43", "S003-48", "S002-23")
def test_the_requests_own_tensor_is_resized_filled_and_run() -> None:
    """Shape, data, call, result; and again with another shape, by number and by name."""
    request = one_request(plus_one())
    for port, shape in ((0, (1, 128)), ("x", (1, 200)), (0, (1, 128))):
        tensor = request.input_tensor(port)
        tensor.shape = shape
        tensor.data[...] = 41
        request.infer()
        assert shape == request.output_tensor().shape
        assert 42 == request.output_tensor().data.min() == request.output_tensor().data.max()


@pytest.mark.seeds("S002-23", "S002-24", "S003-45", "S003-46")
@pytest.mark.parametrize("shape", ["?, ?", "1..10, 8..512", "1, ?"])
def test_an_open_input_starts_without_data(shape: str) -> None:
    """0 in each dynamic dimension, bounds or not, and no memory in OpenVINO's own tensor unless a bound was reserved."""
    model = plus_one().reshape(shape)
    request: Any = one_request(model)
    expected = tuple(0 if axis.is_dynamic else axis.minimum for axis in model.input().partial_shape)
    assert 0 in expected
    assert expected == request.input_tensor().shape == request.input_tensor().data.shape
    assert expected == tuple(request.engine_request.get_input_tensor().shape)
    bounded = all(axis.maximum is not None for axis in model.input().partial_shape)
    assert (10 * 512 * 4 if bounded else 0) == request.input_tensor().capacity_bytes


@pytest.mark.seeds("S003-44")
def test_a_static_input_has_its_shape_at_once() -> None:
    """Nothing needs to be set but the data."""
    request = one_request(plus_one().reshape([2, 3]))
    assert (2, 3) == request.input_tensor().shape
    request.input_tensor().data[...] = 1
    request.infer()
    assert [[2, 2, 2]] * 2 == request.output_tensor().data.tolist()


@pytest.mark.seeds("S003-47")
def test_without_a_shape_the_call_runs_on_nothing() -> None:
    """OpenVINO does not insist that a shape be set: no elements go in, none come out, and nothing is raised."""
    request = one_request(plus_one())
    request.infer()
    assert (0, 0) == request.output_tensor().shape


@pytest.mark.seeds("S002-22", "S003-35", "S003-36", "S003-40")
@pytest.mark.parametrize("shape", ["1, ?", "?, ?", "1..10, 8..512", "?, 8..512"])
def test_a_tensor_of_ones_own_is_set_and_read_by_the_call(shape: str) -> None:
    """One of [1, 128] suits every shape of the seeds' examples, and so does the next, of [1, 200]."""
    request = one_request(plus_one().reshape(shape))
    for columns in (128, 200):
        tensor = Tensor("f32", (1, columns))
        tensor.data[...] = columns
        request.set_input_tensor(0, tensor)
        request.infer()
        assert (1, columns) == request.output_tensor().shape
        assert columns + 1 == request.output_tensor().data[0, -1]


@pytest.mark.seeds("S002-22", "S003-36")
def test_a_set_tensor_is_read_without_a_copy_and_as_it_is_when_the_call_starts() -> None:
    """OpenVINO's tensor is the same memory; new contents and new shapes are seen, with nothing set again."""
    request: Any = one_request(plus_one())
    tensor = Tensor("f32", (2, 3))
    request.set_input_tensor("x", tensor)
    for value, shape in ((1, (2, 3)), (2, (2, 3)), (3, (40, 50)), (4, (1, 1))):
        tensor.shape = shape
        tensor.data[...] = value
        request.infer()
        assert shape == request.output_tensor().shape == request.input_tensor().shape
        assert value + 1 == request.output_tensor().data.max()
        assert address(tensor.data) == address(request.engine_request.get_input_tensor().data)


def test_an_array_of_ones_own_is_read_without_a_copy() -> None:
    """Even one that is not aligned; a shape that outgrows it is refused."""
    memory = np.zeros(4 * 6 + 64, np.uint8)
    start = -address(memory) % 64 + 4
    array = memory[start : start + 4 * 6].view(np.float32).reshape(2, 3)
    request: Any = one_request(plus_one())
    request.set_input_tensor(0, ArrayTensor(array))
    array[...] = [[1, 2, 3], [4, 5, 6]]
    request.infer()
    assert [[2, 3, 4], [5, 6, 7]] == request.output_tensor().data.tolist()
    assert address(array) == address(request.engine_request.get_input_tensor().data)
    request.input_tensor().shape = (1, 4)
    request.infer()
    assert [[2, 3, 4, 5]] == request.output_tensor().data.tolist()
    with pytest.raises(ShapeError, match="upper bound is 24"):
        request.input_tensor().shape = (3, 3)


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.zeros((4, 6))[:, ::2], "not C-contiguous"),
        (np.broadcast_to(np.float32(1), (2, 2)), "C-contiguous|read-only"),
        (np.frombuffer(b"12345678", np.float32), "read-only"),
    ],
)
def test_an_array_that_no_tensor_can_lie_over_is_refused(array: np.ndarray[Any, Any], why: str) -> None:
    """It would have to be copied, or could not be written."""
    with pytest.raises(ShapeError, match=why):
        ArrayTensor(array)


def test_without_the_set_tensor_the_request_uses_its_own_again() -> None:
    """Setting None, or filling with arrays, leaves the caller's tensor alone."""
    request: Any = one_request(plus_one("1..4", "1..8"))
    own = address(request.engine_request.get_input_tensor().data)
    tensor = Tensor("f32", (1, 2))
    tensor.data[...] = 7
    for back in (lambda: request.set_input_tensor(0, None), lambda: request.fill([np.ones((2, 2))])):
        request.set_input_tensor(0, tensor)
        request.infer()
        assert 8 == request.output_tensor().data.max()
        back()
        request.infer([np.ones((2, 2))])
        assert [[2, 2], [2, 2]] == request.output_tensor().data.tolist()
        assert own == address(request.engine_request.get_input_tensor().data)
        assert [[7, 7]] == tensor.data.tolist()
    assert 0 == request.reallocations


@pytest.mark.seeds("S003-37")
def test_tensors_may_be_given_to_the_call_itself() -> None:
    """Which sets them, as by hand: the next call reads them again."""
    request = one_request(plus_one())
    tensor = Tensor("f32", (1, 128))
    tensor.data[...] = 1
    request.infer([tensor])
    tensor.data[...] = 2
    request.infer()
    assert (1, 128) == request.output_tensor().shape
    assert 3 == request.output_tensor().data.max()


@pytest.mark.seeds("S003-38")
def test_arrays_may_be_given_to_the_call_itself() -> None:
    """By position or by name, as lists too; f64, which NumPy makes by itself, becomes f32. They are copied once."""
    request = one_request(plus_one())
    array = np.ones(shape=[1, 128])
    request.infer([array])
    array[...] = 9
    request.infer()
    assert 2 == request.output_tensor().data.max()
    request.infer({"x": [[1, 2], [3, 4]]})
    assert [[2, 3], [4, 5]] == request.output_tensor().data.tolist()


def test_arrays_that_do_not_fit_are_refused_with_what_is_wrong() -> None:
    """Names, number, types and shapes; what would lose more than precision is not converted."""
    x = op.parameter([-1], np.int32, name="x")
    request = one_request(in_memory([op.add(x, x)], [x]))
    for wrong, error, why in (
        ([], ShapeError, "0 inputs were given; the model takes x"),
        ({"y": [1]}, ShapeError, "missing: x; the model takes x"),
        ({"x": [1], "y": [1]}, ShapeError, "unknown: y"),
        (np.ones(1, np.int32), ShapeError, "a list or a mapping, with one entry for each of x"),
        ([[1.5]], ElementTypeError, "input 'x' is i32, which does not hold float64"),
        ([[2**31]], ElementTypeError, "does not hold int64"),
        ([["1"]], ElementTypeError, "does not hold <U1"),
        ([[[1]]], ShapeError, r"takes \[\?\], not \[1, 1\]"),
    ):
        with pytest.raises(error, match=why):
            request.infer(wrong)
    request.infer([[2**31 - 1 - 2**30, 3]])
    assert [2**31 - 2, 6] == request.output_tensor().data.tolist()


@pytest.mark.seeds("S002-14", "S002-22", "S003-18")
def test_some_inputs_may_be_set_and_others_not() -> None:
    """Each port is on its own."""
    request = one_request(two_by_two())
    tensor = Tensor("f32", (2, 3))
    tensor.data[...] = 5
    request.infer({"a": tensor, "b": np.ones((1, 3))})
    assert [[5] * 3, [5] * 3, [1] * 3] == request.output_tensor("joined").data.tolist()
    request.input_tensor("b").data[...] = 2
    tensor.data[...] = 6
    request.infer()
    assert [[6] * 3, [6] * 3, [2] * 3] == request.output_tensor("joined").data.tolist()


@pytest.mark.seeds("S002-22", "S003-42")
def test_a_tensors_shape_is_always_of_plain_sizes() -> None:
    """Bounds are the model's; a tensor of them cannot be made."""
    assert (1, 128) == Tensor("f32", (1, 128)).shape
    for shape in ((1, -1), ("?",), ((1, 10),)):
        with pytest.raises(ShapeError):
            Tensor("f32", shape)  # type: ignore[arg-type]


@pytest.mark.seeds("S002-30", "S003-57")
def test_a_tensor_is_reallocated_only_for_more_than_it_has() -> None:
    """OpenVINO's rule, which the engine's tensor follows: as long as the capacity suffices, the data stays."""
    tensor = Tensor("f32", (16, 16))
    start = address(tensor.data)
    for shape in ((1, 1), (4, 64), (0, 5), (16, 16)):
        tensor.shape = shape
        assert (start, 0) == (address(tensor.data), tensor.reallocations)
    tensor.shape = (16, 17)
    assert 1 == tensor.reallocations
