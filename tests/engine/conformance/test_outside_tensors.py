"""Tensors of the caller's, for inputs and outputs, and inputs given to the call: the same promises on every engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.engine.conformance.models import AFFINE, PAIR, affine

from shapestream_engine import ArrayTensor, ElementTypeError, InferenceError, ShapeError, Tensor
from shapestream_engine.infer_request import InferRequest


def rows(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """So many rows for the model, each element another."""
    return np.arange(count * 4, dtype=np.float32).reshape(count, 4)


def test_a_set_input_is_read_as_it_is_when_the_call_starts(request_of: Callable[..., InferRequest]) -> None:
    """New contents and new shapes are seen, with nothing set again; then the request's own tensor is used again."""
    request = request_of(AFFINE)
    tensor = Tensor("f32", (1, 4))
    request.set_input_tensor(0, tensor)
    for count in (1, 3, 3, 2):
        tensor.shape = (count, 4)
        tensor.data[...] = rows(count) + count
        request.infer()
        np.testing.assert_array_equal(affine(rows(count) + count), request.output_tensor().data)
    request.set_input_tensor(0, None)
    request.infer([rows(2)])
    np.testing.assert_array_equal(affine(rows(2)), request.output_tensor().data)
    np.testing.assert_array_equal(rows(2) + 2, tensor.data)


def test_a_set_input_that_does_not_fit_is_refused(request_of: Callable[..., InferRequest]) -> None:
    """Its type at once, its shape when the call starts, after which the request can be used."""
    request = request_of(AFFINE)
    with pytest.raises(ElementTypeError, match="is f32, and the tensor i64"):
        request.set_input_tensor(0, Tensor("i64", (1, 4)))
    tensor = Tensor("f32", (1, 5))
    request.set_input_tensor(0, tensor)
    with pytest.raises(ShapeError, match=r"not \[1, 5\]"):
        request.infer()
    tensor.shape = (2, 4)
    tensor.data[...] = rows(2)
    request.start_async()
    request.wait()
    np.testing.assert_array_equal(affine(rows(2)), request.output_tensor().data)


def test_a_set_output_is_resized_and_stays_while_it_fits(request_of: Callable[..., InferRequest]) -> None:
    """By either way to call; it moves for what is larger than it was made for, and only then."""
    request = request_of(AFFINE)
    tensor = Tensor("f32", (3, 8))
    request.set_output_tensor(0, tensor)
    start = tensor.reallocations
    for count in (1, 3, 2):
        request.infer([rows(count)])
        np.testing.assert_array_equal(affine(rows(count)), tensor.data)
    assert start == tensor.reallocations
    request.fill([rows(2)])
    request.start_async()
    request.wait()
    np.testing.assert_array_equal(affine(rows(2)), tensor.data)
    np.testing.assert_array_equal(tensor.data, request.output_tensor().data)


def test_an_array_takes_an_output_only_if_its_bound_fits(request_of: Callable[..., InferRequest]) -> None:
    """Within a stated bound the results lie in the array; without one, or with too large a one, it is refused."""
    bounded = request_of(AFFINE, {"x": "batch:1..4, 4"})
    bound = [axis.maximum for axis in bounded.signature.outputs[0].partial_shape]
    array = np.zeros([4, *bound[1:]], np.float32)
    bounded.set_output_tensor(0, ArrayTensor(array))
    for count in (4, 2):
        bounded.infer([rows(count)])
        np.testing.assert_array_equal(affine(rows(count)), array[:count])
    with pytest.raises(ShapeError, match="cannot grow"):
        bounded.set_output_tensor(0, ArrayTensor(array[:3]))


def test_tensors_stay_set_after_a_call_that_failed(request_of: Callable[..., InferRequest]) -> None:
    """What the request's own inputs hold stays there, too."""
    request = request_of(PAIR)
    given, total = Tensor("f32", (2, 4)), Tensor("f32", (2, 4))
    request.set_input_tensor("b", given)
    request.set_output_tensor("total", total)
    own = request.input_tensor("a")
    own.shape = (2, 4)
    own.data[...] = rows(2)
    given.shape = (3, 4)
    given.data[...] = rows(3)
    with pytest.raises(InferenceError):
        request.infer()
    given.shape = (2, 4)
    given.data[...] = 10 * rows(2)
    request.infer()
    np.testing.assert_array_equal(11 * rows(2), total.data)
    np.testing.assert_array_equal(rows(2).sum(axis=1), request.outputs()[1])
