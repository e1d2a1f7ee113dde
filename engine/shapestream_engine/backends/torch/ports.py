"""The inputs and outputs of an exported program.

`torch.export` keeps the bounds of dimensions, and which sizes are the same, but not the names that they were given:
here they are called by its symbols, such as `s31`, until a spec names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from shapestream_engine.backends.file_ports import FilePort
from shapestream_engine.backends.torch.request import ELEMENT_TYPES
from shapestream_engine.errors import SignatureError
from shapestream_engine.shapes import MAX_SIZE, Dimension

__all__ = ["ports_of"]

_TRACED_MINIMUM = 2
"""The size from which on `torch.export` tells no size from another: 0 and 1 are special to it."""


def ports_of(program: torch.export.ExportedProgram) -> tuple[list[FilePort], list[FilePort]]:
    """The program's inputs and outputs, in the order of its flattened arguments and results.

    An output is called by its key where the program returns a dictionary, else `output0`, `output1`, …
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = [
        _port(program, "input", getattr(each.arg, "name", ""), each.arg, values)
        for each in signature.input_specs
        if each.kind == InputKind.USER_INPUT
    ]
    returned = [each.arg for each in signature.output_specs if each.kind == OutputKind.USER_OUTPUT]
    names = _output_names(program, len(returned))
    outputs = [
        _port(program, "output", name, argument, values)
        for name, argument in zip(names, returned, strict=True)
    ]
    return inputs, outputs


def _output_names(program: torch.export.ExportedProgram, count: int) -> list[str]:
    returned = pytree.tree_unflatten(list(range(count)), program.call_spec.out_spec)
    if isinstance(returned, Mapping) and sorted(returned.values(), key=str) == sorted(range(count), key=str):
        by_number = {number: str(key) for key, number in returned.items()}
        return [by_number[number] for number in range(count)]
    return [f"output{number}" for number in range(count)]


def _port(
    program: torch.export.ExportedProgram, kind: str, name: str, argument: Any, values: Mapping[str, Any]
) -> FilePort:
    value = values.get(argument.name) if isinstance(argument, TensorArgument) else None
    if not isinstance(value, torch.Tensor):
        raise SignatureError(
            f"{kind} {name or argument!r} of the program is no tensor; export it without",
            key=(f"{kind}s", name),
        )
    if value.dtype not in ELEMENT_TYPES:
        raise SignatureError(
            f"{kind} {name!r} is of type {value.dtype}, which cannot travel", key=(f"{kind}s", name)
        )
    axes = [_axis(program, size) for size in value.shape]
    return FilePort(
        name=name,
        element_type=ELEMENT_TYPES[value.dtype],
        symbols=tuple(symbol for symbol, _ in axes),
        dimensions=tuple(dimension for _, dimension in axes),
    )


def _axis(program: torch.export.ExportedProgram, size: Any) -> tuple[str | None, Dimension]:
    """The symbol of an axis, if its size is one, and the sizes that it admits."""
    if isinstance(size, int):
        return None, Dimension(size, size)
    expression = size.node.expr
    if not expression.is_Symbol:
        return None, Dimension()
    bounds = program.range_constraints.get(expression)
    dimension = Dimension() if bounds is None else _dimension(bounds.lower, bounds.upper)
    # Sizes that depend on the data, u0 and so on, name no dimension: two outputs may share one by chance of tracing.
    return (None if str(expression).startswith("u") else str(expression)), dimension


def _dimension(lower: Any, upper: Any) -> Dimension:
    """The sizes between two bounds of PyTorch's, which are integers of SymPy's, or infinities.

    PyTorch's infinity of integers, `int_oo`, calls itself finite. Tracing assumes two elements of each dynamic
    dimension that no `min` above 2 was given for: a program that runs does not check it, and takes fewer.
    """
    minimum = max(0, int(lower)) if lower.is_Integer else 0
    maximum = int(upper) if upper.is_Integer and int(upper) < MAX_SIZE else None
    assumed = maximum is None and minimum <= _TRACED_MINIMUM
    return Dimension(0 if assumed else minimum, maximum)
