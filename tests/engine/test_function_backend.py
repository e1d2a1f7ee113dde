"""Models that are Python callables."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.slot_bench import SlotBench

from shapestream_engine import (
    InferenceError,
    InputSpec,
    InvalidInput,
    ModelLoadError,
    ModelSpec,
    OutputSpec,
    SignatureError,
    compile_model,
)
from shapestream_engine.infer_request import InferRequest
from shapestream_engine.output_rules import Rows, Whole, With


def spec_of(
    function: Callable[..., Any] | str,
    inputs: dict[str, str] | None = None,
    outputs: dict[str, str] | None = None,
) -> ModelSpec:
    """A callable over f32 arrays of these shapes."""
    return ModelSpec(
        name="m",
        **({"function": function} if isinstance(function, str) else {"model": function}),
        inputs={
            name: InputSpec(shape=shape, element_type="f32")
            for name, shape in (inputs or {"x": "batch:1..8, n"}).items()
        },
        outputs={
            name: OutputSpec(shape=shape, element_type="f32")
            for name, shape in (outputs or {"y": "batch, n"}).items()
        },
    )


def run(request: InferRequest, *arrays: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Resizes, fills and runs."""
    for tensor, array in zip(request.input_tensors, arrays, strict=True):
        tensor.shape = array.shape
        tensor.data[...] = array
    request.infer()
    return request.outputs()


ONES = np.ones((2, 3), np.float32)


def test_a_number_of_numpy_is_an_array_without_axes() -> None:
    """`x.sum()` returns one."""
    model = compile_model(spec_of(lambda x: x.sum(), {"x": "n"}, {"y": ""}), slots=1, threads=1)
    (total,) = run(model.create_infer_request(), np.ones(3, np.float32))
    assert (3.0, ()) == (total, total.shape)


def test_a_callable_gets_its_inputs_by_name_and_returns_its_outputs_by_name() -> None:
    """Keyword arguments in, a mapping out, whatever its order."""

    def model(b: Any, a: Any) -> dict[str, Any]:
        return {"difference": a - b, "total": a + b}

    ports = {"a": "batch, n", "b": "batch, n"}
    request = compile_model(
        spec_of(model, ports, {"total": "batch, n", "difference": "batch, n"})
    ).create_infer_request()
    total, difference = run(request, ONES * 5, ONES * 2)
    assert (7.0, 3.0) == (float(total[0, 0]), float(difference[0, 0]))


def test_inputs_are_views_of_the_requests_own_tensor() -> None:
    """Nothing is copied on the way into the callable, and nothing moves between calls within the bounds."""
    seen = []

    def model(x: Any) -> Any:
        seen.append(x.ctypes.data)
        return x.copy()

    request = compile_model(spec_of(model, {"x": "batch:1..8, n:1..100"})).create_infer_request()
    for shape in ((8, 100), (1, 1), (3, 50)):
        run(request, np.ones(shape, np.float32))
    assert {request.input_tensor(0).data.ctypes.data} == set(seen)
    assert 0 == request.reallocations


def test_rules_default_to_rows_or_whole() -> None:
    """A model with a batch axis has rows, one without is answered whole, and a rule that is given is taken."""
    assert Rows() == compile_model(spec_of(lambda x: x)).signature.outputs[0].rule
    whole = spec_of(lambda x: x, {"x": "n"}, {"y": "n"})
    assert Whole() == compile_model(whole).signature.outputs[0].rule
    ruled = ModelSpec(
        name="m",
        model=lambda x: x,
        inputs={"x": InputSpec(shape="batch, 4", element_type="f32")},
        outputs={
            "index": OutputSpec(shape="?, 2", element_type="i64", rule={"rule": "index_column"}),
            "values": OutputSpec(shape="?", element_type="f32", rule={"rule": "with", "output": "index"}),
        },
    )
    assert With("index") == compile_model(ruled).signature.outputs[1].rule


def raises(x: Any) -> Any:
    """Fails, with words."""
    raise ValueError("too dark")


def exits(x: Any) -> Any:
    """Tries to end the process."""
    sys.exit(3)


def has_no_words(x: Any) -> Any:
    """Raises what cannot tell its message."""

    class Mute(ValueError):
        def __str__(self) -> str:
            raise LookupError("no words")

    raise Mute


