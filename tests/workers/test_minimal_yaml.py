"""A YAML of a name and a path: files of several exporters are served in batches, or a warning says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import yaml
from onnx import TensorProto, helper
from openvino import opset13 as ops
from tests.onnx_files import write_classifier, write_onnx
from typer.testing import CliRunner, Result

from shapestream_workers.cli import app

ENGINES = ("openvino", pytest.param("onnxruntime", marks=pytest.mark.thorough))
BATCHED = "batch: ?, requests share calls along it"
ALONE = "no batch axis: every request runs alone"


def linear(path: Path, rows: Any, columns: Any = 4) -> None:
    """`y` = `x` times a matrix: rows are independent of each other."""
    matrix = np.linspace(-1, 1, 12).reshape(4, 3).astype(np.float32)
    write_onnx(
        path,
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"x": [rows, columns]},
        {"y": [rows, 3]},
        {"w": matrix},
    )


def transformer(path: Path, batch: str, length: str) -> None:
    """Token ids and their mask, as Optimum exports them: the hidden states are embeddings times the mask."""
    table = np.random.default_rng(1).normal(size=(64, 4)).astype(np.float32)
    write_onnx(
        path,
        [
            helper.make_node("Mod", ["input_ids", "size"], ["ids"]),
            helper.make_node("Gather", ["table", "ids"], ["embedded"]),
            helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
            helper.make_node("Mul", ["embedded", "column"], ["last_hidden_state"]),
        ],
        {"input_ids": [batch, length], "attention_mask": [batch, length]},
        {"last_hidden_state": [batch, length, 4]},
        {"table": table, "last": np.array([2], np.int64), "size": np.array(64, np.int64)},
        types={"input_ids": TensorProto.INT64, "attention_mask": TensorProto.INT64},
    )


def centred(path: Path, rows: Any) -> None:
    """`y` = `x` less the mean of its rows: a request's result depends on its company."""
    write_onnx(
        path,
        [
            helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
            helper.make_node("Sub", ["x", "mean"], ["centred"]),
            helper.make_node("Add", ["x", "centred"], ["y"]),
        ],
        {"x": [rows, 4]},
        {"y": [rows, 4]},
    )


def run(
    folder: Path, command: str, more: str = "", *, engine: str | None = None, file: str = "m.onnx"
) -> Result:
    """`shapestream COMMAND x.yaml`, where the YAML names a model `m` and its file."""
    lines = ["models:", "  - name: m", f"    path: {file}", f"    engine: {engine}" if engine else "", more]
    (folder / "x.yaml").write_text("\n".join(line for line in lines if line) + "\n")
    return CliRunner().invoke(app, [command, str(folder / "x.yaml")])


def advised(ran: Result) -> str:
    """The `inputs:` line that a warning advises, which must be YAML by itself."""
    start = ran.stderr.index("inputs: {")
    line = ran.stderr[start : ran.stderr.index("}}", start) + 2]
    assert isinstance(yaml.safe_load(line), dict)
    return f"    {line}\n"


@pytest.mark.parametrize(
    ("engine", "rows"),
    [
        *(("onnxruntime", rows) for rows in ("batch", "batch_size", "N", "n", "bs", "s23", "unk__7", None)),
        ("openvino", "batch_size"),
        ("openvino", None),
    ],
)
def test_the_usual_names_of_a_first_axis_are_the_batch(tmp_path: Path, engine: str, rows: str | None) -> None:
    """Whatever an exporter calls it, or where it calls it nothing, requests share calls without a warning."""
    linear(tmp_path / "m.onnx", rows)
    ran = run(tmp_path, "check", engine=engine)
    assert (0, "") == (ran.exit_code, ran.stderr)
    assert "input  x: f32 [batch, 4]" in ran.stdout
    assert BATCHED in ran.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_a_transformer_of_optimum_is_served_in_batches(tmp_path: Path, engine: str) -> None:
    """Both engines know both of the file's names, so one length belongs to both inputs."""
    transformer(tmp_path / "m.onnx", "batch_size", "sequence_length")
    ran = run(tmp_path, "check", engine=engine)
    assert (0, "") == (ran.exit_code, ran.stderr)
    assert "input  input_ids: i64 [batch, sequence_length]" in ran.stdout
    assert "input  attention_mask: i64 [batch, sequence_length]" in ran.stdout
    assert "output last_hidden_state: f32 [batch, sequence_length, 4], {rule: rows}" in ran.stdout
    assert BATCHED in ran.stdout


