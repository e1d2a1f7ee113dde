"""The last errors that the page shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shapestream.serving.ends import RequestRefused
from shapestream.serving.recent_errors import ERRORS_PER_CODE, MOST_MESSAGE, RecentErrors


def refused(at: float, code: str) -> RequestRefused:
    """The refusal of some client's seventh request."""
    session: Any = SimpleNamespace(client=(b"\x0a" * 16, None))
    return RequestRefused(session=session, sequence=7, at=at, code=code, message="why" * MOST_MESSAGE)


def test_a_flood_of_one_error_hides_no_other() -> None:
    """Some of each code are kept; the newest come first, whatever their code."""
    errors = RecentErrors()
    errors.ended(refused(0.0, "model_error"))
    for number in range(1000):
        errors.ended(refused(1.0 + number, "overloaded"))
    errors.ended(refused(5.0, "invalid"))
    told = errors.newest_first
    assert ["overloaded"] * ERRORS_PER_CODE + ["invalid", "model_error"] == [error.code for error in told]
    assert (f"{'0a' * 16}-7", MOST_MESSAGE) == (told[0].request_id, len(told[0].message))
