"""The engine's errors: their tree, and the help in their messages."""

from __future__ import annotations

import pickle

import pytest

from shapestream_engine import errors
from shapestream_engine.errors import EngineError, EngineMissing, InferenceError, RuleError, SignatureError


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


def test_an_error_keeps_the_innermost_key() -> None:
    """The part of the description that was named first is the most exact one; it survives pickling."""
    with pytest.raises(SignatureError) as caught, EngineError.about("outputs", "scores"):
        raise SignatureError("no such column", key=("outputs", "scores", "column"))
    assert ("outputs", "scores", "column") == caught.value.key
    assert caught.value.key == pickle.loads(pickle.dumps(caught.value)).key
    with pytest.raises(SignatureError) as caught, EngineError.about("outputs", "scores"):
        raise SignatureError("no such column")
    assert ("outputs", "scores") == caught.value.key
