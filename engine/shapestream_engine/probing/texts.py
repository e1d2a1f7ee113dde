"""Texts for a proof and for calibration: words of ASCII and of other scripts, of exactly the bytes asked for.

Bytes are the same texts, and every second element is noise. Texts that the user gave are taken as they are, except where a
measurement needs texts of other lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from shapestream_engine.string_arrays import Array

_WORDS = (
    "the",
    "of",
    "a",
    "in",
    "model",
    "Paris",
    "2024",
    "\n",
    "it's",
    "naïve",
    "Ωmega",
    "日本語",
    "\U0001f600",
)
_MOST_WORDS = 64
"""Words of one text; a longer text repeats them."""
_ENDS = {
    "str": {"smallest": b"\0", "largest": "\U0010ffff".encode()},
    "bytes": {"smallest": b"\0", "largest": b"\xff"},
}
"""Texts of one character: the first and the last of all."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Strings of one element type, of words, each of at most so many bytes."""

    element_type: str
    at_most_bytes: int

    def draw(self, shape: Sequence[int], random: np.random.Generator) -> Array:
        """Draw independent strings; `shape` has the bytes of all together last."""
        lengths = _lengths(prod(shape[:-1]), shape[-1], self.at_most_bytes, random)
        return _objects([self._drawn(number, length, random) for number, length in enumerate(lengths)], shape)

    def _drawn(self, number: int, length: int, random: np.random.Generator) -> Any:
        if self.element_type == "bytes" and number % 2:
            return random.bytes(length)
        count = min(_MOST_WORDS, length // 2 + 1)
        words = " ".join(_WORDS[word] for word in random.integers(len(_WORDS), size=count))
        return _fitted(self.element_type, words.encode(), length)

    def __str__(self) -> str:
        return "words" if self.element_type == "str" else "words and noise"


def extreme_texts(element_type: str, kind: str, shape: Sequence[int]) -> Array:
    """Return strings that repeat the first or the last character; `shape` has the bytes of all together last."""
    ends = _ENDS[element_type]
    lengths = _even(prod(shape[:-1]), shape[-1])
    return _objects([_fitted(element_type, ends.get(kind, ends["largest"]), each) for each in lengths], shape)


def has_extreme(kind: str) -> bool:
    """Tell whether strings have this kind of extreme value."""
    return kind in _ENDS["str"]


def given_texts(element_type: str, given: Array, nbytes: int | None) -> Array:
    """Return a sample's strings as objects; with `nbytes`, repeated or cut so that they have so many bytes in all."""
    own = given.astype(object)
    encoded = [each.encode() if isinstance(each, str) else bytes(each) for each in own.ravel().tolist()]
    lengths = list(map(len, encoded)) if nbytes is None else _even(len(encoded), nbytes)
    strings = [_fitted(element_type, each, length) for each, length in zip(encoded, lengths, strict=True)]
    return _objects(strings, (*own.shape, 0))


def _objects(strings: Sequence[Any], shape: Sequence[int]) -> Array:
    array = np.empty(len(strings), object)
    array[:] = strings
    return array.reshape(tuple(shape[:-1]))


def _even(count: int, total: int) -> list[int]:
    """Return lengths that are equal, or differ by 1."""
    return [total * (place + 1) // count - total * place // count for place in range(count)]


def _lengths(count: int, total: int, most: int, random: np.random.Generator) -> list[int]:
    """Return different lengths of this sum, up to half as long again as their mean."""
    lengths = np.array(_even(count, total), np.int64)
    order = random.permutation(count)
    longer, shorter = order[: count // 2], order[count // 2 : count // 2 * 2]
    room = np.minimum(lengths[shorter] // 2, np.maximum(most - lengths[longer], 0))
    moved = random.integers(0, room, endpoint=True)
    lengths[longer] += moved
    lengths[shorter] -= moved
    return lengths.tolist()  # type: ignore[no-any-return]  # of integers


def _fitted(element_type: str, text: bytes, length: int) -> Any:
    """Return a text of this length, repeated or cut; where a character would be cut, `x` takes its place."""
    repeated = (text or b"x") * (length // max(1, len(text)) + 1)
    if element_type == "bytes":
        return repeated[:length]
    whole = repeated[:length].decode(errors="ignore")
    return whole + "x" * (length - len(whole.encode()))
