"""The ports of a model: the shapes and element types of its inputs and outputs, as frozen values.

A rule says how an output of a batched call is divided among the requests that shared the call. The rule states the
dimension or output that this output *follows*. It is checked on every batch; a batch that breaks its rule is an error
(`RuleError`). In a configuration a rule is a mapping: `{rule: index_column, column: 0}`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np

from shapestream_engine.element_types import dtype_of
from shapestream_engine.errors import EngineError, ShapeError, SignatureError
from shapestream_engine.shapes import Dimension, NamedShape, PartialShape, checked_sizes
from shapestream_engine.string_arrays import STRING_TYPES

# ---------------------------------------------------------------- rules of outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The size of an output axis, derived from an input dimension: equal, a multiple, or a rounded fraction.

    Extent(dimension="height", divisor=4, rounds_up=True).of(10)  # 3
    """

    dimension: str
    times: int = 1
    divisor: int = 1
    rounds_up: bool = False

    def of(self, size: int) -> int:
        """Return the size of the axis when the dimension has `size`."""
        return (size * self.times + (self.divisor - 1 if self.rounds_up else 0)) // self.divisor

    def __str__(self) -> str:
        if self.divisor > 1:
            return f"{self.dimension}{'/' if self.rounds_up else '//'}{self.divisor}"
        return self.dimension if self.times == 1 else f"{self.dimension}*{self.times}"


@dataclass(frozen=True, slots=True)
class Rule:
    """Base of the rules: how an output is divided among the requests of a batch.

    A rule's fields are its arguments in a configuration. A new rule is a class with a line in `RULES`, and a splitter with
    a line in `splitters_of` of `batching/split.py`.
    """

    NAME: ClassVar[str]
    DATA_AXIS: ClassVar[int | None] = None
    """The axis whose size the data decides; None without such an axis."""

    def check(self, rule: Ruled) -> None:
        """Raise `SignatureError` if the output, other outputs or the inputs do not fit the rule."""

    def data_axis(self, port: OutputPort) -> int | None:
        """Return the axis whose size the data decides (rows found, entries counted); None without such an axis."""
        return self.DATA_AXIS

    def extents(self, port: OutputPort) -> tuple[Extent | None, ...]:
        """Return the extent of each axis; None for an axis that follows nothing.

        Names that no input dimension has are not followed.
        """
        return tuple(None if name is None else Extent(dimension=name) for name in port.shape.names)


@dataclass(frozen=True, slots=True)
class Rows(Rule):
    """Each request takes its own rows along the output's `batch` axis.

    Axes named like a padded dimension are trimmed to the request's size.
    """

    NAME: ClassVar[str] = "rows"

    def check(self, rule: Ruled) -> None:
        """Raise `SignatureError` unless there is one batch axis."""
        rule.check_batch_axis()


_EXTENT = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:\s*(?P<operator>\*|//?)\s*(?P<number>[1-9][0-9]{0,5}))?"
)


@dataclass(frozen=True, slots=True)
class Crop(Rule):
    """Rows whose other axes are cropped at a fixed ratio to input dimensions.

    `to` has an entry per axis: `batch, 8, height/4, width/4`. `NAME/4` rounds up, `NAME//4` rounds down, `NAME*2` is a
    multiple, and `?` stays whole. A call whose output has another size is an error. Only the proof's padding cases show
    whether the cropped result equals the result alone.
    """

    NAME: ClassVar[str] = "crop"
    to: str

    def check(self, rule: Ruled) -> None:
        """Raise `SignatureError` for invalid entries, and for entries that do not fit their axes."""
        rule.check_batch_axis()
        where, output, table = rule.where, rule.output, rule.table
        texts = self.to.split(",")
        if len(texts) != output.shape.rank:
            raise SignatureError(f"{where} has {len(texts)} entries for the axes of [{output.shape}]")
        for axis, (text, extent) in enumerate(zip(texts, self.extents(output), strict=True)):
            shown, admitted = output.shape.names[axis], output.shape.dimensions[axis]
            if extent is None:
                if text.strip() != "?" and int(text) not in admitted:
                    raise SignatureError(f"{where}: axis {axis} is {admitted}, not {text.strip()}")
            elif extent.dimension not in table.names:
                known = ", ".join(table.names)
                raise SignatureError(
                    f"{where}: the inputs have no dimension {extent.dimension!r}; they have {known}"
                )
            elif (axis == output.batch_axis) != (extent == Extent(dimension=BATCH)):
                raise SignatureError(
                    f"{where}: axis {axis} of [{output.shape}] has the entry {text.strip()!r}; the batch axis, and no "
                    f"other, has the entry batch"
                )
            elif admitted.is_static:
                raise SignatureError(f"{where}: axis {axis} is always {admitted}, and cannot follow {extent}")
            elif shown in table.names and extent != Extent(dimension=shown):
                raise SignatureError(f"{where}: axis {axis} is as large as {shown!r}, not {extent}")

    def extents(self, port: OutputPort) -> tuple[Extent | None, ...]:
        """Return the entries of `to`; raises `SignatureError` for an invalid entry."""
        return tuple(map(_extent, self.to.split(",")))


