"""Texts and tokens in a body, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapestream.gateway.errors import EmptyList, WrongField
from shapestream.gateway.text_bodies import MOST_TEXTS, Texts, TokenLists, read_texts
from shapestream.slices import at_once

NUMBERS = st.integers(0, 2**63 - 1)


@given(st.lists(st.text(), min_size=1))
def test_texts_are_taken_as_they_are(texts: list[str]) -> None:
    """Empty ones included, and one that comes alone."""
    assert Texts(texts=tuple(texts)) == at_once(read_texts("input", texts))
    assert Texts(texts=(texts[0],)) == at_once(read_texts("input", texts[0]))


@given(st.lists(st.lists(NUMBERS, min_size=1), min_size=1))
def test_tokens_are_taken_as_they_are(lists: list[list[int]]) -> None:
    """Those of one text, and of several."""
    for content, wanted in ((lists, lists), (lists[0], lists[:1])):
        found = at_once(read_texts("input", content))
        assert isinstance(found, TokenLists)
        assert {"int64"} == {tokens.dtype.name for tokens in found.lists}
        assert wanted == [tokens.tolist() for tokens in found.lists]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "not null"),
        (7, "not a number"),
        ({"text": "a"}, "not an object"),
        (["a", 1], "not several of these in one list"),
        ([1, True], "not several of these in one list"),
        (["a", ["b"]], "not several of these in one list"),
        ([True], "not a list of which an entry is a boolean"),
        ([1.5], "not a list of which an entry is a number"),
        ([None], "not a list of which an entry is null"),
        ([["a"]], "not a list of lists of other things"),
        ([[1], [2, False]], "not a list of lists of other things"),
        ([[1], []], "a list without tokens"),
        ([[-1]], "is from 0 to"),
        ([2**63], "is from 0 to"),
        (["a"] * (MOST_TEXTS + 1), "2049 entries; at most 2048 are taken"),
        ([[1]] * (MOST_TEXTS + 1), "2049 entries; at most 2048 are taken"),
    ],
)
def test_other_things_are_refused(content: Any, words: str) -> None:
    """By the field's name, in words that say what is taken."""
    with pytest.raises(WrongField) as refused:
        at_once(read_texts("input", content))
    assert "input" == refused.value.field
    assert '"input"' in refused.value.message
    assert words in refused.value.message


def test_an_empty_list_is_told_apart() -> None:
    """TEI has a type of error for it."""
    with pytest.raises(EmptyList, match="at least one text"):
        at_once(read_texts("inputs", []))


def test_one_text_may_have_more_tokens_than_a_request_has_texts() -> None:
    """The bound on a text's tokens is the model's."""
    assert 1 == len(at_once(read_texts("input", [1] * (MOST_TEXTS + 1))))
    assert MOST_TEXTS == len(at_once(read_texts("input", [""] * MOST_TEXTS)))
