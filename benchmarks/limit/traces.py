"""What is asked: sentences as token ids, drawn once and the same in every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from examples.embeddings.corpus import Ids, make_corpus
from examples.embeddings.docstrings import collect
from examples.embeddings.tokens import MAX_TOKENS, MIN_TOKENS, SentenceTokenizer
from examples.embeddings.weights import model_folder

MEDIAN_TOKENS, SIGMA = 24, 0.9
"""Of the lognormal lengths: as sentences of queries and titles have them, and with a long tail."""
LAST_TOKEN = 30_521
SEED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Sentences in the order in which they arrive."""

    name: str
    ids: list[Ids]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> npt.NDArray[np.intp]:
        """Tokens of each."""
        return np.array([len(ids) for ids in self.ids], dtype=np.intp)

    @property
    def tokens(self) -> int:
        """Of all of them."""
        return int(self.lengths.sum())

    def cut(self, start: int, stop: int) -> Trace:
        """A slice of it."""
        return Trace(name=self.name, ids=self.ids[start:stop])

    def inputs(self) -> Iterator[tuple[int, dict[str, Ids]]]:
        """What a client's stream takes: the place of each, and its inputs. The server makes the masks."""
        for place, ids in enumerate(self.ids):
            yield place, {"input_ids": ids[None]}


def lognormal(tokens: int) -> Trace:
    """Random token ids of lognormal lengths, about so many tokens in all."""
    draw = np.random.default_rng(SEED)
    ids: list[Ids] = []
    while tokens > 0:
        length = int(
            np.clip(round(MEDIAN_TOKENS * np.exp(SIGMA * draw.standard_normal())), MIN_TOKENS, MAX_TOKENS)
        )
        ids.append(draw.integers(1, LAST_TOKEN, length, endpoint=True, dtype=np.int64))
        tokens -= length
    return Trace(name="lognormal", ids=ids)


def docstrings(tokens: int) -> Trace:
    """Docstrings of the standard library, about so many tokens in all; from the start again where they end."""
    found = make_corpus(collect(), SentenceTokenizer(model_folder()), count=1_000_000).ids
    ids: list[Ids] = []
    while tokens > 0:
        ids.append(found[len(ids) % len(found)])
        tokens -= len(ids[-1])
    return Trace(name="docstrings", ids=ids)
