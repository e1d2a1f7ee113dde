"""What follows from a proof: refused with what to do, left off with a warning, or served."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner, Result

from shapestream.errors import ConfigurationError
from shapestream.loading.models import compile_models, model_spec
from shapestream.loading.proof import judge
from shapestream.settings import load_settings
from shapestream_engine import compile_model
from shapestream_engine.probe import Finding, ProbeReport, Treatment
from shapestream_workers.cli import app

IMPORTABLE = Path(__file__).parents[1] / "engine" / "importable"
MASKED = """\
models:
  - name: m
    function: breakable:FUNCTION
    inputs:
      ids: {shape: "batch:1..8, seq:1..64", element_type: i64, pad: {seq: 0}}
      mask: {shape: "batch, seq", element_type: i64, mask_of: ids}
    outputs:
      y: {shape: "batch, COLUMNS", element_type: f32}
    probe: {ids: {integers: [0, 99]}}
"""
ROWS = """\
models:
  - name: m
    function: breakable:FUNCTION
    inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32}}
    outputs: {y: {shape: "batch, n", element_type: f32}}
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(IMPORTABLE))


def write(folder: Path, text: str, function: str, columns: int = 1, more: str = "") -> Path:
    """The YAML of one model."""
    path = folder / "x.yaml"
    path.write_text(text.replace("FUNCTION", function).replace("COLUMNS", str(columns)) + more)
    return path


def test_a_model_too_slow_for_its_proof_is_told_what_to_do(tmp_path: Path) -> None:
    """Realistic inputs would not help it; more threads or smaller inputs would."""
    loaded = load_settings(write(tmp_path, ROWS, "slightly"))
    (model,) = loaded.settings.models
    compiled = compile_model(model_spec(model))
    slow = Finding(
        treatment=Treatment(kind="batching"),
        output="y",
        verdict="unjudged",
        why="only 9 different requests would have shown anything, of 32: a call takes 5 s, and the time was over",
        call_s=5.0,
    )
    judgement = judge(model, compiled.signature, ProbeReport(model="m", findings=(slow,)))
    ((_, words),) = judgement.warnings
    assert 1 == judgement.most_rows
    assert "a call takes 5 s, and the time was over; each request runs alone" in words
    assert "(give the process more `threads`, describe smaller inputs by `probe`, or vouch" in words
    quick = replace(slow, call_s=None)
    ((_, words),) = judge(model, compiled.signature, ProbeReport(model="m", findings=(quick,))).warnings
    assert "(describe realistic inputs by `probe`, or vouch" in words
    compiled.close()


def check(*arguments: str | Path) -> Result:
    """`shapestream check`."""
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def test_what_is_proved_is_served_padded(tmp_path: Path) -> None:
    """`check` says on how many cases; padding stays on, without `trust`."""
    config = write(tmp_path, MASKED, "attend", 4)
    ran = check(config)
    assert 0 == ran.exit_code, ran.output
    assert "padding of seq, output 'y': proved, checked on" in ran.stdout
    assert "y is seen to be [batch, 4]" in ran.stdout
    loaded = load_settings(config)
    models = compile_models(loaded, loaded.settings.models, slots=1, threads=None)
    assert (False, True) == models["m"].signature.paddable


def test_refuted_padding_is_status_3(tmp_path: Path) -> None:
    """The place in the YAML, the output, the strategy, the difference, the case, and what to do."""
    config = write(tmp_path, MASKED, "mean_of_all")
    ran = check(config)
    assert 3 == ran.exit_code
    column = MASKED.splitlines()[4].index("seq: 0") + 1
    place = f"{config}:5:{column}: models[0].inputs.ids.pad.seq: "
    (problem,) = [line for line in ran.stderr.splitlines() if line.startswith(place)]
    for words in (
        "output 'y': padding of seq (strategy native) changes the results: largest difference ",
        " is allowed",
        "request 1 of 2",
        "remove seq from `pad`",
        "mask_of",
        "trust: true",
    ):
        assert words in problem


def test_refuted_batching_is_status_3(tmp_path: Path) -> None:
    """With the remedy for batches."""
    ran = check(write(tmp_path, ROWS, "batch_norm"))
    assert 3 == ran.exit_code
    assert (
        ":5:15: models[0].outputs.y: output 'y': batching (strategy native) changes the results" in ran.stderr
    )
    assert "set batching.max_batch to 1" in ran.stderr
    assert 0 == check(write(tmp_path, ROWS, "batch_norm", more="    batching: {max_batch: 1}\n")).exit_code


def test_a_model_that_would_take_the_process_along_is_refused(tmp_path: Path) -> None:
    """Neither `check` nor a worker is taken along."""
    config = write(tmp_path, MASKED, "abort_on_padding")
    ran = check(config)
    assert 3 == ran.exit_code
    assert "every output: padding of seq (strategy native) changes the results" in ran.stderr
    assert "SIGABRT" in ran.stderr
    loaded = load_settings(config)
    with pytest.raises(ConfigurationError, match="SIGABRT"):
        compile_models(loaded, loaded.settings.models, slots=1, threads=None)


def test_what_dies_alone_is_not_run_by_check_itself(tmp_path: Path) -> None:
    """It cannot be judged, and this process goes on to say so."""
    ran = check(write(tmp_path, ROWS, "abort_always"))
    assert 0 == ran.exit_code
    assert "warning: " in ran.stderr
    assert "batching cannot be judged: " in ran.stderr
    assert "SIGABRT" in ran.stderr


