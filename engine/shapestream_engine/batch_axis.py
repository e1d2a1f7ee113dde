"""Finds the batch axis of a model whose configuration names none: of every input the axis with a usual name, else the first
one, else the only one without a name whose size is open.

Exporters call the axis `batch_size`, `N` or `s23`, or leave it unnamed. The result is a guess. A proof must show that rows
along the axis are independent before requests share a call. Small inputs of one shape, such as a rate, have no such axis:
requests share a call where they have them in common.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shapestream_engine.errors import RuleMissing
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec, read_model
from shapestream_engine.output_rules import List
from shapestream_engine.ports import InputPort
from shapestream_engine.shapes import BATCH, Dimension, NamedShape
from shapestream_engine.signature import ModelSignature
from shapestream_engine.strategy import Strategy

M = TypeVar("M")

_USUAL = re.compile(r".*batch.*|n|b|bs|s\d+", re.IGNORECASE)
"""Usual names of a batch axis; `s23` is a symbol of `torch.export`."""
_UNNAMED = re.compile(r"unk_*\d+", re.IGNORECASE)
"""Names that tf2onnx and ONNX shape inference give to unknown axes."""
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./]*")
"""Names that YAML accepts without quotes."""
_STATIC_CAN_OPEN = "openvino"
"""The engine that can make a fixed axis dynamic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBatchAxis:
    """The reason why a model has no batch axis, and the shapes that would give it one."""

    reason: str
    """The reason as text; it names the inputs."""
    shapes: Mapping[str, str] = field(default_factory=dict)
    """The shape to state for each input; empty if no statement helps, or none is known to."""
    is_named: bool = False
    """True if an axis could be renamed that is one of several with names, as the height of a picture: only the author of the
    model knows which one holds rows, if any."""

    @property
    def yaml(self) -> str:
        """The line of YAML that states the shapes; "" without shapes."""
        return inputs_line(self.shapes) if self.shapes else ""


def inputs_line(shapes: Mapping[str, str]) -> str:
    """Return the line of YAML that states these input shapes."""
    stated = ", ".join(f"{_quoted(name)}: {{shape: '{shape}'}}" for name, shape in shapes.items())
    return f"inputs: {{{stated}}}"


def states_batch(spec: ModelSpec) -> bool:
    """Tell whether the specification names an input axis `batch`."""
    return any(BATCH in shape.names for shape in _stated(spec).values())


def without_rules(spec: ModelSpec) -> ModelSignature:
    """Return the model's signature, with the rule `shared` or `whole` for outputs that the batch axis does not divide.

    Stated rules and allowed shapes are ignored, because they may need a batch axis that is not found yet. Raises what
    `read_model` raises.
    """
    outputs = {
        name: port if (port.rule or {}).get("rule") == List.NAME else replace(port, rule=None)
        for name, port in spec.outputs.items()
    }
    model, _ = with_shared_rules(replace(spec, outputs=outputs), read_model)
    return model.signature


def with_shared_rules(spec: ModelSpec, make: Callable[[ModelSpec], M]) -> tuple[M, list[str]]:
    """Return `make(spec)`, with the rule `shared` for outputs without a rule, and the names of those outputs.

    Allowed shapes are ignored. Raises what `make` raises.
    """
    unknown: list[str] = []
    plain = replace(spec, strategy=Strategy())
    while True:
        try:
            return make(plain), unknown
        except RuleMissing as error:
            if error.output in unknown:
                raise
            unknown.append(error.output)
            stated = plain.outputs.get(error.output, OutputSpec())
            outputs = {**plain.outputs, error.output: replace(stated, rule={"rule": "shared"})}
            plain = replace(plain, outputs=outputs)


def with_batch_axis(spec: ModelSpec, signature: ModelSignature) -> ModelSpec | NoBatchAxis:
    """Name an axis of every input `batch` where that may be its meaning; otherwise return the reason."""
    stated = {name for shape in _stated(spec).values() for name in shape.names if name is not None}
    can_open = spec.engines[0] == _STATIC_CAN_OPEN
    if (reason := _reason(signature, frozenset(stated))) is not None:
        return _no_batch_axis(signature, reason, can_open=can_open)
    inputs = {**spec.inputs}
    for port in _with_rows(signature):
        own = inputs.get(port.name, InputSpec())
        inputs[port.name] = replace(own, shape=_named(port))
    return replace(spec, inputs=inputs)


def with_second_axis(spec: ModelSpec, signature: ModelSignature) -> ModelSpec | None:
    """Name the second axis of every input `batch`, as recurrent layers have it: time first.

    None unless the first two are dynamic in all of them, and neither has a name.
    """
    inputs = {**spec.inputs}
    for port in _with_rows(signature):
        names, dimensions = port.shape.names[:2], port.shape.dimensions[:2]
        named = [name for name in names if name is not None and not _UNNAMED.fullmatch(name)]
        if len(names) < 2 or named or any(dimension.is_static for dimension in dimensions):
            return None
        shape = str(NamedShape((None, BATCH, *port.shape.names[2:]), port.shape.dimensions))
        inputs[port.name] = replace(inputs.get(port.name, InputSpec()), shape=shape)
    return replace(spec, inputs=inputs)


