"""Two compilations of one model, compared: their speed, and the distance of their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shapestream_engine import CompiledModel, EngineError, InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.backends.openvino.compiling import bf16_if_offered
from shapestream_engine.comparison import AnswerDistance, Gain, Variant, compare_answers, compare_speed
from shapestream_engine.probing.inputs import Integers, Uniform

Array = np.ndarray[Any, Any]
PLENTY_S = 60.0


def model(
    function: Callable[[Array], Array], element_type: str = "f32", shape: str = "batch, n"
) -> CompiledModel:
    """A function over `x` with the output `y` of this type and shape."""
    return compile_model(
        ModelSpec(
            name="m",
            model=lambda x: {"y": function(x)},
            inputs={"x": InputSpec(shape="batch:1..4, n:4..64", element_type="f32")},
            outputs={"y": OutputSpec(shape=shape, element_type=element_type, rule={"rule": "rows"})},
        )
    )


def distance(*models: CompiledModel) -> AnswerDistance:
    """Of one request of 4 rows of 64 values between 0 and 1, without time for a second one."""
    before, after = models
    return compare_answers((before, after), [(4, 64)], values={"x": Uniform(0, 1)}, budget_s=0.0)


@pytest.mark.parametrize(
    ("capabilities", "properties", "expected"),
    [
        (["BF16", "FP32"], {}, {"INFERENCE_PRECISION_HINT": "bf16"}),
        (["FP32", "INT8"], {}, {}),
        (["BF16", "FP32"], {"INFERENCE_PRECISION_HINT": "f32"}, {}),
    ],
)
def test_bf16_is_offered_where_the_device_has_it_and_the_precision_is_open(
    capabilities: list[str], properties: dict[str, str], expected: dict[str, str]
) -> None:
    """Nothing is offered on other devices, nor to a user who has decided."""
    assert expected == bf16_if_offered(capabilities, properties)


def test_the_distance_of_floats_is_a_part_of_their_spread() -> None:
    """Values between 0 and 1 have the standard deviation of 1 / sqrt(12); a shift by 0.01 changes no argmax."""
    found = distance(model(lambda x: x), model(lambda x: x + np.float32(0.01)))
    assert found.of_spread is not None
    assert abs(found.of_spread - 0.01 * 12**0.5) < 0.005
    assert (4, 4, 0, 1, 0) == (
        found.same_argmax,
        found.vectors,
        found.exact,
        found.answers,
        found.other_shapes,
    )
    assert (
        f"answers differ by at most {100 * found.of_spread:.2g} % of their spread, argmax equal in 4 of 4"
        == (found.words())
    )


def test_another_argmax_is_counted() -> None:
    """Of a model that turns the sign of its values."""
    found = distance(model(lambda x: x), model(lambda x: -x))
    assert (0, 4) == (found.same_argmax, found.vectors)


def test_equal_answers_have_no_distance() -> None:
    """Also where all values are equal, so that their spread is 0."""
    assert 0.0 == distance(model(lambda x: x * 0), model(lambda x: x * 0)).of_spread


@pytest.mark.parametrize("other", [lambda x: x * np.float32(np.nan), lambda x: x + np.float32(np.inf)])
def test_answers_that_are_not_finite_have_no_distance_in_numbers(other: Callable[[Array], Array]) -> None:
    """And that is said in words."""
    found = distance(model(lambda x: x), model(other))
    assert found.of_spread is None
    assert "not finite" in found.words()


def test_whole_numbers_are_counted_by_value() -> None:
    """Half of them differ here."""
    found = distance(
        model(lambda x: np.zeros(x.shape, np.int64), "i64"),
        model(lambda x: (np.arange(x.size) % 2).reshape(x.shape), "i64"),
    )
    assert (128, 256, 0) == (found.same_exact, found.exact, found.vectors)
    assert found.words().endswith("whole numbers and strings equal in 128 of 256")


def test_outputs_of_another_shape_are_counted_and_not_compared() -> None:
    """As detectors have them, which find one box more."""
    found = distance(model(lambda x: x, shape="batch, ?"), model(lambda x: x[:, 1:], shape="batch, ?"))
    assert (1, 1, 0) == (found.other_shapes, found.answers, found.vectors)
    assert found.words().endswith("outputs of another shape in 1 of 1 answers")


def test_every_shape_is_compared_at_least_once() -> None:
    """Even without any time."""
    same = model(lambda x: x)
    shapes = [(1, 4), (2, 8), (3, 16)]
    found = compare_answers((same, same), shapes, values={}, budget_s=0.0)
    assert (3, 6) == (found.answers, found.vectors)


def test_a_refused_request_ends_the_comparison() -> None:
    """With the model's own words."""

    def refuse(x: Array) -> Array:
        raise ValueError("no such x")

    with pytest.raises(EngineError, match="no such x"):
        distance(model(lambda x: x), model(refuse))


def test_speeds_are_those_of_the_same_calls() -> None:
    """At the same shapes for all, with as many calls at a time as each variant has."""
    one, other = model(lambda x: x), model(lambda x: x)
    variants = [Variant(one), Variant(other, 2)]
    found = compare_speed(variants, values={"x": Integers(0, 9)}, max_batch=4, budget_s=PLENTY_S)
    first, second = found.seconds
    assert 0 <= found.waited < 1
    assert first.keys() == second.keys()
    assert {(1, 4), (4, 64)} <= first.keys()
    assert all(seconds > 0 for seconds in [*first.values(), *second.values()])


def test_a_model_that_runs_nothing_has_no_speed() -> None:
    """Rather than an error: `check` has said before that the model fails."""

    def refuse(x: Array) -> Array:
        raise ValueError("no such x")

    variants = [Variant(model(lambda x: x)), Variant(model(refuse))]
    assert [{}, {}] == compare_speed(variants, values={}, max_batch=4, budget_s=PLENTY_S).seconds


def test_a_gain_is_the_geometric_mean_over_shapes() -> None:
    """With the least and the most of them; two calls at a time in the same time count twice."""
    before, after = {(1,): 1.0, (2,): 8.0}, {(1,): 1.0, (2,): 2.0}
    assert Gain(mean=pytest.approx(2.0), least=1.0, most=4.0) == Gain.of(before, after)
    assert Gain(mean=pytest.approx(4.0), least=2.0, most=8.0) == Gain.of(before, after, at_once=2.0)
