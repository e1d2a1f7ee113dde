"""When two results are equal: exactly, or as far as their element type and their own spread allow."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from shapestream_engine.element_types import ELEMENT_TYPES, dtype_of
from shapestream_engine.errors import EngineError
from shapestream_engine.output_rules import Whole
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.probing.inputs import Integers, Normal, Uniform, default_values, drawn, filled
from shapestream_engine.probing.tolerances import TOLERANCES, OutputTolerance, coarser, compare
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

EXACT = OutputTolerance.of(None, [])


def tolerance_of(element_type: str, *references: Any) -> OutputTolerance:
    """The tolerance after these results."""
    return OutputTolerance.of(
        TOLERANCES[element_type], [np.asarray(each, dtype_of(element_type)) for each in references]
    )


def test_integers_are_compared_exactly() -> None:
    """One off is off, and the difference of unsigned numbers does not wrap around."""
    difference = compare(np.array([2**64 - 1], np.uint64), np.array([2**64 - 2], np.uint64), EXACT)
    assert (1.0, False) == (difference.amount, difference.within)
    assert compare(np.array([True]), np.array([True]), EXACT).within
    assert not compare(np.array([True]), np.array([False]), EXACT).within


def test_floats_may_differ_by_rounding() -> None:
    """A thousandth of the spread, and no more."""
    random = np.random.default_rng(0)
    references = [random.normal(size=(1, 16)) for _ in range(20)]
    tolerance = tolerance_of("f32", *references)
    alone = references[0].astype(np.float32)
    assert compare(alone, alone + np.float32(2e-4), tolerance).within
    assert not compare(alone, alone + np.float32(5e-3), tolerance).within


def test_columns_of_their_own_scale_have_their_own_tolerance() -> None:
    """Coordinates in the hundreds do not excuse a wrong score."""
    random = np.random.default_rng(0)
    rows = np.column_stack([random.uniform(0, 640, 40), random.uniform(0, 1, 40)])
    tolerance = tolerance_of("f32", rows[:20], rows[20:])
    alone = rows.astype(np.float32)
    off = alone.copy()
    off[:, 0] += 0.1
    assert compare(alone, off, tolerance).within
    off = alone.copy()
    off[:, 1] += 0.05
    assert not compare(alone, off, tolerance).within


def test_nan_equals_nan_and_nothing_else() -> None:
    """And infinities equal themselves."""
    tolerance = tolerance_of("f32", [1.0, 2.0])
    special = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    assert compare(special, special, tolerance).within
    for place, other in ((0, 1.0), (1, -np.inf), (3, np.nan)):
        changed = special.copy()
        changed[place] = other
        difference = compare(special, changed, tolerance)
        assert (False, math.inf) == (difference.within, difference.amount)
        assert "alone" in difference.words


def test_another_shape_is_a_difference() -> None:
    """Both shapes are named."""
    difference = compare(np.zeros((1, 3)), np.zeros((1, 5)), tolerance_of("f64", [1.0]))
    assert "its shape is [1, 5], alone it was [1, 3]" == difference.words
    assert compare(np.zeros((0, 3)), np.zeros((0, 3)), tolerance_of("f64", [1.0])).within


def test_the_coarser_of_two_types_counts() -> None:
    """What is computed in bf16 is no better for being handed out as f32; integers stay exact."""
    assert TOLERANCES["bf16"] == coarser("f32", "bf16")
    assert TOLERANCES["f16"] == coarser("f16", "f32")
    assert coarser("i64", "bf16") is None


@pytest.mark.parametrize("element_type", ELEMENT_TYPES)
def test_values_are_of_their_type_and_in_range(element_type: str) -> None:
    """Every default, drawn and filled, without a wrap-around."""
    random = np.random.default_rng(0)
    port = InputPort("x", element_type, NamedShape.parse("?, ?, ?, ?"))
    output = OutputPort("y", element_type, NamedShape.parse("?"), Whole())
    signature = ModelSignature("m", (port,), (output,))
    for values in (*default_values(signature, port), Integers(-300, 300), Uniform(-1, 1e9), Normal(0, 1e9)):
        for number in range(2):
            array = drawn(values, element_type, (2, 3, 9, 10), random, number=number)
            assert (dtype_of(element_type), (2, 3, 9, 10)) == (array.dtype, array.shape)
    if dtype_of(element_type).kind in "iu":
        assert np.iinfo(dtype_of(element_type)).max == filled(1e30, element_type, (1,))[0]


def test_every_second_picture_is_blocky() -> None:
    """Noise looks like nothing to many a model."""
    random = np.random.default_rng(0)
    noise = drawn(Integers(0, 255), "u8", (1, 16, 16), random, number=0)
    blocks = drawn(Integers(0, 255), "u8", (1, 16, 16), random, number=1)
    assert len(np.unique(noise)) > 50
    assert (blocks[0, :8, :8] == blocks[0, 0, 0]).all()
    assert len(np.unique(blocks)) > 1


def softmax(logits: Any) -> Any:
    """Distributions along the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("scale", [1.0, 2.0], ids=["distributions", "their doubles"])
