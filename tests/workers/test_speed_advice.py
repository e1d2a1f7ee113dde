"""What `check` says about speed: the slots that were chosen, what others would give, and bf16."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from tests.onnx_files import write_onnx
from typer.testing import CliRunner, Result

from shapestream.loading import models
from shapestream_engine.backends.openvino import compiling
from shapestream_engine.backends.openvino.runtime import core
from shapestream_engine.comparison import AnswerDistance, Gain
from shapestream_workers.advice import PrecisionAdvice, SlotsAdvice
from shapestream_workers.cli import app

MODEL = "models: [{name: m, path: m.onnx, inputs: {x: {shape: 'batch:1..8, 256'}}%s}]\n"
BF16 = {"INFERENCE_PRECISION_HINT": "bf16"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a product of matrices, on a machine of two CPUs."""
    weights = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    write_onnx(tmp_path / "m.onnx", [node], {"x": ["batch", 256]}, {"y": ["batch", 64]}, {"w": weights})
    monkeypatch.setattr(models, "available_cpus", lambda: 2)
    return tmp_path


def check(folder: Path, text: str, *options: str) -> Result:
    """`shapestream check` of this text, which finds no problem."""
    (folder / "x.yaml").write_text(text)
    ran = CliRunner().invoke(app, ["check", str(folder / "x.yaml"), *options])
    assert 0 == ran.exit_code, ran.output
    return ran


@pytest.mark.skipif(
    "BF16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"), reason="this CPU has no bf16"
)
def test_bf16_is_measured_on_the_model(folder: Path) -> None:
    """Its answers differ, but by little, and the calls of the proof's shapes were timed."""
    report = json.loads(check(folder, MODEL % "", "--json").stdout)
    found = report["models"][0]["speed"]["precision"]
    assert BF16 == found["properties"]
    assert 0 < found["gain"]["least"] <= found["gain"]["mean"] <= found["gain"]["most"]
    distance = found["distance"]
    assert 0 < distance["of_spread"] < 0.1
    assert 0 < distance["same_argmax"] <= distance["vectors"]


def test_bf16_is_not_mentioned_where_the_device_lacks_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where the configuration names a precision, or nothing is to be measured."""
    assert "bf16" not in check(folder, MODEL % "", "--measure", "0").stdout
    stated = ", properties: {INFERENCE_PRECISION_HINT: f32}"
    assert "bf16" not in check(folder, MODEL % stated).stdout

    def without_bf16(capabilities: list[str], properties: dict[str, str]) -> object:
        return offered([name for name in capabilities if name != "BF16"], properties)

    offered = compiling.bf16_if_offered
    monkeypatch.setattr(compiling, "bf16_if_offered", without_bf16)
    assert "bf16" not in check(folder, MODEL % "").stdout


def test_another_number_of_slots_is_measured(folder: Path) -> None:
    """On the same threads, with the lines to write."""
    places = {"": "workers", "in_process: true\n": "in_process", "workers: [{count: 1}]\n": "workers[0]"}
    for placement, place in places.items():
        ran = check(folder, (MODEL % "") + placement, "--json", "--measure", "600")
        found = json.loads(ran.stdout)["models"][0]["speed"]["slots"]
        assert (place, 2, True) == (found["place"], found["threads"], found["auto"])
        assert {1, 2} == {found["slots"], found["other"]}
        assert found["rate"]["mean"] > 0
        assert found["lone"]["mean"] > 0


def test_what_takes_too_long_is_left_out_and_said(folder: Path) -> None:
    """A compilation takes more than a microsecond."""
    lines = check(folder, MODEL % "", "--measure", "0.000001").stdout
    assert "others are not measured: it takes 3 compilations of " in lines
    assert "not measured: it takes " in lines


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("in_process: {slots: 2, threads: 1}\n", "2:24: in_process.threads: fewer than the 2 slots: "),
        ("workers: [{slots: 4, threads: 3}]\n", "2:22: workers[0].threads: fewer than the 4 slots: "),
        ("workers: [{slots: 4}]\n", None),
        ("workers: [{slots: 4, threads: 4}]\n", None),
    ],
)
def test_fewer_threads_than_slots_are_warned_of(folder: Path, given: str, expected: str | None) -> None:
    """`threads` counts for the process; many read it as a slot's own."""
    warned = [
        line
        for line in check(folder, (MODEL % "") + given, "--measure", "0").stderr.splitlines()
        if "fewer than" in line
    ]
    assert ([] if expected is None else [True]) == [f"x.yaml:{expected}" in line for line in warned]


ONE = Gain(mean=1.0, least=1.0, most=1.0)


@pytest.mark.parametrize(
    ("advice", "expected"),
    [
        (
            PrecisionAdvice(
                properties=BF16,
                gain=Gain(mean=1.731, least=1.04, most=2.32),
                distance=AnswerDistance(of_spread=0.004, vectors=4096, same_argmax=4096, answers=128),
            ),
            "bf16: 1.73 x as fast (1.04 to 2.32 x by call shape); answers differ by at most 0.4 % of their spread, argmax "
            "equal in 4,096 of 4,096: set properties: {INFERENCE_PRECISION_HINT: bf16}",
        ),
        (
            PrecisionAdvice(properties=BF16, gain=ONE, distance=AnswerDistance()),
            "bf16: 1.00 x as fast; nothing to gain",
        ),
        (
            PrecisionAdvice(properties=BF16, gain=ONE, distance=AnswerDistance(), waited=0.5),
            "bf16: 1.00 x as fast; nothing to gain (doubtful: the threads waited for a CPU 50% of the time; repeat it "
            "without other load)",
        ),
        (
            PrecisionAdvice(properties=BF16, why="calls take too long"),
            "bf16: not measured: calls take too long",
        ),
        (
            SlotsAdvice(
                place="workers",
                slots=2,
                threads=2,
                auto=True,
                other=1,
                rate=Gain(mean=0.8, least=0.7, most=0.9),
                lone=Gain(mean=1.25, least=1.0, most=1.5),
            ),
            "slots: 2 of 1 thread, chosen by auto; 1 of 2 threads: 0.80 x the calls per second under load, and a lone call "
            "takes 0.80 x as long: workers: [{slots: 1, threads: 2}]",
        ),
        (
            SlotsAdvice(place="in_process", slots=1, threads=1, auto=False),
            "slots: 1 of 1 thread, as given",
        ),
    ],
)
def test_advice_in_one_line(advice: PrecisionAdvice | SlotsAdvice, expected: str) -> None:
    """With the figures and what to write."""
    assert [expected] == [*advice.lines()]
