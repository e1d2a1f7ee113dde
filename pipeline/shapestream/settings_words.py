"""What a mistyped word was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

__all__ = ["closest", "did_you_mean"]


def closest(word: str, known: Sequence[str]) -> str | None:
    """The known word that `word` was probably meant to be."""
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """`(did you mean "x"?)`, or what there is to choose from; never empty-handed."""
    if (close := closest(word, known)) is not None:
        return f'(did you mean "{close}"?)'
    return f"(known: {', '.join(dict.fromkeys(known))})" if known else "(none is known)"
