"""docs/logging.md lists every event that the code logs, with its level and keys, and says what errors and warnings mean."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    """The names of docs/log_events.py."""
    return runpy.run_path(str(DOCS / "log_events.py"))


def test_the_page_lists_the_events_of_the_code(program: dict[str, Any]) -> None:
    """`python docs/log_events.py` writes the table; run it after a change of a log call."""
    page = (DOCS / "logging.md").read_text(encoding="utf-8")
    assert program["updated"](page) == page


def test_errors_and_warnings_are_explained(program: dict[str, Any]) -> None:
    """Events that a reader must act on have a meaning; the names of the others say enough."""
    meanings = program["meanings"]((DOCS / "logging.md").read_text(encoding="utf-8"))
    grave = [name for name, event in program["events"]().items() if event.levels & {"error", "warning"}]
    assert [] == [name for name in grave if not meanings[name]]


def test_each_form_of_a_log_call_is_found(program: dict[str, Any]) -> None:
    """A level of the log, a name for one, and no method of anything else."""
    source = """
class Port:
    def refuse(self, code):
        write = log.debug if code else log.warning
        write("refused", code=code)
        log.info("plain", why=1)
        other.write("no event", 3)
"""
    found = set()
    for name, level, keys in program["_calls"](program["ast"].parse(source)):
        found.add((name, level, tuple(keys)))
    assert {
        ("refused", "debug", ("code",)),
        ("refused", "warning", ("code",)),
        ("plain", "info", ("why",)),
    } == found
