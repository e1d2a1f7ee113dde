"""The tokens that a tokenizer puts around one text and around two, and the two cut to a number of tokens.

A model that scores pairs takes both texts as one row: `[CLS] query [SEP] text [SEP]`, in which the types of tokens tell the
texts apart. The library `tokenizers` makes such a row of two texts, and encodes both for it. A request with one query and
two thousand texts would have its query encoded as often. So each text is encoded once, without special tokens, and rows are
put together here, by a template that is read from the library's answer to two examples.

Where both are too long, the longer one is cut first, and then both alike: `longest_first` of the library and of
transformers. A cut takes tokens from the end of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class NoTemplate(Exception):
    """The tokenizer puts texts together in another way: it repeats a text, or puts the second one first."""


class Row(NamedTuple):
    """The tokens of one row, and their types."""

    ids: list[int]
    types: list[int]
    uncut: int
    """Tokens that it would have if nothing were cut."""


@dataclass(frozen=True, slots=True)
class Template:
    """Special tokens before, between and after the texts of a row, and the type of each text."""

    special: tuple[tuple[int, ...], ...]
    """The ids of the special tokens before each text, and at the end."""
    special_types: tuple[tuple[int, ...], ...]
    types: tuple[int, ...]
    """The type of each text's tokens."""

    @classmethod
    def of(cls, encoding: Any, texts: Sequence[Sequence[int]]) -> Template:
        """Read a template from the library's encoding of these texts, of which the ids are known.

        Raises `NoTemplate`. A text without tokens shows nothing, so each has one.
        """
        ids, types = list(encoding.ids), list(encoding.type_ids)
        special, special_types, text_types = [], [], []
        at = 0
        for number, text in enumerate(texts):
            begin = next((place for place, of in enumerate(encoding.sequence_ids) if of == number), None)
            if begin is None or begin < at or ids[begin : begin + len(text)] != list(text):
                raise NoTemplate
            end = begin + len(text)
            if len(set(types[begin:end])) != 1:
                raise NoTemplate
            special.append(tuple(ids[at:begin]))
            special_types.append(tuple(types[at:begin]))
            text_types.append(types[begin])
            at = end
        if any(of is not None for of in encoding.sequence_ids[at:]):
            raise NoTemplate
        special.append(tuple(ids[at:]))
        special_types.append(tuple(types[at:]))
        return cls(tuple(special), tuple(special_types), tuple(text_types))

    @property
    def added(self) -> int:
        """Special tokens of a row."""
        return sum(map(len, self.special))

    def row(self, texts: Sequence[list[int]], most: int) -> Row:
        """Return the row of these texts, whose tokens are `most` at most."""
        lengths = [len(text) for text in texts]
        kept = longest_first(lengths, most - self.added)
        ids, types = [*self.special[0]], [*self.special_types[0]]
        for number, (text, count) in enumerate(zip(texts, kept, strict=True)):
            ids += text[:count]
            ids += self.special[number + 1]
            types += [self.types[number]] * count
            types += self.special_types[number + 1]
        return Row(ids, types, sum(lengths) + self.added)


def longest_first(lengths: Sequence[int], most: int) -> list[int]:
    """Return how many tokens of one text, or of each of two, stay: `most` together.

    Of two, the longer one is cut down to the shorter one's length, or to what that leaves; then both to half, of which the
    longer one gets the odd token. The second counts as the longer one of equals.
    """
    if sum(lengths) <= most:
        return list(lengths)
    if len(lengths) == 1:
        return [most]
    first, second = lengths
    short = min(first, second, most // 2)
    kept = short, most - short
    return [kept[1], kept[0]] if first > second else [*kept]
