"""Requests against a signature: what fits becomes sizes, what does not gets a message that one can act upon."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shapestream_engine.errors import ElementTypeError, ShapeError
from shapestream_engine.layout import RequestShape
from shapestream_engine.output_rules import Rows, Whole
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

MODEL = ModelSignature(
    "m",
    (
        InputPort("ids", "i64", NamedShape.parse("batch:1..64, seq:1..512")),
        InputPort("image", "f32", NamedShape.parse("3, height, batch, ..9")),
        InputPort("mask", "boolean", NamedShape.parse("batch, seq:..256"), mask_of="ids"),
    ),
    (OutputPort("y", "f32", NamedShape.parse("batch"), Rows()),),
)
IDS = (0, "i64", (2, 7))
IMAGE = (1, "f32", (3, 5, 2, 9))
MASK = (2, "boolean", (2, 7))
UNBATCHED = ModelSignature(
    "n",
    (InputPort("x", "f64", NamedShape.parse("n, n, ?")), InputPort("scalar", "u8", NamedShape.parse(""))),
    (OutputPort("y", "f32", NamedShape.parse("n"), Whole()),),
)


def test_a_request_that_fits_becomes_sizes_and_bytes() -> None:
    """Sizes are parallel to the signature's dimensions, bytes to the layout, positions to the inputs."""
    assert RequestShape(
        sizes=(2, 7, 5, 9),
        rows=2,
        nbytes=(1080, 14, 112),
        total_nbytes=1206,
        positions=(2, 0, 1),
    ) == MODEL.resolve((IMAGE, MASK, IDS))


def test_a_mask_may_be_left_out() -> None:
    """What masks another input is made by the engine."""
    assert (0, 1, None) == MODEL.resolve((IDS, IMAGE)).positions


def test_without_a_batch_axis_a_request_counts_as_one_row() -> None:
    """Every request of such a model runs alone, and a scalar has the bytes of one element."""
    request = UNBATCHED.resolve(((0, "f64", (3, 3, 4)), (1, "u8", ())))
    assert ((3, 4), 1, (288, 1)) == (request.sizes, request.rows, request.nbytes)


def test_sizes_of_zero_are_sizes() -> None:
    """An open dimension admits 0, and such a tensor has no bytes."""
    request = MODEL.resolve((IDS, (1, "f32", (3, 0, 2, 0))))
    assert ((2, 7, 0, 0), 112) == (request.sizes, request.total_nbytes)


