"""What the scheduler is told of a model's shapes: bounds, calls by rows, the cap and the static shapes."""

from __future__ import annotations

from math import prod

from tests.pipeline.serving.echo_model import model_settings

from shapestream.serving.served_models import ServedModel
from shapestream_engine import InputPort, ModelSignature, NamedShape, OutputPort, Rows
from shapestream_engine.strategy import Strategy, parse_strategy


def served(strategy: Strategy, max_batch: int | None = None) -> ServedModel:
    """A model of `batch` 1..8 and an endless `seq`, which may be padded."""
    shape = NamedShape.parse("batch:1..8, seq:1..64")
    signature = ModelSignature(
        "m", (InputPort("x", "f32", shape, {"seq": 0}),), (OutputPort("y", "f32", shape, Rows()),), strategy
    )
    return ServedModel(0, "m", signature, model_settings(max_batch=max_batch))


def test_a_native_model_may_have_any_rows_within_its_bounds() -> None:
    """One call each, any number of different shapes."""
    profile = served(parse_strategy({})).profile
    assert (8, 64) == profile.bounds
    assert (None, None, ()) == (profile.row_calls, profile.max_shapes, profile.static_shapes)


def test_static_shapes_and_the_cap_are_told() -> None:
    """An eighth of the cap is for calibration, the rest for the scheduler."""
    profile = served(parse_strategy({"max_prepared": 64, "static": [{"seq": [8, 16], "batch": 1}]})).profile
    assert 56 == profile.max_shapes
    assert ((1, 8), (1, 16)) == profile.static_shapes


def test_allowed_rows_become_calls() -> None:
    """By the rows of a batch, from none to `max_batch`; other allowed sizes need no place, as requests arrive rounded."""
    profile = served(Strategy({"batch": (2, 4), "seq": (16, 32)}), max_batch=5).profile
    assert ((2,), (2,), (2,), (4,), (4,), (4, 2)) == profile.row_calls
    assert served(Strategy({"seq": (16, 32)})).profile.row_calls is None


def test_no_batch_has_more_rows_than_the_bound_where_calls_are_not_divided() -> None:
    """A call beyond the bound fails in the engine. Only a batch axis with allowed sizes is divided into calls."""
    assert 8 == served(parse_strategy({"max_prepared": 64}), max_batch=20).profile.max_batch
    assert 5 == served(parse_strategy({"max_prepared": 64}), max_batch=5).profile.max_batch
    assert 20 == served(Strategy({"batch": (2, 4)}), max_batch=20).profile.max_batch


def test_the_bytes_of_strings_are_lengths_and_contents() -> None:
    """Of 3 rows of 2 strings of 10 bytes in the mean, beside numbers."""
    signature = ModelSignature(
        "m",
        (
            InputPort("text", "str", NamedShape.parse("batch, 2")),
            InputPort("x", "f32", NamedShape.parse("batch, 5")),
        ),
        (OutputPort("y", "f32", NamedShape.parse("batch"), Rows()),),
    )
    profile = ServedModel(0, "m", signature, model_settings()).profile
    assert ("batch", "text.bytes") == profile.dimensions
    assert (1,) == profile.strings
    sizes = (3, 10)
    nbytes = sum(entry.nbytes * prod([sizes[axis] for axis in entry.axes]) for entry in profile.inputs)
    assert signature.resolve(((0, "str", (3, 2, 60)), (1, "f32", (3, 5)))).total_nbytes == nbytes