def without_batch_axis(spec: ModelSpec, signature: ModelSignature) -> ModelSpec:
    """Return the specification under which every request runs alone, whatever the file's axis names.

    Raises `SignatureError` if allowed shapes state sizes of the batch.
    """
    taken = {name for port in signature.inputs for name in port.shape.names}
    free = next(name for name in ("rows", "rows_", "rows__") if name not in taken)
    inputs = {**spec.inputs}
    for port in signature.inputs if signature.has_batch else ():
        names = tuple(free if name == BATCH else name for name in port.shape.names)
        shape = str(NamedShape(names, port.shape.dimensions))
        inputs[port.name] = replace(inputs.get(port.name, InputSpec()), shape=shape)
    return replace(spec, inputs=inputs, strategy=replace(spec.strategy, fill_rows=False, most_rows=1))


def why_no_batch(signature: ModelSignature) -> NoBatchAxis | None:
    """Return the reason why requests of this model run alone, by its signature; None if they share calls, or must not."""
    returns_lists = any(port.item is not None for port in signature.outputs)
    if signature.has_batch or signature.strategy.alone or returns_lists:
        return None
    reason = _reason(signature, frozenset()) or _spelled(
        [
            f"input {port.name!r} calls no axis batch"
            for port in _with_rows(signature)
            if BATCH not in port.shape.names
        ]
    )
    return _no_batch_axis(signature, reason, can_open=False)


def _with_rows(signature: ModelSignature) -> list[InputPort]:
    """Return the inputs that need a batch axis: those that requests may have in common need none beside others."""
    own = [port for port in signature.inputs if not port.is_common]
    return own or list(signature.inputs)


def _axis(port: InputPort) -> int:
    """Return the axis of an input that may be the batch."""
    axes = [axis for axis, dimension in enumerate(port.shape.dimensions) if dimension.is_dynamic]
    usual = [axis for axis in axes if _USUAL.fullmatch(port.shape.names[axis] or "")]
    if len(usual) == 1:
        return usual[0]
    if 0 in axes or len(axes) != 1 or port.shape.names[axes[0]] is not None:
        return 0
    return axes[0]


def _stated(spec: ModelSpec) -> dict[str, NamedShape]:
    return {
        name: NamedShape.parse(port.shape) for name, port in spec.inputs.items() if port.shape is not None
    }


def _reason(signature: ModelSignature, stated: frozenset[str]) -> str | None:
    """Return the reason why the first axes cannot be the batch; None if they can."""
    if not signature.inputs:
        return "the model has no inputs"
    to_blame: list[str] = []
    symbols: dict[str, str] = {}
    for port in _with_rows(signature):
        if BATCH in port.axis_names:
            if BATCH not in stated:
                symbols.setdefault(BATCH, port.name)
            continue
        if (blame := _blame(port, stated)) is not None:
            to_blame.append(f"input {port.name!r} [{port.shape}] {blame}")
        elif (name := port.shape.names[_axis(port)]) is not None and not _UNNAMED.fullmatch(name):
            symbols.setdefault(name, port.name)
    if to_blame:
        return _spelled(to_blame)
    if len(symbols) > 1:
        return "the axes that may be the batch differ: " + ", ".join(
            f"input {port!r} calls it {name!r}" for name, port in symbols.items()
        )
    return None


def _blame(port: InputPort, stated: frozenset[str]) -> str | None:
    if not port.shape.dimensions:
        return "has no axes"
    axis = _axis(port)
    first, name = port.shape.dimensions[axis], port.shape.names[axis]
    if first.is_static:
        return f"has a first axis of fixed size, {first}"
    if name is None or _UNNAMED.fullmatch(name):
        return None
    if name in stated:
        return f"calls its first axis {name!r} in the configuration, not batch"
    return None if _USUAL.fullmatch(name) else f"calls its first axis {name!r}, not batch"


def _no_batch_axis(signature: ModelSignature, reason: str, *, can_open: bool) -> NoBatchAxis:
    """Return the reason with the shapes that would help, unless they rename one of several axes with names."""
    if any(_is_one_of_named(port) for port in _with_rows(signature)):
        return NoBatchAxis(reason=reason, is_named=True)
    return NoBatchAxis(reason=reason, shapes=_helpful_shapes(signature, can_open=can_open))


def _is_one_of_named(port: InputPort) -> bool:
    """Tell whether the axis that may be the batch, and another dynamic one, have names of their own."""
    if not port.shape.dimensions or BATCH in port.axis_names:
        return False
    own = [
        axis
        for axis, (name, dimension) in enumerate(zip(port.shape.names, port.shape.dimensions, strict=True))
        if dimension.is_dynamic
        and name is not None
        and not (_USUAL.fullmatch(name) or _UNNAMED.fullmatch(name))
    ]
    return _axis(port) in own and len(own) > 1


def _helpful_shapes(signature: ModelSignature, *, can_open: bool) -> dict[str, str]:
    """Return the shapes that would give each input a batch axis; empty if some input cannot have one."""
    shapes = {}
    for port in _with_rows(signature):
        if BATCH in port.axis_names:
            continue
        if not port.shape.dimensions or (port.shape.dimensions[_axis(port)].is_static and not can_open):
            return {}
        shapes[port.name] = _named(port)
    return shapes


def _named(port: InputPort) -> str:
    """Return the input's shape with the axis that may be the batch named so."""
    if BATCH in port.axis_names:
        return str(port.shape)
    axis, names, dimensions = _axis(port), [*port.shape.names], [*port.shape.dimensions]
    names[axis] = BATCH
    if dimensions[axis].is_static:
        dimensions[axis] = Dimension()
    return str(NamedShape(tuple(names), tuple(dimensions)))


def _quoted(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else "'" + name.replace("'", "''") + "'"


def _spelled(reasons: list[str]) -> str:
    shown = "; ".join(reasons[:3])
    return shown if len(reasons) <= 3 else f"{shown}; and {len(reasons) - 3} more"