def _extent(text: str) -> Extent | None:
    text = text.strip()
    if text == "?" or re.fullmatch("[0-9]{1,18}", text):
        return None
    match = _EXTENT.fullmatch(text)
    if match is None:
        raise SignatureError(
            f"the rule crop: {text!r} is no size of an axis; write NAME, NAME/4 (rounded up), NAME//4 (rounded down), "
            f"NAME*2, a number or ?"
        )
    number = int(match["number"] or 1)
    if match["operator"] == "*":
        return Extent(dimension=match["name"], times=number)
    return Extent(dimension=match["name"], divisor=number, rounds_up=number > 1 and match["operator"] == "/")


@dataclass(frozen=True, slots=True)
class IndexColumn(Rule):
    """Data-dependent rows, `[n, columns]`, with the batch index in one column (NonZero, NonMaxSuppression).

    Each request takes the rows with its indices, in the model's order. The index is rewritten to count from 0 within the
    request. An output `[n]` has the index as column 0. The rows of a divided request come call by call, so an order across
    calls is lost.
    """

    NAME: ClassVar[str] = "index_column"
    DATA_AXIS: ClassVar[int | None] = 0
    column: int = 0

    def check(self, rule: Ruled) -> None:
        """Raise `SignatureError` unless the column exists and can hold an index."""
        output, where = rule.output, rule.where
        if output.shape.rank not in (1, 2):
            raise SignatureError(f"{where} needs the shape [rows, columns] or [rows], not [{output.shape}]")
        columns = Dimension(1, 1) if output.shape.rank == 1 else output.shape.dimensions[1]
        if self.column < 0 or (columns.maximum is not None and self.column >= columns.maximum):
            raise SignatureError(f"{where}: there is no column {self.column} in [{output.shape}]")
        rule.check_counts("index")


@dataclass(frozen=True, slots=True)
class FollowingRule(Rule):
    """Base of the rules that follow another output, named `output`."""

    FOLLOWS: ClassVar[tuple[str, ...]]
    """Names of the rules that the other output may have."""
    MEANING: ClassVar[str]
    """The role of the other output, for error messages."""
    output: str


@dataclass(frozen=True, slots=True)
class With(FollowingRule):
    """The rows are parallel to the rows of another output."""

    NAME: ClassVar[str] = "with"
    DATA_AXIS: ClassVar[int | None] = 0
    FOLLOWS: ClassVar[tuple[str, ...]] = ("index_column", "counts")
    MEANING: ClassVar[str] = "that it runs parallel to"

    def check(self, rule: Ruled) -> None:
        """Raise `SignatureError` unless the other output has rows that this one can follow."""
        rule.check_leader(self.output, self.FOLLOWS)
        if rule.output.shape.rank == 0:
            raise SignatureError(f"{rule.where} needs rows; the output is a scalar")


@dataclass(frozen=True, slots=True)
class Counts(FollowingRule):
    """Concatenated rows, `[n, ...]`: the rows of batch row 0, then of batch row 1, and so on.

    `output` counts them: it has the rule `rows` and one number per row. Rows that are sorted across the batch break the
    rule invisibly; only the proof's batching cases show it.
    """

    NAME: ClassVar[str] = "counts"
    DATA_AXIS: ClassVar[int | None] = 0
    FOLLOWS: ClassVar[tuple[str, ...]] = ("rows",)
    MEANING: ClassVar[str] = "that counts its rows"

    def check(self, rule: Ruled) -> None:
        """Raise `SignatureError` unless the other output counts, and the data decides the number of rows."""
        rule.check_counter(self.output)
        shape = rule.output.shape
        if shape.rank == 0:
            raise SignatureError(f"{rule.where} needs rows; the output is a scalar")
        if shape.names[0] in rule.table.names:
            raise SignatureError(
                f"{rule.where} needs rows in a number that depends on the data; "
                f"in [{shape}] it is that of {shape.names[0]!r}"
            )


