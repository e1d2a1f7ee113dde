"""Tensors that are resized in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream_engine.element_types import ELEMENT_TYPES
from shapestream_engine.errors import ElementTypeError, ShapeError
from shapestream_engine.tensor import Tensor, TensorLike


def test_a_dynamic_tensor_starts_empty() -> None:
    """Until its shape is set a tensor holds nothing, as in OpenVINO."""
    tensor = Tensor("f32")
    assert ((0,), 0, 0, 0) == (tensor.shape, tensor.byte_size, tensor.capacity_bytes, tensor.reallocations)


def test_a_tensor_satisfies_the_interface_of_engines() -> None:
    """Our tensor stands wherever an engine's stands; mypy checks the types, this the behaviour."""
    tensor: TensorLike = Tensor("i64")
    tensor.shape = (2, 3)
    assert ("i64", (2, 3), (2, 3)) == (tensor.element_type, tensor.shape, tensor.data.shape)


@given(
    st.sampled_from(sorted(ELEMENT_TYPES)),
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=8),
)
def test_the_data_has_the_shape_wherever_it_went_before(element_type: str, shapes: list[list[int]]) -> None:
    """After any sequence of shapes the view is contiguous, aligned, writable, of the right type and size."""
    tensor = Tensor(element_type)
    for shape in shapes:
        tensor.set_shape(shape)
        data = tensor.data
        assert (tuple(shape), tuple(shape)) == (tensor.shape, data.shape)
        assert ELEMENT_TYPES[element_type] == data.dtype
        assert data.flags.c_contiguous
        assert data.flags.writeable
        assert 0 == data.ctypes.data % 64
        assert data.nbytes == tensor.byte_size <= tensor.capacity_bytes
        data[...] = 1


@given(st.lists(st.integers(0, 500), min_size=1, max_size=30))
def test_a_reallocation_is_counted_when_the_data_moved(lengths: list[int]) -> None:
    """The counter follows the data's address, and it moves only when the capacity was exceeded."""
    tensor = Tensor("u8", (1,))
    moves = 0
    for length in lengths:
        address, capacity = tensor.data.ctypes.data, tensor.capacity_bytes
        tensor.shape = (length,)
        moved = length > capacity
        assert moved == (tensor.data.ctypes.data != address)
        moves += moved
    assert moves == tensor.reallocations


def test_capacity_doubles_so_that_growing_stays_cheap() -> None:
    """A shape that grows by one row at a time moves the data only a logarithmic number of times."""
    tensor = Tensor("u8", (1,))
    for length in range(1, 1025):
        tensor.shape = (length,)
    assert (10, 1024) == (tensor.reallocations, tensor.capacity_bytes)


def test_growth_stops_at_the_upper_bound() -> None:
    """No capacity is reserved that no shape can use."""
    tensor = Tensor("u8", (60,), upper_bound_bytes=100, reserve_bytes=0)
    tensor.shape = (61,)
    assert 100 == tensor.capacity_bytes


def test_a_small_upper_bound_is_reserved_at_once() -> None:
    """Within the bound nothing ever moves."""
    tensor = Tensor("f32", upper_bound_bytes=4096, reserve_bytes=4096)
    for length in (1, 1024, 0, 512):
        tensor.shape = (length,)
    assert (0, 4096) == (tensor.reallocations, tensor.capacity_bytes)


def test_a_large_upper_bound_is_not_reserved() -> None:
    """Above `reserve_bytes` memory is taken when it is needed."""
    assert 0 == Tensor("f32", upper_bound_bytes=4097, reserve_bytes=4096).capacity_bytes


def test_beyond_the_upper_bound_is_an_error_that_changes_nothing() -> None:
    """A shape that the bound excludes is a shape error, and the tensor stays as it was."""
    tensor = Tensor("f32", (2, 2), upper_bound_bytes=64)
    tensor.data[...] = 7
    with pytest.raises(ShapeError, match=r"\[17\] needs 68 bytes; the upper bound is 64"):
        tensor.shape = (17,)
    assert ((2, 2), [7.0] * 4) == (tensor.shape, tensor.data.ravel().tolist())


@pytest.mark.parametrize("shape", [(-1,), (1.0,), (True,), ("3",), (2**64,), (2**62, 4), (2**40, 2**40, 0)])
def test_impossible_shapes_are_refused(shape: Any) -> None:
    """Negative, fractional, boolean and overflowing sizes are shape errors, and the tensor stays as it was."""
    tensor = Tensor("u8", (3,))
    with pytest.raises(ShapeError):
        tensor.set_shape(shape)
    assert (3,) == tensor.shape


def test_numpy_sizes_do_not_overflow() -> None:
    """Sizes are multiplied as Python's integers, whatever type they came in."""
    with pytest.raises(ShapeError, match="more than"):
        Tensor("u8").set_shape([np.int64(2**32), np.int64(2**32)])


def test_memory_that_is_not_there_changes_nothing() -> None:
    """A failed allocation leaves the tensor as it was."""
    tensor = Tensor("u8", (3,))
    with pytest.raises(MemoryError):
        tensor.shape = (2**62,)
    assert ((3,), 3, 0) == (tensor.shape, tensor.capacity_bytes, tensor.reallocations)


def test_an_unknown_element_type_is_refused() -> None:
    """A tensor of objects cannot be made."""
    with pytest.raises(ElementTypeError):
        Tensor("object")


def test_a_tensor_says_what_it_holds() -> None:
    """The repr shows type, shape and how much of the capacity is used."""
    assert "Tensor(f32, [2, 3], 24 of 32 bytes)" == repr(Tensor("f32", (2, 3), upper_bound_bytes=32))
