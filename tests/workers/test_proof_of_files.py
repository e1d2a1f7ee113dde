"""`check` on model files, by the engines that read them: what hides mixed rows, and calls as large as are served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from tests.onnx_files import write_onnx
from typer.testing import CliRunner, Result

from shapestream.loading.models import compile_models
from shapestream.settings import load_settings
from shapestream_workers.cli import app

IMPORTABLE = Path(__file__).parents[1] / "engine" / "importable"
ENGINES = ("openvino", pytest.param("onnxruntime", marks=pytest.mark.thorough))
CONFIG = """\
models:
  - name: m
    path: scores.onnx
    engine: ENGINE
    inputs: {x: {shape: "batch:1..64, 4"}}
    outputs: {y: {rule: rows}}
"""
ROWS = """\
models:
  - name: m
    function: breakable:FUNCTION
    inputs: {x: {shape: "batch:1..64, n:1..64", element_type: f32}}
    outputs: {y: {shape: "batch, n", element_type: f32}}
"""


def scores(folder: Path, banned: float, mixed_from: int) -> None:
    """[batch, 4] -> [batch, 5]: `x`, with half of the mean of all rows from so many rows on; the last one is banned.

    No value is too large for the mean, and none is no number: hostile neighbours look like all others.
    """
    constants = {
        "zero": np.array(0, np.int64),
        "most": np.array(mixed_from - 1, np.int64),
        "none": np.array(0, np.float32),
        "least": np.array(-3, np.float32),
        "largest": np.array(3, np.float32),
        "half": np.array(0.5, np.float32),
        "first": np.array([0], np.int64),
        "second": np.array([1], np.int64),
        "axis": np.array([1], np.int64),
        "banned": np.array(banned, np.float32),
    }
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["rows"]),
        helper.make_node("Greater", ["rows", "most"], ["many"]),
        helper.make_node("Equal", ["x", "x"], ["numbers"]),
        helper.make_node("Where", ["numbers", "x", "none"], ["known"]),
        helper.make_node("Clip", ["known", "least", "largest"], ["clipped"]),
        helper.make_node("ReduceMean", ["clipped"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("Mul", ["mean", "half"], ["part"]),
        helper.make_node("Where", ["many", "part", "none"], ["leak"]),
        helper.make_node("Add", ["x", "leak"], ["scores"]),
        helper.make_node("Slice", ["x", "first", "second", "axis"], ["column"]),
        helper.make_node("Equal", ["column", "column"], ["same"]),
        helper.make_node("Where", ["same", "banned", "banned"], ["last"]),
        helper.make_node("Concat", ["scores", "last"], ["y"], axis=1),
    ]
    write_onnx(folder / "scores.onnx", nodes, {"x": ["batch", 4]}, {"y": ["batch", 5]}, constants)


def check(folder: Path, text: str) -> Result:
    """`shapestream check` of this configuration."""
    (folder / "x.yaml").write_text(text)
    return CliRunner().invoke(app, ["check", str(folder / "x.yaml")])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("banned", [float(np.finfo(np.float32).min), -1e9])
def test_a_banned_class_hides_no_mixed_scores(tmp_path: Path, engine: str, banned: float) -> None:
    """A model that mixes rows is refused, with a difference in proportion to its scores."""
    scores(tmp_path, banned, mixed_from=2)
    ran = check(tmp_path, CONFIG.replace("ENGINE", engine))
    assert 3 == ran.exit_code, ran.output
    assert "output 'y': batching (strategy native) changes the results" in ran.stderr
    assert "e+" not in ran.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_a_banned_class_is_no_obstacle(tmp_path: Path, engine: str) -> None:
    """A model that keeps rows apart is proved in calls of as many rows as are served."""
    scores(tmp_path, float(np.finfo(np.float32).min), mixed_from=1 << 20)
    ran = check(tmp_path, CONFIG.replace("ENGINE", engine))
    assert 0 == ran.exit_code, ran.output
    assert "batching, output 'y': proved, checked on" in ran.stdout
    assert "cases of up to 64 rows" in ran.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_mixes_nine_rows_is_refused_where_nine_are_served(tmp_path: Path, engine: str) -> None:
    """With `max_batch: 8` it is served, and never asked for more."""
    scores(tmp_path, -1.0, mixed_from=9)
    text = CONFIG.replace("ENGINE", engine)
    ran = check(tmp_path, text)
    assert 3 == ran.exit_code, ran.output
    assert "of 9, of batch 1: 9 requests, batch 9" in ran.stderr
    assert 3 == check(tmp_path, text + "    batching: {max_batch: 9}\n").exit_code
    assert 0 == check(tmp_path, text + "    batching: {max_batch: 8}\n").exit_code
    assert 0 == check(tmp_path, text + "    idempotent: false\n").exit_code


def test_calls_that_could_not_be_tried_are_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls have at most the rows that were tried; a warning says how many, and what to write."""
    monkeypatch.syspath_prepend(str(IMPORTABLE))
    text = ROWS.replace("FUNCTION", "first_column").replace("n:1..64", "262144")
    text = text.replace("batch, n", "batch, 1").replace("batch:1..64", "batch")
    ran = check(tmp_path, text + "    batching: {max_batch: 1024}\n")
    assert 0 == ran.exit_code, ran.output
    assert "models[0].inputs" not in ran.stderr
    assert "batching.max_batch: output 'y': batching was not tried beyond 256 rows" in ran.stderr
    assert "; calls have at most 256 rows (set batching.max_batch to 256, or vouch" in ran.stderr
    config = tmp_path / "limited.yaml"
    config.write_text(text + "    batching: {max_batch: 1024}\n")
    loaded = load_settings(config)
    models = compile_models(loaded, loaded.settings.models, slots=1, threads=None)
    (served,) = models.values()
    assert 256 == served.signature.strategy.most_rows
    ran = check(tmp_path, text + "    batching: {max_batch: 256}\n")
    assert 0 == ran.exit_code, ran.output