@dataclass(frozen=True, slots=True)
class PaddedCounts(FollowingRule):
    """A padded table per row of the batch, `[batch, max, ...]`; `output` has the number of valid entries of each row.

    `output` has the rule `rows` and one number per row. The data axis is the first axis beside `batch`. It is trimmed to
    the largest count of the request's rows. Entries beyond a row's count are set to 0.
    """

    NAME: ClassVar[str] = "padded_counts"
    FOLLOWS: ClassVar[tuple[str, ...]] = ("rows",)
    MEANING: ClassVar[str] = "that counts its rows"

    def check(self, rule: Ruled) -> None:
        """Raise `SignatureError` unless the other output counts, and this output has a table per row."""
        rule.check_counter(self.output)
        rule.check_batch_axis()
        if rule.output.is_string:
            raise SignatureError(f"{rule.where} sets entries beyond a count to 0, which no string is")
        if rule.output.shape.rank < 2:
            raise SignatureError(f"{rule.where} needs the shape [batch, max, ...], not [{rule.output.shape}]")

    def data_axis(self, port: OutputPort) -> int | None:
        """Return the first axis beside `batch`: entries counted."""
        return 1 if port.batch_axis == 0 else 0


@dataclass(frozen=True, slots=True)
class Recount(FollowingRule):
    """The number of rows of `output` in the batch, counted again for each request."""

    NAME: ClassVar[str] = "recount"
    FOLLOWS: ClassVar[tuple[str, ...]] = ("index_column", "with", "counts", "padded_counts")
    MEANING: ClassVar[str] = "whose rows it counts"

    def check(self, rule: Ruled) -> None:
        """Raise `SignatureError` unless the other output has rows to count, and this output is one number."""
        rule.check_leader(self.output, self.FOLLOWS)
        output, where = rule.output, rule.where
        if any(1 not in size for size in output.shape.dimensions):
            raise SignatureError(f"{where} needs one number, [] or [1], not [{output.shape}]")
        if BATCH in output.shape.names:
            raise SignatureError(
                f"{where} needs a total over the batch; [{output.shape}] has a number per row"
            )
        rule.check_counts("count")


@dataclass(frozen=True, slots=True)
class Shared(Rule):
    """An output that is equal for every request, such as anchors: each request gets a copy of the whole.

    It may follow padded dimensions, and is trimmed along them, but not the batch axis or the data. A batch cannot show
    whether this holds; it needs a proof beside other requests, or `trust`.
    """

    NAME: ClassVar[str] = "shared"

    def check(self, rule: Ruled) -> None:
        """Raise `SignatureError` where the output follows the batch."""
        if BATCH in rule.output.shape.names:
            raise SignatureError(
                f"{rule.where} cannot hold: [{rule.output.shape}] follows the batch; that is the rule rows"
            )


@dataclass(frozen=True, slots=True)
class Whole(Rule):
    """The model has no batch axis: each call serves one request, which takes the whole output."""

    NAME: ClassVar[str] = "whole"


@dataclass(frozen=True, slots=True)
class List(Whole):
    """A list of arrays, each of any shape within `of`: `height, width, 3`. There may be none.

    The output has the elements of all arrays, one after the other. A second output, `NAME.shapes`, has a row per array,
    its shape (`list_ports` makes both). `count` names the input dimension whose size is the number of arrays, if one is.
    """

    NAME: ClassVar[str] = "list"
    DATA_AXIS: ClassVar[int | None] = 0
    of: str
    count: str | None = None

    def check(self, rule: Ruled) -> None:
        """Raise `SignatureError` unless `of` is a shape, and the dimension and the output of the arrays' shapes exist."""
        output, where = rule.output, rule.where
        try:
            item = NamedShape.parse(self.of)
        except EngineError as error:
            raise SignatureError(f"{where}: {self.of!r} is no shape: {error}") from error
        if self.count is not None and self.count not in rule.table.names:
            known = ", ".join(rule.table.names)
            raise SignatureError(f"{where}: the inputs have no dimension {self.count!r}; they have {known}")
        expected, shapes = list_ports(output.name, output.element_type, item, self.count)
        if output != expected or shapes not in rule.outputs:
            raise SignatureError(
                f"{where} needs the shape [?], not [{output.shape}], and an output {shapes.name!r} with the arrays' shapes"
            )