BAD_LAYOUTS: list[tuple[str, Any, str]] = [
    ("missing", (IDS,), r"missing input 'image'; the model has 0 'ids'; 1 'image'; 2 'mask'; only masks and fixed values"),
    ("all missing", (), r"missing input 'ids', 'image'"),
    ("extra", (IDS, IMAGE, MASK, (3, "f32", (1,))), r"there is no input number 3; the model has 0 'ids'"),
    ("negative port", (IDS, (-1, "f32", (3, 5, 2, 9))), r"there is no input number -1"),
    ("boolean port", ((False, "i64", (2, 7)), IMAGE), r"there is no input number False"),
    ("fractional port", ((0.0, "i64", (2, 7)), IMAGE), r"there is no input number 0\.0"),
    ("twice", (IDS, IMAGE, IDS), r"input 'ids' is given twice"),
    ("wrong type", ((0, "f32", (2, 7)), IMAGE), r"'ids' is of element type i64, not 'f32'; convert it before"),
    ("no type", ((0, None, (2, 7)), IMAGE), r"'ids' is of element type i64, not None"),
    ("rank", ((0, "i64", (2,)), IMAGE), r"'ids' has 2 dimensions, \[batch:1\.\.64, seq:1\.\.512\], not 1: \[2\]"),
    ("below", ((0, "i64", (0, 7)), IMAGE), r"dimension 'batch' is 0, the model takes 1\.\.64"),
    ("above", ((0, "i64", (2, 513)), IMAGE), r"input 'ids': dimension 'seq' is 513, the model takes 1\.\.512"),
    ("above together", ((0, "i64", (2, 300)), IMAGE), r"'seq' is 300, the inputs together take 1\.\.256"),
    ("static", (IDS, (1, "f32", (4, 5, 2, 9))), r"input 'image': axis 0 is 4, the model takes 3"),
    ("anonymous", (IDS, (1, "f32", (3, 5, 2, 10))), r"input 'image': axis 3 is 10, the model takes \.\.9"),
    ("disagree", (IDS, (1, "f32", (3, 5, 4, 9))), r"'image': dimension 'batch' is 4, but 2 in input 'ids'"),
    ("mask disagrees", (IDS, IMAGE, (2, "boolean", (2, 8))), r"'mask': dimension 'seq' is 8, but 7 in input 'ids'"),
    ("negative", (IDS, (1, "f32", (3, -5, 2, 9))), r"dimension 'height' is negative; a size lies within 0\.\."),
    ("true", ((0, "i64", (True, 7)), IMAGE), r"dimension 'batch' is True; a size is an integer"),
    ("fraction", ((0, "i64", (2.0, 7)), IMAGE), r"dimension 'batch' is 2\.0; a size is an integer"),
    ("text", ((0, "i64", ("2", 7)), IMAGE), r"dimension 'batch' is '2'; a size is an integer"),
    ("numpy", ((0, "i64", (np.int64(2), 7)), IMAGE), r"a size is an integer"),
    ("huge", (IDS, (1, "f32", (3, 2**63, 2, 9))), r"'height' is too large; a size lies within 0\.\."),
    ("unprintable", (IDS, (1, "f32", (3, 10**5000, 2, 9))), r"'height' is too large"),
    ("overflow", (IDS, (1, "f32", (3, 2**62, 2, 9))), r"input 'image': a tensor of this shape needs more than"),
    ("hidden overflow", (IDS, (1, "f32", (3, 2**62, 2, 0))), r"input 'image': a tensor of this shape needs more"),
    ("list layout", [IDS, IMAGE], r"a layout is a tuple of .*, not list"),
    ("list entry", ([0, "i64", (2, 7)], IMAGE), r"a layout's entry is"),
    ("short entry", ((0, "i64"), IMAGE), r"a layout's entry is"),
    ("list shape", ((0, "i64", [2, 7]), IMAGE), r"a shape is a tuple of integers, not \[2, 7\]"),
    ("no shape", ((0, "i64", None), IMAGE), r"a shape is a tuple of integers, not None"),
    ("none", None, r"a layout is a tuple"),
    ("unmarshallable", ((0, "i64", (object(), 7)), IMAGE), r"a size is an integer"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "message"), [case[1:] for case in BAD_LAYOUTS], ids=[case[0] for case in BAD_LAYOUTS]
)
def test_what_does_not_fit_is_refused_by_name(layout: Any, message: str) -> None:
    """Each fault is a shape error that names the port, the dimension and what would be right, every time."""
    for _ in range(2):
        with pytest.raises(ShapeError, match=message):
            MODEL.resolve(layout)


@pytest.mark.parametrize("lookalike", [(True, 7), (1.0, 7), (np.int64(1), 7), (1, 7.0)])
def test_what_equals_a_remembered_layout_is_not_let_through(lookalike: tuple[Any, ...]) -> None:
    """True and 1.0 equal 1 as keys of a dictionary; they are refused all the same after 1 was accepted."""
    image = (1, "f32", (3, 5, 1, 9))
    MODEL.resolve(((0, "i64", (1, 7)), image))
    with pytest.raises(ShapeError, match="a size is an integer"):
        MODEL.resolve(((0, "i64", lookalike), image))


def test_a_wrong_element_type_is_an_error_of_its_own() -> None:
    """Clients convert and try again on this one."""
    with pytest.raises(ElementTypeError):
        MODEL.resolve(((0, "i32", (2, 7)), IMAGE))


def test_a_name_that_occurs_twice_in_one_input_is_one_size() -> None:
    """`n, n` is a square."""
    with pytest.raises(ShapeError, match=r"dimension 'n' is 4, but 3 in input 'x'"):
        UNBATCHED.resolve(((0, "f64", (3, 4, 1)), (1, "u8", ())))


def test_the_inputs_together_stay_within_what_can_be_addressed() -> None:
    """Tensors that are possible each for itself may be too large in sum."""
    model = ModelSignature(
        "m",
        tuple(InputPort(name, "u8", NamedShape.parse(name)) for name in "ab"),
        (OutputPort("y", "f32", NamedShape.parse("?"), Whole()),),
    )
    with pytest.raises(ShapeError, match="the request has 9223372036854775808 bytes"):
        model.resolve(((0, "u8", (2**62,)), (1, "u8", (2**62,))))
