"""Arrays that are given to a request: what the element type of its input holds is taken, all else is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shapestream_engine import (
    ELEMENT_TYPES,
    ArrayTensor,
    ElementTypeError,
    InferenceError,
    InferRequest,
    InputSpec,
    ModelSpec,
    OutputSpec,
    ShapeError,
    compile_model,
)

Array = np.ndarray[Any, Any]


def request_for(element_type: str) -> InferRequest:
    """Of a model that gives back what it was given."""
    return compile_model(
        ModelSpec(
            name="m",
            model=lambda x: x.copy(),
            inputs={"x": InputSpec(shape="n", element_type=element_type)},
            outputs={"y": OutputSpec(shape="n", element_type=element_type)},
        )
    ).create_infer_request()


def given_back(element_type: str, value: Any) -> Array:
    """What the model saw."""
    request = request_for(element_type)
    request.infer([value])
    return request.outputs()[0]


@pytest.mark.parametrize(
    ("element_type", "value"),
    [
        ("f64", np.array([2**53 + 1])),
        ("f64", np.array([-(2**63) + 1])),
        ("f64", np.array([2**64 - 1], np.uint64)),
        ("f64", [2**53 + 1]),
        ("f64", [2**53 + 1, 0.5]),
        ("f64", [np.array(2**53 + 1), 0.5]),
        ("f32", np.array([2**64 - 1], np.uint64)),
        ("f32", [2**24 + 1]),
        ("f32", [2**53 + 1]),
        ("f16", np.array([70_000])),
        ("f16", [2049]),
        ("bf16", [257]),
        ("f32", [1e39]),
        ("f16", np.array([1e5], np.float32)),
        ("f32", [1e-300]),
        ("bf16", [1e300]),
        ("f32", np.ma.array([1.0, 2.0], mask=[0, 1])),
        ("f32", np.ma.array([1.0, 2.0], np.float32, mask=[0, 1])),
        ("i64", [np.ma.masked]),
        ("f32", [1j]),
        ("boolean", [1]),
        ("boolean", [1.0]),
        ("i64", [float("nan")]),
        ("i32", [2**40]),
        ("u64", [-1]),
        ("i64", np.array([2**63], np.uint64)),
        ("f32", np.array([1.0], object)),
        ("f32", [None]),
        ("f32", np.array(["2026-01-01"], "M8[D]")),
        ("i64", np.array([1], "m8[s]")),
    ],
)
def test_what_would_change_is_refused(element_type: str, value: Any) -> None:
    """With the name of the input. The request stays usable."""
    request = request_for(element_type)
    with pytest.raises(ElementTypeError, match="input 'x'"):
        request.infer([value])
    request.infer([np.ones(2, ELEMENT_TYPES[element_type])])
    assert [1, 1] == request.outputs()[0].tolist()


@pytest.mark.parametrize(
    ("element_type", "value"),
    [
        ("f64", np.array([2**53, 2**62, -(2**63)])),
        ("f64", np.array([2**63], np.uint64)),
        ("f32", [2**24, 2**30, -(2**31)]),
        ("f32", [float("inf"), float("-inf"), 0.0]),
        ("f16", [2048, True]),
        ("bf16", [256, 2**10]),
        ("f32", np.ma.array([1.0, 2.0])),
        ("i64", [True, False]),
        ("u8", np.array([255], np.int64)),
    ],
)
def test_what_stays_the_same_is_taken(element_type: str, value: Any) -> None:
    """To the last digit."""
    assert np.asarray(value).tolist() == given_back(element_type, value).tolist()


@given(
    st.sampled_from(sorted(ELEMENT_TYPES)),
    st.lists(
        st.integers(-(2**63), 2**64 - 1)
        | st.builds(lambda power, more: 2**power + more, st.integers(0, 62), st.integers(-2, 2)),
        min_size=1,
        max_size=4,
    ),
)
@example("bf16", [0, 9_918_942_994_166_290_432])  # NumPy makes floats of these
def test_integers_arrive_as_they_are_or_not_at_all(element_type: str, values: list[int]) -> None:
    """In every element type, whatever NumPy would have made of them."""
    try:
        found = given_back(element_type, values)
    except ShapeError:
        return
    assert values == [int(number) for number in found.astype(object).tolist()]


def test_a_tensor_does_not_lie_over_a_masked_array() -> None:
    """Its memory holds what the mask hides."""
    with pytest.raises(ElementTypeError, match="mask"):
        ArrayTensor(np.ma.array([1.0, 2.0], np.float32, mask=[0, 1]))


def test_a_function_that_returns_masked_elements_has_failed() -> None:
    """What would travel is whatever lies under the mask."""
    request = compile_model(
        ModelSpec(
            name="m",
            model=lambda x: np.ma.masked_less(x, 0),
            inputs={"x": InputSpec(shape="n", element_type="f32")},
            outputs={"y": OutputSpec(shape="n", element_type="f32")},
        )
    ).create_infer_request()
    with pytest.raises(InferenceError, match="output 'y' has masked elements"):
        request.infer([[1.0, -1.0]])
    request.infer([[1.0, 2.0]])
    assert [1.0, 2.0] == request.outputs()[0].tolist()