def test_a_classifier_of_scikit_learn_is_served_in_batches(tmp_path: Path) -> None:
    """Its outputs get their rules, too."""
    write_classifier(tmp_path / "m.onnx", zipmap=False)
    ran = run(tmp_path, "check", engine="onnxruntime")
    assert (0, "") == (ran.exit_code, ran.stderr)
    assert BATCHED in ran.stdout


def test_an_ir_without_names_is_served_in_batches(tmp_path: Path) -> None:
    """An IR never has names of dimensions."""
    x = ops.parameter([-1, 4], np.float32, name="x")
    ov.save_model(ov.Model([ops.result(ops.add(x, x))], [x]), tmp_path / "m.xml")
    ran = run(tmp_path, "check", file="m.xml")
    assert (0, "") == (ran.exit_code, ran.stderr)
    assert BATCHED in ran.stdout


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rows", ["batch", "batch_size", None])
def test_an_axis_along_which_the_proof_fails_is_no_batch_axis(
    tmp_path: Path, engine: str, rows: str | None
) -> None:
    """Nobody wrote that it is one: requests run alone, and the warning has the proof's evidence."""
    centred(tmp_path / "m.onnx", rows)
    ran = run(tmp_path, "check", engine=engine)
    assert 0 == ran.exit_code, ran.output
    assert ALONE in ran.stdout
    assert f"warning: {tmp_path}/x.yaml:2:5: models[0]: every request runs alone: with the " in ran.stderr
    assert "batching changes the results: largest difference " in ran.stderr
    assert "batching: {max_batch: 1} says that this is meant" in ran.stderr
    silenced = run(tmp_path, "check", "    batching: {max_batch: 1}", engine=engine)
    assert (0, "") == (silenced.exit_code, silenced.stderr)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_axis_that_a_user_wrote_is_refused_where_the_proof_fails(tmp_path: Path, engine: str) -> None:
    """What the configuration states is never dropped silently."""
    centred(tmp_path / "m.onnx", "batch_size")
    ran = run(tmp_path, "check", "    inputs: {x: {shape: 'batch, 4'}}", engine=engine)
    assert 3 == ran.exit_code
    assert "output 'y': batching (strategy native) changes the results" in ran.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_the_input_to_blame_is_named_with_the_lines_that_help(tmp_path: Path, engine: str) -> None:
    """With these lines in the YAML requests share calls, and there is no warning any more."""
    linear(tmp_path / "m.onnx", "frames")
    for command in ("check", "models"):
        ran = run(tmp_path, command, engine=engine)
        assert 0 == ran.exit_code
        assert ALONE in ran.stdout
        assert (
            f"warning: {tmp_path}/x.yaml:2:5: models[0]: every request runs alone: input 'x' [frames, 4] calls its "
            "first axis 'frames', not batch (if rows do not depend on each other, add inputs: {x: {shape: 'batch, 4'}} "
            "to the model; else batching: {max_batch: 1} says that this is meant)\n"
        ) == ran.stderr
    helped = run(tmp_path, "check", advised(ran), engine=engine)
    assert (0, "") == (helped.exit_code, helped.stderr)
    assert BATCHED in helped.stdout


