"""Models for chains in memory: their signatures, and what they compute, by NumPy alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shapestream_engine.element_types import dtype_of, element_type_of
from shapestream_engine.layout import Tensors
from shapestream_engine.output_rules import Rows, Whole
from shapestream_engine.ports import InputPort, OutputPort, list_ports
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

Array = npt.NDArray[Any]
BAD = 13.0
"""A first element with which every model fails."""


def norm(x: Array) -> dict[str, Any]:
    """By row: twice the row, and three numbers."""
    if (x == BAD).any():
        raise ValueError("bad row")
    return {"a": 2 * x, "b": np.stack([x.sum(1), x[:, 0], np.full(len(x), 7)], 1).astype(np.float32)}


def split(x: Array) -> dict[str, Any]:
    """A list: of row i, the first i elements, or all."""
    if (x == BAD).any():
        raise ValueError("bad row")
    return {"parts": [row[: index % (len(row) + 1)].copy() for index, row in enumerate(x)]}


def blocks(x: Array) -> dict[str, Any]:
    """A list: the first i rows, for each i; of no rows, nothing."""
    if (x == BAD).any():
        raise ValueError("bad row")
    return {"tables": [x[:count].copy() for count in range(len(x))]}


def pick(x: Array) -> dict[str, Any]:
    """The rows that begin with a positive number."""
    return {"rows": x[x[:, 0] > 0]}


def flat(v: Array) -> dict[str, Any]:
    """Three numbers of a vector."""
    if (v == BAD).any():
        raise ValueError("bad row")
    return {"o": np.array([v.sum(), len(v), v.max(initial=0)], np.float32)}


def mix(x: Array, y: Array) -> dict[str, Any]:
    """By row, of two inputs with as many rows: the row, moved by the sum of the other, and the other way round."""
    if (x == BAD).any():
        raise ValueError("bad row")
    return {"a": x + y.sum(1)[:, None], "b": y + x[:, :1]}


def weigh(v: Array, t: Array) -> dict[str, Any]:
    """Three numbers and one of a vector and a table."""
    if (v == BAD).any():
        raise ValueError("bad row")
    return {"o": np.array([v.sum(), t.sum(), len(t)], np.float32), "total": np.float32(v.sum() - t.sum())}


def join(v: Array, u: Array) -> dict[str, Any]:
    """Three numbers of two vectors."""
    if (v == BAD).any() or (u == BAD).any():
        raise ValueError("bad row")
    return {"o": np.array([v.sum(), 2 * u.sum(), len(v) - len(u)], np.float32)}


def both(x: Array, y: Array) -> dict[str, Any]:
    """Of two tables, the first's rows that begin with a positive number, and one number."""
    if (x == BAD).any() or (y == BAD).any():
        raise ValueError("bad row")
    return {"rows": x[x[:, 0] > 0], "total": np.float32(x.sum() - 2 * y.sum())}


def _shape(text: str) -> NamedShape:
    return NamedShape.parse(text)


_X = "f32"
SIGNATURES: dict[str, ModelSignature] = {
    "norm": ModelSignature(
        "norm",
        (InputPort("x", _X, _shape("batch, w:1..9")),),
        (OutputPort("a", _X, _shape("batch, w"), Rows()), OutputPort("b", _X, _shape("batch, 3"), Rows())),
    ),
    "split": ModelSignature(
        "split", (InputPort("x", _X, _shape("n, w:1..9")),), list_ports("parts", _X, _shape("k"))
    ),
    "blocks": ModelSignature(
        "blocks", (InputPort("x", _X, _shape("n, w:1..9")),), list_ports("tables", _X, _shape("k, w"))
    ),
    "pick": ModelSignature(
        "pick", (InputPort("x", _X, _shape("n, w:1..9")),), (OutputPort("rows", _X, _shape("?, ?"), Whole()),)
    ),
    "flat": ModelSignature(
        "flat", (InputPort("v", _X, _shape("k")),), (OutputPort("o", _X, _shape("3"), Whole()),)
    ),
    "mix": ModelSignature(
        "mix",
        (InputPort("x", _X, _shape("batch, w:1..9")), InputPort("y", _X, _shape("batch, 3"))),
        (OutputPort("a", _X, _shape("batch, w"), Rows()), OutputPort("b", _X, _shape("batch, 3"), Rows())),
    ),
    "weigh": ModelSignature(
        "weigh",
        (InputPort("v", _X, _shape("k")), InputPort("t", _X, _shape("n, w:1..9"))),
        (OutputPort("o", _X, _shape("3"), Whole()), OutputPort("total", _X, _shape(""), Whole())),
    ),
    "join": ModelSignature(
        "join",
        (InputPort("v", _X, _shape("k")), InputPort("u", _X, _shape("m"))),
        (OutputPort("o", _X, _shape("3"), Whole()),),
    ),
    "both": ModelSignature(
        "both",
        (InputPort("x", _X, _shape("n, w:1..9")), InputPort("y", _X, _shape("m, v:1..9"))),
        (OutputPort("rows", _X, _shape("?, ?"), Whole()), OutputPort("total", _X, _shape(""), Whole())),
    ),
}
FUNCTIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "norm": norm,
    "split": split,
    "blocks": blocks,
    "pick": pick,
    "flat": flat,
    "mix": mix,
    "weigh": weigh,
    "join": join,
    "both": both,
}


def tensors_of(arrays: list[Array]) -> Tensors:
    """Arrays in the order of their ports."""
    return Tensors(
        layout=tuple((port, element_type_of(array.dtype), array.shape) for port, array in enumerate(arrays)),
        buffers=[array.tobytes() for array in arrays],
    )


def arrays_of(tensors: Tensors) -> dict[int, Array]:
    """The arrays by port."""
    return {
        port: np.frombuffer(bytes(memoryview(buffer)), dtype_of(element_type)).reshape(shape)
        for (port, element_type, shape), buffer in zip(tensors.layout, tensors.buffers, strict=True)
    }


def lists_of(elements: Array, shapes: Array) -> list[Array]:
    """The arrays of a list, of its two tensors."""
    found, begin = [], 0
    for shape in shapes.tolist():
        size = int(np.prod(shape, dtype=np.int64))
        found.append(elements[begin : begin + size].reshape(shape))
        begin += size
    assert begin == len(elements)
    return found


def run(model: str, tensors: Tensors) -> Tensors:
    """What a worker would report; raises ValueError where the model fails."""
    signature = SIGNATURES[model]
    signature.resolve(tensors.layout)
    inputs = {signature.inputs[port].name: array for port, array in arrays_of(tensors).items()}
    outputs: list[Array] = []
    for value in FUNCTIONS[model](**inputs).values():
        if isinstance(value, list):
            rank = 2 if model == "blocks" else 1
            shapes = np.array([array.shape for array in value], np.int64).reshape(len(value), rank)
            outputs += [
                np.concatenate([*[array.ravel() for array in value], np.zeros(0, np.float32)]),
                shapes,
            ]
        else:
            outputs.append(np.asarray(value))
    return tensors_of(outputs)
