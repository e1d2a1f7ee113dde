"""`make mutations`: which tests fail when one mechanism of the scheduler is switched off?

    this process      per mechanism: one child that patches the scheduler (benchmarks/ablations) and runs the tests

A mechanism whose absence fails no test is not tested. One that fails forty is tested forty times: its tests may be fewer.
A mechanism that the ablations give another value, or another rule, is switched in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from benchmarks.ablations.mechanisms import MECHANISMS, Patches

TESTS = ("tests/pipeline/scheduling", "tests/workers/lab")
NOTHING = "nothing"
"""Is switched off first: the tests pass, or no verdict about a mechanism would mean anything."""
MOST_S = 900.0
"""A child that runs longer is ended: without some mechanisms a test may go on for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the tests said without a mechanism."""

    mechanism: str
    failed: Sequence[str] = ()
    problem: str = ""
    """Why there is no verdict; empty where there is one."""


class Failures:
    """A plugin of pytest: the tests that failed, in their order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure of a test, of its fixtures too, once."""
        if report.failed and report.nodeid not in self.names:
            self.names.append(report.nodeid)


def tested_without(mechanism: str, found: Path, tests: Sequence[str], *, first: bool) -> int:
    """In a child: run the tests without it, and write the names of those that fail."""
    if mechanism != NOTHING:
        MECHANISMS[mechanism].off(Patches())
    failures = Failures()
    status = pytest.main(
        ["-q", "-p", "no:cacheprovider", *tests, *(["-x"] if first else [])], plugins=[failures]
    )
    found.write_text(json.dumps(failures.names))
    return int(status)


def outcome_of(mechanism: str, tests: Sequence[str], *, first: bool) -> Outcome:
    """Run one child to its end."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        found = Path(folder, "failed.json")
        command = [
            sys.executable,
            "-m",
            "tests.mutations",
            *tests,
            "--without",
            mechanism,
            "--found",
            str(found),
        ]
        command += ["--first"] if first else []
        environment = {**os.environ, "HYPOTHESIS_PROFILE": "landing"}
        try:
            ran = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=MOST_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome(mechanism=mechanism, problem=f"did not end within {MOST_S:g} s")
        if not found.exists() or ran.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            last = [*(ran.stdout + ran.stderr).strip().splitlines(), ""][-2:]
            return Outcome(mechanism=mechanism, problem=f"status {ran.returncode}: {last}")
        return Outcome(mechanism=mechanism, failed=json.loads(found.read_text()))


def told(outcome: Outcome, shown: int) -> str:
    """One mechanism's lines: how many tests fail without it, and the first of them."""
    if outcome.problem:
        return f"  ?  {outcome.mechanism}: {outcome.problem}"
    words = "" if outcome.failed else "  NOT TESTED"
    lines = [f"{len(outcome.failed):3}  {outcome.mechanism}{words}"]
    return "\n".join([*lines, *(f"       {name}" for name in outcome.failed[:shown])])


def main() -> int:
    """The command; 1 if a mechanism is not tested or has no verdict, 2 if the tests fail with all of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="*", default=TESTS, help="files or folders; default: %(default)s")
    parser.add_argument("--only", action="append", choices=list(MECHANISMS), help="may be repeated")
    parser.add_argument("--processes", type=int, default=2, help="children at a time")
    parser.add_argument("--shown", type=int, default=5, help="names of failed tests, at most")
    parser.add_argument("--first", action="store_true", help="end at the first failure: is it tested at all?")
    parser.add_argument("--without", help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.without is not None:
        return tested_without(given.without, given.found, given.tests, first=given.first)
    untouched = outcome_of(NOTHING, given.tests, first=given.first)
    if untouched.failed or untouched.problem:
        print(told(untouched, given.shown))
        return 2
    well = True
    with ThreadPoolExecutor(given.processes) as children:
        outcomes = children.map(
            lambda name: outcome_of(name, given.tests, first=given.first), given.only or MECHANISMS
        )
        for outcome in outcomes:
            print(told(outcome, given.shown), flush=True)
            well = well and bool(outcome.failed)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
