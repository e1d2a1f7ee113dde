"""A model's ports as its file describes them, together with what a spec states: the way to a `ModelSignature`.

For engines whose files name dynamic dimensions (ONNX's `dim_param`, the symbols of `torch.export`): a symbol is the
same size wherever it stands, so outputs follow inputs by name, and nothing has to be tried. A spec may call a
symbol otherwise, `batch` above all; the name then goes wherever the symbol stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shapestream_engine.dimension_table import BATCH, DimensionTable
from shapestream_engine.errors import EngineError, RuleMissing, ShapeError, SignatureError
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.rules import Rows, Rule, Whole, follow_renamed, parse_rule
from shapestream_engine.shapes import Dimension, NamedShape
from shapestream_engine.signature import ModelSignature

__all__ = ["FilePort", "names_of_symbols", "no_tensors", "signature_of"]

_ANY = Dimension()


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePort:
    """One input or output, as the model file describes it."""

    name: str
    """The file's own name of it, or `input0`, `output1`, … where it has none."""
    element_type: str
    symbols: tuple[str | None, ...]
    """Per axis what the file calls its size; None where it says nothing."""
    dimensions: tuple[Dimension, ...]
    """Per axis the sizes that the file admits."""

    def __str__(self) -> str:
        return f"[{','.join(map(str, self.dimensions))}]"


def signature_of(spec: ModelSpec, inputs: Sequence[FilePort], outputs: Sequence[FilePort]) -> ModelSignature:
    """The signature of the model with these ports, as `spec` wants it; raises `SignatureError`."""
    try:
        input_names = _Names.of("input", inputs, spec.inputs)
        output_names = _Names.of("output", outputs, spec.outputs)
        shapes, calls = _input_shapes(spec, inputs, input_names.names)
        input_ports = tuple(
            _input(port, name, spec.inputs.get(name, InputSpec()), shape, input_names)
            for port, name, shape in zip(inputs, input_names.names, shapes, strict=True)
        )
        table = DimensionTable.of(input_ports)
        known = {name for port in input_ports for name in port.shape.names if name is not None}
        output_ports = tuple(
            _output(
                port,
                name,
                spec.outputs.get(name, OutputSpec()),
                [called if (called := calls.get(symbol or "")) in known else None for symbol in port.symbols],
                output_names,
                batched=table.has_batch,
            )
            for port, name in zip(outputs, output_names.names, strict=True)
        )
    except RuleMissing as error:
        raise error.of_model(spec.name) from error
    except EngineError as error:
        raise SignatureError(f"model {spec.name!r}: {error}", key=error.key) from error
    return ModelSignature(spec.name, input_ports, output_ports, spec.strategy)


@dataclass(frozen=True, slots=True)
class _Names:
    """What the ports of one kind are called: as the configuration calls them, else as the file does."""

    kind: str
    names: tuple[str, ...]
    in_file: tuple[str, ...]

    @classmethod
    def of(cls, kind: str, ports: Sequence[FilePort], configured: Iterable[str]) -> _Names:
        names = cls(kind, tuple(port.name for port in ports), tuple(port.name for port in ports))
        chosen: dict[int, str] = {}
        for name in configured:
            number = names._number(name)
            if number in chosen:
                raise SignatureError(
                    f"{kind} {names.in_file[number]!r} is configured twice: as {chosen[number]!r} and {name!r}",
                    key=(f"{kind}s", names.in_file[number]),
                )
            chosen[number] = name
        called = tuple(chosen.get(number, port.name) for number, port in enumerate(ports))
        return cls(kind, called, names.in_file)

    def resolve(self, name: str) -> str:
        """The port's name, for that or for what else it is called; raises `SignatureError` that lists the names."""
        return self.names[self._number(name)]

    def _number(self, name: str) -> int:
        if name in self.names:
            return self.names.index(name)
        if name in self.in_file:
            return self.in_file.index(name)
        position = name.removeprefix(self.kind)
        if name != position and position.isdecimal() and int(position) < len(self.names):
            return int(position)
        raise SignatureError(
            f"there is no {self.kind} {name!r}; the model has {', '.join(self.in_file) or 'none'}",
            key=(f"{self.kind}s", name),
        )


def _input_shapes(
    spec: ModelSpec, ports: Sequence[FilePort], names: Sequence[str]
) -> tuple[list[NamedShape], dict[str, str]]:
    """Per input its shape, and for each of the file's symbols the name that its size has from here on."""
    stated = [_stated(port, name, spec.inputs.get(name)) for port, name in zip(ports, names, strict=True)]
    calls = names_of_symbols(
        (name, port.symbols, shape.names) for name, port, shape in zip(names, ports, stated, strict=True)
    )
    bounds = _stated_bounds(names, stated)
    shapes = []
    for name, port, shape in zip(names, ports, stated, strict=True):
        axis_names = tuple(
            wanted or calls.get(symbol or "")
            for wanted, symbol in zip(shape.names, port.symbols, strict=True)
        )
        dimensions = tuple(
            _settled(name, axis, own, bounds.get(axis_name or "", _ANY) if said == _ANY else said)
            for axis, (axis_name, said, own) in enumerate(
                zip(axis_names, shape.dimensions, port.dimensions, strict=True)
            )
        )
        shapes.append(NamedShape(axis_names, dimensions))
    return shapes, calls


def no_tensors(outputs: Sequence[str]) -> str:
    """What to say of outputs that are sequences or maps, which no request can be answered with."""
    names = ", ".join(map(repr, outputs))
    return (
        f"output{'s' if len(outputs) > 1 else ''} {names}: a sequence or a map, which is no tensor "
        "(export the model without ZipMap; with skl2onnx: options={'zipmap': False})"
    )


