"""A model's ports as a `ModelSignature`: what its file says, what the spec states, and what shape inference shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import openvino as ov
from openvino import layout_helpers

from shapestream_engine.backends.file_ports import names_of_symbols
from shapestream_engine.backends.openvino.engine_words import engine_words
from shapestream_engine.backends.openvino.following import Findings, follow
from shapestream_engine.backends.openvino.port_names import SpecNames, match_spec
from shapestream_engine.dimension_table import BATCH, DimensionTable
from shapestream_engine.errors import EngineError, RuleMissing, SignatureError
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec
from shapestream_engine.model_files import input_symbols
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.rules import Rows, Rule, Whole, follow_renamed, parse_rule
from shapestream_engine.shapes import Dimension, NamedShape
from shapestream_engine.signature import ModelSignature

__all__ = ["reshape_inputs", "signature_of"]

_ANY = Dimension()


def signature_of(model: ov.Model, spec: ModelSpec) -> ModelSignature:
    """The signature of `model`, whose inputs are reshaped to what the spec states; raises `SignatureError`."""
    try:
        input_names = match_spec("input", model.inputs, spec.inputs)
        output_names = match_spec("output", model.outputs, spec.outputs)
        inputs, opened = _inputs(model, spec, input_names)
        reshape_inputs(model, inputs)
        table = DimensionTable.of(inputs)
        findings = follow(model, inputs, dict(zip(table.names, table.bounds, strict=True)))
        for changed, dimension, change in opened:
            if not (findings.accepted if dimension is None else dimension in findings.varied):
                raise SignatureError(
                    f"{change}; of other sizes the model takes none, as far as was tried: {findings.complaint}",
                    key=("inputs", changed),
                )
        outputs = tuple(
            _output(number, port, name, spec.outputs, output_names, findings, batched=table.has_batch)
            for number, (port, name) in enumerate(zip(model.outputs, output_names.names, strict=True))
        )
    except RuleMissing as error:
        raise error.of_model(spec.name) from error
    except EngineError as error:
        raise SignatureError(f"model {spec.name!r}: {error}", key=error.key) from error
    return ModelSignature(spec.name, inputs, outputs, spec.strategy)


def _inputs(
    model: ov.Model, spec: ModelSpec, names: SpecNames
) -> tuple[tuple[InputPort, ...], list[tuple[str, str | None, str]]]:
    """The inputs, and the axes that the file has fixed and the spec changes.

    Of each such axis: its input, its dimension (None: fixed again) and words.
    """
    shapes = {}
    for port, name in zip(model.inputs, names.names, strict=True):
        stated = spec.inputs.get(name, InputSpec()).shape
        shapes[name] = _file_shape(port, name) if stated is None else NamedShape.parse(stated)
    shapes = _named_by_file(model, spec, shapes)
    bounds = _stated_bounds(shapes)
    ports: list[InputPort] = []
    opened: list[tuple[str, str | None, str]] = []
    for port, name in zip(model.inputs, names.names, strict=True):
        own = spec.inputs.get(name, InputSpec())
        element_type = _element_type("input", name, port, own.element_type)
        shape = _with_batch_of_layout(port, _settled(port, name, shapes[name], bounds))
        mask_of = None if own.mask_of is None else names.resolve(own.mask_of)
        ports.append(InputPort(name, element_type, shape, dict(own.pad), mask_of))
        opened += _opened(port, ports[-1])
    return tuple(ports), opened


def _named_by_file(
    model: ov.Model, spec: ModelSpec, shapes: Mapping[str, NamedShape]
) -> dict[str, NamedShape]:
    """The shapes, in which axes without a name have that of the ONNX file, which OpenVINO does not keep."""
    in_file = {} if spec.path is None else input_symbols(spec.path)
    symbols = [
        next(
            (
                in_file[own]
                for own in sorted(port.names)
                if own in in_file and len(in_file[own]) == len(shape)
            ),
            (None,) * len(shape),
        )
        for port, shape in zip(model.inputs, shapes.values(), strict=True)
    ]
    calls = names_of_symbols(
        (name, own, shape.names) for own, (name, shape) in zip(symbols, shapes.items(), strict=True)
    )
    return {
        name: NamedShape(
            tuple(wanted or calls.get(symbol or "") for wanted, symbol in zip(shape.names, own, strict=True)),
            shape.dimensions,
        )
        for own, (name, shape) in zip(symbols, shapes.items(), strict=True)
    }


def _file_shape(port: Any, name: str) -> NamedShape:
    if port.partial_shape.rank.is_dynamic:
        raise SignatureError(
            f"input {name!r} has any number of axes in the model file; state its shape", key=("inputs", name)
        )
    dimensions = tuple(map(_dimension, port.partial_shape))
    return NamedShape((None,) * len(dimensions), dimensions)


def _stated_bounds(shapes: Mapping[str, NamedShape]) -> dict[str, Dimension]:
    """Per name what the inputs state together; a name alone states nothing."""
    bounds: dict[str, Dimension] = {}
    for port, shape in shapes.items():
        for name, dimension in zip(shape.names, shape.dimensions, strict=True):
            if name is None or dimension == _ANY:
                continue
            try:
                bounds[name] = bounds.get(name, _ANY).intersection(dimension)
            except EngineError as error:
                raise SignatureError(
                    f"input {port!r}: dimension {name!r}: {error}", key=("inputs", port)
                ) from error
    return bounds


def _settled(port: Any, name: str, shape: NamedShape, bounds: Mapping[str, Dimension]) -> NamedShape:
    """The shape with a size for each axis: stated here, stated elsewhere for the same name, or as the file says."""
    rank = port.partial_shape.rank
    if rank.is_static and rank.get_length() != len(shape):
        raise SignatureError(
            f"input {name!r} has {rank.get_length()} axes in the model file, {port.partial_shape}, "
            f"and {len(shape)} in the configuration, [{shape}]",
            key=("inputs", name),
        )
    settled = []
    for axis, (axis_name, dimension) in enumerate(zip(shape.names, shape.dimensions, strict=True)):
        if dimension == _ANY and axis_name is not None:
            dimension = bounds.get(axis_name, _ANY)
        if dimension == _ANY and rank.is_static and (own := _dimension(port.partial_shape[axis])).is_dynamic:
            dimension = own
        settled.append(dimension)
    return NamedShape(shape.names, tuple(settled))


def _with_batch_of_layout(port: Any, shape: NamedShape) -> NamedShape:
    """The axis that the model's layout calls N is `batch`, where the configuration names none and calls it nothing."""
    layout = port.node.layout
    if BATCH in shape.names or not layout_helpers.has_batch(layout):
        return shape
    axis = layout_helpers.batch_idx(layout) % max(1, len(shape))
    if axis >= len(shape) or shape.names[axis] is not None or shape.dimensions[axis].is_static:
        return shape
    return NamedShape((*shape.names[:axis], BATCH, *shape.names[axis + 1 :]), shape.dimensions)