def test_a_first_axis_of_fixed_size_is_to_blame(tmp_path: Path) -> None:
    """OpenVINO can open it, so the lines that do are printed; ONNX Runtime cannot."""
    linear(tmp_path / "m.onnx", 1)
    ran = run(tmp_path, "check", engine="onnxruntime")
    assert (
        "every request runs alone: input 'x' [1, 4] has a first axis of fixed size, 1 (export it with a dynamic first "
        "axis of every input; or batching: {max_batch: 1} says that this is meant)" in ran.stderr
    )
    ran = run(tmp_path, "check")
    assert 0 == ran.exit_code, ran.output
    helped = run(tmp_path, "check", advised(ran))
    assert (0, "") == (helped.exit_code, helped.stderr)
    assert BATCHED in helped.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_first_axes_of_different_names_are_not_one_batch(tmp_path: Path, engine: str) -> None:
    """Two sizes of a file are two: requests that have both keep working."""
    write_onnx(
        tmp_path / "m.onnx",
        [
            helper.make_node("Transpose", ["b"], ["t"], perm=[1, 0]),
            helper.make_node("MatMul", ["a", "t"], ["y"]),
        ],
        {"a": ["N", 4], "b": ["batch_size", 4]},
        {"y": ["N", "batch_size"]},
    )
    ran = run(tmp_path, "check", engine=engine)
    assert 0 == ran.exit_code, ran.output
    assert (
        "the axes that may be the batch differ: input 'a' calls it 'N', input 'b' calls it 'batch_size'"
        in ran.stderr
    )
    assert ALONE in ran.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_a_guess_that_cannot_be_proved_is_not_served(tmp_path: Path, engine: str) -> None:
    """Outputs that never change prove nothing; the warning says how to prove more, or to vouch."""
    write_onnx(
        tmp_path / "m.onnx",
        [helper.make_node("Mul", ["x", "zero"], ["clear"]), helper.make_node("IsNaN", ["clear"], ["y"])],
        {"x": ["N", 4]},
        {"y": ["N", 4]},
        {"zero": np.array(0, np.float32)},
        types={"y": TensorProto.BOOL},
    )
    ran = run(tmp_path, "check", engine=engine)
    assert 0 == ran.exit_code, ran.output
    assert ALONE in ran.stdout
    assert "is unproved: " in ran.stderr
    assert (
        "(describe realistic inputs by `probe`, or add inputs: {x: {shape: 'batch, 4'}} to the model; else "
        in ran.stderr
    )


def test_trust_vouches_for_no_guess(tmp_path: Path) -> None:
    """With `trust: true` nothing is tried, so no axis is guessed."""
    linear(tmp_path / "m.onnx", "N")
    ran = run(tmp_path, "models", "    trust: true")
    assert 0 == ran.exit_code, ran.output
    assert ALONE in ran.stdout
    assert "trust: true forbids to try it (if rows do not depend on each other, add inputs: " in ran.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_naming_one_input_names_the_symbol_everywhere(tmp_path: Path, engine: str) -> None:
    """What the file calls alike is alike, for both engines."""
    transformer(tmp_path / "m.onnx", "examples", "tokens")
    ran = run(tmp_path, "check", "    inputs: {input_ids: {shape: 'batch:1..8, seq:1..16'}}", engine=engine)
    assert (0, "") == (ran.exit_code, ran.stderr)
    assert "input  attention_mask: i64 [batch:1..8, seq:1..16]" in ran.stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_the_second_axis_is_tried_where_the_first_is_time(tmp_path: Path, engine: str) -> None:
    """Sums along the first axis: requests share calls along the second, and the output follows it."""
    write_onnx(
        tmp_path / "m.onnx",
        [helper.make_node("CumSum", ["x", "axis"], ["y"])],
        {"x": [None, None, 4]},
        {"y": [None, None, 4]},
        {"axis": np.array(0)},
    )
    ran = run(tmp_path, "check", engine=engine)
    assert 0 == ran.exit_code, ran.output
    assert "input  x: f32 [?, batch, 4]" in ran.stdout
    assert BATCHED in ran.stdout


