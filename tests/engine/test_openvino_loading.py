"""Model files, devices and properties: what OpenVINO is asked for, and what is said when it cannot."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op
from tests.onnx_files import write_scaling

from shapestream_engine import ModelLoadError, ModelSpec, SignatureError, compile_model
from shapestream_engine.backends.openvino.runtime import engine_words


def small_model() -> ov.Model:
    """x [?, 4] times a matrix of weights."""
    x = op.parameter([-1, 4], np.float32, name="x")
    weights = op.constant(np.arange(400, dtype=np.float32).reshape(4, 100))
    return ov.Model([op.result(op.matmul(x, weights, False, False))], [x], "small")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a good model, and files that are damaged in several ways."""
    ov.save_model(small_model(), tmp_path / "good.xml")
    text = (tmp_path / "good.xml").read_text(encoding="utf-8")
    (tmp_path / "truncated.xml").write_text(text[: len(text) // 2], encoding="utf-8")
    (tmp_path / "no_weights.xml").write_text(text, encoding="utf-8")
    (tmp_path / "short_weights.xml").write_text(text, encoding="utf-8")
    (tmp_path / "short_weights.bin").write_bytes(b"\x00" * 10)
    (tmp_path / "prose.xml").write_text("not a model", encoding="utf-8")
    (tmp_path / "noise.onnx").write_bytes(b"\x00\x01noise")
    (tmp_path / "empty.onnx").write_bytes(b"")
    (tmp_path / "folder.xml").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.xml", "no such file"),
        ("missing.onnx", "no such file"),
        ("folder.xml", "is a directory"),
        ("truncated.xml", "Error parsing"),
        ("no_weights.xml", "Empty weights data in bin file or bin file cannot be found"),
        ("short_weights.xml", "Incorrect weights in bin file"),
        ("prose.xml", "No document element found"),
        ("noise.onnx", "as ONNX: the file is damaged"),
        ("empty.onnx", "as ONNX: "),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(
    folder: Path, capfd: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    """The error holds the path and the reason, without places in OpenVINO's source, and nothing goes to stderr."""
    with pytest.raises(ModelLoadError, match=reason) as caught:
        compile_model(ModelSpec(name="m", path=folder / name))
    assert str(folder / name) in str(caught.value)
    assert ".cpp" not in str(caught.value)
    assert ("", "") == tuple(capfd.readouterr())


def properties_of(**more: Any) -> dict[str, Any]:
    """The effective properties of the small model."""
    counts = {key: more.pop(key) for key in ("slots", "threads") if key in more}
    return dict(compile_model(ModelSpec(name="m", model=small_model(), **more), **counts).properties)


def test_weights_behind_a_link_that_leaves_the_folder_are_refused_with_the_way_out(tmp_path: Path) -> None:
    """As in the cache of Hugging Face; a copy of what the links lead to is served, and ONNX Runtime follows the links."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    for place in (blobs, snapshot):
        place.mkdir()
    write_scaling(blobs / "m.onnx", 2.0)
    for name in ("m.onnx", "m.weights"):
        (snapshot / name).symlink_to(blobs / name)
    with pytest.raises(ModelLoadError, match=r"a link leads out of the folder.* cp -rL .*snapshot COPY"):
        compile_model(ModelSpec(path=snapshot / "m.onnx", engine="openvino"))
    assert "onnxruntime" == compile_model(snapshot / "m.onnx").engine
    copied = shutil.copytree(snapshot, tmp_path / "copy")
    assert "openvino" == compile_model(copied / "m.onnx").engine


def test_effective_properties_are_plain_data() -> None:
    """f32 unless said otherwise, one stream for each slot's own model, its share of the threads, and nothing pinned."""
    properties = properties_of(slots=2, threads=4)
    expected = {
        "INFERENCE_PRECISION_HINT": "f32",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": 2,
        "ENABLE_CPU_PINNING": False,
        "EXECUTION_DEVICES": ["CPU"],
    }
    assert expected == {name: properties[name] for name in expected}
    plain = (str, int, float, bool, list, dict)
    assert [] == [(name, value) for name, value in properties.items() if not isinstance(value, plain)]


def test_a_property_that_does_not_exist_is_refused() -> None:
    """OpenVINO's own words say which."""
    with pytest.raises(ModelLoadError, match=r"CPU cannot compile it: .*Unsupported property NONSENSE"):
        properties_of(properties={"NONSENSE": "1"})


@pytest.mark.parametrize("model", [object(), "model.xml", 7])
def test_what_is_no_model_is_refused(model: Any) -> None:
    """In memory OpenVINO takes its own models only."""
    with pytest.raises(SignatureError, match=r"takes a path or an ov\.Model, not"):
        compile_model(ModelSpec(name="m", model=model, engine="openvino"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plain words", "plain words"),
        ("Exception from src/a.cpp:1:\nException from src/b.cpp:22:\n the reason\n\n", "the reason"),
        ("Check 'a <= b && c' failed at src/x/y.cpp:77:\nfirst\nsecond:\n", "first; second"),
        (
            "Exception from src/a.cpp:1:\nCaught exception: Infer Request was canceled\n",
            "Infer Request was canceled",
        ),
        ("Check 'x' failed at src/y.cpp:1:", "Check 'x' failed at src/y.cpp:1:"),
        ("", "RuntimeError"),
    ],
)
def test_engine_words_are_the_reason_alone(text: str, words: str) -> None:
    """Places in OpenVINO's source are left out, unless there is nothing else."""
    assert words == engine_words(RuntimeError(text))