def _opened(in_file: Any, port: InputPort) -> list[tuple[str, str | None, str]]:
    if in_file.partial_shape.rank.is_dynamic:
        return []
    fixed = map(_dimension, in_file.partial_shape)
    return [
        (
            port.name,
            name,
            f"input {port.name!r}: axis {axis} is {own} in the model file and {wanted} in the configuration",
        )
        for axis, (name, wanted, own) in enumerate(
            zip(port.axis_names, port.shape.dimensions, fixed, strict=True)
        )
        if own.is_static and own != wanted
    ]


def reshape_inputs(model: ov.Model, inputs: Sequence[InputPort]) -> None:
    """Give the model's inputs the shapes of these ports; raises `SignatureError` if it does not take them."""
    wanted = {
        number: ov.PartialShape(
            [
                ov.Dimension(axis.minimum, -1 if axis.maximum is None else axis.maximum)
                for axis in port.shape.dimensions
            ]
        )
        for number, port in enumerate(inputs)
    }
    if all(model.inputs[number].partial_shape == shape for number, shape in wanted.items()):
        return
    try:
        model.reshape(wanted)
    except RuntimeError as error:
        shapes = ", ".join(f"{port.name} [{port.shape}]" for port in inputs)
        raise SignatureError(f"the model does not take the shapes {shapes}: {engine_words(error)}") from error


def _output(
    number: int,
    port: Any,
    name: str,
    specs: Mapping[str, OutputSpec],
    names: SpecNames,
    findings: Findings,
    *,
    batched: bool,
) -> OutputPort:
    own = specs.get(name, OutputSpec())
    element_type = _element_type("output", name, port, own.element_type)
    shape = _output_shape(port, name, own.shape, findings.names[number])
    if own.rule is None:
        return OutputPort(name, element_type, shape, _default_rule(name, shape, findings, batched=batched))
    return OutputPort(name, element_type, shape, follow_renamed(parse_rule(own.rule), names.resolve))


def _output_shape(port: Any, name: str, stated: str | None, follows: Sequence[str | None]) -> NamedShape:
    if port.partial_shape.rank.is_dynamic:
        if stated is None:
            raise SignatureError(
                f"output {name!r} may have any number of axes; state its shape", key=("outputs", name)
            )
        return NamedShape.parse(stated)
    dimensions = tuple(map(_dimension, port.partial_shape))
    if stated is None:
        return NamedShape(tuple(follows), dimensions)
    shape = NamedShape.parse(stated)
    if len(shape) != len(dimensions):
        raise SignatureError(
            f"output {name!r} has {len(dimensions)} axes, {port.partial_shape}, and {len(shape)} in the "
            f"configuration, [{shape}]",
            key=("outputs", name),
        )
    for axis, (said, shown) in enumerate(zip(shape.names, follows, strict=True)):
        if said is not None and shown is not None and said != shown:
            raise SignatureError(
                f"output {name!r}: axis {axis} follows {shown!r}, and is called {said!r} in the configuration",
                key=("outputs", name),
            )
    try:
        together = tuple(
            said.intersection(own) for said, own in zip(shape.dimensions, dimensions, strict=True)
        )
    except EngineError as error:
        raise SignatureError(
            f"output {name!r} is {port.partial_shape}, not [{shape}]: {error}", key=("outputs", name)
        ) from error
    return NamedShape(
        tuple(said or shown for said, shown in zip(shape.names, follows, strict=True)), together
    )


def _default_rule(name: str, shape: NamedShape, findings: Findings, *, batched: bool) -> Rule:
    if not batched:
        return Whole()
    if shape.names.count(BATCH) == 1:
        return Rows()
    tried = "" if findings.accepted else f" (shape inference could not be asked: {findings.complaint})"
    raise RuleMissing(
        f"output {name!r} is [{shape}], in which no axis follows the batch{tried}; say whose rows are whose, such as "
        f"outputs: {{{name}: {{rule: index_column, column: 0}}}}, or name its axes: {{shape: ...}}",
        output=name,
    )


def _element_type(kind: str, name: str, port: Any, stated: str | None) -> str:
    own = str(port.element_type.get_type_name())
    if stated is not None and stated != own:
        raise SignatureError(
            f"{kind} {name!r} is {own} in the model, and {stated} in the configuration",
            key=(f"{kind}s", name),
        )
    return own


def _dimension(dimension: Any) -> Dimension:
    most = dimension.get_max_length()
    return Dimension(dimension.get_min_length(), None if most < 0 else most)
