"""From the ports of a model file and a `ModelSpec` to a `ModelSignature`.

An engine describes its file's ports as `FilePort`s. Files may name dynamic dimensions (ONNX's `dim_param`, the symbols of
`torch.export`). Equal symbols mean equal sizes, so outputs follow inputs by name, without a trial. A spec may give a
symbol another name, `batch` above all. The new name then replaces the symbol at every port.

An engine that can change the input shapes of a model (OpenVINO) passes `reshape`. The callback changes them, and returns
the dimensions that the outputs then follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shapestream_engine.errors import EngineError, RuleMissing, ShapeError, SignatureError
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec
from shapestream_engine.output_rules import Rows, Rule, Whole, follow_renamed, parse_rule
from shapestream_engine.ports import DimensionTable, InputPort, OutputPort
from shapestream_engine.shapes import BATCH, Dimension, NamedShape
from shapestream_engine.signature import ModelSignature

_ANY = Dimension()
_NO_NAMES = ("?", "-1", "", "None")
"""Words that exporters write for any size; two axes with one of them need not be equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePort:
    """One input or output, as the model file describes it."""

    name: str
    """The name in the file; without a name `input0`, `output1`, …"""
    element_type: str
    symbols: tuple[str | None, ...]
    """The file's name for the size of each axis; None for an axis without a name."""
    dimensions: tuple[Dimension, ...] | None
    """The sizes that the file admits for each axis; None if the file leaves the rank open."""
    aliases: frozenset[str] = frozenset()
    """Further names that a spec may use. The position, such as `input0`, is always a name."""
    batch_axis: int | None = None
    """The axis that the file marks as the batch without a symbol; a negative number counts from the last axis."""

    def __post_init__(self) -> None:
        named = tuple(None if symbol in _NO_NAMES else symbol for symbol in self.symbols)
        object.__setattr__(self, "symbols", named)  # frozen

    def __str__(self) -> str:
        return "[...]" if self.dimensions is None else f"[{','.join(map(str, self.dimensions))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshaped:
    """The outputs of a reshaped model, and how many trials support them."""

    outputs: Sequence[FilePort]
    """The outputs after the reshape; their symbols are the input dimensions that they follow."""
    accepted: int
    """Number of sets of sizes that the model accepted."""
    varied: frozenset[str]
    """Dimensions that the model accepted in more than one size."""
    complaint: str
    """The error for the last set of sizes that the model refused."""


Reshape: TypeAlias = Callable[[tuple[InputPort, ...], DimensionTable], Reshaped]
"""Callback that gives the inputs the shapes of these ports; raises `SignatureError` if the model refuses them."""


