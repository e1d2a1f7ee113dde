"""The texts of a request that embeds or tokenises them, as OpenAI's and text-embeddings-inference's bodies have them.

A client that has tokenised a text itself sends the numbers of its tokens instead. A list has texts or tokens, not both.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shapestream.gateway.gateway_errors import EmptyList, WrongField
from shapestream.gateway.json_text import type_name
from shapestream.wire.limits import MAX_INTEGER
from shapestream_engine.layout import value

MOST_TEXTS = 2048
"""Texts of one request, at most, as at OpenAI."""
FEWER_TEXTS = "send fewer texts at once"
"""The way to send more than one request may have."""


@value
class Texts:
    """Texts, in their order."""

    texts: Sequence[str]

    def __len__(self) -> int:
        return len(self.texts)


@value
class TokenLists:
    """The tokens of each text."""

    lists: Sequence[npt.NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.lists)


def read_texts(field: str, content: Any) -> Texts | TokenLists:
    """Return what a field of a body has: a text, a list of texts, the tokens of one text, or a list of such lists.

    Raises `WrongField`. An empty text is a text.
    """
    if isinstance(content, str):
        return Texts(texts=(content,))
    if not isinstance(content, list):
        raise _wrong(field, f"not {type_name(content)}")
    if not content:
        raise EmptyList(field, f'"{field}" is an empty list: send at least one text')
    kinds = set(map(type, content))
    if kinds == {int}:
        return TokenLists(lists=(_tokens(field, content),))
    if len(content) > MOST_TEXTS:
        raise WrongField(field, f'"{field}" has {len(content)} entries; at most {MOST_TEXTS} are taken')
    if kinds == {str}:
        return Texts(texts=content)
    if kinds == {list}:
        return TokenLists(lists=[_tokens(field, tokens) for tokens in content])
    if len(kinds) > 1:
        raise _wrong(field, "not several of these in one list")
    raise _wrong(field, f"not a list of which an entry is {type_name(content[0])}")


def _tokens(field: str, tokens: list[Any]) -> npt.NDArray[np.int64]:
    if not tokens:
        raise WrongField(field, f'"{field}" has a list without tokens')
    if set(map(type, tokens)) != {int}:
        raise _wrong(field, "not a list of lists of other things")
    try:
        numbers = np.array(array("q", tokens))
    except OverflowError:
        numbers = np.array([-1])
    if numbers.min() < 0:
        raise WrongField(field, f'"{field}": the number of a token is from 0 to {MAX_INTEGER}')
    return numbers


def _wrong(field: str, but: str) -> WrongField:
    return WrongField(
        field, f'"{field}" is a text, a list of texts, the tokens of a text or a list of such lists, {but}'
    )


def read_flag(content: dict[str, Any], field: str) -> bool | None:
    """Return a field that is true, false, or absent (None). Raises `WrongField`."""
    flag = content.get(field)
    if flag is not None and not isinstance(flag, bool):
        raise WrongField(field, f'"{field}" is true or false, not {type_name(flag)}')
    return flag


def read_dimensions(content: dict[str, Any]) -> int | None:
    """Return the field `dimensions`, the wished size of vectors, or None. Raises `WrongField`."""
    wish = content.get("dimensions")
    if wish is not None and (type(wish) is not int or wish < 1):
        raise WrongField("dimensions", '"dimensions" is an integer from 1 on')
    return wish
