"""The engine for those who use it by itself: results, ports, names of inputs, closed models. The same on every engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.engine.conformance.engines import Engine
from tests.engine.conformance.models import AFFINE, PAIR, affine

from shapestream_engine import InferResults, ShapeError, compile_model, read_model
from shapestream_engine.infer_request import InferRequest

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


def test_infer_returns_the_results(request_of: Callable[..., InferRequest]) -> None:
    """By name, or by number; a mapping over all outputs, whether the inputs came with the call or before."""
    request = request_of(AFFINE)
    results = request.infer([ROWS])
    assert isinstance(results, InferResults)
    np.testing.assert_array_equal(affine(ROWS), results["y"])
    np.testing.assert_array_equal(affine(ROWS), results[0])  # type: ignore[index]  # a mapping of names
    assert ["y"] == list(results)
    assert "<InferResults y: float32 [2, 4]>" == repr(results)
    request.input_tensor(0).data[...] = ROWS + 1
    (again,) = request.infer().values()
    np.testing.assert_array_equal(affine(ROWS + 1), again)


def test_results_name_the_outputs_that_there_are(request_of: Callable[..., InferRequest]) -> None:
    """For a name that is none, and for a number beyond them."""
    results = request_of(PAIR).infer({"a": ROWS, "b": ROWS})
    assert {"total", "sums"} == set(results)
    np.testing.assert_array_equal(ROWS * 2, results["total"])
    for port in ("totals", 2):
        with pytest.raises(KeyError, match="has total, sums"):
            results[port]  # type: ignore[index]  # a mapping of names


def test_a_misspelt_input_is_named_beside_the_one_that_is_missing(
    request_of: Callable[..., InferRequest],
) -> None:
    """Either alone does not show that they are the same."""
    with pytest.raises(ShapeError, match=r"^unknown: c; missing: b; the model takes a, b$"):
        request_of(PAIR).infer({"a": ROWS, "c": ROWS})
    with pytest.raises(ShapeError, match=r"^unknown: c; the model takes a, b$"):
        request_of(PAIR).infer({"a": ROWS, "b": ROWS, "c": ROWS})
    with pytest.raises(ShapeError, match=r"^missing: b; the model takes a, b$"):
        request_of(PAIR).infer({"a": ROWS})


def test_a_model_shows_its_inputs_and_outputs(engine: Engine, tmp_path: Path) -> None:
    """Read or compiled."""
    read = read_model(engine.spec(PAIR, tmp_path))
    for model in (read, read.compile()):
        assert ["a", "b"] == [port.name for port in model.inputs]
        assert {"total", "sums"} == {port.name for port in model.outputs}
        assert "f32" == model.inputs[0].element_type
        assert "[?,?]" == str(model.inputs[0].partial_shape)


def test_a_closed_model_makes_no_requests(engine: Engine, tmp_path: Path) -> None:
    """The error says so, and what to do; closing again is no error."""
    model = compile_model(engine.spec(AFFINE, tmp_path))
    model.create_infer_request().infer([ROWS])
    model.close()
    model.close()
    with pytest.raises(RuntimeError, match="is closed and makes no requests; compile it anew"):
        model.create_infer_request()


def test_threads_are_given_to_compile(engine: Engine, tmp_path: Path) -> None:
    """One thread computes the same."""
    request = read_model(engine.spec(AFFINE, tmp_path)).compile(slots=2, threads=1).create_infer_request()
    np.testing.assert_array_equal(affine(ROWS), request.infer([ROWS])["y"])
