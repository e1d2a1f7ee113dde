"""The ports of a model: names, element types and admitted shapes of its inputs and outputs, as frozen values.

A port checks what it states when it is made, whatever the other ports are. An input also states how it may be padded, an
output the rule that divides it among requests (`output_rules.py`).

What inputs have in common is the table of the model's dynamic dimensions. Axes of one name are one dimension: it has the
same size in all inputs of a request, and the bounds that all of them admit. A dynamic axis without a name is a dimension of
its own, `<input>.<axis>`. A table is made from the inputs alone, and never changes. A dimension's number in it is its
place in the sizes of each request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np

from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import EngineError, ShapeError, SignatureError
from shapestream_engine.output_rules import Extent, List, Rule, Whole, parse_rule, rule_to_dict
from shapestream_engine.shapes import BATCH, Dimension, NamedShape, PartialShape, checked_sizes
from shapestream_engine.string_arrays import STRING_TYPES

MAX_RANK = 32
"""Largest rank in a description of unknown origin (NumPy 1 holds no more)."""
PadValue: TypeAlias = "int | float | bool"
DEFAULT_AT_MOST_BYTES = 1 << 20
"""Bytes of the longest string of an input that states no bound."""
MAX_COMMON_BYTES = 1 << 10
"""Bytes of the largest input that requests may have in common: as many as travel inline, so comparing them costs little."""
MAX_AT_MOST_BYTES = (1 << 32) - 1
"""Largest bound of a string in bytes: a string is sent with its length as u32."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a model: its name, element type and admitted shapes."""

    KIND: ClassVar[str]
    name: str
    element_type: str
    shape: NamedShape

    def __post_init__(self) -> None:
        if not self.name:
            raise SignatureError(f"an {self.KIND} needs a name")
        try:
            if not self.is_string:
                dtype_of(self.element_type)
        except EngineError as error:
            raise SignatureError(
                f"{self.KIND} {self.name!r}: {error}, {', '.join(STRING_TYPES)}",
                key=(f"{self.KIND}s", self.name),
            ) from error

    @property
    def is_string(self) -> bool:
        """Tell whether the elements are strings, `str` or `bytes`, each of any length."""
        return self.element_type in STRING_TYPES

    @property
    def partial_shape(self) -> PartialShape:
        """The admitted shapes without names, as OpenVINO's `partial_shape`."""
        return self.shape.partial_shape

    @property
    def is_dynamic(self) -> bool:
        """Tell whether the port may take more than one shape."""
        return self.shape.is_dynamic

    def to_dict(self) -> dict[str, Any]:
        """Return plain data from which the class's `from_dict` makes an equal port."""
        return {"name": self.name, "element_type": self.element_type, "shape": str(self.shape)}


