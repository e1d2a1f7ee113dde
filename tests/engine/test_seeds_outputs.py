"""The seeds' claims about output tensors: their shapes, their memory, and tensors set beforehand, on the real OpenVINO.

The numbers are those of tests/engine/seeds.md, which says what each claim is and how it fares.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from openvino import opset13 as op
from tests.engine.seed_models import in_memory, nonzero, one_request, plus_one, two_by_two

from shapestream_engine import (
    ArrayTensor,
    ElementTypeError,
    InferenceError,
    PartialShape,
    ShapeError,
    Tensor,
)


def address(array: np.ndarray[Any, Any]) -> int:
    """Where the data is."""
    return int(array.ctypes.data)


def run(request: Any, *shapes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Calls with ones of these shapes: the shapes of the outputs, whose every element must be 2."""
    found = []
    for shape in shapes:
        request.infer([np.ones(shape)])
        assert (request.output_tensor().data == 2).all()
        found.append(request.output_tensor().shape)
    return found


@pytest.mark.seeds("S002-27", "S003-39", "S003-54")
def test_an_outputs_shape_is_known_after_each_call() -> None:
    """Whatever the call before has left; a view taken then stays what it was only by a copy."""
    shapes = [(1, 128), (1, 200), (3, 1), (1, 128)]
    assert shapes == run(one_request(plus_one()), *shapes)


@pytest.mark.seeds("S002-28", "S003-55")
def test_before_the_first_call_only_the_open_sizes_are_zero() -> None:
    """Not [0], as of an unknown rank, but 0 in each dynamic dimension: here as in OpenVINO's own tensor."""
    for shape, expected in (("?, 384", (0, 384)), ("1..8, ?", (0, 0)), ("1, 2..5", (1, 0))):
        request: Any = one_request(plus_one(*["?"] * 2).reshape(shape))
        assert expected == request.output_tensor().shape == request.output_tensor().data.shape
        assert expected == tuple(request.engine_request.get_output_tensor().shape)
        assert 0 == request.output_tensor().data.nbytes


@pytest.mark.seeds("S003-55")
def test_a_small_upper_bound_is_reserved_once_and_for_all() -> None:
    """Outputs within it never move, though each call has another shape; without a bound they move as they grow."""
    shapes = [(1, 8), (3, 100), (10, 512), (1, 9), (9, 511)]
    for bounds, places in (("1..10, 8..512", 1), ("?, ?", 3)):
        request: Any = one_request(plus_one().reshape(bounds))
        seen = []
        for shape in shapes:
            run(request, shape)
            seen.append(address(request.engine_request.get_output_tensor().data))
        assert places == len(set(seen))


@pytest.mark.seeds("S003-41")
def test_openvinos_handle_follows_the_calls_and_ours_is_of_one_call() -> None:
    """The runtime's tensor, asked for once, shows every later result; the engine's is a view of one, and asked for anew."""
    request: Any = one_request(plus_one())
    run(request, (1, 128))
    handle, ours = request.engine_request.get_output_tensor(), request.output_tensor()
    run(request, (1, 200))
    assert (1, 200) == tuple(handle.shape) == handle.data.shape == request.output_tensor().shape
    assert (1, 128) == ours.shape


@pytest.mark.seeds("S003-58")
def test_slicing_an_output_is_no_copy() -> None:
    """`data[:]` is a view that the next call writes over; `.copy()` stays."""
    request = one_request(plus_one())
    request.infer([np.ones((1, 8))])
    sliced, copied = request.output_tensor().data[:], request.output_tensor().data.copy()
    request.infer([np.full((1, 8), 6)])
    assert [7] * 8 == sliced[0].tolist()
    assert [2] * 8 == copied[0].tolist()


@pytest.mark.seeds("S002-29", "S002-30", "S003-56", "S003-57")
def test_a_tensor_set_beforehand_is_resized_and_moves_only_when_it_must_grow() -> None:
    """The call replaces its shape; within the capacity that it was made with, the data stays where it is."""
    request = one_request(plus_one())
    tensor = Tensor("f32", (10, 512))
    request.set_output_tensor(0, tensor)
    start, moves = tensor.reallocations, []
    for shape in ((2, 3), (10, 512), (1, 1), (4, 5), (20, 600), (2, 2)):
        assert [shape] == run(request, shape)
        assert shape == tensor.shape
        assert (tensor.data == 2).all()
        assert address(tensor.data) == address(request.output_tensor().data)
        moves.append(tensor.reallocations - start)
    assert [0, 0, 0, 0, 1, 1] == moves


@pytest.mark.seeds("S002-30", "S003-57")
def test_a_set_tensor_of_a_bounded_output_gets_its_bound_at_once() -> None:
    """However small it was; no call within the bounds moves it."""
    request = one_request(plus_one().reshape("1..10, 1..512"))
    tensor = Tensor("f32")
    request.set_output_tensor(0, tensor)
    assert 10 * 512 * 4 <= tensor.capacity_bytes
    places = {run(request, shape) and address(tensor.data) for shape in ((1, 1), (10, 512), (3, 4))}
    assert 1 == len(places)


