"""Which rows of which requests each call gets, and the bytes of these rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream_engine import InputPort, ModelSignature, NamedShape, OutputPort, RequestShape, Rows, Tensors
from shapestream_engine.batching.calls import CallPlanner, Piece, PieceCutter, divide
from shapestream_engine.errors import ShapeError
from shapestream_engine.strategy import Strategy

Array = np.ndarray[Any, Any]


def signature(shape: str = "batch:0..64, n:1..9") -> ModelSignature:
    """A model with one input and its mask."""
    return ModelSignature(
        "m",
        (
            InputPort("x", "i32", NamedShape.parse(shape), {"n": -1}),
            InputPort("mask", "u8", NamedShape.parse("batch, n"), mask_of="x"),
        ),
        (OutputPort("y", "f32", NamedShape.parse("batch"), Rows()),),
        Strategy({"batch": (4, 8)}),
    )


def request(model: ModelSignature, array: Array) -> tuple[Tensors, RequestShape]:
    """A request without its mask."""
    tensors = Tensors(layout=((0, "i32", array.shape),), buffers=(array.tobytes(),))
    return tensors, model.resolve(tensors.layout)


def read(tensors: Tensors) -> Array:
    """The first input of a request, or of a piece."""
    return np.frombuffer(bytes(tensors.buffers[0]), np.int32).reshape(tensors.layout[0][2])


@given(
    rows=st.lists(st.integers(0, 7), min_size=1, max_size=8),
    sizes=st.sampled_from([(1, 2, 4), (3,), (2, 5), (8,)]),
)
def test_every_row_is_in_one_piece_in_order(rows: list[int], sizes: tuple[int, ...]) -> None:
    """And a member without rows is in exactly one call."""
    strategy = Strategy({"batch": sizes}, partitioned=True)
    calls = CallPlanner(ModelSignature("m", signature().inputs, signature().outputs, strategy)).plan(
        (sum(rows), 1)
    )
    divided = divide(calls, rows)
    assert [call.stop - call.start for call in calls] == [
        sum(piece.stop - piece.start for piece in pieces) for pieces in divided
    ]
    flat = [piece for pieces in divided for piece in pieces]
    assert [piece.member for piece in flat] == sorted(piece.member for piece in flat)
    for member, own in enumerate(rows):
        parts = [piece for piece in flat if piece.member == member]
        assert [0, *[piece.stop for piece in parts]] == [*[piece.start for piece in parts], own]
        assert own > 0 or 1 == len(parts)


def test_a_request_in_one_call_is_passed_on_as_it_is() -> None:
    """Nothing is made for it."""
    model = signature()
    member, shape = request(model, np.zeros((3, 2), np.int32))
    assert (member, shape) == PieceCutter(model).cut(Piece(0, 0, 3), [member], [shape])


def test_a_piece_is_a_view_of_its_rows() -> None:
    """As long as they follow each other; the layout and the sizes are its own."""
    model = signature()
    array = np.arange(10, dtype=np.int32).reshape(5, 2)
    buffer = array.tobytes()
    member = Tensors(layout=((0, "i32", (5, 2)),), buffers=(buffer,))
    cut, shape = PieceCutter(model).cut(Piece(0, 1, 3), [member], [model.resolve(member.layout)])
    assert array[1:3].tolist() == read(cut).tolist()
    assert np.shares_memory(cut.buffers[0], np.frombuffer(buffer, np.uint8))
    assert ((2, 2), 2, (16,), 16) == (shape.sizes, shape.rows, shape.nbytes, shape.total_nbytes)


def test_a_call_without_rows_has_nothing_to_be_filled_up_with() -> None:
    """Nothing is made up."""
    model = signature()
    members, shapes = [[each] for each in request(model, np.zeros((0, 2), np.int32))]
    with pytest.raises(ShapeError, match="no row of a request"):
        PieceCutter(model).filling(4, members, shapes)