def signature_of(
    spec: ModelSpec,
    inputs: Sequence[FilePort],
    outputs: Sequence[FilePort],
    *,
    reshape: Reshape | None = None,
) -> ModelSignature:
    """Return the signature of the model with these ports and this spec; raises `SignatureError`."""
    try:
        input_names = _Names.of("input", inputs, spec.inputs)
        output_names = _Names.of("output", outputs, spec.outputs)
        shapes, calls = _input_shapes(spec, inputs, input_names.names, reshapes=reshape is not None)
        input_ports = tuple(
            _input(port, name, spec.inputs.get(name, InputSpec()), shape, input_names)
            for port, name, shape in zip(inputs, input_names.names, shapes, strict=True)
        )
        table = DimensionTable.of(input_ports)
        if reshape is None:
            known = {name for port in input_ports for name in port.shape.names if name is not None}
            follows = [
                [called if (called := calls.get(symbol or "")) in known else None for symbol in port.symbols]
                for port in outputs
            ]
            unfollowed = f"the model file calls no axis {BATCH!r}"
        else:
            reshaped = reshape(input_ports, table)
            _check_opened(inputs, input_ports, reshaped)
            outputs = reshaped.outputs
            follows = [list(port.symbols) for port in outputs]
            unfollowed = "no axis follows the batch" + (
                "" if reshaped.accepted else f" (shape inference could not be asked: {reshaped.complaint})"
            )
        output_ports = tuple(
            _output(
                port,
                name,
                spec.outputs.get(name, OutputSpec()),
                own,
                output_names,
                unfollowed=unfollowed if table.has_batch else None,
            )
            for port, name, own in zip(outputs, output_names.names, follows, strict=True)
        )
    except RuleMissing as error:
        raise RuleMissing(f"model {spec.name!r}: {error}", output=error.output) from error
    except EngineError as error:
        raise SignatureError(f"model {spec.name!r}: {error}", key=error.key) from error
    return ModelSignature(spec.name, input_ports, output_ports, spec.strategy)


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of the inputs or outputs: the configuration's, else the file's. A port may have further names."""

    kind: str
    names: tuple[str, ...]
    aliases: tuple[frozenset[str], ...]

    @classmethod
    def of(cls, kind: str, ports: Sequence[FilePort], configured: Mapping[str, object]) -> _Names:
        in_file = cls(kind, tuple(port.name for port in ports), tuple(port.aliases for port in ports))
        chosen: dict[int, str] = {}
        for name in configured:
            number = in_file._number(name)
            if number in chosen:
                raise SignatureError(
                    f"{kind} {in_file.names[number]!r} is configured twice: as {chosen[number]!r} and {name!r}",
                    key=(f"{kind}s", in_file.names[number]),
                )
            chosen[number] = name
        names = tuple(chosen.get(number, name) for number, name in enumerate(in_file.names))
        return cls(kind, names, tuple(port.aliases | {port.name} for port in ports))

    def resolve(self, name: str) -> str:
        """Return the main name of a port, for any of its names; raises `SignatureError` that lists the names."""
        return self.names[self._number(name)]

    def _number(self, name: str) -> int:
        if name in self.names:
            return self.names.index(name)
        found = [number for number, others in enumerate(self.aliases) if name in others]
        position = name.removeprefix(self.kind)
        if name != position and position.isdecimal() and int(position) < len(self.names):
            found = found or [int(position)]
        if len(found) == 1:
            return found[0]
        if found:
            raise SignatureError(
                f"{self.kind} {name!r} may be any of {', '.join(self.names[number] for number in found)}",
                key=(f"{self.kind}s", name),
            )
        raise SignatureError(
            f"there is no {self.kind} {name!r}; the model has {', '.join(self.names) or 'none'}",
            key=(f"{self.kind}s", name),
        )


def _input_shapes(
    spec: ModelSpec, ports: Sequence[FilePort], names: Sequence[str], *, reshapes: bool
) -> tuple[list[NamedShape], dict[str, str]]:
    """Return the shape of each input, and the dimension name of each of the file's symbols."""
    stated = [
        _stated_shape(port, name, spec.inputs.get(name, InputSpec()))
        for port, name in zip(ports, names, strict=True)
    ]
    calls = _names_of_symbols(ports, names, stated)
    named = [
        tuple(
            wanted or calls.get(symbol or "")
            for wanted, symbol in zip(_axis_names(port, shape), _symbols(port, shape), strict=True)
        )
        for port, shape in zip(ports, stated, strict=True)
    ]
    bounds = _stated_bounds(names, stated, named)
    shapes = []
    for name, port, shape, axis_names in zip(names, ports, stated, named, strict=True):
        own = port.dimensions or (_ANY,) * len(axis_names)
        unsaid = own if reshapes else (_ANY,) * len(own)
        said = [
            bounds.get(axis_name or "", _ANY) if dimension == _ANY else dimension
            for axis_name, dimension in zip(
                axis_names, unsaid if shape is None else shape.dimensions, strict=True
            )
        ]
        dimensions = tuple(
            _settled(name, axis, in_file, wanted, reshapes)
            for axis, (in_file, wanted) in enumerate(zip(own, said, strict=True))
        )
        shapes.append(_with_batch_of_file(port, NamedShape(axis_names, dimensions)))
    return shapes, calls


def no_tensors(outputs: Sequence[str]) -> str:
    """Return the error message for outputs that are sequences or maps; a reply holds tensors only."""
    names = ", ".join(map(repr, outputs))
    return (
        f"output{'s' if len(outputs) > 1 else ''} {names}: a sequence or a map, which is no tensor "
        "(export the model without ZipMap; with skl2onnx: options={'zipmap': False})"
    )


