"""The rules of outputs: how an output of a batched call is divided among the requests that shared the call.

A rule states the dimension or output that an output *follows*. In a configuration it is a mapping:
`{rule: index_column, column: 0}`. A rule is a frozen value of its arguments and knows no port. Each rule of a signature is
checked against the model when the signature is made (`rule_check.py`), and again on every batch (`batching/split.py`). A
batch that breaks its rule is an error (`RuleError`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

from shapestream_engine.errors import SignatureError
from shapestream_engine.shapes import NamedShape


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

    A rule's fields are its arguments in a configuration. A new rule is a class with a line in `RULES`, a check with a line
    in `RuleCheck.run` (`rule_check.py`), and a splitter with a line in `splitters_of` of `batching/split.py`.
    """

    NAME: ClassVar[str]
    DATA_AXIS: ClassVar[int | None] = None
    """The axis whose size the data decides; None without such an axis."""

    def data_axis(self, shape: NamedShape) -> int | None:
        """Return the axis whose size the data decides (rows found, entries counted); None without such an axis."""
        return self.DATA_AXIS

    def extents(self, shape: NamedShape) -> tuple[Extent | None, ...]:
        """Return the extent of each axis of an output of this shape; None for an axis that follows nothing.

        Names that no input dimension has are not followed.
        """
        return tuple(None if name is None else Extent(dimension=name) for name in shape.names)


@dataclass(frozen=True, slots=True)
class Rows(Rule):
    """Each request takes its own rows along the output's `batch` axis.

    Axes named like a padded dimension are trimmed to the request's size.
    """

    NAME: ClassVar[str] = "rows"


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

    def extents(self, shape: NamedShape) -> tuple[Extent | None, ...]:
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


@dataclass(frozen=True, slots=True)
class PaddedCounts(FollowingRule):
    """A padded table per row of the batch, `[batch, max, ...]`; `output` has the number of valid entries of each row.

    `output` has the rule `rows` and one number per row. The data axis is the first axis beside `batch`. It is trimmed to
    the largest count of the request's rows. Entries beyond a row's count are set to 0.
    """

    NAME: ClassVar[str] = "padded_counts"
    FOLLOWS: ClassVar[tuple[str, ...]] = ("rows",)
    MEANING: ClassVar[str] = "that counts its rows"

    def data_axis(self, shape: NamedShape) -> int | None:
        """Return the first axis beside `batch`: entries counted."""
        return 1 if shape.batch_axis == 0 else 0


@dataclass(frozen=True, slots=True)
class Recount(FollowingRule):
    """The number of rows of `output` in the batch, counted again for each request."""

    NAME: ClassVar[str] = "recount"
    FOLLOWS: ClassVar[tuple[str, ...]] = ("index_column", "with", "counts", "padded_counts")
    MEANING: ClassVar[str] = "whose rows it counts"


@dataclass(frozen=True, slots=True)
class Shared(Rule):
    """An output that is equal for every request, such as anchors: each request gets a copy of the whole.

    It may follow padded dimensions, and is trimmed along them, but not the batch axis or the data. A batch cannot show
    whether this holds; it needs a proof beside other requests, or `trust`.
    """

    NAME: ClassVar[str] = "shared"


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
