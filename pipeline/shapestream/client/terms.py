"""What a caller asks of a request besides its result: model, deadline and priority, checked before anybody relies on them.

A deadline is given as seconds from the call, and is a point in time from there on, by the core's clock: seconds that
are left would begin anew with every look at a clock, and a process that stood still in between would forget it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["checked_deadline", "checked_name", "checked_priority", "deadline_at"]

MAX_PRIORITY = 2**31 - 1
"""What the protocol takes (docs/protocol.md, `Request`)."""
MAX_NAME_CHARACTERS = 512
"""The same of a name (docs/protocol.md, Limits)."""
NEVER_S = 1e9
"""Thirty years: who gives as much sets no deadline."""


def checked_deadline(seconds: float | None) -> float | None:
    """Seconds from the call; None where there is no deadline, which infinity says too. What is 0 or less has passed already.

    Raises TypeError for what is no number that a float can hold, and ValueError for NaN.
    """
    if seconds is None:
        return None
    try:
        missing = math.isnan(seconds)
    except (TypeError, OverflowError):  # no number, or none that a float can hold
        raise TypeError(f"{_DEADLINE}; not {seconds!r}") from None
    if missing:
        raise ValueError(f"{_DEADLINE}; not {seconds!r}")
    return float(seconds) if seconds < NEVER_S else None


def deadline_at(clock: Callable[[], float], seconds: float | None) -> float | None:
    """The point in time so many seconds from now; checked as above."""
    left = checked_deadline(seconds)
    return None if left is None else clock() + left


def checked_priority(priority: int) -> int:
    """The priority, an integer of at most 31 bits and a sign; raises TypeError and ValueError."""
    if type(priority) is not int:
        raise TypeError(f"a priority is an integer, not {priority!r}")
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise ValueError(
            f"a priority is an integer between -{MAX_PRIORITY} and {MAX_PRIORITY}, not {priority}"
        )
    return priority


def checked_name(model: str) -> str:
    """The model's name as it can be sent; raises TypeError and ValueError: nobody could answer for another."""
    if not isinstance(model, str):
        raise TypeError(f"a model's name is a string, not {model!r}")
    if len(model) > MAX_NAME_CHARACTERS:
        raise ValueError(f"a model's name has at most {MAX_NAME_CHARACTERS} characters, not {len(model)}")
    try:
        model.encode()
    except UnicodeEncodeError:
        raise ValueError(f"a model's name is text that UTF-8 can write, not {model!r}") from None
    return model


_DEADLINE = "a deadline is a number of seconds from now, or None for no deadline"