def _stated_shape(port: FilePort, name: str, spec: InputSpec) -> NamedShape | None:
    """Return the shape that the spec states; None without a statement."""
    with EngineError.about("inputs", name):
        if spec.shape is not None:
            shape = NamedShape.parse(spec.shape)
            _check_rank("input", name, port, shape)
            return shape
        if port.dimensions is None:
            raise SignatureError(f"input {name!r} has any number of axes in the model file; state its shape")
        return None


def _axis_names(port: FilePort, stated: NamedShape | None) -> tuple[str | None, ...]:
    return (None,) * len(port.dimensions or ()) if stated is None else stated.names


def _symbols(port: FilePort, stated: NamedShape | None) -> tuple[str | None, ...]:
    """Return the symbols of a port's axes; all None if the file leaves the rank open."""
    return (None,) * len(stated) if port.dimensions is None and stated is not None else port.symbols


def _names_of_symbols(
    ports: Sequence[FilePort], names: Sequence[str], stated: Sequence[NamedShape | None]
) -> dict[str, str]:
    """Return the dimension name of each of the file's symbols: the configuration's, else the symbol."""
    own: dict[str, str] = {}
    calls: dict[str, str] = {}
    for port, name, shape in zip(ports, names, stated, strict=True):
        for symbol, wanted in zip(_symbols(port, shape), _axis_names(port, shape), strict=True):
            if symbol is None:
                continue
            # A symbol such as ONNX's "past + 1" is no name; the configuration may give it one.
            if symbol.isascii() and symbol.isidentifier():
                own[symbol] = symbol
            if wanted is not None and calls.setdefault(symbol, wanted) != wanted:
                raise SignatureError(
                    f"input {name!r}: the size {symbol!r} of the model file cannot be called both "
                    f"{calls[symbol]!r} and {wanted!r}",
                    key=("inputs", name),
                )
    return own | calls


def _stated_bounds(
    names: Sequence[str], shapes: Sequence[NamedShape | None], named: Sequence[Sequence[str | None]]
) -> dict[str, Dimension]:
    """Return the bounds of each dimension that all inputs state together; a name alone states no bound."""
    bounds: dict[str, Dimension] = {}
    for port, shape, axis_names in zip(names, shapes, named, strict=True):
        for name, dimension in zip(axis_names, () if shape is None else shape.dimensions, strict=False):
            if name is None or dimension == _ANY:
                continue
            try:
                bounds[name] = bounds.get(name, _ANY).intersection(dimension)
            except ShapeError as error:
                raise SignatureError(
                    f"input {port!r}: dimension {name!r}: {error}", key=("inputs", port)
                ) from error
    return bounds


def _settled(name: str, axis: int, own: Dimension, wanted: Dimension, reshapes: bool) -> Dimension:
    """Return the bounds of one axis. Without `reshapes`, the file's bounds are final and the spec may not exceed them."""
    if reshapes:
        return own if wanted == _ANY and own.is_dynamic else wanted
    if wanted == _ANY:
        return own
    try:
        together = own.intersection(wanted)
    except ShapeError:
        together = None
    if together != wanted:
        raise SignatureError(_contradiction(name, axis, own, wanted), key=("inputs", name))
    return wanted


def _contradiction(name: str, axis: int, own: Dimension, wanted: Dimension) -> str:
    return f"input {name!r}: axis {axis} is {own} in the model file and {wanted} in the configuration"


def _with_batch_of_file(port: FilePort, shape: NamedShape) -> NamedShape:
    """Name the file's batch axis `batch`, unless the configuration names that axis, or names another axis `batch`."""
    if port.batch_axis is None or BATCH in shape.names or not len(shape):
        return shape
    axis = port.batch_axis % len(shape)
    if shape.names[axis] is not None or shape.dimensions[axis].is_static:
        return shape
    return NamedShape((*shape.names[:axis], BATCH, *shape.names[axis + 1 :]), shape.dimensions)