@pytest.mark.seeds("S003-56")
def test_an_array_takes_the_output_where_its_bound_fits() -> None:
    """OpenVINO writes into the array itself: at its start, as many elements as the call gave."""
    array = np.full((10, 512), -1, np.float32)
    tensor = ArrayTensor(array)
    request = one_request(plus_one().reshape("1..10, 1..512"))
    request.set_output_tensor(0, tensor)
    assert (10, 512) == tensor.shape
    for shape in ((2, 3), (10, 512), (1, 1)):
        run(request, shape)
        count = shape[0] * shape[1]
        assert shape == tensor.shape
        assert [2] * count == array.reshape(-1)[:count].tolist()
    assert 0 == tensor.reallocations


@pytest.mark.seeds("S003-56")
@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ("?, 512", "may need any number of bytes, and an array of 20480 bytes cannot grow"),
        ("1..11, 512", "may need 22528 bytes, and an array of 20480"),
    ],
)
def test_an_array_that_the_output_may_outgrow_is_refused(shape: str, why: str) -> None:
    """At once, not in the call that outgrows it; the request keeps its own tensor."""
    request = one_request(plus_one().reshape(shape))
    with pytest.raises(ShapeError, match=why):
        request.set_output_tensor(0, ArrayTensor(np.zeros((10, 512), np.float32)))
    assert [(11, 512)] == run(request, (11, 512))


def test_what_no_output_tensor_can_be_is_refused() -> None:
    """Another element type, or another port."""
    request = one_request(plus_one())
    with pytest.raises(ElementTypeError, match="is f32, and the tensor f64"):
        request.set_output_tensor(0, Tensor("f64"))
    with pytest.raises(KeyError, match="no output 'z'"):
        request.set_output_tensor("z", Tensor("f32"))


def test_each_output_is_set_on_its_own() -> None:
    """One in a tensor, one over an array, with others' results unchanged."""
    request = one_request(two_by_two().reshape({"a": "1..4, 3", "b": "1..4, 3"}))
    joined, doubled = Tensor("f32"), np.zeros((4, 3), np.float32)
    request.set_output_tensor("joined", joined)
    request.infer({"a": np.ones((1, 3)), "b": np.ones((2, 3))})
    request.set_output_tensor("doubled", ArrayTensor(doubled))
    request.infer({"a": np.ones((2, 3)), "b": np.full((1, 3), 4)})
    assert [[1] * 3, [1] * 3, [4] * 3] == joined.data.tolist()
    assert [8] * 3 == doubled[0].tolist()


@pytest.mark.seeds("S002-29", "S003-56")
def test_rows_that_the_data_decides_come_into_the_set_tensor() -> None:
    """None, some or all; the model's own bound is enough to lie over an array."""
    request = one_request(nonzero(5, 5))
    array = np.zeros((25, 2), np.int64)
    tensor = ArrayTensor(array)
    request.set_output_tensor(0, tensor)
    random = np.random.default_rng(0)
    for share in (0.5, 0.0, 1.0):
        x = (random.random((5, 5)) < share).astype(np.int64)
        request.infer([x])
        np.testing.assert_array_equal(np.argwhere(x), tensor.data)
    assert 0 == tensor.reallocations


@pytest.mark.seeds("S004-02", "S004-03", "S004-05")
def test_openvino_bounds_what_depends_on_the_data_too() -> None:
    """At most 25 places in a square of 5, two numbers each; the results come in their true size, within the bound."""
    model = nonzero(5, 5)
    shape = model.output().partial_shape
    assert "[..25,2]" == str(shape)
    assert PartialShape.parse("<=25, 2") == shape
    assert [True, False] == [axis.is_dynamic for axis in shape]
    request = one_request(model)
    for count in (0, 7, 25):
        request.infer([np.arange(25).reshape(5, 5) < count])
        assert (count, 2) == request.output_tensor().shape
        assert shape.admits(request.output_tensor().shape)


def test_a_failed_call_leaves_the_set_tensor_in_use() -> None:
    """The next call that runs is found in it."""
    x, wanted = op.parameter([-1, -1], np.float32, name="x"), op.parameter([2], np.int64, name="wanted")
    request = one_request(in_memory([op.reshape(x, wanted, False)], [x, wanted]))
    tensor = Tensor("f32")
    request.set_output_tensor(0, tensor)
    for shape, runs in (((3, 2), True), ((5, 5), False), ((1, 6), True)):
        inputs = [np.arange(6).reshape(2, 3), np.array(shape)]
        if runs:
            request.infer(inputs)
            assert shape == tensor.shape
            assert list(range(6)) == tensor.data.ravel().tolist()
        else:
            with pytest.raises(InferenceError):
                request.infer(inputs)


def test_a_model_that_returns_its_input_still_fills_the_set_tensor() -> None:
    """Though OpenVINO leaves such an output where the input is."""
    x = op.parameter([-1, 4], np.float32, name="x")
    request = one_request(in_memory([x], [x]))
    tensor = Tensor("f32", (8, 4))
    request.set_output_tensor(0, tensor)
    for rows in (2, 8, 1, 20):
        request.infer([np.full((rows, 4), rows)])
        assert np.full((rows, 4), rows).tolist() == tensor.data.tolist()
