"""The smallest call that holds several requests."""

from __future__ import annotations

import pytest

from shapestream_engine.batching.calls import merge_sizes
from shapestream_engine.errors import ShapeError
from shapestream_engine.output_rules import Rows, Whole
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

MODEL = ModelSignature(
    "m",
    (
        InputPort("a", "f32", NamedShape.parse("batch, seq, height"), {"seq": 0}),
        InputPort("b", "f32", NamedShape.parse("batch")),
    ),
    (OutputPort("y", "f32", NamedShape.parse("batch"), Rows()),),
)
UNBATCHED = ModelSignature(
    "n",
    (InputPort("x", "f32", NamedShape.parse("n")),),
    (OutputPort("y", "f32", NamedShape.parse("n"), Whole()),),
)


def test_rows_add_up_and_padded_dimensions_take_the_largest() -> None:
    """The call is the smallest that holds every request."""
    assert (6, 9, 4) == merge_sizes(MODEL, [(1, 9, 4), (2, 3, 4), (3, 5, 4)])


def test_one_request_is_its_own_call() -> None:
    """Alone a request is never padded, with or without a batch axis."""
    assert (2, 3, 4) == merge_sizes(MODEL, [(2, 3, 4)])
    assert (7,) == merge_sizes(UNBATCHED, [(7,)])


def test_what_may_not_be_padded_must_be_equal() -> None:
    """Requests that differ there are refused, with the dimension's name."""
    with pytest.raises(ShapeError, match=r"whose 'height' differs cannot share a call.*\[4, 5\]"):
        merge_sizes(MODEL, [(1, 9, 4), (1, 9, 5)])


def test_without_a_batch_axis_requests_cannot_share_a_call() -> None:
    """Two requests for such a model are two calls."""
    with pytest.raises(ShapeError, match="has no batch axis"):
        merge_sizes(UNBATCHED, [(7,), (7,)])


def test_an_empty_call_is_refused() -> None:
    """There is no call without a request."""
    with pytest.raises(ShapeError, match="at least one request"):
        merge_sizes(MODEL, [])
