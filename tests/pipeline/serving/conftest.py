"""Fixtures of the serving tests."""

from __future__ import annotations

import pytest
from tests.pipeline.serving.eager import EagerScheduler

import shapestream.serving.server


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> EagerScheduler:
    """The one that the next server uses."""
    made = EagerScheduler()
    monkeypatch.setattr(shapestream.serving.server, "Scheduler", lambda **_: made)
    return made
