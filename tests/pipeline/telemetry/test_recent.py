"""The rings of the last batches and errors."""

from __future__ import annotations

from shapestream.telemetry.recent import (
    ERRORS_PER_CODE,
    MOST_BATCHES,
    Recent,
    RecentBatch,
    RecentError,
)


def batch(number: int) -> RecentBatch:
    """One that can be told from others."""
    return RecentBatch(number, number + 0.5, "local/0", "m", 1, 1, 4, 4, 0, (1, 4))


def error(time: float, code: str) -> RecentError:
    """One of some client."""
    return RecentError(time, "m", code, "why", b"\x0a" * 16, 7, None)


def test_batches_are_kept_up_to_a_number_and_told_once() -> None:
    """From any number on; those that are gone are left out."""
    recent = Recent()
    assert [] == recent.since(0)
    for number in range(MOST_BATCHES + 10):
        recent.add_batch(batch(number))
    assert MOST_BATCHES + 10 == recent.batches
    assert list(range(10, MOST_BATCHES + 10)) == [RecentBatch(*each).started for each in recent.since(0)]
    assert [MOST_BATCHES + 9] == [RecentBatch(*each).started for each in recent.since(MOST_BATCHES + 9)]
    assert [] == recent.since(MOST_BATCHES + 10)


def test_a_flood_of_one_error_hides_no_other() -> None:
    """Some of each code are kept; the newest come first, whatever their code."""
    recent = Recent()
    recent.add_error(error(0.0, "model_error"))
    for number in range(1000):
        recent.add_error(error(1.0 + number, "overloaded"))
    recent.add_error(error(5.0, "invalid"))
    codes = [each.code for each in recent.errors]
    assert ["overloaded"] * ERRORS_PER_CODE + ["invalid", "model_error"] == codes
    assert f"{'0a' * 16}-7" == recent.errors[0].request_id
    assert "mine" == recent.errors[0]._replace(own_id="mine").request_id
