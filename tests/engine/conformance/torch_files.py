"""The models of the suite as programs that PyTorch has exported."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from tests.engine.conformance.models import POWERS, Model
from torch.export import Dim

from shapestream_engine.shapes import NamedShape

_TYPES = {
    "boolean": torch.bool,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "u16": torch.uint16,
    "u32": torch.uint32,
    "u64": torch.uint64,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
}
_EXAMPLES = {"batch": 5, "n": 7}


class Affine(torch.nn.Module):
    """2 x + 1"""

    def forward(self, x: Any) -> Any:
        """The call."""
        return {"y": x * 2 + 1}


class Pair(torch.nn.Module):
    """Two inputs, two outputs."""

    def forward(self, a: Any, b: Any) -> Any:
        """The call."""
        return {"total": a + b, "sums": a.sum(dim=1)}


class Doubled(torch.nn.Module):
    """Any element type."""

    def forward(self, x: Any) -> Any:
        """The call."""
        return {"y": torch.cat([x, x], dim=1)}


class Places(torch.nn.Module):
    """An output whose shape depends on the data."""

    def forward(self, x: Any) -> Any:
        """The call."""
        return {"places": torch.nonzero(x)}


class Scaled(torch.nn.Module):
    """Nothing dynamic, and a scalar."""

    def forward(self, x: Any, factor: Any) -> Any:
        """The call."""
        return {"y": x * factor}


class Powers(torch.nn.Module):
    """Something that takes long."""

    def forward(self, x: Any) -> Any:
        """The call."""
        for _ in range(POWERS):
            x = torch.relu(x @ x)
        return {"y": x}


_MODULES = {
    "affine": Affine,
    "pair": Pair,
    "doubled": Doubled,
    "places": Places,
    "scaled": Scaled,
    "powers": Powers,
}


def write(model: Model, folder: Path) -> Path:
    """The model's file. `torch.export` keeps the bounds of dimensions, but not their names."""
    dims = {name: Dim(name, min=0) for name in _EXAMPLES}
    examples, dynamic = [], []
    for element_type, shape in model.inputs.values():
        parsed = NamedShape.parse(shape)
        sizes = [
            axis.minimum if axis.is_static else _EXAMPLES[str(name)]
            for name, axis in zip(parsed.names, parsed.dimensions, strict=True)
        ]
        examples.append(torch.ones(sizes).to(_TYPES[element_type]))
        dynamic.append({axis: dims[name] for axis, name in enumerate(parsed.names) if name is not None})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's own affairs; what is tested comes afterwards
        program = torch.export.export(
            _MODULES[model.name.partition("_")[0]](), tuple(examples), dynamic_shapes=tuple(dynamic)
        )
        path = folder / f"{model.name}.pt2"
        torch.export.save(program, path)
    return path
