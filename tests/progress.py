"""A line now and then that tells how many tests are done, and how long the others will take."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

EVERY_S = 20.0
"""Seconds from one line to the next, at least."""
TESTS_OF_REAL_PROCESSES = "tests/e2e"
LEAST_DONE = 0.05
"""Part of a run after which its rate says something."""
WEIGHT = 8.0
"""One test of real processes takes as long as so many others (measured over all tests, on two cores)."""


class Progress:
    """Counts tests, weighted by the time that such a test takes, and extrapolates this machine's rate."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began_s = self._told_s = time.monotonic()
        self._tests = self._done = 0
        self._weight = self._done_weight = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Know the tests of a run in this process."""
        self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        """Know the tests of a run in several processes, each of which collects all of them."""
        self._expect([*ids])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test that has ended."""
        if report.when != "teardown":
            return
        self._done += 1
        self._done_weight += _weight(report.nodeid)
        now_s = time.monotonic()
        if now_s < self._told_s + EVERY_S or not LEAST_DONE <= self._done_weight / self._weight < 1.0:
            return
        self._told_s = now_s
        taken_s = now_s - self._began_s
        left_s = taken_s * (self._weight / self._done_weight - 1.0)
        writer = self._config.get_terminal_writer()
        writer.line()
        writer.line(
            f"{self._done:,} of {self._tests:,} tests after {_spelled(taken_s)}; about {_spelled(left_s)} left"
        )

    def _expect(self, ids: list[str]) -> None:
        self._tests = len(ids)
        self._weight = sum(map(_weight, ids))


def _weight(test: str) -> float:
    return WEIGHT if test.startswith(TESTS_OF_REAL_PROCESSES) else 1.0


def _spelled(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
