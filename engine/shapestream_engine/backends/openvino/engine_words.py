"""OpenVINO's error texts, less what is of use only to its own developers."""

from __future__ import annotations

import re

__all__ = ["engine_words"]

_WHERE = re.compile(r"^(Exception from \S+:\d+:?|Caught exception:)\s*")
_CHECK = re.compile(r"Check '.*?' failed at (/?[\w.+-]+/)*[\w.+-]+:\d+:?\s*", re.DOTALL)


def engine_words(error: BaseException) -> str:
    """One line that says what OpenVINO said, without places in its source, which its errors are wrapped in."""
    text = str(error)
    kept = []
    for line in _CHECK.sub("", text).splitlines():
        while (shorter := _WHERE.sub("", line)) != line:
            line = shorter
        if line.strip():
            kept.append(line.strip().rstrip(":"))
    return "; ".join(kept) or " ".join(text.split()) or type(error).__name__
