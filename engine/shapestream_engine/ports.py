"""The ports of a model: what each input takes and each output gives, as plain, frozen descriptions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import EngineError, ShapeError, SignatureError
from shapestream_engine.rules import (
    Counts,
    IndexColumn,
    PaddedCounts,
    Rule,
    With,
    parse_rule,
    rule_to_dict,
)
from shapestream_engine.shapes import NamedShape, PartialShape, checked_sizes

__all__ = ["InputPort", "OutputPort", "PadValue"]

MAX_RANK = 32
"""Dimensions of a tensor in a description that comes from elsewhere (NumPy 1 holds no more)."""
PadValue: TypeAlias = "int | float | bool"


@dataclass(frozen=True, slots=True)
class InputPort:
    """One input of a model.

    `pad` allows padding: name of a dynamic dimension -> the value of the elements added along it. An
    element outside the request along several dimensions gets the value of the first of them. `mask_of`
    names the input whose extent this one masks: 1 in the request's own region, 0 in the padding; it is made
    where a request has none.
    """

    name: str
    element_type: str
    shape: NamedShape
    pad: Mapping[str, PadValue] = field(default_factory=dict, hash=False)
    mask_of: str | None = None

    def __post_init__(self) -> None:
        _check_port("input", self.name, self.element_type)
        for dimension, value in self.pad.items():
            with EngineError.about("inputs", self.name):
                self._check_pad(dimension, value)

    @property
    def partial_shape(self) -> PartialShape:
        """The shapes that it may take, without names: what OpenVINO calls its `partial_shape`."""
        return self.shape.partial_shape

    def admitted(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape, of Python's own integers, if this input takes it; raises `ShapeError` otherwise."""
        sizes = tuple(shape)
        admits = self.shape.partial_shape.admits
        if admits(sizes):
            return sizes
        refused = f"input {self.name!r} takes [{self.shape}]"
        try:
            sizes = checked_sizes(shape)  # NumPy's integers are sizes, too
        except ShapeError as error:
            raise ShapeError(f"{refused}: {error}") from None
        if not admits(sizes):
            raise ShapeError(f"{refused}, not {list(sizes)}")
        return sizes

    @property
    def is_dynamic(self) -> bool:
        """Whether it may take more than one shape."""
        return self.shape.is_dynamic

    @property
    def axis_names(self) -> tuple[str | None, ...]:
        """Per axis the name of its dimension, `<input>.<axis>` where it has none; None for a static axis."""
        return tuple(
            (name or f"{self.name}.{axis}") if dimension.is_dynamic else None
            for axis, (name, dimension) in enumerate(
                zip(self.shape.names, self.shape.dimensions, strict=True)
            )
        )

    def pads(self, dimension: str) -> bool:
        """Whether this input may be padded along `dimension`; a mask always may."""
        return self.mask_of is not None or dimension in self.pad

    def pad_value(self, dimension: str) -> PadValue:
        """What padding along `dimension` consists of; 0 unless the configuration says otherwise."""
        return self.pad.get(dimension, 0)

    def _check_pad(self, dimension: str, value: PadValue) -> None:
        where = f"input {self.name!r}: pad {dimension!r}"
        if dimension == "batch":
            raise SignatureError(f"{where}: the batch axis is never padded; requests add up along it")
        # Only a name that was given will do: outputs are trimmed by it, and none can carry an automatic one.
        if dimension not in self.shape.names or dimension not in self.axis_names:
            raise SignatureError(
                f"{where}: no dynamic dimension of this name in [{self.shape}]; name the axis to pad it"
            )
        if not _holds(self.element_type, value):
            raise SignatureError(f"{where}: {self.element_type} cannot hold {value!r}")
        if self.mask_of is not None and value != 0:
            raise SignatureError(f"{where}: a mask is 0 in the padding, not {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` turns into an equal port."""
        plain: dict[str, Any] = {
            "name": self.name,
            "element_type": self.element_type,
            "shape": str(self.shape),
        }
        if self.pad:
            plain["pad"] = dict(self.pad)
        if self.mask_of is not None:
            plain["mask_of"] = self.mask_of
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> InputPort:
        """The port that `plain` describes; raises an `EngineError` that says what is wrong with it."""
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
        )

    def __str__(self) -> str:
        notes = [f"pad {name} with {value}" for name, value in self.pad.items()]
        notes += [f"mask of {self.mask_of}"] if self.mask_of is not None else []
        return f"{self.name}: {self.element_type} [{self.shape}]" + "".join(f", {note}" for note in notes)


@dataclass(frozen=True, slots=True)
class OutputPort:
    """One output of a model, and the rule by which it is divided among the requests of a batch.

    Axes named like a dimension of the inputs have the size that it has there; other dynamic axes depend on
    the data.
    """

    name: str
    element_type: str
    shape: NamedShape
    rule: Rule

    def __post_init__(self) -> None:
        _check_port("output", self.name, self.element_type)

    @property
    def partial_shape(self) -> PartialShape:
        """The shapes that it may take, without names: what OpenVINO calls its `partial_shape`."""
        return self.shape.partial_shape

    @property
    def is_dynamic(self) -> bool:
        """Whether it may take more than one shape."""
        return self.shape.is_dynamic

    @property
    def batch_axis(self) -> int | None:
        """The axis named `batch`, if there is one and it is dynamic."""
        for axis, (name, dimension) in enumerate(zip(self.shape.names, self.shape.dimensions, strict=True)):
            if name == "batch" and dimension.is_dynamic:
                return axis
        return None

    @property
    def data_axis(self) -> int | None:
        """The axis of which a result has as much as the data gave: rows found, or entries counted; None without one."""
        match self.rule:
            case IndexColumn() | With() | Counts():
                return 0
            case PaddedCounts():
                return 1 if self.batch_axis == 0 else 0
            case _:
                return None

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` turns into an equal port."""
        return {
            "name": self.name,
            "element_type": self.element_type,
            "shape": str(self.shape),
            "rule": rule_to_dict(self.rule),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> OutputPort:
        """The port that `plain` describes; raises an `EngineError` that says what is wrong with it."""
        return cls(
            _text(plain, "name"),
            _text(plain, "element_type"),
            _shape(plain),
            parse_rule(plain.get("rule", {})),
        )

    def __str__(self) -> str:
        arguments = ", ".join(f"{key}: {value}" for key, value in rule_to_dict(self.rule).items())
        return f"{self.name}: {self.element_type} [{self.shape}], {{{arguments}}}"


def _check_port(kind: str, name: str, element_type: str) -> None:
    if not name:
        raise SignatureError(f"an {kind} needs a name")
    try:
        dtype_of(element_type)
    except EngineError as error:
        raise SignatureError(f"{kind} {name!r}: {error}", key=(f"{kind}s", name)) from error


def _holds(element_type: str, value: object) -> bool:
    """Whether the element type can hold `value`: exactly, or, for floats, rounded but within its range."""
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
