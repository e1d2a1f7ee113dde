"""Movement: what counts as rounding where a tolerance was learned from other values, and what never does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shapestream_engine.layout import Tensors
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.probing.tolerances import (
    TOLERANCES,
    Movement,
    Movements,
    OutputTolerance,
    change_of,
    changed,
)
from shapestream_engine.signature import ModelSignature

FLOATS = OutputTolerance(TOLERANCES["f32"], overall=1.0)
EXACT = OutputTolerance(None)
ALONE = np.arange(16, dtype=np.float32).reshape(1, 16)


def _signature(element_type: str = "f32", **more: Any) -> ModelSignature:
    return compile_model(
        ModelSpec(
            name="m",
            model=lambda x, mask=None: x,
            inputs={
                "x": InputSpec(shape="batch:1..8, n:1..8", element_type=element_type, **more.get("x", {}))
            }
            | more.get("others", {}),
            outputs={"y": OutputSpec(shape="batch, n", element_type=element_type)},
        )
    ).signature


def _tensors(*arrays: np.ndarray[Any, Any]) -> Tensors:
    names = {"float16": "f16", "float32": "f32", "float64": "f64", "int64": "i64"}
    layout = tuple((number, names[x.dtype.name], x.shape) for number, x in enumerate(arrays))
    return Tensors(layout=layout, buffers=[x.tobytes() for x in arrays])


def test_each_float_changes_by_the_same_part_of_itself_up_or_down():
    """Another number changes others."""
    values = np.random.default_rng(1).normal(size=(1, 8)).astype(np.float32) * 1e6
    found = [changed(_tensors(values), _signature(), 1e-5, number) for number in range(4)]
    others = [np.frombuffer(tensors.buffers[0], np.float32) for tensors in found]
    assert {1e-5, -1e-5} == set(np.round((np.stack(others) / values - 1).ravel().astype(float), 7))
    assert 4 == len({other.tobytes() for other in others})


def test_whole_numbers_stay_for_they_may_have_a_meaning():
    """A few among others stay; where most are whole, the others do, too. Zeros say nothing of that."""
    few = np.array([[0, 0, 0, 0, 0, 1, 0.5, 0.3]], np.float32)
    other = np.frombuffer(changed(_tensors(few), _signature(), 1e-5, 0).buffers[0], np.float32)
    assert [True] * 6 + [False] * 2 == (other == few[0]).tolist()
    most = np.array([[3, 4, 5, 0.5, np.inf]], np.float32)
    assert changed(_tensors(most), _signature(), 1e-5, 0) is None


@pytest.mark.parametrize(("dtype", "name"), [(np.int64, "i64"), (np.float16, "f16")])
def test_nothing_changes_where_the_type_holds_no_such_change(dtype, name):
    """Ids, and halves of which a hundred-thousandth is asked."""
    assert changed(_tensors(np.full((1, 4), 1.5).astype(dtype)), _signature(name), 1e-5, 0) is None


def test_a_mask_stays():
    """What the server could have made itself is no number."""
    mask = {"mask": InputSpec(shape="batch, n", element_type="f32", mask_of="x")}
    values, given = np.full((1, 4), 0.3, np.float32), np.full((1, 4), 0.5, np.float32)
    found = changed(_tensors(values, given), _signature(x={"pad": {"n": 0}}, others=mask), 1e-5, 0)
    assert (True, given.tobytes()) == (found.buffers[0] != values.tobytes(), found.buffers[1])


def test_the_change_is_that_of_the_coarsest_output():
    """Exact outputs alone say nothing; then it is that of f32."""
    assert TOLERANCES["bf16"].of_magnitude == change_of(
        {"a": FLOATS, "b": OutputTolerance(TOLERANCES["bf16"])}
    )
    assert TOLERANCES["f32"].of_magnitude == change_of({"a": EXACT})


@pytest.mark.parametrize(
    ("off", "other", "explained"), [(0.5, 0.0, True), (0.6, 0.0, False), (0.5, 0.1, False)]
)
def test_a_difference_is_rounding_up_to_the_tolerance_and_the_largest_movement(off, other, explained):
    """At each element by itself: here one moved by half, and the others did not."""
    answer = ALONE.copy()
    answer[0, 3:5] += off, other
    movement = Movement(ALONE, answer, FLOATS)
    assert not movement.explains
    for part in (0.2, -0.5, 0.1):
        moved = ALONE.copy()
        moved[0, 3] += part
        movement.changed(moved)
    assert explained == movement.explains


@pytest.mark.parametrize(("answer", "explained"), [([7, 5], True), ([3, 6], False), ([9, 5], False)])
def test_an_index_that_flips_alone_is_rounding_and_another_is_not(answer, explained):
    """Exact outputs are allowed nothing else."""
    movement = Movement(np.array([[3, 5]]), np.array([answer]), EXACT)
    movement.changed(np.array([[7, 5]]))
    assert explained == movement.explains


@pytest.mark.parametrize(("rows", "explained"), [(2, True), (4, False)])
def test_another_number_of_rows_is_rounding_only_if_the_request_alone_gave_as_many(rows, explained):
    """As a detector does near its threshold."""
    movement = Movement(np.zeros((3, 4)), np.zeros((rows, 4)), FLOATS)
    movement.changed(np.ones((3, 4)))
    assert not movement.explains
    movement.changed(np.zeros((2, 4)))
    assert explained == movement.explains


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_in_company_alone_is_no_rounding(value):
    """Unless a change of the inputs makes it so, too."""
    answer = np.full_like(ALONE, value)
    movement = Movement(ALONE, answer, FLOATS)
    movement.changed(ALONE + 1e9)
    assert not movement.explains
    movement.changed(answer)
    assert movement.explains


@pytest.mark.parametrize(("off", "explained"), [(0.004, True), (0.01, False)])
def test_copies_excuse_up_to_a_part_of_the_spread_of_the_answer_itself(off, explained):
    """A model that is wrong by the number of rows is wrong beside copies as well; 1e-3 of 4.6 is the cap."""
    movement = Movement(ALONE, ALONE + np.float32(off), OutputTolerance(TOLERANCES["f32"], overall=1e-6))
    movement.beside_copies(ALONE + np.float32(off))
    assert explained == movement.explains


def test_copies_excuse_no_index():
    """There is no small difference of them."""
    movement = Movement(np.array([[3]]), np.array([[4]]), EXACT)
    movement.beside_copies(np.array([[4]]))
    assert not movement.explains


def test_every_output_must_be_explained():
    """Those without a tolerance apart, of which the proof could say nothing."""
    answer = [ALONE + 1, ALONE + 1, ALONE + 1]
    movements = Movements([ALONE] * 3, answer, [FLOATS, None, FLOATS])
    assert [False, True] == [
        movements.changed([ALONE + 1, ALONE, ALONE]),
        movements.changed([ALONE, ALONE, ALONE + 1]),
    ]