def summed(path: Path) -> None:
    """Rows of `x` that are above 0, each with its index: `y` has rows whose owners neither file nor YAML names."""
    write_onnx(
        path,
        [
            helper.make_node("Greater", ["x", "zero"], ["above"]),
            helper.make_node("NonZero", ["above"], ["columns"]),
            helper.make_node("Transpose", ["columns"], ["y"], perm=[1, 0]),
        ],
        {"x": ["N", 6]},
        {"y": ["found", 2]},
        {"zero": np.array(0, np.float32)},
        types={"y": TensorProto.INT64},
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_every_command_infers_the_same_rules(tmp_path: Path, engine: str) -> None:
    """`models` and `simulate` accept what `check` accepts, and show what it shows."""
    summed(tmp_path / "m.onnx")
    for command in ("check", "models"):
        ran = run(tmp_path, command, engine=engine)
        assert 0 == ran.exit_code, ran.output
        assert "{rule: index_column, column: 0}" in ran.stdout
        assert BATCHED in ran.stdout
    simulated = CliRunner().invoke(
        app,
        f"simulate {tmp_path}/x.yaml --sizes batch=1 --rate 100 --requests 20 --cost fixed_ms=1".split(),
    )
    assert 0 == simulated.exit_code, simulated.output


def yaml_lines(ran: Result) -> str:
    """The lines that `check` advises, as they stand below a model."""
    lines = ran.stdout.splitlines()
    start = lines.index("    inputs:")
    end = next(number for number in range(start + 1, len(lines)) if not lines[number].startswith("     "))
    return "\n".join(lines[start:end])


@pytest.mark.parametrize("engine", ENGINES)
def test_padding_is_proved_before_it_is_advised(tmp_path: Path, engine: str) -> None:
    """The lines are printed; with them the YAML allows the padding, and nothing more is advised."""
    transformer(tmp_path / "m.onnx", "batch_size", "sequence_length")
    ran = run(tmp_path, "check", engine=engine)
    assert (
        "  padding of sequence_length with 0 was tried for advice, and proved: requests of different sizes share calls "
        "with these lines in the model"
    ) in ran.stdout.splitlines()
    lines = yaml_lines(ran)
    port = {"pad": {"sequence_length": 0}}
    assert {"inputs": {"input_ids": port, "attention_mask": port}} == yaml.safe_load(lines)
    helped = run(tmp_path, "check", lines, engine=engine)
    assert (0, "") == (helped.exit_code, helped.stderr)
    assert "  sequence_length: ?, may be padded" in helped.stdout.splitlines()
    assert "for advice" not in helped.stdout


def test_an_axis_without_a_name_gets_one_in_the_lines(tmp_path: Path) -> None:
    """Only named axes may be padded; a sum over the axis stays what it is."""
    x = ops.parameter([-1, -1, 4], np.float32, name="x")
    y = ops.reduce_sum(x, ops.constant([1]))
    ov.save_model(ov.Model([ops.result(y)], [x]), tmp_path / "m.xml")
    ran = run(tmp_path, "check", file="m.xml")
    lines = yaml_lines(ran)
    assert {"inputs": {"x": {"shape": "batch, size1, 4", "pad": {"size1": 0}}}} == yaml.safe_load(lines)
    helped = run(tmp_path, "check", lines, file="m.xml")
    assert (0, "") == (helped.exit_code, helped.stderr)
    assert "  size1: ?, may be padded" in helped.stdout.splitlines()


@pytest.mark.thorough
def test_padding_that_changes_results_is_not_advised(tmp_path: Path) -> None:
    """Of two dimensions the sum's may be padded, and the mean's may not: evidence for one, lines for the other."""
    write_onnx(
        tmp_path / "m.onnx",
        [
            helper.make_node("ReduceMean", ["x"], ["mean"], axes=[2], keepdims=0),
            helper.make_node("ReduceSum", ["mean", "one"], ["y"], keepdims=0),
        ],
        {"x": ["batch", "summed", "averaged", 3]},
        {"y": ["batch", 3]},
        {"one": np.array([1], np.int64)},
    )
    ran = run(tmp_path, "check")
    assert (0, "") == (ran.exit_code, ran.stderr)
    (against,) = [line for line in ran.stdout.splitlines() if "is not advised" in line]
    assert against.startswith(
        "  padding of averaged with 0 was tried for advice, and is not advised: output 'y' changes: "
    )
    assert {"inputs": {"x": {"pad": {"summed": 0}}}} == yaml.safe_load(yaml_lines(ran))
    report = CliRunner().invoke(app, ["check", "--json", str(tmp_path / "x.yaml")])
    (model,) = json.loads(report.stdout)["models"]
    assert (["summed"], ["averaged"]) == (model["padding"]["proved"], list(model["padding"]["refused"]))
