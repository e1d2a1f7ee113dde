"""The scores of texts: pairs of a query and texts, as the bodies of several APIs have them, and the numbers of an answer.

A model that scores texts gives a number for each label and text, its logits. APIs tell them as probabilities unless they
are asked for raw scores: of one label its sigmoid, of several their softmax, as text-embeddings-inference does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shapestream.errors import TooLarge
from shapestream.gateway.errors import EmptyList, UnusableVectors, WrongField
from shapestream.gateway.json_text import type_name, write_json
from shapestream.gateway.text_bodies import MOST_TEXTS, Matrix
from shapestream.slices import Slices
from shapestream.web.messages import Buffer
from shapestream_engine.layout import value

MOST_SCORES = 65_536
"""Scores of an answer with labels: 32 for each of the most texts. So many are 3 MB of JSON, each with its label."""
SLICE_SCORES = 2048
"""Scores that are written at a time, in about 2 ms."""


@value
class Pairs:
    """Texts, each with its query, in their order."""

    queries: Sequence[str]
    """One for all texts, one for each, or none: then texts are scored alone."""
    texts: Sequence[str]
    truncate: bool | None = None
    """False: what is too long is refused. Else the tokenizer's settings decide."""


def read_text(content: dict[str, Any], field: str) -> str:
    """Return a field that is a text. Raises `WrongField`."""
    text = content.get(field)
    if not isinstance(text, str):
        raise WrongField(field, f'"{field}" is a text, not {type_name(text)}')
    return text


def read_list(content: dict[str, Any], field: str) -> list[Any]:
    """Return a field that is a list with an entry for each text. Raises `WrongField`."""
    entries = content.get(field)
    if not isinstance(entries, list):
        raise WrongField(field, f'"{field}" is a list of texts, not {type_name(entries)}')
    if not entries:
        raise EmptyList(field, f'"{field}" is an empty list: send at least one text')
    if len(entries) > MOST_TEXTS:
        raise WrongField(field, f'"{field}" has {len(entries)} entries; at most {MOST_TEXTS} are taken')
    return entries


def check_number(labels: int, texts: int) -> None:
    """Raise `TooLarge` where an answer would have too many scores."""
    if labels * texts > MOST_SCORES:
        most = MOST_SCORES // labels
        raise TooLarge(f"{texts} texts of {labels} scores each; at most {most} texts of so many are taken")


def finite(logits: Matrix) -> Matrix:
    """Return the scores. Raises `UnusableVectors` where a number is NaN or infinite: JSON has no word for it."""
    good = np.isfinite(logits).all(axis=1)
    if not good.all():
        raise UnusableVectors(f"the model gave NaN or infinity for text {int(good.argmin())}")
    return logits


def probabilities(logits: Matrix) -> Matrix:
    """Return the sigmoid of one label, and the softmax of several."""
    numbers = logits.astype(np.float64)
    if logits.shape[1] == 1:
        with np.errstate(over="ignore"):  # of a very small logit, whose probability is 0
            found = 1 / (1 + np.exp(-numbers))
    else:
        powers = np.exp(numbers - numbers.max(axis=1, keepdims=True))
        found = powers / powers.sum(axis=1, keepdims=True)
    return found.astype(np.float32)


def written(entry: Callable[[int], Any], count: int, scores: int = 1) -> Slices[list[Buffer]]:
    """Return so many entries, of `scores` scores each, as the elements of a JSON list, written in slices."""
    pieces: list[Buffer] = []
    step = max(1, SLICE_SCORES // scores)
    for begin in range(0, count, step):
        entries = list(map(entry, range(begin, min(begin + step, count))))
        pieces += (b"," if begin else b"", write_json(entries)[1:-1])
        yield
    return pieces


def ranked(scores: np.ndarray[Any, np.dtype[np.float32]]) -> list[int]:
    """Return the numbers of scores, the largest first; equal ones keep their order."""
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    return order
