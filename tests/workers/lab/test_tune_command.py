"""`shapestream tune` before it measures anything: what it refuses, and where that is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.workers.lab.worlds import write_trace
from typer.testing import CliRunner

from shapestream.telemetry.trace import TraceRequest
from shapestream_workers.cli import app

YAML = """\
models:
  - name: sort
    function: numpy:sort
    inputs: {a: {shape: "batch:1..8, n:0..64", element_type: f32}}
    outputs: {sorted: {shape: "batch, n", element_type: f32, rule: rows}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A YAML and traces, of which one fits."""
    (tmp_path / "sort.yaml").write_text(YAML)
    (tmp_path / "alias.yaml").symlink_to("sort.yaml")
    (tmp_path / "none.yaml").write_text(
        "server: {worker_listen: tcp://127.0.0.1:5556}\n" + YAML + "workers: []\n"
    )
    (tmp_path / "engine.yaml").write_text(YAML.replace("function: numpy:sort", "function: numpy:sorted_not"))
    two = YAML + YAML.removeprefix("models:\n").replace("name: sort", "name: other")
    (tmp_path / "two.yaml").write_text(two)
    stages = "[{name: a, model: sort, inputs: {a: a}}, {name: b, model: sort, inputs: {a: a.sorted}}]"
    chain = f"chains: [{{name: twice, inputs: {{a: a.a}}, stages: {stages}, outputs: {{b: b.sorted}}}}]\n"
    (tmp_path / "chain.yaml").write_text(YAML + chain)
    write(tmp_path / "sort.trace", {"sort": ("batch", "n")}, (1, 8))
    write(tmp_path / "both.trace", {"sort": ("batch", "n"), "other": ("batch", "n")}, (1, 8))
    write(tmp_path / "stranger.trace", {"stranger": ("batch", "n")}, (1, 8))
    write(tmp_path / "large.trace", {"sort": ("batch", "n")}, (1, 999))
    write(tmp_path / "empty.trace", {"sort": ("batch", "n")})
    return tmp_path


def write(path: Path, models: dict[str, tuple[str, ...]], *sizes: tuple[int, ...]) -> None:
    """A trace of the first of these models."""
    requests = [TraceRequest(0.0, 0, 0, each) for each in sizes]
    write_trace(path, requests, models)


@pytest.mark.parametrize(
    ("config", "trace", "extra", "words"),
    [
        ("sort", "stranger", [], "no request of the model 'sort'; it is about stranger"),
        ("sort", "large", [], "n 999: the model takes ..64"),
        ("sort", "empty", [], "no request of the model 'sort'"),
        ("sort", "gone", [], "no such file"),
        ("sort", "sort", ["--model", "sorted"], "there is no model 'sorted'; the models are sort"),
        (
            "chain",
            "sort",
            ["--model", "twice"],
            "6:10: chains[0]: 'twice' is a chain; tune one of its models: sort",
        ),
        ("sort", "sort", ["--out", "sort.yaml"], "never overwritten"),
        ("sort", "sort", ["--out", "sort.trace"], "never overwritten"),
        ("sort", "sort", ["--out", "alias.yaml"], "never overwritten"),
        ("sort", "sort", ["--out", "nowhere/tuned.yaml"], "no such folder"),
        ("two", "both", [], "is not clear: the file has sort, other"),
        ("none", "sort", [], "none are started, so none can be measured"),
        ("engine", "sort", [], "sorted_not"),
        (
            "sort",
            "sort",
            ["--precision", "bf16"],
            "the engine function has no choice of precisions; openvino, torch have (leave out --precision)",
        ),
    ],
)
def test_what_does_not_fit_together_is_told_before_anything_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, config: str, trace: str, extra: list[str], words: str
) -> None:
    """Status 3, on stderr, and nothing is written."""
    monkeypatch.chdir(folder)
    before = {path.name for path in folder.iterdir()}
    ran = CliRunner().invoke(app, ["tune", f"{config}.yaml", "--trace", f"{trace}.trace", *extra])
    assert (3, "") == (ran.exit_code, ran.stdout), ran.output
    assert words in ran.stderr
    assert before == {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    "extra", [[], ["--trace", "x", "--budget", "1"], ["--trace", "x", "--objective", "fame"]]
)
def test_wrong_usage_is_status_2(folder: Path, extra: list[str]) -> None:
    """As with every command."""
    assert 2 == CliRunner().invoke(app, ["tune", str(folder / "sort.yaml"), *extra]).exit_code
