"""A tokenizer and an encoder in NumPy: a token for each character, and a vector that each token has a part in."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
FIRST = 1
"""The token before each text."""
SIZE = 8
"""Numbers of a vector."""
MOST_TOKENS = 4096


def tokenise(text: Array) -> dict[str, Any]:
    """The tokens of each text, and their numbers."""
    lists = [np.array([FIRST, *map(ord, each)], np.int64) for each in text.tolist()]
    return {"input_ids": lists, "tokens": np.array([*map(len, lists)], np.int64)}


def encode(input_ids: Array) -> Array:
    """A vector for each row, not of length 1."""
    angles = input_ids[..., np.newaxis] % 1009 * np.arange(1, SIZE + 1) / 100
    return (3 * np.sin(angles).mean(axis=1)).astype(np.float32)


def embed(text: str) -> Array:
    """The vector of a text, without a server."""
    (tokens,) = tokenise(np.array([text], object))["input_ids"]
    return encode(tokens[np.newaxis])[0]
