"""What callers may pass for a tensor, and what is refused because it would lose something."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shapestream.client.opened_models import Model
from shapestream.errors import InvalidRequest
from shapestream.testing import identity_signature
from shapestream.wire.tensor_frames import to_array


def opened(shape: str, element_type: str) -> Model:
    """A model with one input."""
    signature = identity_signature(shape=shape, element_type=element_type)
    return Model(signature.name, signature.to_dict(), 0)


def encoded(element_type: str, value: Any, shape: str = "?") -> Any:
    """The array that travels for `value`."""
    tensors, nbytes = opened(shape, element_type).encode({"x": value})
    ((port, travels_as, sizes),) = tensors.layout
    array = to_array(travels_as, sizes, tensors.buffers[0])
    assert (0, element_type, array.nbytes) == (port, travels_as, nbytes)
    return array


@pytest.mark.parametrize(
    ("element_type", "value"),
    [
        ("f32", [1, 2]),
        ("f32", [0.1, 0.2]),
        ("f32", [float("inf"), float("nan")]),
        ("f16", [1.5]),
        ("f64", [1]),
        ("u8", [0, 255]),
        ("i8", [-128]),
        ("u64", [2**64 - 1]),
        ("boolean", [True, False]),
        ("i64", [True]),
        ("i32", np.array([1, -1], np.int64)),
        ("u8", np.array([255], np.int32)),
        ("i64", np.array([7], np.uint8)),
        ("f32", np.array([7], np.int16)),
        ("f64", np.array([0.1], np.float32)),
        ("f32", []),
        ("boolean", []),
        ("f64", np.array([2**53, 2**60, -(2**63)], np.int64)),
        ("f64", np.array([2**63, 0], np.uint64)),
        ("f64", [2**53, 0.5]),
        ("f32", [2**24, 2**30]),
        ("f32", np.ma.array([1, 2], np.float32)),
        ("f64", np.array([True])),
    ],
)
def test_what_loses_nothing_is_taken(element_type: str, value: Any) -> None:
    """Plain numbers take the port's type; arrays are widened, or change integer type where every value fits."""
    array = encoded(element_type, value)
    np.testing.assert_array_equal(np.asarray(value, array.dtype), array)


@pytest.mark.parametrize(
    ("element_type", "value", "message"),
    [
        ("u8", [256], "cannot hold"),
        ("u8", [-1], "cannot hold"),
        ("i64", np.array([2**63], np.uint64), "cannot hold"),
        ("u64", np.array([-1], np.int64), "cannot hold"),
        ("f32", [2**24 + 1], "cannot hold"),
        ("f16", [1e6], "cannot hold"),
        ("i64", [1.0], "astype"),
        ("i64", np.array([1.0]), "astype"),
        ("f32", np.array([1.0]), "astype"),
        ("f16", np.array([1.0], np.float32), "astype"),
        ("f32", np.array([1], np.int64), "astype"),
        ("boolean", [1], "astype"),
        ("boolean", np.array([1], np.uint8), "astype"),
        ("f32", ["a"], "cannot be sent"),
        ("f32", [object()], "cannot be sent"),
        ("f32", [1 + 2j], "cannot be sent"),
        ("f32", np.array(["2026-01-01"], "M8[D]"), "cannot be sent"),
        ("f32", [[1], [2, 3]], "no array"),
        ("f64", np.array([2**53 + 1], np.int64), "cannot hold"),
        ("f64", np.array([1, -(2**53) - 1], np.int64), "cannot hold"),
        ("f64", np.array([2**64 - 1], np.uint64), "cannot hold"),
        ("f64", [2**53 + 1], "cannot hold"),
        ("f64", [2**63 - 1], "cannot hold"),
        ("f32", [2**53 + 1], "cannot hold"),
        ("f64", [[2**53 + 1, 0.5]], "too large"),
        ("f64", [np.int64(2**53 + 1), 0.5], "too large"),
        ("f16", [70_000], "cannot hold"),
        ("f16", [2049], "cannot hold"),
        ("f32", [1e-300], "cannot hold"),
        ("f32", np.ma.array([1, 2], np.float32, mask=[0, 1]), r"\.filled"),
        ("f64", np.ma.array([1, 2], np.float32, mask=[0, 1]), r"\.filled"),
        ("f32", [np.ma.array([1, 2], np.float32, mask=[0, 1])], r"\.filled"),
        ("f32", [1.0, np.ma.masked], r"\.filled"),
        ("i64", [float("nan")], "astype"),
        ("f32", np.array([1 + 2j]), "cannot be sent"),
        ("f32", np.array([1.5], object), "cannot be sent"),
        ("i64", np.array([1], "m8[s]"), "cannot be sent"),
        ("f32", [None], "cannot be sent"),
    ],
)
def test_what_would_lose_something_is_refused(element_type: str, value: Any, message: str) -> None:
    """The message names the input, what it takes, and what to do."""
    with pytest.raises(InvalidRequest, match=message) as caught:
        encoded(element_type, value)
    assert "'x'" in str(caught.value)


@given(arrays.arrays(np.int64, st.integers(0, 5), elements=st.integers(-(2**63), 2**63 - 1)))
def test_integers_change_their_type_only_where_every_value_fits(array: Any) -> None:
    """For any values: either all of them arrive, or the request is refused."""
    for element_type, low, high in (("u8", 0, 255), ("i32", -(2**31), 2**31 - 1), ("u64", 0, 2**64 - 1)):
        if all(low <= value <= high for value in array.tolist()):
            assert array.tolist() == encoded(element_type, array).tolist()
        else:
            with pytest.raises(InvalidRequest):
                encoded(element_type, array)


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.sampled_from([2**53, 2**53 + 1, -(2**53) - 1]), min_size=1)
)
def test_integers_become_floats_only_where_these_are_the_same_numbers(values: list[int]) -> None:
    """Compared by Python, which knows all digits of both."""
    for given_as in (values, np.array(values, np.int64)):
        if all(int(float(value)) == value for value in values):
            assert values == [int(number) for number in encoded("f64", given_as).tolist()]
        else:
            with pytest.raises(InvalidRequest, match="cannot hold"):
                encoded("f64", given_as)


class Sore:
    """An array of some other library that cannot be read now."""

    dtype = "theirs"

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("it requires grad; detach it")


def test_what_another_library_raises_is_said_with_the_name_of_the_input() -> None:
    """As for any input that is no array."""
    with pytest.raises(InvalidRequest, match="'x' is no array: it requires grad"):
        encoded("f32", Sore())


def test_small_arrays_are_copied_at_once_and_large_ones_are_not() -> None:
    """A small array may change as soon as the call has begun; a large one travels from where it is."""
    encoder = opened("?", "u8")
    for size, shared in ((1000, False), (64 * 1024, True)):
        array = np.zeros(size, np.uint8)
        tensors, _ = encoder.encode({"x": array})
        array[0] = 1
        assert shared == bool(memoryview(tensors.buffers[0])[0])


class OnAnotherLibrary:
    """An array of some other library, that NumPy can read."""

    dtype = "theirs"

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array([1, 2], np.float32)


def test_arrays_of_other_libraries_are_read_through_numpy() -> None:
    """Whatever offers `__array__` is an array."""
    np.testing.assert_array_equal(np.array([1, 2], np.float32), encoded("f32", OnAnotherLibrary()))
