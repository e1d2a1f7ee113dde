"""How an output of a batched call is divided among the requests that shared it: one rule per output.

A rule says what an output *follows*; it is checked on every batch, and a batch that breaks it is an error
(`RuleError`), never a guess. In a configuration a rule is a mapping: `{rule: index_column, column: 0}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, TypeAlias

from shapestream_engine.errors import SignatureError

__all__ = [
    "Counts",
    "IndexColumn",
    "PaddedCounts",
    "Recount",
    "Rows",
    "Rule",
    "Shared",
    "Whole",
    "With",
    "follow_renamed",
    "parse_rule",
    "rule_to_dict",
]


@dataclass(frozen=True, slots=True)
class Rows:
    """The output's `batch` axis follows that of the inputs: each request takes its own rows.

    Axes named like a dimension along which requests were padded are trimmed back to the request's own size.
    """

    NAME: ClassVar[str] = "rows"


@dataclass(frozen=True, slots=True)
class IndexColumn:
    """Data-dependent rows, `[n, columns]`, with the batch index in one column (NonZero, NonMaxSuppression).

    Each request takes the rows with its indices, in the order in which they came; the index is rewritten to
    count from 0 within the request. An output `[n]` is all index; its column is 0. Of a request that was divided over
    calls the rows stand call by call; an order across its rows that one call would have made is not known.
    """

    NAME: ClassVar[str] = "index_column"
    column: int = 0


@dataclass(frozen=True, slots=True)
class With:
    """Rows that run parallel to those of another output, which has the rule `index_column` or `counts`."""

    NAME: ClassVar[str] = "with"
    output: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Concatenated rows, `[n, ...]`: first those of the first row of the batch, then those of the second, and so on.

    How many each has stands in `output`, which has the rule `rows` and one number per row. Rows that are sorted
    across the batch do not follow their counts, which nothing in them shows: the probe's check of batching does.
    """

    NAME: ClassVar[str] = "counts"
    output: str


@dataclass(frozen=True, slots=True)
class PaddedCounts:
    """A table per row of the batch, `[batch, max, ...]`, of which only the first so many entries mean anything.

    How many stands in `output`, which has the rule `rows` and one number per row. The data axis, which is the first
    beside `batch`, is trimmed to the largest count among the request's own rows; what lies beyond a row's own count
    is 0, whatever the model has left there.
    """

    NAME: ClassVar[str] = "padded_counts"
    output: str


@dataclass(frozen=True, slots=True)
class Recount:
    """How many rows `output` has in the whole batch: one number, recomputed from what each request got of it."""

    NAME: ClassVar[str] = "recount"
    output: str


@dataclass(frozen=True, slots=True)
class Shared:
    """The same for every request of the batch, such as anchors or a table of classes: each gets a copy of all.

    It may follow padded dimensions, and is trimmed along them; it follows neither the batch axis nor any data. Nothing
    in a batch shows whether that holds, so it takes a probe that saw it unchanged under other batch-mates, or trust.
    """

    NAME: ClassVar[str] = "shared"


@dataclass(frozen=True, slots=True)
class Whole:
    """The model has no batch axis, so every call serves one request, which takes the output as it is."""

    NAME: ClassVar[str] = "whole"


Rule: TypeAlias = Rows | IndexColumn | With | Counts | PaddedCounts | Recount | Shared | Whole

_RULES: dict[str, type[Rule]] = {
    rule.NAME: rule for rule in (Rows, IndexColumn, With, Counts, PaddedCounts, Recount, Shared, Whole)
}
_ARGUMENT_TYPES: dict[str, type] = {"column": int, "output": str}


def parse_rule(value: Mapping[str, Any]) -> Rule:
    """The rule that a mapping such as `{"rule": "with", "output": "peaks"}` states.

    Raises `SignatureError` for an unknown rule, listing the known ones, and for arguments that are missing,
    unknown or of the wrong type.
    """
    if not isinstance(value, Mapping):
        raise SignatureError(f"a rule is a mapping such as {{rule: rows}}, not {value!r}")
    arguments = dict(value)
    name = arguments.pop("rule", None)
    kind = _RULES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise SignatureError(f"unknown rule {name!r}; known are {', '.join(_RULES)}")
    known = {field.name for field in fields(kind)}
    if unknown := sorted(map(str, arguments.keys() - known)):
        takes = f"takes {', '.join(sorted(known))}" if known else "takes no argument"
        raise SignatureError(f"the rule {name} does not know {', '.join(unknown)}; it {takes}")
    for argument, given in arguments.items():
        # A bool is an int to isinstance, and a column to nobody.
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
    """The mapping that `parse_rule` turns into `rule` again."""
    return {"rule": rule.NAME, **asdict(rule)}


def follow_renamed(rule: Rule, resolve: Callable[[str], str]) -> Rule:
    """The rule with the output that it names, if it names one, called what `resolve` says."""
    if isinstance(rule, With | Counts | PaddedCounts | Recount):
        return replace(rule, output=resolve(rule.output))
    return rule
