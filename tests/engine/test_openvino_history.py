"""An answer of OpenVINO does not depend on the shapes of the calls before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from shapestream_engine import CompiledModel, InputSpec, ModelSpec, compile_model

WIDTH = 64


def attention(device: str = "CPU") -> ModelSpec:
    """softmax(x x^T) x, which OpenVINO computes in one kernel of its own."""
    x = op.parameter([-1, -1, WIDTH], np.float32, name="x")
    scores = op.matmul(x, x, False, True)
    mixed = op.matmul(op.softmax(scores, -1), x, False, False)
    model = ov.Model([op.result(mixed)], [x])
    return ModelSpec(
        name="m",
        model=model,
        device=device,
        inputs={"x": InputSpec(shape=f"batch:1..16, n:1..256, {WIDTH}")},
    )


def expected(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same as NumPy says it."""
    scores = np.exp(x @ x.transpose(0, 2, 1) - (x * x).sum(-1).max())
    mixed: np.ndarray[Any, Any] = (scores / scores.sum(-1, keepdims=True)) @ x
    return mixed


@pytest.mark.seeds("S002-21", "S003-34")
@pytest.mark.parametrize("first", [(1, 1), (4, 1), (1, 2), (1, 16)], ids=str)
@pytest.mark.parametrize("slots", [1, 2])
def test_attention_is_right_whatever_length_came_first(first: tuple[int, int], slots: int) -> None:
    """OpenVINO 2026.4.1 answered all lengths from 16 wrongly, for ever, where a stream's first call had length 1."""
    answers_are_right(compile_model(attention(), slots=slots, threads=slots), first)


@pytest.mark.parametrize("device", ["AUTO", "AUTO:CPU", "MULTI:CPU", "HETERO:CPU"])
def test_it_is_right_where_the_cpu_is_a_part_of_the_device(device: str) -> None:
    """These devices hand on neither the property that mends it, nor by themselves the precision f32."""
    answers_are_right(compile_model(attention(device)), (1, 1))


def answers_are_right(model: CompiledModel, first: tuple[int, int]) -> None:
    """Calls of several lengths, after one of the shape `first`, answer as NumPy does."""
    request = model.create_infer_request()
    for shape in (first, (1, 8), (1, 16), (3, 40), (1, 230), first):
        x = np.random.default_rng(1).normal(size=(*shape, WIDTH)).astype(np.float32) / 4
        request.input_tensor("x").shape = x.shape
        request.input_tensor("x").data[...] = x
        request.infer()
        np.testing.assert_allclose(request.outputs()[0], expected(x), rtol=0, atol=1e-4)