@dataclass(frozen=True, slots=True)
class InputPort(Port):
    """One input of a model.

        InputPort("mask", "i64", NamedShape.parse("batch, seq"), mask_of="ids")

    `pad` allows padding: dimension name -> value of the added elements. Elements outside the request along several
    dimensions get the value of the first. `mask_of` names the input that this one masks, with 1 in the request's region
    and 0 in the padding. The mask is made if a request lacks it. `at_most_bytes` bounds each element of an input of
    strings; it is None for numbers. `value` is that of each element, where all requests have the same; a request may lack
    the input.
    """

    KIND: ClassVar[str] = "input"
    pad: Mapping[str, PadValue] = field(default_factory=dict, hash=False)
    mask_of: str | None = None
    at_most_bytes: int | None = None
    value: PadValue | None = None

    def __post_init__(self) -> None:
        Port.__post_init__(self)  # super() fails in a dataclass with slots
        with EngineError.about("inputs", self.name):
            self._check_strings()
            self._check_value()
        for dimension, value in self.pad.items():
            with EngineError.about("inputs", self.name):
                self._check_pad(dimension, value)

    def admitted(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape as Python integers; raises `ShapeError` if this input does not take it."""
        sizes = tuple(shape)
        admits = self.shape.admits
        if admits(sizes):
            return sizes
        refused = f"input {self.name!r} takes [{self.shape}]"
        try:
            sizes = checked_sizes(shape)  # NumPy integers are sizes as well
        except ShapeError as error:
            raise ShapeError(f"{refused}: {error}") from None
        if not admits(sizes):
            raise ShapeError(f"{refused}, not {list(sizes)}")
        return sizes

    @property
    def axis_names(self) -> tuple[str | None, ...]:
        """The dimension name of each axis, `<input>.<axis>` without a name; None for a static axis."""
        return tuple(
            (name or f"{self.name}.{axis}") if dimension.is_dynamic else None
            for axis, (name, dimension) in enumerate(
                zip(self.shape.names, self.shape.dimensions, strict=True)
            )
        )

    @property
    def is_common(self) -> bool:
        """Tell whether a call has this input once, for all its requests, which must have equal bytes of it.

        It is small, of one shape, and without the batch axis: a rate, a threshold, a flag.
        """
        if self.is_string or self.is_dynamic or self.mask_of is not None or BATCH in self.shape.names:
            return False
        sizes = [dimension.minimum for dimension in self.shape.dimensions]
        return math.prod(sizes) * dtype_of(self.element_type).itemsize <= MAX_COMMON_BYTES

    @property
    def may_lack(self) -> bool:
        """Tell whether a request may lack this input, because the server makes it."""
        return self.mask_of is not None or self.value is not None

    @property
    def value_bytes(self) -> bytes | None:
        """The bytes of an input whose value is fixed; else None."""
        if self.value is None:
            return None
        sizes = [dimension.minimum for dimension in self.shape.dimensions]
        return np.full(sizes, self.value, dtype_of(self.element_type)).tobytes()

    @property
    def bytes_dimension(self) -> str | None:
        """The name of the dimension that an input of strings implies: the mean bytes of its elements, rounded up."""
        return f"{self.name}.bytes" if self.is_string else None

    def pads(self, dimension: str) -> bool:
        """Tell whether this input may be padded along `dimension`; a mask may always be padded."""
        return self.mask_of is not None or dimension in self.pad

    def pad_value(self, dimension: str) -> PadValue:
        """Return the padding value along `dimension`; 0 by default."""
        return self.pad.get(dimension, 0)

    def _check_strings(self) -> None:
        where, most = f"input {self.name!r}", self.at_most_bytes
        if not self.is_string:
            if most is not None:
                raise SignatureError(
                    f"{where}: at_most_bytes bounds strings, and {self.element_type} is none"
                )
            return
        if self.mask_of is not None:
            raise SignatureError(f"{where}: a mask is 1 or 0, and {self.element_type} is neither")
        if self.pad:
            raise SignatureError(f"{where}: strings are never padded; leave pad out")
        if most is None:
            object.__setattr__(self, "at_most_bytes", DEFAULT_AT_MOST_BYTES)  # frozen
        elif type(most) is not int or not 1 <= most <= MAX_AT_MOST_BYTES:
            raise SignatureError(f"{where}: at_most_bytes is from 1 to {MAX_AT_MOST_BYTES}, not {most!r}")

    def _check_value(self) -> None:
        if self.value is None:
            return
        where = f"input {self.name!r}: value"
        if not self.is_common:
            raise SignatureError(
                f"{where} is for numbers of one shape, without a batch axis, of at most {MAX_COMMON_BYTES} bytes; "
                f"this input is {self.element_type} [{self.shape}]"
            )
        if not _holds(self.element_type, self.value):
            raise SignatureError(f"{where}: {self.element_type} cannot hold {self.value!r}")

    def _check_pad(self, dimension: str, value: PadValue) -> None:
        where = f"input {self.name!r}: pad {dimension!r}"
        if dimension == BATCH:
            raise SignatureError(f"{where}: the batch axis is never padded; requests add up along it")
        # The name must be explicit, because outputs are trimmed by it and cannot carry an automatic name.
        if dimension not in self.shape.names or dimension not in self.axis_names:
            raise SignatureError(
                f"{where}: no dynamic dimension of this name in [{self.shape}]; name the axis to pad it"
            )
        if not _holds(self.element_type, value):
            raise SignatureError(f"{where}: {self.element_type} cannot hold {value!r}")
        if self.mask_of is not None and value != 0:
            raise SignatureError(f"{where}: a mask is 0 in the padding, not {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data from which `from_dict` makes an equal port."""
        own = {
            "pad": dict(self.pad),
            "mask_of": self.mask_of,
            "at_most_bytes": self.at_most_bytes,
            "value": self.value,
        }
        return {
            **Port.to_dict(self),
            **{key: stated for key, stated in own.items() if stated not in (None, {})},
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> InputPort:
        """Return the port that `plain` describes; raises `EngineError` for invalid data."""
        mask_of = plain.get("mask_of")
        pad = plain.get("pad", {})
        if not isinstance(pad, Mapping) or not all(isinstance(name, str) for name in pad):
            raise SignatureError(f"pad maps names of dimensions to values, {pad!r} does not")
        return cls(
            _text(plain, "name"),
            _text(plain, "element_type"),
            _shape(plain),
            dict(pad),
            None if mask_of is None else _text(plain, "mask_of"),
            plain.get("at_most_bytes"),
            plain.get("value"),
        )

    def __str__(self) -> str:
        notes = [f"pad {name} with {value}" for name, value in self.pad.items()]
        notes += [f"mask of {self.mask_of}"] if self.mask_of is not None else []
        notes += [f"at most {self.at_most_bytes} bytes each"] if self.at_most_bytes is not None else []
        notes += [f"always {self.value}"] if self.value is not None else []
        return f"{self.name}: {self.element_type} [{self.shape}]" + "".join(f", {note}" for note in notes)


@dataclass(frozen=True, slots=True)
class OutputPort(Port):
    """One output of a model, and the rule that divides it among the requests of a batch.

        OutputPort("scores", "f32", NamedShape.parse("batch, seq, 8"), Rows())

    Axes named like an input dimension have its size, unless the rule says otherwise. The data decides the size of other
    dynamic axes.
    """

    KIND: ClassVar[str] = "output"
    rule: Rule

    @property
    def batch_axis(self) -> int | None:
        """The dynamic axis named `batch`; None without one."""
        return self.shape.batch_axis

    @property
    def data_axis(self) -> int | None:
        """The axis whose size the data decides (rows found, entries counted); None without such an axis."""
        return self.rule.data_axis(self.shape)

    @property
    def item(self) -> NamedShape | None:
        """The shape of one array, if the output is a list of arrays; else None."""
        return NamedShape.parse(self.rule.of) if isinstance(self.rule, List) else None

    @property
    def extents(self) -> tuple[Extent | None, ...]:
        """The extent of each axis, by the shape's names or the rule; None for an axis without one."""
        return self.rule.extents(self.shape)

    def own_sizes(self, own: Mapping[str, int]) -> tuple[int | None, ...]:
        """Return the size of each axis in the result of a request of these sizes; None if the sizes do not determine it."""
        return tuple(
            None if extent is None or extent.dimension not in own else extent.of(own[extent.dimension])
            for extent in self.extents
        )

    def announces(self, shape: Sequence[int]) -> bool:
        """Tell whether a result may have this shape: its rank, and sizes within the dimensions.

        Of the axis along which the data decides, a result may have any part, nothing included.
        """
        data_axis = self.data_axis
        return len(shape) == self.shape.rank and all(
            (axis == data_axis and size <= dimension.minimum) or size in dimension
            for axis, (size, dimension) in enumerate(zip(shape, self.shape.dimensions, strict=True))
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data from which `from_dict` makes an equal port."""
        return {**Port.to_dict(self), "rule": rule_to_dict(self.rule)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> OutputPort:
        """Return the port that `plain` describes; raises `EngineError` for invalid data."""
        return cls(
            _text(plain, "name"),
            _text(plain, "element_type"),
            _shape(plain),
            parse_rule(plain.get("rule", {})),
        )

    def __str__(self) -> str:
        arguments = ", ".join(f"{key}: {value}" for key, value in rule_to_dict(self.rule).items())
        return f"{self.name}: {self.element_type} [{self.shape}], {{{arguments}}}"


def shapes_of(name: str) -> str:
    """Return the name of the output with the shapes of a list's arrays."""
    return f"{name}.shapes"


def list_ports(
    name: str, element_type: str, item: NamedShape, count: str | None = None
) -> tuple[OutputPort, OutputPort]:
    """Return the two outputs of a list of arrays: their elements in one row, and their shapes, i64 [arrays, rank].

    `count` names the input dimension whose size is the number of arrays.
    """
    shapes = NamedShape((count, None), (Dimension(), Dimension(item.rank, item.rank)))
    return (
        OutputPort(name, element_type, NamedShape((None,), (Dimension(),)), List(str(item), count)),
        OutputPort(shapes_of(name), "i64", shapes, Whole()),
    )


def _holds(element_type: str, value: object) -> bool:
    """Tell whether the element type holds `value`: exactly, or rounded within the range of a float type."""
    dtype = dtype_of(element_type)
    if not isinstance(value, bool | int | float):
        return False
    if dtype.kind == "b":
        return value in (0, 1)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return value == value // 1 and int(limits.min) <= value <= int(limits.max)
    if isinstance(value, float) and not math.isfinite(value):
        return True
    try:
        with np.errstate(over="ignore"):
            return bool(np.isfinite(np.asarray(float(value)).astype(dtype).astype(np.float64)))
    except OverflowError:
        return False


def _shape(plain: Mapping[str, Any]) -> NamedShape:
    text = _text(plain, "shape")
    if text.count(",") >= MAX_RANK:
        raise SignatureError(f"a port's shape has at most {MAX_RANK} dimensions, not {text.count(',') + 1}")
    return NamedShape.parse(text)


def _text(plain: Mapping[str, Any], key: str) -> str:
    value = plain.get(key)
    if not isinstance(value, str):
        raise SignatureError(f"a port's {key} is text, not {value!r}")
    return value


# ---------------------------------------------------------------- what the inputs have in common


@dataclass(frozen=True, slots=True, kw_only=True)
class DimensionTable:
    """Names, bounds and positions of the dynamic dimensions; tuples are parallel to `names` unless stated otherwise."""

    names: tuple[str, ...]
    """`batch` first if there is a batch axis, then in order of first occurrence."""
    bounds: tuple[Dimension, ...]
    """The sizes of each dimension that all inputs admit."""
    paddable: tuple[bool, ...]
    """True if every input with the dimension allows padding; always False for `batch`."""
    has_batch: bool
    """True if every input has a dynamic dimension `batch` or is common; otherwise requests cannot share calls."""
    axes: tuple[tuple[int | None, ...], ...]
    """The dimension number of each axis of each input; None for a static axis."""
    strings: tuple[int | None, ...]
    """The number of the dimension that each input of strings implies, the mean bytes of its elements; else None.

    No axis has it, and no element is ever added to it. So it is always paddable: requests of any means share a call.
    """

    @classmethod
    def of(cls, inputs: Sequence[InputPort]) -> DimensionTable:
        """Return the table of these inputs; raises `SignatureError` if they contradict each other."""
        axis_names = [port.axis_names for port in inputs]
        has_batch = has_batch_axis(inputs)
        first = [BATCH] if has_batch else []
        implied = [port.bytes_dimension for port in inputs]
        per_input = zip(axis_names, implied, strict=True)
        names = tuple(
            dict.fromkeys(first + [name for own, last in per_input for name in (*own, last) if name])
        )
        number = {name: index for index, name in enumerate(names)}
        for port, per_axis in zip(inputs, axis_names, strict=True):
            if per_axis.count(BATCH) > 1:
                raise SignatureError(
                    f"input {port.name!r} has two batch axes: [{port.shape}]", key=("inputs", port.name)
                )
        _check_static_names(inputs)
        return cls(
            names=names,
            bounds=_bounds(names, inputs, axis_names),
            paddable=tuple(
                all(port.pads(name) for port, per in zip(inputs, axis_names, strict=True) if name in per)
                for name in names
            ),
            has_batch=has_batch,
            axes=tuple(
                tuple(None if name is None else number[name] for name in per_axis) for per_axis in axis_names
            ),
            strings=tuple(None if name is None else number[name] for name in implied),
        )


def has_batch_axis(inputs: Sequence[InputPort]) -> bool:
    """Tell whether requests can share calls: some input has a batch axis, and the others have one or are common."""
    own = [BATCH in port.axis_names for port in inputs]
    return any(own) and all(has or port.is_common for has, port in zip(own, inputs, strict=True))


def _bounds(
    names: Sequence[str], inputs: Sequence[InputPort], axis_names: Sequence[Sequence[str | None]]
) -> tuple[Dimension, ...]:
    """Return the sizes that all axes of a name admit; a static axis fixes the dynamic axes of its name."""
    bounds = dict.fromkeys(names, Dimension())
    for port, per_axis in zip(inputs, axis_names, strict=True):
        if (implied := port.bytes_dimension) is not None:
            bounds[implied] = Dimension(1, port.at_most_bytes)
        for axis, dimension in enumerate(port.shape.dimensions):
            name = per_axis[axis] or port.shape.names[axis]
            if name not in bounds:
                continue
            try:
                bounds[name] = bounds[name].intersection(dimension)
            except ShapeError as error:
                raise SignatureError(
                    f"input {port.name!r}: dimension {name!r} contradicts the other inputs: {error}",
                    key=("inputs", port.name),
                ) from error
    return tuple(bounds.values())


def _check_static_names(inputs: Sequence[InputPort]) -> None:
    """Raise `SignatureError` if static axes of one name differ, such as `c:3` and `c:4`."""
    seen: dict[str, tuple[str, Dimension]] = {}
    for port in inputs:
        for name, dimension in zip(port.shape.names, port.shape.dimensions, strict=True):
            if name is None or dimension.is_dynamic:
                continue
            other, size = seen.setdefault(name, (port.name, dimension))
            if size != dimension:
                raise SignatureError(
                    f"dimension {name!r} is {size} in input {other!r} and {dimension} in input {port.name!r}",
                    key=("inputs", other),
                )
