"""The models of the conformance suite: ports, and what each computes as NumPy says it, which is also the reference.

What an engine needs instead of a NumPy callable, a file, is written by `onnx_files` and `torch_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from shapestream_engine import ELEMENT_TYPES

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A small model. Shapes are named; the names are in the file too, where its format has a place for them."""

    name: str
    inputs: Mapping[str, tuple[str, str]]
    """Name -> element type and shape, as the *file* has it."""
    outputs: Mapping[str, tuple[str, str]]
    function: Callable[..., Any]
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def affine(x: Array) -> Array:
    """2 x + 1"""
    return x * np.float32(2) + np.float32(1)


def pair(a: Array, b: Array) -> dict[str, Array]:
    """The sum of two tensors, which fails if their sizes differ, and the sums of the first one's rows."""
    return {"total": a + b, "sums": a.sum(axis=1)}


def doubled(x: Array) -> Array:
    """The tensor beside itself."""
    return np.concatenate([x, x], axis=1)


def places(x: Array) -> Array:
    """The indices of what is not zero, a row for each."""
    return np.argwhere(x)


def scaled(x: Array, factor: Array) -> Array:
    """A fixed shape by a scalar."""
    return x * factor


def powers(x: Array) -> Array:
    """Products of matrices, many of them: something that takes long."""
    for _ in range(POWERS):
        x = np.maximum(x @ x, 0)
    return x


POWERS = 30

AFFINE = Model(
    name="affine",
    inputs={"x": ("f32", "batch, 4")},
    outputs={"y": ("f32", "batch, 4")},
    function=affine,
)
PAIR = Model(
    name="pair",
    inputs={"a": ("f32", "batch, n"), "b": ("f32", "batch, n")},
    outputs={"total": ("f32", "batch, n"), "sums": ("f32", "batch")},
    function=pair,
)
PLACES = Model(
    name="places", inputs={"x": ("f32", "n")}, outputs={"places": ("i64", "?, 1")}, function=places
)
SCALED = Model(
    name="scaled",
    inputs={"x": ("f32", "3"), "factor": ("f32", "")},
    outputs={"y": ("f32", "3")},
    function=scaled,
)
POWERS_MODEL = Model(
    name="powers", inputs={"x": ("f32", "n, n")}, outputs={"y": ("f32", "n, n")}, function=powers
)
DOUBLED = {
    element_type: Model(
        name=f"doubled_{element_type}",
        inputs={"x": (element_type, "batch, 3")},
        outputs={"y": (element_type, "batch, 6")},
        function=doubled,
    )
    for element_type in ELEMENT_TYPES
}
