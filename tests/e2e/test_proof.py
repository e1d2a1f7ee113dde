"""A model that mixes its requests up cannot be served by real processes, and proofs are made once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import alive

pytestmark = pytest.mark.e2e

IMPORTABLE = Path(__file__).parents[1] / "engine" / "importable"

CENTRED = """\
models:
  - name: centred
    function: gated:centred
    inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
    outputs: {y: {shape: "batch, n", element_type: f32}}
"""


@pytest.mark.parametrize("how", ["in_process: true\n", "workers: [{count: 2}]\n"])
def test_a_refuted_model_ends_serve_with_status_3(workplace: Any, how: str) -> None:
    """The reason is in the log, and no process is left."""
    served = workplace.try_serve(CENTRED + how)
    assert 3 == served.wait()
    log = served.log.read_text()
    assert "models[0].outputs.y: output 'y': batching (strategy native) changes the results" in log
    assert "Traceback" not in log


def test_workers_that_start_together_prove_once(
    workplace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one takes the verdict of the first, and so does a restart."""
    monkeypatch.setenv("SHAPESTREAM_PROBE_CACHE", str(tmp_path / "proofs"))
    text = CENTRED.replace("gated:centred", "gated:double") + "workers: [{count: 2, slots: 1}]\n"
    served = workplace.serve(text)
    first, second = served.wait_for("model tried", 2)
    assert (first["seconds"], first["findings"]) == (second["seconds"], second["findings"])
    assert ["cache", "measured"] == sorted(event["source"] for event in (first, second))
    assert 1 == len(list((tmp_path / "proofs").glob("*.json")))
    assert ["batching, output 'y': proved"] == [
        words.partition(", checked")[0] for words in first["findings"]
    ]


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param("workers: [{count: 2, slots: 1}]\n", marks=pytest.mark.thorough),
        pytest.param("in_process: true\n", marks=pytest.mark.thorough),
        "workers: [{count: 1, threads: 1}, {count: 1, threads: 3}]\n",
    ],
)
def test_what_check_has_proved_serve_does_not_prove_again(
    workplace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    """Nor do `models` and workers with other numbers of threads; the log names the source of each verdict."""
    monkeypatch.setenv("SHAPESTREAM_PROBE_CACHE", str(tmp_path / "proofs"))
    config = workplace.write(CENTRED.replace("gated:centred", "gated:double") + processes)
    assert 0 == workplace.run("check", str(config)).returncode
    proved = set((tmp_path / "proofs").glob("*.json"))
    assert 0 == workplace.run("models", str(config)).returncode
    served = workplace.serve(config)
    tried = served.wait_for("model tried", 1 if "in_process" in processes else 2)
    assert {"cache"} == {event["source"] for event in tried}
    assert proved == set((tmp_path / "proofs").glob("*.json"))


def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    """No process is left of a proof that was killed in the middle of a call that never returns."""
    script = f"""
import sys
sys.path.insert(0, {str(IMPORTABLE)!r})
from shapestream_engine import InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.probe import ProbeOptions, prove
spec = ModelSpec(
    name="m", function="breakable:wait_for_ever",
    inputs={{"x": InputSpec(shape="batch:1..8, n:1..64", element_type="f32")}},
    outputs={{"y": OutputSpec(shape="batch, n", element_type="f32")}},
)
prove(spec, compile_model(spec), ProbeOptions())
"""
    environment = {**os.environ, "BREAKABLE_FOLDER": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as parent:
        child = int(_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
        parent.kill()
    _until(lambda: not alive(child))


def _until(condition: Callable[[], Any]) -> Any:
    """Polls real processes."""
    give_up_at = time.monotonic() + 120
    while not (value := condition()):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    return value
