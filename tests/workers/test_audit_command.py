"""The lines of `shapestream audit`; tests/e2e/test_audit.py asks a server."""

from __future__ import annotations

from typing import Any

from shapestream_workers.printing import described

FINDING: dict[str, Any] = {
    "at": 1.0,
    "output": "y",
    "largest": 0.25,
    "allowed": 0.001,
    "why": "",
    "sizes": [1, 3],
    "call": [4, 3],
    "requests": 4,
    "request_digest": "ab",
    "model_digest": None,
    "slot": "w0/1",
}
STATE: dict[str, Any] = {
    "share": 0.001,
    "seen": 9000,
    "sampled": 9,
    "audited": 8,
    "unjudged": 1,
    "judges_little": False,
    "mismatches": 2,
    "varies": False,
    "stopped": True,
    "waiting": 0,
    "findings": [FINDING, {**FINDING, "largest": None, "why": "its shape is [2]"}],
}


def test_a_stop_is_told_with_sizes_and_digests() -> None:
    """A difference that is no number is told in words."""
    assert [
        "mixing: every request runs alone; share 0.001, 8 audited of 9 sampled, 2 differed, 1 not told from "
        "rounding",
        "  output 'y' differed (by 0.25 where 0.001 is allowed): sizes [1, 3], in a call of [4, 3] with 4 requests on "
        "w0/1; request ab, model a function",
        "  output 'y' differed (its shape is [2]): sizes [1, 3], in a call of [4, 3] with 4 requests on "
        "w0/1; request ab, model a function",
    ] == list(described({"mixing": STATE}))


def test_others_are_told_in_a_line() -> None:
    """Whether they vary, or cannot be judged, too."""
    state = {**STATE, "stopped": False, "findings": []}
    others = {"odd": {**state, "varies": True}, "large": {**state, "judges_little": True}}
    lines = [line.partition(";")[0] for line in described({"ok": state, **others})]
    assert ["ok: ok", "odd: varies", "large: most answers cannot be told from rounding"] == lines
