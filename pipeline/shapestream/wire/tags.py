"""Tags of a request: its caller's own id for it, its place in a trace (W3C Trace Context), for whom a gateway asks, how many
requests were submitted together with it, and whether a server vanished while it had the request.

No result depends on them.

They travel as a map of text. A reader keeps the tags that it knows and ignores the others.
"""

from __future__ import annotations

import re
from typing import Any

from shapestream.wire.fields import BadEntryError, must_be
from shapestream.wire.limits import (
    MAX_CALLER_CHARACTERS,
    MAX_REQUEST_ID_CHARACTERS,
    MAX_TAGS,
    MAX_TAGS_CHARACTERS,
    MAX_TRACE_CHARACTERS,
)

REQUEST_ID = "request_id"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
CALLER = "caller"
SUSPECT = "suspect"
"""A server vanished while it had the request. The text is one digit: the losses of which the request alone may be the cause,
because it ran alone and the server had said so."""
TOGETHER = "together"
"""How many requests were submitted as one thing, this one included, in decimal digits: shorter work may pass them."""
MAX_TOGETHER = 99_999
_MOST_CHARACTERS = {
    REQUEST_ID: MAX_REQUEST_ID_CHARACTERS,
    TRACEPARENT: MAX_TRACE_CHARACTERS,
    TRACESTATE: MAX_TRACE_CHARACTERS,
    CALLER: MAX_CALLER_CHARACTERS,
    SUSPECT: 1,
    TOGETHER: len(str(MAX_TOGETHER)),
}
_DIGITS = frozenset({SUSPECT, TOGETHER})
"""The tags whose text is a number."""
MOST_LOSSES = 2
"""Losses of a request that ran alone in its server's process, after which it is `poisoned`. One may be a coincidence: a
process can be killed at any time."""

# Of version 00, and of later ones, which may add fields behind it. "ff" is no version; an id of zeros is none.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]*)?"
)
_TRACEPARENT_00_CHARACTERS = 55


def read_tags(value: Any) -> dict[str, str] | None:
    """Return the known tags of an entry, None for none; raises `BadEntryError` for wrong types and passed limits."""
    if value is None:
        return None
    if type(value) is not dict or len(value) > MAX_TAGS:
        raise must_be(f"nil or a map of at most {MAX_TAGS} elements", value)
    known: dict[str, str] = {}
    left = MAX_TAGS_CHARACTERS
    for name, text in value.items():
        if type(text) is not str:
            raise must_be("a map of strings to strings", text)
        left -= len(name) + len(text)
        if left < 0:
            raise BadEntryError(f"has more than {MAX_TAGS_CHARACTERS} characters")
        if name in _MOST_CHARACTERS:
            if not can_be_sent(name, text):
                raise BadEntryError(f"needs {rule_of(name)} in {name}")
            known[name] = text
    return known or None


def can_be_sent(name: str, text: str) -> bool:
    """Tell whether a known tag may have this text (`rule_of`)."""
    fits = 0 < len(text) <= _MOST_CHARACTERS[name] and text.isascii() and text.isprintable()
    return fits and (name not in _DIGITS or text.isdigit())


def rule_of(name: str) -> str:
    """Return the rule for the text of a known tag, in words."""
    kind = "digits" if name in _DIGITS else "printable ASCII characters"
    return "one digit" if name == SUSPECT else f"1 to {_MOST_CHARACTERS[name]} {kind}"


def together_of(tags: dict[str, str]) -> int:
    """Return how many requests were submitted together, this one included; 1 where the tags do not say."""
    return max(1, int(tags.get(TOGETHER, "1")))


def losses_of(tags: dict[str, str]) -> int | None:
    """Return the losses of a suspect; None where the tags do not name the request as one."""
    text = tags.get(SUSPECT)
    return None if text is None else int(text)


def with_losses(tags: dict[str, str] | None, losses: int) -> dict[str, str]:
    """Return the tags of a request, and that it is a suspect with so many losses. It goes before a long `tracestate`."""
    marked = {**(tags or {}), SUSPECT: str(losses)}
    if sum(map(len, [*marked, *marked.values()])) > MAX_TAGS_CHARACTERS:
        marked.pop(TRACESTATE, None)
    return marked


def trace_of(tags: dict[str, str] | None) -> dict[str, str]:
    """Return `trace` for a log line, as its keyword arguments; empty where the tags tell none."""
    trace = None if tags is None else trace_id(tags.get(TRACEPARENT))
    return {} if trace is None else {"trace": trace}


def trace_id(traceparent: str | None) -> str | None:
    """Return the 32 hexadecimal digits that name the trace; None where the text is no `traceparent`."""
    if traceparent is None or (match := _TRACEPARENT.fullmatch(traceparent)) is None:
        return None
    if traceparent.startswith("00") and len(traceparent) != _TRACEPARENT_00_CHARACTERS:
        return None
    return match[1]