def names_of_symbols(
    inputs: Iterable[tuple[str, Sequence[str | None], Sequence[str | None]]],
) -> dict[str, str]:
    """For each of the file's symbols the name that its size has: as the configuration calls it, else as the file does.

    Of each input: its name, the symbols of its axes, and what the configuration calls them. Raises `SignatureError`.
    """
    own: dict[str, str] = {}
    calls: dict[str, str] = {}
    for name, symbols, stated in inputs:
        for symbol, wanted in zip(symbols, stated, strict=True):
            if symbol is None:
                continue
            # What is no name, such as ONNX's "past + 1", stays without one unless the configuration gives it one.
            if _is_name(symbol):
                own[symbol] = symbol
            if wanted is not None and calls.setdefault(symbol, wanted) != wanted:
                raise SignatureError(
                    f"input {name!r}: the size {symbol!r} of the model file cannot be called both "
                    f"{calls[symbol]!r} and {wanted!r}",
                    key=("inputs", name),
                )
    return own | calls


def _is_name(symbol: str) -> bool:
    return symbol.isascii() and symbol.isidentifier()


def _stated(port: FilePort, name: str, spec: InputSpec | None) -> NamedShape:
    """What the spec says of the shape, which is nothing for every axis where it says nothing."""
    if spec is None or spec.shape is None:
        return NamedShape((None,) * len(port.dimensions), (_ANY,) * len(port.dimensions))
    shape = NamedShape.parse(spec.shape)
    _check_rank("input", name, port, shape)
    return shape


def _check_rank(kind: str, name: str, port: FilePort, shape: NamedShape) -> None:
    if len(shape) != len(port.dimensions):
        raise SignatureError(
            f"{kind} {name!r} has {len(port.dimensions)} axes in the model file, {port}, and {len(shape)} in the "
            f"configuration, [{shape}]",
            key=(f"{kind}s", name),
        )


def _stated_bounds(names: Sequence[str], shapes: Sequence[NamedShape]) -> dict[str, Dimension]:
    """Per dimension what the inputs state together; a name alone states nothing."""
    bounds: dict[str, Dimension] = {}
    for port, shape in zip(names, shapes, strict=True):
        for name, dimension in zip(shape.names, shape.dimensions, strict=True):
            if name is None or dimension == _ANY:
                continue
            try:
                bounds[name] = bounds.get(name, _ANY).intersection(dimension)
            except ShapeError as error:
                raise SignatureError(
                    f"input {port!r}: dimension {name!r}: {error}", key=("inputs", port)
                ) from error
    return bounds


def _settled(name: str, axis: int, own: Dimension, wanted: Dimension) -> Dimension:
    """The sizes of one axis. The file's bounds are the model's own: sizes beyond them it does not take."""
    if wanted == _ANY:
        return own
    try:
        together = own.intersection(wanted)
    except ShapeError:
        together = None
    if together != wanted:
        raise SignatureError(
            f"input {name!r}: axis {axis} is {own} in the model file and {wanted} in the configuration",
            key=("inputs", name),
        )
    return wanted


def _input(port: FilePort, name: str, spec: InputSpec, shape: NamedShape, names: _Names) -> InputPort:
    mask_of = None if spec.mask_of is None else names.resolve(spec.mask_of)
    return InputPort(name, _element_type("input", name, port, spec), shape, dict(spec.pad), mask_of)


def _output(
    port: FilePort,
    name: str,
    spec: OutputSpec,
    follows: Sequence[str | None],
    names: _Names,
    *,
    batched: bool,
) -> OutputPort:
    element_type = _element_type("output", name, port, spec)
    shape = _output_shape(port, name, spec.shape, follows)
    if spec.rule is None:
        return OutputPort(name, element_type, shape, _default_rule(name, shape, batched=batched))
    return OutputPort(name, element_type, shape, follow_renamed(parse_rule(spec.rule), names.resolve))


def _output_shape(port: FilePort, name: str, stated: str | None, follows: Sequence[str | None]) -> NamedShape:
    if stated is None:
        return NamedShape(tuple(follows), port.dimensions)
    shape = NamedShape.parse(stated)
    _check_rank("output", name, port, shape)
    for axis, (said, shown) in enumerate(zip(shape.names, follows, strict=True)):
        if said is not None and shown is not None and said != shown:
            raise SignatureError(
                f"output {name!r}: axis {axis} follows {shown!r}, and is called {said!r} in the configuration",
                key=("outputs", name),
            )
    try:
        together = tuple(
            said.intersection(own) for said, own in zip(shape.dimensions, port.dimensions, strict=True)
        )
    except ShapeError as error:
        raise SignatureError(
            f"output {name!r} is {port} in the model file, not [{shape}]: {error}", key=("outputs", name)
        ) from error
    return NamedShape(
        tuple(said or shown for said, shown in zip(shape.names, follows, strict=True)), together
    )


def _default_rule(name: str, shape: NamedShape, *, batched: bool) -> Rule:
    if not batched:
        return Whole()
    if shape.names.count(BATCH) == 1:
        return Rows()
    raise RuleMissing(
        f"output {name!r} is [{shape}], in which the model file calls no axis {BATCH!r}; say whose rows are whose, "
        f"such as outputs: {{{name}: {{rule: index_column, column: 0}}}}, or name its axes: {{shape: ...}}",
        output=name,
    )


def _element_type(kind: str, name: str, port: FilePort, spec: InputSpec | OutputSpec) -> str:
    if spec.element_type not in (None, port.element_type):
        raise SignatureError(
            f"{kind} {name!r} is {port.element_type} in the model, and {spec.element_type} in the configuration",
            key=(f"{kind}s", name),
        )
    return port.element_type
