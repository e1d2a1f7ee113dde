"""Every test of the suite runs on every engine that is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conformance.engines import PRESENT, Engine
from tests.engine.conformance.models import Model

from shapestream_engine import compile_model
from shapestream_engine.infer_request import InferRequest


@pytest.fixture(params=PRESENT, ids=lambda engine: engine.name)
def engine(request: pytest.FixtureRequest) -> Engine:
    """An engine on a device."""
    found: Engine = request.param
    return found


@pytest.fixture
def request_of(engine: Engine, tmp_path: Path) -> Callable[..., InferRequest]:
    """A request of a freshly compiled model."""

    def make(model: Model, shapes: dict[str, str] | None = None, **counts: Any) -> InferRequest:
        return compile_model(engine.spec(model, tmp_path, shapes), **counts).create_infer_request()

    return make
