"""Fixtures of the scheduler's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.pipeline.scheduling import forms
from tests.pipeline.scheduling.stage import Stage

if changed := forms.changed():
    raise pytest.UsageError(f"the compiled scheduler is older than {', '.join(changed)}; make compiled")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that ask for the pure form where the scheduler is compiled."""
    for item in items:
        if forms.COMPILED and (mark := item.get_closest_marker("pure")):
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))


@pytest.fixture
def stage() -> Stage:
    """A stage with roomy bounds."""
    return Stage()


@pytest.fixture
def make_stage() -> Callable[..., Stage]:
    """Makes stages with bounds of the test's choice."""
    return Stage
