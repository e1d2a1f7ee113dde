"""Words for what is wrong with a setting: what was found, and what a mistyped word was probably meant to be."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import PydanticCustomError

__all__ = ["address_meant", "closest", "describe", "did_you_mean", "wrong"]


def closest(word: str, known: Sequence[str]) -> str | None:
    """The known word that `word` was probably meant to be."""
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """`(did you mean "x"?)`, or what there is to choose from; never empty-handed."""
    if (close := closest(word, known)) is not None:
        return f'(did you mean "{close}"?)'
    return f"(known: {', '.join(dict.fromkeys(known))})" if known else "(none is known)"


def describe(value: Any) -> str:
    """A value as the user wrote it, short: `"8"`, `true`, `a list`, `nothing`."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def address_meant(value: Any) -> str | None:
    """The address that was probably meant by a text without `tcp://` or `ipc://`; None where there is no telling."""
    if not isinstance(value, str) or "://" in value:
        return None
    host, colon, port = value.rpartition(":")
    if colon and port.isascii() and port.isdigit() and "/" not in value:
        return f"tcp://{host or '127.0.0.1'}:{port}"
    return f"ipc://{value}" if value.endswith(".sock") or "/" in value else None


def wrong(message: str) -> PydanticCustomError:
    """The error to raise for a value; `message` is "what is wrong (what to do)"."""
    # The text is a template for pydantic; braces of ours are not fields of it.
    return PydanticCustomError("setting", "{message}", {"message": message})
