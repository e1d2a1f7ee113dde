"""`shapestream infer` without a server: what it reads, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.entries import result_of

from shapestream.client.opened_models import Result
from shapestream.errors import InvalidRequest
from shapestream.testing import identity_signature, tensors_of
from shapestream_engine.element_types import dtype_of
from shapestream_engine.layout import Tensors
from shapestream_engine.signature import ModelSignature
from shapestream_workers.inference import format_result, read_arguments, read_inputs, save_outputs

NUMBERS = identity_signature(element_type="f64")


def read(argument: str, signature: ModelSignature = NUMBERS) -> Any:
    """The value of an argument `x=...`."""
    return read_inputs(read_arguments([argument]), signature)["x"]


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5_000, "[[1]", "", "nan"])
def test_what_is_no_json_is_refused_with_its_name(text: str) -> None:
    """However deep or long it is; the error repeats a part of it."""
    with pytest.raises(InvalidRequest, match=r"input 'x': '.*' is neither a .npy file nor JSON") as caught:
        read(f"x={text}")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["[1e400]", "[-1e999, 1]", "1e-400", "[0.5, 0.0001e-330]"])
def test_a_number_that_no_float_holds_is_refused(text: str) -> None:
    """It would be infinite, or zero; what is zero may have any exponent."""
    with pytest.raises(InvalidRequest, match="beyond the range of f64"):
        read(f"x={text}")
    assert [0.0, 1e300] == read("x=[0.000e-999, 1e300]")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x03\x04", b"[[1]]"])
def test_a_file_that_is_no_npy_is_refused_with_its_name(content: bytes, tmp_path: Path) -> None:
    """Empty, cut off, or something else."""
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"input 'x': .*x\.npy: "):
        read(f"x={path}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a sentence", ["a sentence"]),
        ("", [""]),
        ("12", ["12"]),
        ("null", ["null"]),
        ("[brackets, not JSON", ["[brackets, not JSON"]),
        ("key=value", ["key=value"]),
        ('"in JSON"', ["in JSON"]),
        ('["one", "two"]', ["one", "two"]),
        ("[]", []),
        ("@FILE", ["né\n"]),
    ],
)
def test_an_input_of_strings_takes_text_as_it_is(text: str, expected: list[str], tmp_path: Path) -> None:
    """One element, unless it is a list; also of a file."""
    (tmp_path / "x.txt").write_text("né\n", "utf-8")
    text = text.replace("FILE", str(tmp_path / "x.txt"))
    assert expected == list(read(f"x={text}", identity_signature("m", "n", "str")))
    contents = [each.encode() for each in expected]
    assert contents == list(read(f"x={text}", identity_signature("m", "n", "bytes")))
    if len(expected) == 1:
        assert expected[0] == read(f"x={text}", identity_signature("m", "", "str")).item()


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_that_is_no_text_is_refused_with_its_name(content: bytes | None, tmp_path: Path) -> None:
    """One that is not there, or no UTF-8; as bytes the latter is all right."""
    path = tmp_path / "x.txt"
    if content is not None:
        path.write_bytes(content)
        assert [content] == list(read(f"x=@{path}", identity_signature("m", "n", "bytes")))
    with pytest.raises(InvalidRequest, match=r"input 'x': .*x\.txt"):
        read(f"x=@{path}", identity_signature("m", "n", "str"))


def strings_result(*elements: Any) -> Result:
    """A result with these strings as `y`."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return Result(None, result_of(1, tensors_of([array])), {0: "y"})


def test_strings_are_printed_a_line_each() -> None:
    """Long ones and many are cut, and a terminal's commands are spelt out."""
    lines = format_result(strings_result("né", "\x1b[2J\n", "a" * 1000), as_json=False).splitlines()
    assert ["y: str [3]", "  'né'", "  '\\x1b[2J\\n'"] == lines[:3]
    assert lines[3].endswith("a'... of 1000")
    assert "  ... of 100" in format_result(strings_result(*["a"] * 100), as_json=False).splitlines()
    assert "  b'\\xff'" in format_result(strings_result(b"\xff"), as_json=False).splitlines()


def test_strings_are_text_in_json_and_in_files(tmp_path: Path) -> None:
    """Bytes too, unless they are no text."""
    for elements, expected in (
        (["né", ""], {"element_type": "str", "shape": [2], "data": ["né", ""]}),
        ([b"a"], {"element_type": "bytes", "shape": [1], "data": ["a"]}),
        (
            [b"a", b"\xff"],
            {"element_type": "bytes", "shape": [2], "encoding": "base64", "data": ["YQ==", "/w=="]},
        ),
    ):
        result = strings_result(*elements)
        assert expected == json.loads(format_result(result, as_json=True))["outputs"]["y"]
        save_outputs(result, tmp_path)
        assert expected == json.loads((tmp_path / "y.json").read_text("utf-8"))


def no_constant(name: str) -> float:
    """JSON has none of NaN and Infinity."""
    raise AssertionError(name)


@pytest.mark.parametrize("element_type", ["f32", "f16", "f64", "bf16"])
def test_json_holds_what_is_no_number_by_name(element_type: str) -> None:
    """Any reader of JSON takes it."""
    array = np.array([1.5, np.nan, -np.inf]).astype(dtype_of(element_type))
    tensors = Tensors(layout=((0, element_type, (3,)),), buffers=[array.tobytes()])
    answer = result_of(1, tensors)
    plain = json.loads(
        format_result(Result(None, answer, {0: "y"}), as_json=True), parse_constant=no_constant
    )
    assert [1.5, "nan", "-inf"] == plain["outputs"]["y"]["data"]
