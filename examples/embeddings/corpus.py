"""The sentences to embed: docstrings of 4 to 256 tokens, with their token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from examples.embeddings.docstrings import Docstring
from examples.embeddings.tokens import MIN_TOKENS, SentenceTokenizer

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Docstrings and their token ids [seq], in parallel."""

    docstrings: list[Docstring]
    ids: list[Ids]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each."""
        return np.array([len(ids) for ids in self.ids], dtype=np.int64)


def make_corpus(docstrings: Sequence[Docstring], tokenizer: SentenceTokenizer, count: int) -> Corpus:
    """The first `count` that are long enough; longer ones than MiniLM takes are cut off."""
    encoded = tokenizer.encode([docstring.text for docstring in docstrings])
    pairs = [pair for pair in zip(docstrings, encoded, strict=True) if len(pair[1]) >= MIN_TOKENS][:count]
    return Corpus(docstrings=[docstring for docstring, _ in pairs], ids=[ids for _, ids in pairs])
