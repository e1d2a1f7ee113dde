"""Tensors between stages: taken apart and put together again, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.pipeline.chains.models import SIGNATURES, Array, arrays_of, tensors_of

from shapestream.chains.plan import plan_chain
from shapestream.chains.run import ChainRun, RunState
from shapestream.chains.spec import ChainSpec, StageSpec
from shapestream.chains.values import Items, Tensor, listed, stacked
from shapestream.wire.tensor_frames import from_array, to_array
from shapestream_engine.element_types import dtype_of
from shapestream_engine.output_rules import Whole
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

TYPES = st.sampled_from(["f32", "f64", "i64", "u8", "boolean", "str"])
TEXTS = st.text(st.characters(codec="utf-8"), max_size=5)


def tensor_of(array: Array) -> Tensor:
    """The same elements; objects are `str`."""
    return Tensor(*from_array(array))


def array_of(tensor: Tensor) -> Array:
    """The same elements."""
    return to_array(tensor.element_type, tensor.shape, tensor.buffer)


def any_arrays(element_type: str, shape: Any) -> st.SearchStrategy[Array]:
    """Arrays of numbers, or of texts."""
    if element_type == "str":
        return arrays(object, shape, elements=TEXTS, fill=st.nothing())
    return arrays(dtype_of(element_type), shape)


def assert_same(expected: Array, tensor: Tensor) -> None:
    """Type, shape and elements, to the bit."""
    found = array_of(tensor)
    assert (expected.dtype, expected.shape, expected.shape) == (found.dtype, found.shape, tensor.sizes)
    if expected.dtype == object:
        assert expected.tolist() == found.tolist()
    else:
        assert expected.tobytes() == found.tobytes()


@st.composite
def lists(draw: st.DrawFn, *, least_rank: int = 0) -> tuple[str, int, list[Array]]:
    """Arrays of one element type and rank."""
    element_type, rank = draw(TYPES), draw(st.integers(least_rank, 3))
    shape = st.tuples(*[st.integers(0, 3)] * rank)
    return element_type, rank, draw(st.lists(any_arrays(element_type, shape), max_size=6))


@given(given_list=lists())
def test_a_list_is_read_as_it_was_written(given_list: tuple[str, int, list[Array]]) -> None:
    """With none, with empty ones, with scalars."""
    element_type, rank, expected = given_list
    elements, shapes = Items(element_type, rank, [tensor_of(array) for array in expected]).write()
    assert (sum(array.size for array in expected),) == elements.sizes
    assert ("i64", (len(expected), rank)) == (shapes.element_type, shapes.shape)
    assert [list(array.shape) for array in expected] == array_of(shapes).tolist()
    again = Items.read(elements, shapes)
    assert (element_type, rank, len(expected)) == (again.element_type, again.rank, len(again.tensors))
    for array, tensor in zip(expected, again.tensors, strict=True):
        assert_same(array, tensor)


@given(given_list=lists(), more=st.sampled_from([-1, 1, 5]))
def test_a_list_whose_bytes_are_not_those_of_its_shapes_is_refused(
    given_list: tuple[str, int, list[Array]], more: int
) -> None:
    """Too few, or too many."""
    element_type, rank, expected = given_list
    elements, shapes = Items(element_type, rank, [tensor_of(array) for array in expected]).write()
    raw = bytes(memoryview(elements.buffer))
    changed = raw[:more] if more < 0 else raw + bytes(more)
    if element_type == "str":
        # The codec has checked that the bytes are those of the shape: one string more or less is what can be wrong.
        count = elements.sizes[0] + more
        elements = elements._replace(shape=(max(count, 0), 0))
        changed = bytes(4 * count) if count >= 0 else raw
    if changed != raw:
        with pytest.raises(ValueError, match=r"arrays of .* bytes came with"):
            _ = Items.read(elements._replace(buffer=changed), shapes).tensors


def test_a_list_with_a_negative_size_is_refused() -> None:
    """Whatever its bytes are."""
    shapes = tensor_of(np.array([[2, -1]], np.int64))
    with pytest.raises(ValueError, match=r"array 0 of the list has the shape \[2, -1\]"):
        _ = Items.read(tensor_of(np.zeros(2, np.float32)), shapes).tensors


@given(data=st.data(), element_type=TYPES, keep_axis=st.booleans())
def test_rows_are_put_together_to_what_they_were_taken_from(
    data: st.DataObject, element_type: str, keep_axis: bool
) -> None:
    """As a stack, and as a list."""
    shape = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple))
    array: Array = data.draw(any_arrays(element_type, shape))
    rows = tensor_of(array).rows(keep_axis=keep_axis)
    parts = [array[index, ...] for index in range(len(array))]  # a text is a scalar array of one
    for expected, row in zip(parts, rows, strict=True):
        assert_same(expected[None] if keep_axis else expected, row)
    assert_same(array, stacked(rows, element_type, shape[1:]))
    items = listed(rows, element_type, (0,) * (len(shape) - 1), drop_row=keep_axis)
    for expected, row in zip(parts, items.tensors, strict=True):
        assert_same(expected, row)
    if len(array):
        assert_same(array, items.as_batch())


@given(given_list=lists(least_rank=1))
def test_a_batch_is_made_of_arrays_of_one_shape(given_list: tuple[str, int, list[Array]]) -> None:
    """Those of different shapes are refused."""
    element_type, rank, arrays_ = given_list
    items = Items(element_type, rank, [tensor_of(array) for array in arrays_])
    if len({array.shape for array in arrays_}) > 1:
        with pytest.raises(ValueError, match="a batch needs arrays of one shape"):
            items.as_batch()
    elif arrays_:
        assert_same(np.stack(arrays_), items.as_batch())
    else:
        assert (0, *[0] * rank) == items.as_batch().sizes


@given(given_list=lists(), data=st.data())
def test_rows_without_a_result_leave_the_bytes_right(
    given_list: tuple[str, int, list[Array]], data: st.DataObject
) -> None:
    """Zeros, or empty texts, of the smallest shape are in their place: of an array that may be empty, none."""
    element_type, rank, arrays_ = given_list
    smallest = tuple(data.draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank)))
    rows = [tensor_of(array) if data.draw(st.booleans()) else None for array in arrays_]
    again = Items.read(*listed(rows, element_type, smallest, drop_row=False).write())
    for array, row, tensor in zip(arrays_, rows, again.tensors, strict=True):
        nothing = np.full(smallest, "" if array.dtype == object else 0, array.dtype)
        assert_same(nothing if row is None else array, tensor)


def test_rows_without_a_result_are_empty_texts_in_a_stack() -> None:
    """As zeros are among numbers."""
    texts = np.array([["a", "é"]], object)
    assert_same(
        np.array([["", ""], ["a", "é"], ["", ""]], object),
        stacked([None, tensor_of(texts), None], "str", (2,)),
    )


def test_a_row_of_another_shape_is_no_part_of_a_stack() -> None:
    """It would move all that follow."""
    with pytest.raises(ValueError, match="not of the shape"):
        stacked([tensor_of(np.zeros(3, np.float32)), tensor_of(np.zeros(2, np.float32))], "f32", (3,))


PAIR = ModelSignature(
    "pair",
    (
        InputPort("x", "f32", NamedShape.parse("n, w")),
        InputPort("y", "f32", NamedShape.parse("m, v")),
    ),
    (OutputPort("o", "f32", NamedShape.parse("?, ?"), Whole()),),
)


@pytest.mark.parametrize("how", ["batch", "row"])
@pytest.mark.parametrize(("positive", "result"), [(0, "different numbers of rows: 0, 2"), (2, None)])
def test_sources_that_are_spread_together_have_equal_numbers_of_rows(
    how: str, positive: int, result: str | None
) -> None:
    """None is a number, too: no rows of one source and two of another are no empty stage."""
    vectors = replace_inputs(PAIR) if how == "row" else PAIR
    spec = ChainSpec(
        name="c",
        inputs={"x": "pick.x", "y": "pair.y"},
        stages=[
            StageSpec(name="pick", model="pick", inputs={"x": "x"}),
            StageSpec(
                name="pair",
                model="pair",
                inputs={"x": "pick.rows", "y": "y"},
                each=[f"{how} of pick.rows", f"{how} of y"],
            ),
        ],
        outputs={"o": "pair.o"},
    )
    chain = plan_chain(spec, SIGNATURES | {"pair": vectors})
    x = np.zeros((2, 3), np.float32)
    x[:positive] = 1.0
    chain_run = ChainRun(chain, tensors_of([x, np.ones((2, 3), np.float32)]), None)
    chain_run.begin(0.0)
    (request,) = chain_run.ready
    chain_run.ready = []
    chain_run.answered(request, tensors_of([x[:positive]]), 1.0)
    if result is None:
        assert chain_run.failure is None
        assert (1 if how == "batch" else 2) == len(chain_run.ready)
        shapes = [array.shape for array in arrays_of(chain_run.ready[0].tensors).values()]
        assert [(2, 3) if how == "batch" else (3,)] * 2 == shapes
    else:
        assert RunState.FAILED is chain_run.state
        assert chain_run.failure is not None
        assert "invalid" == chain_run.failure.code
        assert result in chain_run.failure.message


def replace_inputs(signature: ModelSignature) -> ModelSignature:
    """The same model, for one row of each input."""
    inputs: list[Any] = [InputPort(port.name, "f32", NamedShape.parse("k")) for port in signature.inputs]
    return ModelSignature(signature.name, tuple(inputs), signature.outputs)
