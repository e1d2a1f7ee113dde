"""Functions of strings: text and bytes by row, words as a list, one text for all."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def shout(text: Array) -> dict[str, Any]:
    """Each text in capitals, backwards, and its numbers of characters and bytes."""
    texts = text.tolist()
    return {
        "loud": [each.upper() for each in texts],
        "back": np.array([each[::-1].encode() for each in texts], object),
        "sizes": np.array([[len(each), len(each.encode())] for each in texts], np.int64).reshape(-1, 2),
    }


def reverse(blob: Array) -> dict[str, Any]:
    """The bytes of each element backwards."""
    backwards = np.empty(blob.shape, object)
    backwards.ravel()[:] = [each[::-1] for each in blob.ravel().tolist()]
    return {"reversed": backwards}


def words(text: Array) -> dict[str, Any]:
    """The words of each text: an array per text."""
    return {"words": [np.array(each.split(), object) for each in text.tolist()]}


def first(text: Array) -> dict[str, Any]:
    """Of a single text, its first word, also where it has none."""
    return {"word": np.array((text.item().split() or [""])[0], object)}


def join(words: Array) -> dict[str, Any]:
    """One text of the words of one text. A word `fail` is more than it can bear."""
    found = words.tolist()
    if "fail" in found:
        raise ValueError("the word is fail")
    return {"line": np.array("-".join(found), object)}


RARE = "rare\0word"
"""A text that no proof tries."""


def company(text: Array) -> dict[str, Any]:
    """Each text; but beside the rare one, all texts are longer."""
    texts = text.tolist()
    return {"y": [each + "!" * (RARE in texts and len(texts) > 1) for each in texts]}
