"""Answers keep the bounds of their signature: clients and chains reserve memory and derive their own bounds by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.engine.slot_bench import Array, SlotBench

from shapestream_engine import ErrorCode, InputSpec, ModelSpec, OutputSpec, Strategy, compile_model

X = InputSpec(shape="batch:1..8, samples:1..64", element_type="f32")


def bench(function: Callable[[Array], Array], output: OutputSpec, **more: Any) -> SlotBench:
    """A slot that runs a function on `x` [batch, samples], with one output `y`."""
    spec = ModelSpec(name="m", model=function, inputs={"x": X}, outputs={"y": output}, **more)
    return SlotBench(compile_model(spec))


def frames(x: Array) -> Array:
    """The samples in frames of four; of fewer there is none."""
    count = x.shape[1] // 4
    return x[:, : 4 * count].reshape(len(x), count, 4)


def above(x: Array) -> Array:
    """Row and value of each sample above 0.5."""
    rows, columns = np.nonzero(x > 0.5)
    return np.stack([rows.astype(np.float32), x[rows, columns]], axis=1)


@pytest.mark.parametrize(
    ("shape", "samples"), [("batch, time:1.., 4", 3), ("batch, time:..4, 4", 20), ("batch, time, 5", 8)]
)
def test_an_answer_outside_of_its_bounds_fails_with_both_shapes(shape: str, samples: int) -> None:
    """Below, above, and another size than the only one; the next request is answered."""
    made = bench(frames, OutputSpec(shape=shape, element_type="f32", rule={"rule": "rows"}))
    report = made.run(np.zeros((1, samples), np.float32))
    given = [1, samples // 4, 4]
    assert (
        ErrorCode.MODEL_ERROR,
        f"output 'y' has the shape {given}, and the signature announces [{shape}]",
    ) == (
        report.code,
        report.message,
    )
    if "5" not in shape:
        assert made.run(np.zeros((1, 8), np.float32)).code is None


def test_of_what_the_data_decides_any_part_may_be_missing() -> None:
    """A table of at least one row in a call: a request of it may have none, and none has more than the most."""
    output = OutputSpec(shape="1..3, 2", element_type="f32", rule={"rule": "index_column", "column": 0})
    made = bench(above, output)
    assert made.run(np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32)).code is None
    report = made.run(np.ones((1, 4), np.float32))
    assert "output 'y' has the shape [4, 2], and the signature announces [1..3, 2]" == report.message


def test_parts_of_several_calls_are_one_answer() -> None:
    """Each call has two rows, which fit; together they are four."""
    output = OutputSpec(shape="..3, 2", element_type="f32", rule={"rule": "index_column", "column": 0})
    made = bench(above, output, strategy=Strategy({"batch": (1,)}, partitioned=True))
    assert made.run(np.ones((1, 3), np.float32)).code is None
    report = made.run(np.ones((2, 2), np.float32))
    assert "output 'y' has the shape [4, 2], and the signature announces [..3, 2]" == report.message
