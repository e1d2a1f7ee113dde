"""How an output of a batched call is divided among the requests that shared it: one rule per output.

A rule says what an output *follows*; it is checked on every batch, and a batch that breaks it is an error
(`RuleError`), never a guess. In a configuration a rule is a mapping: `{rule: index_column, column: 0}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeAlias

from shapestream_engine.errors import SignatureError

__all__ = ["IndexColumn", "Rows", "Rule", "Whole", "With", "parse_rule", "rule_to_dict"]


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
    count from 0 within the request. An output `[n]` is all index; its column is 0.
    """

    NAME: ClassVar[str] = "index_column"
    column: int = 0


@dataclass(frozen=True, slots=True)
class With:
    """Rows that run parallel to those of another output, which has the rule `index_column`."""

    NAME: ClassVar[str] = "with"
    output: str


@dataclass(frozen=True, slots=True)
class Whole:
    """The model has no batch axis, so every call serves one request, which takes the output as it is."""

    NAME: ClassVar[str] = "whole"


Rule: TypeAlias = Rows | IndexColumn | With | Whole

_RULES: dict[str, type[Rule]] = {rule.NAME: rule for rule in (Rows, IndexColumn, With, Whole)}
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
