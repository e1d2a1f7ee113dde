"""Engines that installed packages add by entry point, and what is said of those that cannot be loaded."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shapestream_engine import (
    InferenceError,
    InputSpec,
    ModelLoadError,
    ModelSpec,
    SignatureError,
    compile_model,
)
from shapestream_engine.backends.registry import ENTRY_POINT_GROUP, known_engines, load_backend

DOCUMENTED = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution on the path that brings the engine `acme`, one that is broken, and one that wants our name."""
    site = tmp_path / "site-packages"
    info = site / "acme_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\n"
        "acme = acme_engine\nnamed = acme_engine:compile_spec\nbroken = acme_broken\n"
        "gone = acme_gone\nfunction = acme_broken\n"
    )
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENTED, re.DOTALL)
    (site / "acme_engine.py").write_text(example)
    (site / "acme_broken.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(site))
    yield site
    for name in ("acme_engine", "acme_broken"):
        sys.modules.pop(name, None)


def test_an_installed_package_adds_an_engine(installed: Path, tmp_path: Path) -> None:
    """The engine of docs/backends.md: known by its entry point, it compiles, runs and fails like any other."""
    np.save(tmp_path / "m.npy", np.eye(2, 3, dtype=np.float32))
    spec = ModelSpec(name="m", path=tmp_path / "m.npy", engine="acme")
    request = compile_model(spec).create_infer_request()
    assert ("rows", ("batch", None)) == (
        request.signature.outputs[0].rule.NAME,
        request.signature.outputs[0].shape.names,
    )
    tensor = request.input_tensor("x")
    tensor.shape = (2, 2)
    tensor.data[...] = [[1, 2], [3, np.nan]]
    with pytest.raises(InferenceError, match="not finite"):
        request.infer()
    tensor.data[1, 1] = 4
    request.infer()
    assert [[1, 2, 0], [3, 4, 0]] == request.output_tensor("y").data.tolist()
    with pytest.raises(ModelLoadError, match=r"cannot read the model .*absent.npy"):
        compile_model(replace(spec, path=tmp_path / "absent.npy"))
    with pytest.raises(SignatureError, match="axis 1 is 2 in the model file and 3 in the configuration"):
        compile_model(replace(spec, inputs={"x": InputSpec(shape="batch, 3")}))


def test_added_engines_are_listed_after_ours(installed: Path) -> None:
    """An unknown engine is answered with all that there are; nobody can take a name of ours."""
    assert (
        "openvino",
        "onnxruntime",
        "torch",
        "function",
        "tokenizer",
        "acme",
        "broken",
        "gone",
        "named",
    ) == known_engines()
    with pytest.raises(SignatureError, match=r"unknown engine 'acmee'; known are openvino.* acme"):
        ModelSpec(name="m", path=Path("m"), engine="acmee")
    assert "shapestream_engine.backends.function" == getattr(load_backend("function"), "__name__", None)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("broken", "No module named 'a_package_that_nobody_has'"),
        ("gone", "No module named 'acme_gone'"),
        ("named", "has no compile_spec"),
    ],
)
def test_an_engine_that_cannot_be_loaded_says_why(installed: Path, engine: str, reason: str) -> None:
    """What its package lacks is none of our extras: the reason is passed on."""
    with pytest.raises(ModelLoadError, match=rf"the engine '{engine}' .*{reason}"):
        compile_model(ModelSpec(name="m", path=Path("m"), engine=engine))


def test_without_the_package_its_engine_is_unknown() -> None:
    """A configuration that names it is refused, with the engines that there are."""
    with pytest.raises(
        SignatureError, match="unknown engine 'acme'; known are openvino, onnxruntime, torch, function"
    ):
        ModelSpec(name="m", path=Path("m"), engine="acme")
