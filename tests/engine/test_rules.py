"""Rules as they stand in a configuration."""

from __future__ import annotations

from typing import Any

import pytest

from shapestream_engine.errors import SignatureError
from shapestream_engine.output_rules import (
    Counts,
    Crop,
    IndexColumn,
    PaddedCounts,
    Recount,
    Rows,
    Rule,
    Shared,
    Whole,
    With,
    follow_renamed,
    parse_rule,
    rule_to_dict,
)


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ({"rule": "rows"}, Rows()),
        ({"rule": "whole"}, Whole()),
        ({"rule": "index_column"}, IndexColumn(0)),
        ({"rule": "index_column", "column": 2}, IndexColumn(2)),
        ({"rule": "with", "output": "peaks"}, With("peaks")),
        ({"rule": "counts", "output": "found"}, Counts("found")),
        ({"rule": "padded_counts", "output": "found"}, PaddedCounts("found")),
        ({"rule": "recount", "output": "peaks"}, Recount("peaks")),
        ({"rule": "shared"}, Shared()),
        ({"rule": "crop", "to": "batch, height/4"}, Crop("batch, height/4")),
    ],
)
def test_a_mapping_states_a_rule_and_back(plain: dict[str, Any], expected: Rule) -> None:
    """Every rule reads from a mapping, and reads back from what it is written as."""
    assert expected == parse_rule(plain)
    assert expected == parse_rule(rule_to_dict(expected))


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        (
            {"rule": "row"},
            r"unknown rule 'row'; known are rows, index_column, with, counts, padded_counts, recount, shared, whole",
        ),
        ({}, r"unknown rule None; known are rows"),
        ({"rule": ["rows"]}, r"unknown rule"),
        ("rows", r"a rule is a mapping such as \{rule: rows\}, not 'rows'"),
        ({"rule": "rows", "column": 1}, r"rows does not know column; it takes no argument"),
        ({"rule": "index_column", "colum": 1}, r"does not know colum; it takes column"),
        ({"rule": "index_column", "column": "1"}, r"column is of type int, not '1'"),
        ({"rule": "index_column", "column": True}, r"column is of type int, not True"),
        ({"rule": "with"}, r"with needs: output"),
        ({"rule": "with", "output": 3}, r"output is of type str, not 3"),
        ({"rule": "counts"}, r"counts needs: output"),
        ({"rule": "padded_counts", "column": 1}, r"padded_counts does not know column; it takes output"),
        ({"rule": "recount", "output": None}, r"output is of type str, not None"),
        ({"rule": "crop"}, r"crop needs: to"),
        ({"rule": "crop", "to": 4}, r"to is of type str, not 4"),
        ({"rule": "shared", "output": "y"}, r"shared does not know output; it takes no argument"),
    ],
)
def test_a_wrong_rule_is_refused_with_what_would_be_right(plain: Any, message: str) -> None:
    """Unknown rules and arguments, missing ones and wrong types each say what is expected."""
    with pytest.raises(SignatureError, match=message):
        parse_rule(plain)


@pytest.mark.parametrize("rule", [With("a"), Counts("a"), PaddedCounts("a"), Recount("a")])
def test_a_rule_follows_an_output_under_its_new_name(rule: Rule) -> None:
    """What one calls an output in a configuration need not be its name in the signature."""
    assert type(rule)("A") == follow_renamed(rule, str.upper)


@pytest.mark.parametrize("rule", [Rows(), IndexColumn(1), Shared(), Whole()])
def test_a_rule_that_follows_nothing_stays_as_it_is(rule: Rule) -> None:
    """There is no name in it to look up."""
    assert rule is follow_renamed(rule, str.upper)
