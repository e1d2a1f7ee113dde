"""`shapestream infer` without a server: what it reads, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shapestream.client.results import Result
from shapestream.errors import InvalidRequest
from shapestream.wire.messages import ResultEntry as Answer
from shapestream.wire.messages import Timings
from shapestream_engine.element_types import dtype_of
from shapestream_engine.layout import Tensors
from shapestream_workers.inference import format_result, read_inputs


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5_000, "[[1]", "", "nan"])
def test_what_is_no_json_is_refused_with_its_name(text: str) -> None:
    """However deep or long it is; the error repeats a part of it."""
    with pytest.raises(InvalidRequest, match=r"input 'a': '.*' is neither a .npy file nor JSON") as caught:
        read_inputs([f"a={text}"])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["[1e400]", "[-1e999, 1]", "1e-400", "[0.5, 0.0001e-330]"])
def test_a_number_that_no_float_holds_is_refused(text: str) -> None:
    """It would be infinite, or zero; what is zero may have any exponent."""
    with pytest.raises(InvalidRequest, match="beyond the range of f64"):
        read_inputs([f"a={text}"])
    assert {"a": [0.0, 1e300]} == read_inputs(["a=[0.000e-999, 1e300]"])


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x03\x04", b"[[1]]"])
def test_a_file_that_is_no_npy_is_refused_with_its_name(content: bytes, tmp_path: Path) -> None:
    """Empty, cut off, or something else."""
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"input 'a': .*x\.npy: "):
        read_inputs([f"a={path}"])


def no_constant(name: str) -> float:
    """JSON has none of NaN and Infinity."""
    raise AssertionError(name)


@pytest.mark.parametrize("element_type", ["f32", "f16", "f64", "bf16"])
def test_json_holds_what_is_no_number_by_name(element_type: str) -> None:
    """Any reader of JSON takes it."""
    array = np.array([1.5, np.nan, -np.inf]).astype(dtype_of(element_type))
    tensors = Tensors(layout=((0, element_type, (3,)),), buffers=[array.tobytes()])
    timings = Timings(queue_us=1, run_us=1, total_us=3, batch_requests=1, batch_rows=1, worker="w/0")
    answer = Answer(sequence=1, tensors=tensors, timings=timings)
    plain = json.loads(
        format_result(Result(None, answer, {0: "y"}), as_json=True), parse_constant=no_constant
    )
    assert [1.5, "nan", "-inf"] == plain["outputs"]["y"]["data"]
