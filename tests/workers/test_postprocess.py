"""The key `postprocess` of a model: where mistakes are shown, what is proved, and what clients are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from tests.onnx_files import write_onnx

from shapestream.errors import ConfigurationError
from shapestream.gateway.model_pages import model_metadata
from shapestream.loading.models import compile_models, read_signatures
from shapestream.settings import LoadedSettings, load_settings
from shapestream_workers.check import check_configuration

YAML = """\
models:
  - name: tagger
    path: model.onnx
    engine: onnxruntime
    inputs: {x: {shape: "batch:1..8, 3, 64"}}
    postprocess: STEPS
    calibration_s: 0
in_process: true
"""


def load(folder: Path, steps: str, more: str = "") -> LoadedSettings:
    """The settings of a tagger of five labels, of which the first two are equal up to rounding."""
    weight = np.random.default_rng(1).standard_normal((64, 5)).astype(np.float32)
    weight[:, 1] = weight[:, 0] * np.float32(1 + 1e-7)
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["logits"])]
    write_onnx(
        folder / "model.onnx", nodes, {"x": ["batch", 3, 64]}, {"logits": ["batch", 3, 5]}, {"weight": weight}
    )
    path = folder / "server.yaml"
    path.write_text(YAML.replace("STEPS", steps) + more)
    return load_settings(path)


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        (
            "{logits: argmin}",
            "6:19: models[0].postprocess.logits: expected softmax, argmax, topk K, or softmax before one of the "
            'others, got "argmin"',
        ),
        (
            "{logits: 5}",
            "6:19: models[0].postprocess.logits: expected softmax, argmax, topk K, or softmax before",
        ),
        ("argmax", "6:5: models[0].postprocess: expected a mapping"),
    ],
)
def test_other_words_are_refused_in_their_place(tmp_path: Path, steps: str, line: str) -> None:
    """Before any model is read."""
    with pytest.raises(ConfigurationError) as refused:
        load(tmp_path, steps)
    (problem,) = refused.value.problems
    assert str(problem).removeprefix(f"{tmp_path}/server.yaml:").startswith(line)


def test_a_tokenizer_has_no_steps(tmp_path: Path) -> None:
    """Its outputs are ids."""
    (tmp_path / "t.json").write_text("{}")
    (tmp_path / "s.yaml").write_text(
        "models: [{name: t, tokenizer: t.json, postprocess: {counts: argmax}}]\nin_process: true\n"
    )
    with pytest.raises(ConfigurationError) as refused:
        load_settings(tmp_path / "s.yaml")
    (problem,) = refused.value.problems
    assert 'models[0].postprocess: a tokenizer has no "postprocess"' in str(problem)


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        ("{logits: topk 6}", "has 5 classes (write topk 5 or less)"),
        ("{scores: argmax}", "there is no output 'scores'; it has logits"),
    ],
)
def test_what_does_not_fit_the_model_has_its_place(tmp_path: Path, steps: str, line: str) -> None:
    """With what to write."""
    loaded = load(tmp_path, steps)
    (problem,) = check_configuration(loaded).problems
    assert problem.startswith(f"{tmp_path}/server.yaml:6:")
    assert line in problem


def ports(page: dict[str, Any]) -> list[tuple[str, str, list[int]]]:
    """The outputs of a page of metadata."""
    return [(port["name"], port["datatype"], port["shape"]) for port in page["outputs"]]


def test_a_model_with_ties_is_served_in_batches(tmp_path: Path) -> None:
    """Proved by its values, with tolerances for audits; clients are told of the classes and their values."""
    loaded = load(tmp_path, "{logits: 'softmax,  topk 2'}")
    assert {"logits": "softmax, topk 2"} == loaded.settings.models[0].postprocess
    (signature,) = read_signatures(loaded).signatures
    expected = [("logits", "INT64", [-1, 3, 2]), ("logits.values", "FP32", [-1, 3, 2])]
    assert expected == ports(model_metadata(signature))
    compiled = compile_models(loaded, loaded.settings.models, slots=1, threads=1)["tagger"]
    assert (True, signature.outputs) == (compiled.signature.has_batch, compiled.signature.outputs)
    assert compiled.signature.strategy.most_rows != 1
    assert {"logits": {"margins": "logits.values"}} == {
        name: dict(one) for name, one in compiled.tolerances.items() if name == "logits"
    }
    x = np.random.default_rng(0).standard_normal((4, 3, 64)).astype(np.float32)
    results = compiled.create_infer_request().infer({"x": x})
    assert (4, 3, 2) == results["logits"].shape
    assert (results["logits.values"][..., 0] >= results["logits.values"][..., 1]).all()
    report = check_configuration(loaded)
    assert [] == report.problems
    assert [] == [line for line in report.warnings if "unproved" in line or "runs alone" in line]
