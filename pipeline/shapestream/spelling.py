"""Words that were probably meant, for messages about unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def closest(word: str, known: Sequence[str]) -> str | None:
    """Return the known word that `word` is probably a mistake for, or None."""
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return the hint `(did you mean "x"?)`, or the list of known words."""
    if (close := closest(word, known)) is not None:
        return f'(did you mean "{close}"?)'
    return f"(known: {', '.join(dict.fromkeys(known))})" if known else "(none is known)"
