"""Outputs that are lists of arrays, each of any shape: packed into two tensors, and taken apart again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from tests.engine.slot_bench import SlotBench

from shapestream_engine import InferenceError, InputSpec, ModelSpec, OutputSpec, ShapeError, SignatureError
from shapestream_engine import compile_model as compiled
from shapestream_engine.array_lists import pack, unpack
from shapestream_engine.element_types import dtype_of
from shapestream_engine.output_rules import List
from shapestream_engine.ports import OutputPort, list_ports
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

Array = np.ndarray[Any, Any]


def spec_of(
    function: Callable[..., Any],
    shape: str = "height, width, 3",
    element_type: str = "u8",
    **more: OutputSpec,
) -> ModelSpec:
    """A function of a number with a list as output."""
    images = OutputSpec(rule={"rule": "list"}, shape=shape, element_type=element_type)
    return ModelSpec(
        name="m",
        model=function,
        inputs={"n": InputSpec(shape="", element_type="i64")},
        outputs={"images": images, **more},
    )


def outputs_of(spec: ModelSpec) -> list[Array]:
    """The outputs of one call."""
    request = compiled(spec).create_infer_request()
    request.infer({"n": np.array(3)})
    return request.outputs()


def same(first: list[Array], second: list[Array]) -> bool:
    """Tells whether both lists have the same arrays: types, shapes and bytes."""
    return [(each.dtype, each.shape, each.tobytes()) for each in first] == [
        (each.dtype, each.shape, each.tobytes()) for each in second
    ]


def test_a_list_has_two_outputs() -> None:
    """The elements of all arrays in one row, and their shapes; other outputs keep their order."""
    spec = spec_of(lambda n: {}, count=OutputSpec(shape="", element_type="i64"))
    signature = compiled(spec).signature
    assert ["images", "images.shapes", "count"] == [port.name for port in signature.outputs]
    assert list_ports("images", "u8", NamedShape.parse("height, width, 3")) == signature.outputs[:2]
    assert List("height, width, 3") == signature.outputs[0].rule


def test_parts_of_a_picture_are_a_list() -> None:
    """Views that are not contiguous are packed as they look; the other output is beside them."""
    picture = np.arange(7 * 9 * 3, dtype=np.uint8).reshape(7, 9, 3)
    crops = [picture[1:3, 2:8], picture[::2, ::-1], picture[4:4, 1:2], picture[:1, :1]]
    elements, shapes, count = outputs_of(
        spec_of(
            lambda n: {"count": np.array(4), "images": crops}, count=OutputSpec(shape="", element_type="i64")
        )
    )
    assert [[2, 6, 3], [4, 9, 3], [0, 1, 3], [1, 1, 3]] == shapes.tolist()
    assert same(crops, unpack(elements, shapes))
    assert 4 == count


def test_the_number_of_arrays_may_be_that_of_an_input_dimension() -> None:
    """It stands in the signature, which survives the wire, and each call is held to it."""

    def spec(count: str) -> ModelSpec:
        rule = {"rule": "list", "count": count}
        return ModelSpec(
            name="m",
            model=lambda boxes: [np.zeros(box, np.float32) for box in boxes[:2]],
            inputs={"boxes": InputSpec(shape="boxes", element_type="i64")},
            outputs={"y": OutputSpec(rule=rule, shape="k", element_type="f32")},
        )

    model = compiled(spec("boxes"))
    signature = model.signature
    assert list_ports("y", "f32", NamedShape.parse("k"), "boxes") == signature.outputs
    assert signature == ModelSignature.from_dict(signature.to_dict())
    bench = SlotBench(model)
    (result,) = bench.results(np.array([3, 1]))
    assert [[3], [1]] == result["y.shapes"].tolist()
    report = bench.run(np.array([3, 1, 2]), batch=2)
    assert report.code is not None
    assert "y.shapes" in report.message
    with pytest.raises(SignatureError, match=r"no dimension 'crops'; they have boxes"):
        compiled(spec("crops"))


@pytest.mark.parametrize("none", [[], ()], ids=["list", "tuple"])
def test_a_list_may_be_empty(none: Any) -> None:
    """No crops are an ordinary result, of the right types and rank."""
    elements, shapes = outputs_of(spec_of(lambda n: none))
    assert ((0,), np.uint8, (0, 3), np.int64) == (elements.shape, elements.dtype, shapes.shape, shapes.dtype)
    assert [] == unpack(elements, shapes)


@pytest.mark.parametrize("element_type", ["f16", "bf16", "boolean", "f64", "i8", "u64"])
def test_a_list_may_have_any_element_type(element_type: str) -> None:
    """Types that NumPy does not have, and booleans, included."""
    arrays = [
        np.arange(6).reshape(2, 3).astype(dtype_of(element_type)),
        np.ones((1, 3), dtype_of(element_type)),
    ]
    assert same(arrays, unpack(*outputs_of(spec_of(lambda n: arrays, "n, 3", element_type))))


def test_a_list_of_scalars_has_shapes_without_columns() -> None:
    """Arrays of rank 0 have one element each."""
    arrays = [np.array(value, np.float32) for value in (1.5, -2.0, 0.0)]
    elements, shapes = outputs_of(spec_of(lambda n: arrays, "", "f32"))
    assert ([1.5, -2.0, 0.0], (3, 0)) == (elements.tolist(), shapes.shape)
    assert same(arrays, unpack(elements, shapes))


def test_a_list_may_have_thousands_of_arrays() -> None:
    """2,000 arrays, each of another size."""
    arrays = [np.full((size % 7, size), size % 251, np.uint8) for size in range(2000)]
    assert same(arrays, unpack(*outputs_of(spec_of(lambda n: arrays, "a, b"))))


GOOD = np.zeros((2, 4, 3), np.uint8)
MASKED = np.ma.masked_equal(GOOD, 0)


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        (None, "output 'images' is NoneType, not a list or tuple of NumPy arrays"),
        (GOOD, "output 'images' is ndarray, not a list or tuple of NumPy arrays"),
        ((each for each in [GOOD]), "output 'images' is generator, not a list or tuple"),
        ([GOOD, [1]], "output 'images', array 1, is list, not a NumPy array"),
        ([GOOD, GOOD, None], "output 'images', array 2, is NoneType, not a NumPy array"),
        ([MASKED], "output 'images', array 0, has masked elements"),
        ([GOOD, GOOD.astype(np.int8)], "output 'images', array 1, is of type int8, declared is u8"),
        ([GOOD[0]], r"output 'images', array 0, has the shape \[4, 3\], declared is \[height, width:4..8, 3\]"),
        ([GOOD, GOOD[:, :, :2]], r"array 1, has the shape \[2, 4, 2\], declared is \[height, width:4..8, 3\]"),
        ([GOOD[:, :3]], r"array 0, has the shape \[2, 3, 3\], declared is"),
        ({"crops": [GOOD]}, "the function returned no output 'images', only crops"),
        ({"images": [GOOD], "images.shapes": GOOD}, "outputs that are not declared: images.shapes"),
    ],
)  # fmt: skip
def test_a_list_that_differs_from_its_declaration_is_the_models_error(returned: Any, complaint: str) -> None:
    """The message names the output, and the array by its index."""
    with pytest.raises(InferenceError, match=complaint):
        outputs_of(spec_of(lambda n: returned, "height, width:4..8, 3"))


def test_axes_of_one_name_are_equal_within_each_array() -> None:
    """A square is a square, and another array may be another square."""
    squares = [np.zeros((2, 2), np.uint8), np.zeros((5, 5), np.uint8)]
    assert same(squares, unpack(*outputs_of(spec_of(lambda n: squares, "n, n"))))
    with pytest.raises(InferenceError, match=r"array 0, has the shape \[2, 3\], declared is \[n, n\]"):
        outputs_of(spec_of(lambda n: [np.zeros((2, 3), np.uint8)], "n, n"))


def test_a_list_does_not_fit_rows_that_share_calls() -> None:
    """Nothing says which arrays belong to which request."""
    spec = ModelSpec(
        name="m",
        model=lambda x: [x],
        inputs={"x": InputSpec(shape="batch, n", element_type="u8")},
        outputs={"y": OutputSpec(rule={"rule": "list"}, shape="n", element_type="u8")},
    )
    with pytest.raises(SignatureError, match="the rule list cannot hold: the model has a batch axis"):
        compiled(spec)


def test_the_name_of_the_shapes_must_be_free() -> None:
    """Two outputs of one name are refused."""
    with pytest.raises(SignatureError, match=r"images\.shapes"):
        compiled(spec_of(lambda n: {}, **{"images.shapes": OutputSpec(shape="", element_type="i64")}))


@pytest.mark.parametrize(
    ("elements", "shapes", "complaint"),
    [
        (np.zeros(5, np.uint8), np.array([[2, 2]]), "1 arrays of 4 bytes came with 5 bytes"),
        (np.zeros(3, np.uint8), np.array([[2, 2]]), "1 arrays of 4 bytes came with 3 bytes"),
        (np.zeros(4, np.uint8), np.array([[-2, -2]]), r"array 0 of the list has the shape \[-2, -2\]"),
        (np.zeros(0, np.uint8), np.array([[2**62, 2**62, 0]]), "needs more than"),
        (np.zeros(0, np.uint8), np.array([[2**32, 2**32]]), "needs more than"),
        (np.zeros(4, np.uint8), np.array([2, 2]), "a list has elements"),
        (np.zeros((2, 2), np.uint8), np.array([[2, 2]]), "a list has elements"),
        (np.zeros(4, np.uint8), np.array([[2.0, 2.0]]), "a list has elements"),
    ],
)
def test_a_damaged_list_is_refused(elements: Array, shapes: Array, complaint: str) -> None:
    """Whatever another process sent, the error is one that a caller can expect."""
    with pytest.raises(ShapeError, match=complaint):
        unpack(elements, shapes)


LISTS = st.integers(0, 4).flatmap(
    lambda rank: st.tuples(
        st.just(rank),
        st.lists(
            arrays_of.arrays(
                np.float16, st.lists(st.integers(0, 4), min_size=rank, max_size=rank).map(tuple)
            ),
            max_size=12,
        ),
    )
)


@given(LISTS)
def test_each_list_comes_back_as_it_was(given_list: tuple[int, list[Array]]) -> None:
    """Any number of arrays of one rank, of any sizes and bits; views of the row, which cannot be written if it cannot."""
    rank, arrays = given_list
    port: OutputPort = list_ports("y", "f16", NamedShape.parse(", ".join("?" * rank)))[0]
    elements, shapes = pack(port, arrays)
    elements.flags.writeable = False
    back = unpack(elements, shapes)
    assert same(arrays, back)
    assert not any(each.flags.writeable for each in back)
    assert all(np.shares_memory(each, elements) for each in back if each.size)


@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=32, max_size=80))
def test_many_arrays_are_found_as_few_are(shapes: list[list[int]]) -> None:
    """By NumPy, at once: the same views as of each list of one."""
    elements = np.arange(sum(a * b for a, b in shapes), dtype=np.int32)
    begin, expected = 0, []
    for a, b in shapes:
        expected += unpack(elements[begin : begin + a * b], np.array([[a, b]]))
        begin += a * b
    assert same(expected, unpack(elements, np.array(shapes)))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([-1, 1], "array 40 of the list has the shape"),
        ([1, 2], "a list of 50 arrays of 204 bytes came with 200 bytes"),
        ([2**60, 0], "a list of 50 arrays of 196 bytes came with 200 bytes"),
        ([2**62, 4], "needs more than"),
    ],
)
def test_a_wrong_shape_among_many_is_named(shape: list[int], words: str) -> None:
    """As among few; sizes may be as large as a tensor tells them."""
    shapes = [[1, 1]] * 50
    shapes[40] = shape
    with pytest.raises(ShapeError, match=words):
        unpack(np.zeros(50, np.int32), np.array(shapes))


def test_sizes_beyond_all_numbers_are_refused_without_a_warning() -> None:
    """Nothing is computed with their product, which is beyond f64."""
    with pytest.raises(ShapeError, match="needs more than"):
        unpack(np.zeros(1, np.int32), np.full((40, 20), 2**62))
