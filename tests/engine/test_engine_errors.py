"""The engine's errors: their tree, and the help in their messages."""

from __future__ import annotations

import pytest

from shapestream_engine import errors
from shapestream_engine.errors import EngineError, EngineMissing, InferenceError, RuleError


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_an_engine_error(name: str) -> None:
    """One except clause covers what the engine raises on purpose."""
    assert issubclass(getattr(errors, name), EngineError)


def test_a_broken_rule_is_a_failed_inference() -> None:
    """A slot maps both to the same code."""
    assert issubclass(RuleError, InferenceError)


def test_a_missing_engine_names_the_extra_that_installs_it() -> None:
    """The message is the command to type."""
    error = EngineMissing("openvino")
    assert "openvino" == error.extra
    assert "pip install 'shapestream[openvino]'" in str(error)
