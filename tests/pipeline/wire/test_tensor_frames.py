"""Arrays <-> what travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shapestream.errors import InvalidRequest
from shapestream.wire.tensor_frames import from_array, to_array
from shapestream_engine.element_types import ELEMENT_TYPES

DTYPES = [dtype for name, dtype in ELEMENT_TYPES.items() if name != "bf16"]


@given(st.data())
@settings(deadline=None)
def test_arrays_survive_the_round_trip(data: st.DataObject) -> None:
    """Any type, shape and content, sizes of 0 and scalars included."""
    dtype = data.draw(st.sampled_from(DTYPES))
    array = data.draw(hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=5)))
    came = to_array(*from_array(array))
    assert (array.shape, array.dtype) == (came.shape, came.dtype)
    assert array.tobytes() == came.tobytes()


@pytest.mark.skipif("bf16" not in ELEMENT_TYPES, reason="needs ml_dtypes")
@pytest.mark.parametrize("size", [3, 100_000])
def test_bfloat16_travels(size: int) -> None:
    """NumPy cannot export it as a buffer of its own type; its bytes travel all the same."""
    array = np.arange(size).astype(ELEMENT_TYPES["bf16"])
    came = to_array(*from_array(array))
    assert array.tobytes() == came.tobytes()
    assert array.dtype == came.dtype


@pytest.mark.parametrize("side", [3, 300])
@pytest.mark.parametrize(
    "change",
    [
        lambda array: array.T,
        lambda array: array[::2, 1:],
        lambda array: array[::-1],
        lambda array: array.astype(">f4"),
        np.asfortranarray,
        lambda array: np.broadcast_to(array[0], array.shape),
    ],
)
def test_any_memory_layout_arrives_as_the_same_values(change: Any, side: int) -> None:
    """Transposed, strided, reversed, big-endian, Fortran-ordered and broadcast arrays, small and large."""
    array = change(np.arange(side * side, dtype="f4").reshape(side, side))
    element_type, shape, data = from_array(array)
    assert ("f32", array.shape) == (element_type, shape)
    np.testing.assert_array_equal(array, to_array(element_type, shape, data))


def test_a_large_array_is_not_copied() -> None:
    """The buffer that is sent is the array's own memory, and the received array is the buffer's."""
    array = np.zeros((300, 300), "f4")
    element_type, shape, data = from_array(array)
    assert np.shares_memory(array, np.frombuffer(data, "u1"))
    assert np.shares_memory(array, to_array(element_type, shape, data))


def test_a_small_array_may_change_after_it_was_handed_over() -> None:
    """Small tensors are copied, so that a producer may fill the same array again."""
    array = np.ones(4, "f4")
    _, _, data = from_array(array)
    array[:] = 2
    np.testing.assert_array_equal(np.ones(4, "f4"), to_array("f32", (4,), data))


@pytest.mark.parametrize("data", [bytes(8), bytearray(8), np.zeros(2, "f4")])
def test_a_received_array_is_read_only(data: Any) -> None:
    """What others may share cannot be written, whatever holds the bytes."""
    array = to_array("f32", (2,), data)
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_unaligned_bytes_are_usable() -> None:
    """Received frames start at any address; NumPy reads them correctly."""
    data = memoryview(b"?" + np.arange(5, dtype="f8").tobytes())[1:]
    np.testing.assert_array_equal(np.arange(5.0), to_array("f64", (5,), data))


@pytest.mark.parametrize(
    "array",
    [
        np.array(["2026-01-01"], "M8[D]"),
        np.array([1j]),
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, np.longdouble),
    ],
)
def test_types_that_mean_nothing_elsewhere_are_refused(array: npt.NDArray[Any]) -> None:
    """Dates, complex and structured arrays get an error that names the type."""
    with pytest.raises(InvalidRequest, match="known are"):
        from_array(array)


@given(st.data())
@settings(deadline=None)
def test_strings_survive_the_round_trip(data: st.DataObject) -> None:
    """Any shape and content: empty ones, zeros within, every character, bytes that are no UTF-8."""
    elements = data.draw(st.sampled_from([st.text(st.characters(codec="utf-8")), st.binary()]))
    array = data.draw(
        hnp.arrays(object, hnp.array_shapes(min_dims=0, min_side=0, max_side=4), elements=elements)
    )
    came = to_array(*from_array(array))
    assert (array.shape, array.tolist()) == (came.shape, came.tolist())
    assert not came.flags.writeable


@pytest.mark.parametrize(
    ("array", "element_type"),
    [
        (np.array(["é", "bc"]), "str"),
        (np.array(["é", "bc"], np.dtypes.StringDType()), "str"),
        (np.array([b"\xff", b"bc"]), "bytes"),
        (np.array([["é", "a"], ["bc", ""]], object).T, "str"),
    ],
)
def test_strings_of_every_kind_travel(array: npt.NDArray[Any], element_type: str) -> None:
    """NumPy's own types of text and bytes, and objects; strided ones too."""
    sent = from_array(array)
    assert element_type == sent[0]
    assert array.tolist() == to_array(*sent).tolist()


@pytest.mark.parametrize(
    ("elements", "words"),
    [
        ([object()], "str, not object"),
        (["a", b"b"], "not bytes"),
        ([b"a", "b"], "not str"),
        (["\ud800"], "lone surrogate"),
    ],
)
def test_objects_that_are_no_strings_are_refused(elements: list[Any], words: str) -> None:
    """One tensor has text or bytes, and nothing else."""
    with pytest.raises(InvalidRequest, match=words):
        from_array(np.array(elements, object))


@pytest.mark.parametrize(
    "arguments",
    [
        ("f32", (3,), bytes(8)),
        ("f32", (2,), b""),
        ("O", (1,), bytes(8)),
        ("str", (1, 1), bytes(4)),
        ("str", (1, 1), b"\2\0\0\0a"),
        ("str", (1, 1), b"\1\0\0\0\xff"),
    ],
)
def test_bytes_that_are_no_such_tensor_are_refused(arguments: Any) -> None:
    """A wrong length, an unknown element type or text that is no UTF-8 never becomes an array."""
    with pytest.raises(InvalidRequest):
        to_array(*arguments)