def gives_up(x: Any) -> Any:
    """Ends as a call that asyncio gave up."""
    raise asyncio.CancelledError("too slow")


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (raises, "ValueError: too dark"),
        (has_no_words, "Mute: .its message cannot be read"),
        (exits, "SystemExit: 3"),
        (gives_up, "CancelledError: too slow"),
        (lambda x: None, "output 'y' is NoneType, not a NumPy array"),
        (lambda x: {"z": x}, "the function returned no output 'y', only z"),
        (lambda x: {}, "the function returned no output 'y', only nothing"),
        (lambda x: {"y": x, "z": x, "a": x}, "outputs that are not declared: a, z"),
        (lambda x: {"y": [1.0]}, "output 'y' is list, not a NumPy array"),
        (lambda x: x.astype(np.float64), "output 'y' is of type float64, declared is f32"),
        (lambda x: x[0], r"output 'y' has the shape \[3\], declared is \[batch, n\]"),
    ],
)
def test_a_call_that_goes_wrong_is_the_models_error_and_the_request_stays_usable(
    function: Callable[..., Any], complaint: str
) -> None:
    """Whatever a callable raises or returns, the slot gets an `InferenceError` in words."""
    broken = [True]

    def model(x: Any) -> Any:
        return function(x) if broken[0] else x

    request = compile_model(spec_of(model)).create_infer_request()
    with pytest.raises(InferenceError, match=complaint):
        run(request, ONES)
    request.start_async()
    with pytest.raises(InferenceError, match=complaint):
        request.wait()
    broken[0] = False
    np.testing.assert_array_equal(ONES, run(request, ONES)[0])
    request.start_async()
    request.wait()


def test_a_function_may_refuse_its_input() -> None:
    """The batch fails as `invalid`, in the function's own words, and not as the model's error."""

    def model(x: Any) -> Any:
        if x.min() < 0:
            raise InvalidInput("x has negative numbers: take their logarithm elsewhere")
        return x

    bench = SlotBench(compile_model(spec_of(model)))
    report = bench.run(ONES, -ONES)
    assert (None, "invalid") == (report.outputs, report.code)
    assert "x has negative numbers: take their logarithm elsewhere" == report.message
    assert bench.results(ONES)


def test_several_outputs_need_a_mapping() -> None:
    """An array alone could be any of them."""
    model = compile_model(spec_of(lambda x: x, outputs={"y": "batch, n", "z": "batch, n"}))
    with pytest.raises(InferenceError, match="returned ndarray, not a mapping with y, z"):
        run(model.create_infer_request(), ONES)


def test_a_function_is_imported_from_an_installed_module() -> None:
    """`package.module:name`, attributes of attributes included."""
    nested = compile_model(spec_of("numpy:fft.fftshift", {"x": "n"}, {"y": "n"}))
    assert {"function": "numpy:fft.fftshift"} == nested.properties
    model = compile_model(spec_of("numpy:copy", {"a": "n"}, {"y": "n"}))
    np.testing.assert_array_equal(ONES[0], run(model.create_infer_request(), ONES[0])[0])


@pytest.mark.parametrize(
    ("spec", "error", "complaint"),
    [
        (spec_of("no_such_package:model"), ModelLoadError, "'no_such_package:model': ModuleNotFoundError"),
        (spec_of("numpy:no_such_function"), ModelLoadError, "AttributeError"),
        (spec_of("numpy:pi"), ModelLoadError, "cannot be called"),
        (spec_of(lambda y: y), SignatureError, "cannot be called with the inputs x: "),
        (spec_of(lambda x, more: x), SignatureError, "cannot be called with the inputs x: "),
        (ModelSpec(name="m", model=raises), SignatureError, "a function needs inputs and outputs"),
        (
            ModelSpec(
                name="m", model=raises, inputs={"x": InputSpec(shape="n")}, outputs={"y": OutputSpec()}
            ),
            SignatureError,
            "port 'x' needs its element_type",
        ),
        (
            ModelSpec(name="m", path=Path("m.py"), engine="function"),
            SignatureError,
            "takes a function, not a file",
        ),
        (
            ModelSpec(name="m", model=raises, properties={"NUM_STREAMS": "1"}),
            SignatureError,
            "the engine function has no properties",
        ),
    ],
)
def test_what_cannot_be_a_model_is_refused_when_it_is_loaded(
    spec: ModelSpec, error: type[Exception], complaint: str
) -> None:
    """Every mistake in the description of a function is found before a request comes."""
    with pytest.raises(error, match=complaint):
        compile_model(spec)


def test_a_module_that_ends_the_process_when_it_is_imported_is_a_model_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sys.exit(0)` at its top would else end a `check` as if all were well."""
    (tmp_path / "leaves_at_once.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = ModelSpec(
        name="m",
        function="leaves_at_once:f",
        inputs={"x": InputSpec(shape="batch", element_type="f32")},
        outputs={"y": OutputSpec(shape="batch", element_type="f32")},
    )
    with pytest.raises(ModelLoadError, match="cannot load the function 'leaves_at_once:f': SystemExit: 0"):
        compile_model(spec)
