"""OpenVINO models that take and give strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset15 as op
from tests.engine.slot_bench import SlotBench

from shapestream_engine import (
    InferenceError,
    InputSpec,
    ModelSpec,
    ShapeError,
    Strategy,
    StringTensor,
    compile_model,
)

Array = np.ndarray[Any, Any]


def objects(*elements: str) -> Array:
    """An array of objects [n]."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Texts taken apart and put together again, and the bytes of each."""
    text = op.parameter([-1], ov.Type.string, name="text")
    parts = op.string_tensor_unpack(text)
    again = op.string_tensor_pack(*[parts.output(number) for number in range(3)])
    length = op.subtract(parts.output(1), parts.output(0))
    for output, name in ((text.output(0), "text"), (again.output(0), "y"), (length.output(0), "length")):
        output.set_names({name})
    ov.save_model(ov.Model([again.output(0), length.output(0)], [text], "m"), tmp_path / "m.xml")
    return tmp_path / "m.xml"


def spec_of(path: Path, **more: Any) -> ModelSpec:
    """The model, batched."""
    return ModelSpec(name="m", path=path, inputs={"text": InputSpec(shape="batch")}, **more)


def test_strings_in_and_out(path: Path) -> None:
    """Batched, with zeros inside, other scripts, nothing, and a long one."""
    bench = SlotBench(compile_model(spec_of(path)))
    assert ["text: str [batch], at most 1048576 bytes each"] == list(map(str, bench.signature.inputs))
    given = objects("a", "é\0z"), objects(""), objects("日本", "x" * 70_000)
    for own, result in zip(given, bench.results(*given), strict=True):
        assert own.tolist() == result["y"].tolist()
        assert [len(each.encode()) for each in own] == result["length"].tolist()


def test_rows_of_set_numbers(path: Path) -> None:
    """Calls are divided and filled up, on models of fixed sizes."""
    bench = SlotBench(compile_model(spec_of(path, strategy=Strategy({"batch": (2, 4)}))))
    (result,) = bench.results(objects("a", "", "ccc"))
    assert (["a", "", "ccc"], [1, 0, 3]) == (result["y"].tolist(), result["length"].tolist())


def test_a_string_that_ends_with_a_zero_byte_is_refused(path: Path) -> None:
    """OpenVINO would drop it without a word; the next call runs."""
    bench = SlotBench(compile_model(spec_of(path)))
    report = bench.run(objects("a", "b\0"))
    assert "input 'text': element 1 ends with a zero byte, which OpenVINO would drop" == report.message
    assert ["b"] == bench.results(objects("b"))[0]["y"].tolist()


def test_a_request_of_the_engine_alone(path: Path) -> None:
    """Lists, tensors of the caller's, and resizing."""
    request = compile_model(spec_of(path)).create_infer_request()
    assert ["a", "é"] == request.infer({"text": ["a", "é"]})["y"].tolist()
    outside = StringTensor("str", (1,))
    outside.data[...] = "mine"
    request.set_input_tensor("text", outside)
    request.input_tensor("text").shape = (1,)
    assert ["mine"] == request.infer()["y"].tolist()
    request.set_input_tensor("text", None)
    request.input_tensor("text").shape = (3,)
    assert ["", "", ""] == request.infer()["y"].tolist()
    with pytest.raises(ShapeError):
        request.input_tensor("text").shape = (2, 2)
    with pytest.raises(InferenceError, match="output 'y' is of strings, which OpenVINO writes to no other"):
        request.set_output_tensor("y", StringTensor("str"))  # type: ignore[arg-type]  # what a caller might try
