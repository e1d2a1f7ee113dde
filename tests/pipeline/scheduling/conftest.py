"""Fixtures of the scheduler's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.pipeline.scheduling.stage import Stage


@pytest.fixture
def stage() -> Stage:
    """A stage with roomy bounds."""
    return Stage()


@pytest.fixture
def make_stage() -> Callable[..., Stage]:
    """Makes stages with bounds of the test's choice."""
    return Stage