def test_rounding_of_logits_moves_rare_classes_of_distributions_only(scale: float) -> None:
    """By a hundred-thousandth of the likeliest class of the row; what does not add up to 1 gets nothing from its row."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(20, 1, 8)) * [3, 3, 3, 3, 3, 3, 3, 0.1] - [0, 0, 0, 0, 0, 0, 0, 18]
    tolerance = tolerance_of("f32", *(scale * softmax(each) for each in logits))
    alone = scale * softmax(logits[0])
    moved = alone.copy()
    moved[0, 7] += 0.5e-5 * alone.max()
    assert (scale == 1.0) == compare(alone, moved, tolerance).within
    assert not tolerance.hides(alone)
    moved[0, 7] += 1e-5 * alone.max()
    assert not compare(alone, moved, tolerance).within


def test_one_row_that_is_no_distribution_excuses_no_rare_class() -> None:
    """Neither among the results that the tolerance is learned from, nor in the result that is compared."""
    random = np.random.default_rng(0)
    rows = softmax(random.normal(size=(20, 2, 8)) * 3 - [0, 0, 0, 0, 0, 0, 0, 18])
    other = rows[0] * [[1.0], [-1.0]]
    assert 1 == tolerance_of("f32", *rows).classes
    assert tolerance_of("f32", other, *rows).classes is None
    for alone, learned in ((rows[0], (other, *rows)), (other, tuple(rows))):
        moved = alone.copy()
        moved[0, 7] += 0.5e-5
        assert not compare(alone, moved, tolerance_of("f32", *learned)).within


def test_a_mark_excuses_nothing_wherever_it_stands() -> None:
    """Without an axis of fixed size, too: the lowest float marks positions of a result of any length."""
    random = np.random.default_rng(0)
    for mark in (np.finfo(np.float32).min, np.float32(-1e9)):
        results = [random.normal(size=(1, length)).astype(np.float32) for length in (5, 7, 9, 11)]
        for number, result in enumerate(results):
            result[0, number::3] = mark
        tolerance = tolerance_of("f32", *results)
        off = results[0].copy()
        off[0, 1] += 0.01
        assert not compare(results[0], off, tolerance).within
        off = results[0].copy()
        off[0, 0] = 0.5
        assert not compare(results[0], off, tolerance).within
        assert not tolerance.hides(results[0])


def test_values_of_every_scale_are_no_marks() -> None:
    """Coarse types repeat their values; only what stands far above all others is a mark."""
    random = np.random.default_rng(0)
    results = [np.exp(random.normal(size=(1, 50)) * 2).astype(np.float16) for _ in range(9)]
    assert math.inf == tolerance_of("f16", *results).mark
    assert math.inf == tolerance_of("f32", *[np.eye(3)] * 3).mark


def test_a_tolerance_is_the_same_once_it_was_plain_data() -> None:
    """As JSON holds it; of an axis of thousands the overall spread counts."""
    random = np.random.default_rng(0)
    references = [random.normal(size=(2, 5)) * [1, 10, 100, 1, 1] for _ in range(9)]
    classes = tolerance_of("f32", *map(softmax, references))
    for tolerance in (EXACT, classes, tolerance_of("f32", *references), tolerance_of("f16", [-65504.0] * 8)):
        plain = json.loads(json.dumps(tolerance.to_dict(), allow_nan=False))
        assert tolerance.to_dict() == OutputTolerance.from_dict(plain).to_dict()
    wide = tolerance_of("f32", *[random.normal(size=(1, 5000)) for _ in range(8)])
    assert [] == [axis for axis, _ in wide.to_dict()["spreads"] if axis == 1]
    for wrong in (
        {"of_spread": 1.0},
        [1],
        {**tolerance.to_dict(), "mark": "high"},
        {**tolerance.to_dict(), "classes": "all"},
    ):
        with pytest.raises(EngineError):
            OutputTolerance.from_dict(wrong)  # type: ignore[arg-type]