def _check_opened(in_file: Sequence[FilePort], ports: Sequence[InputPort], reshaped: Reshaped) -> None:
    """Raise `SignatureError` for an axis that the file fixes and that took no other size in a trial."""
    for own, port in zip(in_file, ports, strict=True):
        for axis, (name, wanted, fixed) in enumerate(
            zip(port.axis_names, port.shape.dimensions, own.dimensions or (), strict=False)
        ):
            opened = fixed.is_static and fixed != wanted
            if opened and not (reshaped.accepted if name is None else name in reshaped.varied):
                raise SignatureError(
                    f"{_contradiction(port.name, axis, fixed, wanted)}; of other sizes the model takes none, "
                    f"as far as was tried: {reshaped.complaint}",
                    key=("inputs", port.name),
                )


def _check_rank(kind: str, name: str, port: FilePort, shape: NamedShape) -> None:
    if port.dimensions is not None and len(shape) != len(port.dimensions):
        where = " in the model file" if kind == "input" else ""  # outputs follow the inputs as stated
        raise SignatureError(
            f"{kind} {name!r} has {len(port.dimensions)} axes{where}, {port}, and {len(shape)} in the "
            f"configuration, [{shape}]"
        )


def _input(port: FilePort, name: str, spec: InputSpec, shape: NamedShape, names: _Names) -> InputPort:
    mask_of = None if spec.mask_of is None else names.resolve(spec.mask_of)
    with EngineError.about("inputs", name):
        element_type = _element_type("input", name, port, spec)
        return InputPort(name, element_type, shape, dict(spec.pad), mask_of, spec.at_most_bytes, spec.value)


def _output(
    port: FilePort,
    name: str,
    spec: OutputSpec,
    follows: Sequence[str | None],
    names: _Names,
    *,
    unfollowed: str | None,
) -> OutputPort:
    """Return the port. `unfollowed`: the message for an output that follows no batch; None if there is no batch axis."""
    with EngineError.about("outputs", name):
        element_type = _element_type("output", name, port, spec)
        shape = _output_shape(port, name, spec.shape, follows)
        if spec.rule is None:
            return OutputPort(name, element_type, shape, _default_rule(name, shape, unfollowed))
        return OutputPort(name, element_type, shape, follow_renamed(parse_rule(spec.rule), names.resolve))


def _output_shape(port: FilePort, name: str, stated: str | None, follows: Sequence[str | None]) -> NamedShape:
    if stated is None:
        if port.dimensions is None:
            raise SignatureError(f"output {name!r} may have any number of axes; state its shape")
        return NamedShape(tuple(follows), port.dimensions)
    shape = NamedShape.parse(stated)
    if port.dimensions is None:
        return shape
    _check_rank("output", name, port, shape)
    for axis, (said, shown) in enumerate(zip(shape.names, follows, strict=True)):
        if said is not None and shown is not None and said != shown:
            raise SignatureError(
                f"output {name!r}: axis {axis} follows {shown!r}, and is called {said!r} in the configuration"
            )
    try:
        together = tuple(
            said.intersection(own) for said, own in zip(shape.dimensions, port.dimensions, strict=True)
        )
    except ShapeError as error:
        raise SignatureError(f"output {name!r} is {port}, not [{shape}]: {error}") from error
    return NamedShape(
        tuple(said or shown for said, shown in zip(shape.names, follows, strict=True)), together
    )


def _default_rule(name: str, shape: NamedShape, unfollowed: str | None) -> Rule:
    if unfollowed is None:
        return Whole()
    if shape.names.count(BATCH) == 1:
        return Rows()
    raise RuleMissing(
        f"output {name!r} is [{shape}], in which {unfollowed}; state the rule that divides it, or name its axes: "
        f"outputs: {{{name}: {{rule: ...}}}} or {{shape: ...}}",
        output=name,
    )


def _element_type(kind: str, name: str, port: FilePort, spec: InputSpec | OutputSpec) -> str:
    if spec.element_type not in (None, port.element_type):
        raise SignatureError(
            f"{kind} {name!r} is {port.element_type} in the model, and {spec.element_type} in the configuration"
        )
    return port.element_type
