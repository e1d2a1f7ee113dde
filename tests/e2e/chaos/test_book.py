"""What the ledger concludes from what it was told."""

from __future__ import annotations

from typing import Any

import pytest
from tests.e2e.chaos.book import SLACK_S, Book

ALL_WELL = {"without_an_end": 0, "two_ends": 0, "wrong_answers": 0, "started_late": 0}
TOKEN = 1 << 32 | 7


def book(*facts: dict[str, Any]) -> Book:
    """One that was told these, after the submission of one request at 10.0, to end by 11.0, whose answer is 5."""
    written = Book()
    submitted = {"client": 1, "kind": "usual", "at": 10.0, "deadline_at": 11.0, "expected": 5}
    written.take({"fact": "submitted", "token": TOKEN, **submitted})
    for fact in facts:
        written.take(fact)
    return written


def ended(code: str = "ok", answer: int | None = 5, at: float = 10.5) -> dict[str, Any]:
    """The end of that request, as its caller was told."""
    return {"fact": "ended", "token": TOKEN, "at": at, "code": code, "answer": answer}


def run(at: float, pid: int = 99) -> dict[str, Any]:
    """The beginning of a run of it."""
    return {"fact": "run", "pid": pid, "at": at, "tokens": [TOKEN, TOKEN]}


def reply(code: str = "ok") -> dict[str, Any]:
    """A terminal reply to its client."""
    return {"fact": "reply", "client": 1, "sequence": 7, "code": code}


@pytest.mark.parametrize(
    "facts",
    [
        [ended()],
        [ended("overloaded", None)],
        [ended("withdrawn", None), reply("cancelled")],
        [run(10.1), run(10.2), reply(), ended()],
        [run(11.0 + SLACK_S), ended()],
        [{"fact": "paused", "since": 10.9, "until": 12.9}, run(13.0), ended()],
        [reply("draining"), reply(), ended()],
        [{"fact": "killed", "client": 1, "at": 10.2}],
    ],
    ids=[
        "answered",
        "refused",
        "withdrawn",
        "run twice",
        "within the slack",
        "paused",
        "draining first",
        "client killed",
    ],
)
def test_all_is_well(facts: list[dict[str, Any]]) -> None:
    """One end, which is right, of a request that was started in time; or no end, of a client that is dead."""
    assert ALL_WELL == book(*facts).zeros()


@pytest.mark.parametrize(
    ("zero", "facts"),
    [
        ("without_an_end", [run(10.1), reply()]),
        ("two_ends", [ended(), ended()]),
        ("two_ends", [ended(), reply(), reply()]),
        ("wrong_answers", [ended(answer=6)]),
        ("wrong_answers", [ended("model_error", None)]),
        ("wrong_answers", [ended(), {"fact": "corrupt", "pid": 99, "tokens": [TOKEN]}]),
        ("wrong_answers", [ended(), {"fact": "ended", "token": 1, "at": 10.0, "code": "ok", "answer": 5}]),
        ("started_late", [run(11.1 + SLACK_S), ended("deadline_exceeded", None)]),
        ("started_late", [{"fact": "paused", "since": 8.0, "until": 9.9}, run(12.0), ended()]),
    ],
)
def test_each_violation_is_one(zero: str, facts: list[dict[str, Any]]) -> None:
    """Exactly the count that it belongs to becomes 1."""
    assert {**ALL_WELL, zero: 1} == book(*facts).zeros()


def test_facts_that_overtake_the_submission_are_kept_for_it() -> None:
    """Each process has its own way to the ledger."""
    written = Book()
    written.take(run(10.1))
    submitted = {"client": 1, "kind": "usual", "at": 10.0, "deadline_at": None, "expected": 5}
    written.take({"fact": "submitted", "token": TOKEN, **submitted})
    written.take(ended())
    assert ALL_WELL == written.zeros()
    assert 1 == written.runs_of(client=1)


def test_what_was_in_flight_is_told_by_the_facts_times() -> None:
    """Not by when they were read."""
    ran = {"fact": "ran", "pid": 99, "at": 10.3, "tokens": [TOKEN]}
    written = book(run(10.1), ran, ended(at=10.5))
    assert [0, 1, 1, 0] == [written.in_flight(at) for at in (9.9, 10.0, 10.4, 10.5)]
    assert [0, 1, 0] == [written.in_run(99, at) for at in (10.0, 10.2, 10.3)]
    assert [0, 1, 0] == [written.in_reply(at) for at in (10.2, 10.4, 10.5)]
    assert 0 == written.cut_short(99)
    assert 1 == book(run(10.1)).cut_short(99)


def test_recovery_is_counted_from_the_fault() -> None:
    """To the first result of a later request, and to the last end of what was under way."""
    written = book(ended(at=12.0))
    assert {"first_result_s": None, "settled_s": 1.5} == written.recovery(10.5)
    assert {"first_result_s": 3.0, "settled_s": 0.0} == written.recovery(9.0)


def test_a_word_that_is_no_fact_is_refused() -> None:
    """A misspelt fact would otherwise count as none."""
    with pytest.raises(ValueError, match="unknown fact 'gossip'"):
        Book().take({"fact": "gossip"})