def test_what_cannot_be_judged_is_served_one_request_a_call(tmp_path: Path) -> None:
    """With the reason and the remedy; `trust: true` batches it all the same."""
    config = write(tmp_path, ROWS, "at_random")
    ran = check(config)
    assert 0 == ran.exit_code, ran.output
    assert "batching cannot be judged: output 'y' differs when the same request is repeated" in ran.stderr
    assert "; each request runs alone (describe realistic inputs by `probe`, or vouch" in ran.stderr
    loaded = load_settings(config)
    models = compile_models(loaded, loaded.settings.models, slots=1, threads=None)
    assert models["m"].signature.strategy.alone
    trusted = load_settings(write(tmp_path, ROWS, "at_random", more="    trust: true\n"))
    models = compile_models(trusted, trusted.settings.models, slots=1, threads=None)
    assert not models["m"].signature.strategy.alone


def test_padding_that_cannot_be_judged_is_left_off(tmp_path: Path) -> None:
    """A model whose padding moves a tie in each request; requests of one size share calls."""
    text = """\
models:
  - name: m
    function: breakable:best_position
    inputs: {x: {shape: "batch:1..8, n:1..64", element_type: f32, pad: {n: -100}}}
    outputs: {y: {shape: "batch", element_type: i64}}
    probe: {x: {uniform: [-3, 3]}}
"""
    config = tmp_path / "x.yaml"
    config.write_text(text)
    loaded = load_settings(config)
    with structlog.testing.capture_logs() as logs:
        models = compile_models(loaded, loaded.settings.models, slots=1, threads=None)
    assert (False, False) == models["m"].signature.paddable
    assert not models["m"].signature.strategy.alone
    (warning,) = [entry["what"] for entry in logs if entry["log_level"] == "warning"]
    assert "padding of n cannot be judged: " in warning
    assert "n is not padded (describe realistic inputs by `probe`" in warning


def test_what_hangs_in_check_itself_does_not_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so and ends, and leaves the call behind."""
    monkeypatch.setattr("shapestream_workers.check.RUN_TIMEOUT_S", 0.05)
    released = importlib.import_module("breakable").RELEASED
    try:
        ran = check(write(tmp_path, ROWS, "hangs_in_check"))
    finally:
        released.set()
    assert 3 == ran.exit_code
    assert "no answer within 0.05 s for batch 1, n 1" in ran.stderr


def test_unproved_padding_stays_off_with_a_warning(tmp_path: Path) -> None:
    """Batching goes on; both warnings name the output and what to do."""
    config = write(tmp_path, MASKED.replace("[0, 99]", "[0, 0]"), "mean_of_all")
    ran = check(config)
    assert 0 == ran.exit_code, ran.output
    assert "output 'y': padding of seq is unproved: it never changed over" in ran.stderr
    assert "seq is not padded (describe realistic inputs by `probe`" in ran.stderr
    assert "output 'y': batching is unproved" in ran.stderr
    loaded = load_settings(config)
    with structlog.testing.capture_logs() as logs:
        models = compile_models(loaded, loaded.settings.models, slots=1, threads=None)
    assert (False, False) == models["m"].signature.paddable
    assert models["m"].signature.has_batch
    warnings = [entry["what"] for entry in logs if entry["log_level"] == "warning"]
    assert [True, True] == ["output 'y'" in warning for warning in warnings]


def test_trust_serves_it_all_the_same(tmp_path: Path) -> None:
    """A worker does not even try, and logs it; `check` tries, and warns."""
    config = write(tmp_path, MASKED, "mean_of_all", more="    trust: true\n")
    ran = check(config)
    assert 0 == ran.exit_code, ran.output
    assert "served nevertheless" in ran.stderr
    loaded = load_settings(config)
    with structlog.testing.capture_logs() as logs:
        models = compile_models(loaded, loaded.settings.models, slots=1, threads=None)
    assert (False, True) == models["m"].signature.paddable
    assert ["model is served without proof"] == [
        each["event"] for each in logs if each["log_level"] == "warning"
    ]


def test_a_script_reads_the_same(tmp_path: Path) -> None:
    """Verdicts, cases and differences as JSON."""
    ran = check(write(tmp_path, MASKED, "mean_of_all"), "--json")
    report = json.loads(ran.stdout)
    assert (3, False) == (ran.exit_code, report["ok"])
    findings = report["models"][0]["proof"]["findings"]
    assert ["proved", "refuted"] == [finding["verdict"] for finding in findings]
    assert findings[1]["largest"] > findings[1]["allowed"]
    assert "seq" in report["problems"][0]


def test_a_mistake_in_the_samples_points_to_them(tmp_path: Path) -> None:
    """An .npz that is none."""
    (tmp_path / "real.npz").write_bytes(b"no archive")
    ran = check(write(tmp_path, ROWS, "constant", more="    probe: real.npz\n"))
    assert 3 == ran.exit_code
    assert ":6:5: models[0].probe: cannot read samples from" in ran.stderr


def test_an_answer_that_the_outputs_bounds_exclude_is_told(tmp_path: Path) -> None:
    """`check` warns of the sizes at which the model gives no frame though the YAML announces one, and advises no padding."""
    outputs = '    outputs: {frames: {shape: "batch, time:1.., 4", element_type: f32, rule: rows}}\n'
    config = write(tmp_path, "".join(ROWS.splitlines(keepends=True)[:4]), "frames_of_four", more=outputs)
    words = "output 'frames' has the shape [1, 0, 4], and the signature announces [batch, time:1.., 4]"
    ran = check(config)
    assert 0 == ran.exit_code, ran.output
    assert f"failed on made-up inputs, batch 1, n 1: {words} (if the model takes no such sizes" in ran.stderr
    assert f"a request alone breaks the rule of an output: inputs no. 0: {words}" in ran.stdout
    config.write_text(config.read_text().replace("time:1..", "time"))
    assert "announces" not in check(config).output