RULES: dict[str, type[Rule]] = {
    rule.NAME: rule
    for rule in (Rows, IndexColumn, With, Counts, PaddedCounts, Recount, Shared, Whole, Crop, List)
}
"""Rules by their names in a configuration."""
_ARGUMENT_TYPES: dict[str, type] = {"column": int, "output": str, "to": str, "of": str, "count": str}


def parse_rule(value: Mapping[str, Any]) -> Rule:
    """Parse a rule such as `{"rule": "with", "output": "peaks"}`.

    Raises `SignatureError` for an unknown rule, and for missing, unknown or mistyped arguments.
    """
    if not isinstance(value, Mapping):
        raise SignatureError(f"a rule is a mapping such as {{rule: rows}}, not {value!r}")
    arguments = dict(value)
    name = arguments.pop("rule", None)
    kind = RULES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise SignatureError(f"unknown rule {name!r}; known are {', '.join(RULES)}")
    known = {field.name for field in fields(kind)}
    if unknown := sorted(map(str, arguments.keys() - known)):
        takes = f"takes {', '.join(sorted(known))}" if known else "takes no argument"
        raise SignatureError(f"the rule {name} does not know {', '.join(unknown)}; it {takes}")
    for argument, given in arguments.items():
        # isinstance would accept a bool as an int.
        if type(given) is not _ARGUMENT_TYPES[argument]:
            raise SignatureError(
                f"the rule {name}: {argument} is of type {_ARGUMENT_TYPES[argument].__name__}, not {given!r}"
            )
    try:
        return kind(**arguments)
    except TypeError:
        missing = ", ".join(sorted(known - arguments.keys()))
        raise SignatureError(f"the rule {name} needs: {missing}") from None


def rule_to_dict(rule: Rule) -> dict[str, Any]:
    """Return the mapping from which `parse_rule` makes an equal rule."""
    return {"rule": rule.NAME, **{name: given for name, given in asdict(rule).items() if given is not None}}


def follow_renamed(rule: Rule, resolve: Callable[[str], str]) -> Rule:
    """Return the rule with its `output`, if it has one, renamed by `resolve`."""
    return replace(rule, output=resolve(rule.output)) if isinstance(rule, FollowingRule) else rule


# ---------------------------------------------------------------- ports

MAX_RANK = 32
"""Largest rank in a description of unknown origin (NumPy 1 holds no more)."""
PadValue: TypeAlias = "int | float | bool"
DEFAULT_AT_MOST_BYTES = 1 << 20
"""Bytes of the longest string of an input that states no bound."""
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
    strings; it is None for numbers.
    """

    KIND: ClassVar[str] = "input"
    pad: Mapping[str, PadValue] = field(default_factory=dict, hash=False)
    mask_of: str | None = None
    at_most_bytes: int | None = None

    def __post_init__(self) -> None:
        Port.__post_init__(self)  # super() fails in a dataclass with slots
        with EngineError.about("inputs", self.name):
            self._check_strings()
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

    def _check_pad(self, dimension: str, value: PadValue) -> None:
        where = f"input {self.name!r}: pad {dimension!r}"
        if dimension == "batch":
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
        plain = Port.to_dict(self)
        if self.pad:
            plain["pad"] = dict(self.pad)
        if self.mask_of is not None:
            plain["mask_of"] = self.mask_of
        if self.at_most_bytes is not None:
            plain["at_most_bytes"] = self.at_most_bytes
        return plain

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
        )

    def __str__(self) -> str:
        notes = [f"pad {name} with {value}" for name, value in self.pad.items()]
        notes += [f"mask of {self.mask_of}"] if self.mask_of is not None else []
        notes += [f"at most {self.at_most_bytes} bytes each"] if self.at_most_bytes is not None else []
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
        for axis, (name, dimension) in enumerate(zip(self.shape.names, self.shape.dimensions, strict=True)):
            if name == "batch" and dimension.is_dynamic:
                return axis
        return None

    @property
    def data_axis(self) -> int | None:
        """The axis whose size the data decides (rows found, entries counted); None without such an axis."""
        return self.rule.data_axis(self)

    @property
    def item(self) -> NamedShape | None:
        """The shape of one array, if the output is a list of arrays; else None."""
        return NamedShape.parse(self.rule.of) if isinstance(self.rule, List) else None

    @property
    def extents(self) -> tuple[Extent | None, ...]:
        """The extent of each axis, by the shape's names or the rule; None for an axis without one."""
        return self.rule.extents(self)

    def own_sizes(self, own: Mapping[str, int]) -> tuple[int | None, ...]:
        """Return the size of each axis in the result of a request of these sizes; None if the sizes do not determine it."""
        return tuple(
            None if extent is None or extent.dimension not in own else extent.of(own[extent.dimension])
            for extent in self.extents
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


# ---------------------------------------------------------------- dynamic dimensions

BATCH = "batch"
"""The name of the dimension along which requests share calls."""


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
    """True if every input has a dynamic dimension `batch`; otherwise requests cannot share calls."""
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
        has_batch = bool(inputs) and all(BATCH in names for names in axis_names)
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


# ---------------------------------------------------------------- rules checked


@dataclass(frozen=True, slots=True)
class Ruled:
    """An output whose rule is checked, with the other outputs and the dimensions."""

    output: OutputPort
    outputs: Sequence[OutputPort]
    """All outputs of the model."""
    table: DimensionTable

    @property
    def where(self) -> str:
        """The output and its rule, the beginning of an error message."""
        return f"output {self.output.name!r}: the rule {self.output.rule.NAME}"

    def check(self) -> None:
        """Raise `SignatureError` if the rule does not fit the output; the message names the remedy."""
        if isinstance(self.output.rule, Whole) == self.table.has_batch:
            remedy = (
                "the model has a batch axis; state the rule that divides the output among requests"
                if self.table.has_batch
                else "the model has no batch axis, so its outputs are taken whole"
            )
            raise SignatureError(f"{self.where} cannot hold: {remedy}")
        self.output.rule.check(self)

    def check_batch_axis(self) -> None:
        """Raise `SignatureError` unless the output has one batch axis."""
        output = self.output
        if output.shape.names.count(BATCH) != 1 or output.batch_axis is None:
            raise SignatureError(
                f"{self.where} needs one dynamic axis named batch; there is none in [{output.shape}]"
            )

    def check_leader(self, name: str, rules: tuple[str, ...]) -> None:
        """Raise `SignatureError` unless the output `name` has one of these rules."""
        leader = next((other for other in self.outputs if other.name == name), None)
        if leader is None or leader.rule.NAME not in rules:
            *first, last = rules
            raise SignatureError(
                f"{self.where} follows {name!r}, which is no output with the rule {', '.join(first)} or {last}"
            )

    def check_counter(self, name: str) -> None:
        """Raise `SignatureError` unless the output `name` has one number per row of the batch."""
        where = self.where
        counter = next((other for other in self.outputs if other.name == name), None)
        if counter is None or not isinstance(counter.rule, Rows):
            raise SignatureError(f"{where} is counted by {name!r}, which is no output with the rule rows")
        others = [size for axis, size in enumerate(counter.shape.dimensions) if axis != counter.batch_axis]
        if any(1 not in size for size in others):
            raise SignatureError(
                f"{where} is counted by {name!r}, which has more than one number per row: [{counter.shape}]"
            )
        if counter.element_type in _UNCOUNTED:
            raise SignatureError(f"{where} is counted by {name!r}: a {counter.element_type} is no count")

    def check_counts(self, what: str) -> None:
        """Raise `SignatureError` if the output's element type holds no counts; `what` is a count of it in words."""
        if self.output.element_type in _UNCOUNTED:
            raise SignatureError(f"{self.where}: a {self.output.element_type} is no {what}")


_UNCOUNTED = ("boolean", *STRING_TYPES)
"""Element types that hold no counts."""
