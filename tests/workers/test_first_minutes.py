"""Mistakes of the first ten minutes with a YAML of one's own: each is said with what to write instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.onnx_files import write_classifier, write_onnx
from typer.testing import CliRunner, Result

from shapestream_workers.cli import app

ENGINES = ("openvino", pytest.param("onnxruntime", marks=pytest.mark.thorough))


def relu(path: Path) -> Path:
    """`y` = the part of `x` above 0."""
    return write_onnx(
        path, [helper.make_node("Relu", ["x"], ["y"])], {"x": ["batch", 4]}, {"y": ["batch", 4]}
    )


def convolution(path: Path) -> Path:
    """Takes signals of 20 samples and more."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], strides=[2]),
        helper.make_node("ReduceMean", ["c"], ["y"], axes=[2], keepdims=0),
    ]
    weights = np.linspace(-1, 1, 40).reshape(2, 1, 20).astype(np.float32)
    return write_onnx(path, nodes, {"x": ["batch", 1, "length"]}, {"y": ["batch", 2]}, {"w": weights})


def clock(path: Path, element_type: int) -> Path:
    """Seconds since a moment of the year 2023, in numbers of this type."""
    moment = helper.make_tensor("moment", element_type, [], [1.7e9])
    nodes = [
        helper.make_node("Constant", [], ["moment"], value=moment),
        helper.make_node("Sub", ["x", "moment"], ["y"]),
    ]
    types = {"x": element_type, "y": element_type}
    return write_onnx(path, nodes, {"x": ["batch", 4]}, {"y": ["batch", 4]}, types=types)


def check(folder: Path, text: str, *options: str) -> Result:
    """`shapestream check` of this text."""
    (folder / "x.yaml").write_text(text)
    return CliRunner().invoke(app, ["check", str(folder / "x.yaml"), *options])


def problems(ran: Result, folder: Path) -> list[str]:
    """The lines on stderr of a configuration that is refused, without the file's name."""
    assert 3 == ran.exit_code, ran.output
    return [line.removeprefix(f"{folder}/x.yaml:") for line in ran.stderr.splitlines()]


def test_faulty_workers_hide_no_problem_of_a_model(tmp_path: Path) -> None:
    """The models are compiled and tried all the same, so one run finds everything."""
    write_classifier(tmp_path / "m.onnx", zipmap=True)
    ran = check(tmp_path, "models: [{name: m, path: m.onnx}]\nworkers: 2\n")
    first, second = problems(ran, tmp_path)
    assert first.startswith("2:1: workers: expected a list")
    assert second.startswith("1:20: models[0].path: cannot read the model")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_output_that_is_no_tensor(tmp_path: Path, engine: str) -> None:
    """What to tell the exporter stands in the message."""
    write_classifier(tmp_path / "m.onnx", zipmap=True)
    ran = check(tmp_path, f"models: [{{name: m, path: m.onnx, engine: {engine}}}]\n")
    (problem,) = problems(ran, tmp_path)
    assert problem.endswith(
        "output 'y': a sequence or a map, which is no tensor "
        "(export the model without ZipMap; with skl2onnx: options={'zipmap': False})"
    )


def test_an_operator_that_openvino_has_not(tmp_path: Path) -> None:
    """ONNX Runtime takes it by itself; it is advised where the engine is named."""
    write_classifier(tmp_path / "m.onnx", zipmap=False)
    ran = check(tmp_path, "models: [{name: m, path: m.onnx, engine: openvino}]\n")
    (problem,) = problems(ran, tmp_path)
    assert "ai.onnx.ml.LinearClassifier" in problem
    assert problem.endswith(" (ONNX Runtime may have what OpenVINO lacks: engine: onnxruntime)")
    for engine in ("", ", engine: auto", ", engine: onnxruntime"):
        ran = check(tmp_path, f"models: [{{name: m, path: m.onnx{engine}}}]\n")
        assert (0, "") == (ran.exit_code, ran.stderr)


def test_the_choice_of_an_engine_and_its_reason_are_told(tmp_path: Path) -> None:
    """A line of `check`, and an entry of its JSON; OpenVINO would compute the times as f32."""
    clock(tmp_path / "m.onnx", TensorProto.DOUBLE)
    text = "models: [{name: m, path: m.onnx}]\n"
    (line,) = [line for line in check(tmp_path, text).stdout.splitlines() if line.startswith("  engine ")]
    assert line.startswith("  engine onnxruntime (openvino: model 'm': OpenVINO computes f64 as f32")
    (model,) = json.loads(check(tmp_path, text, "--json").stdout)["models"]
    assert ("onnxruntime", ["openvino"]) == (model["engine"]["engine"], [*model["engine"]["passed_over"]])
    clock(tmp_path / "m.onnx", TensorProto.FLOAT)
    assert "  engine openvino" in check(tmp_path, text).stdout.splitlines()


@pytest.mark.parametrize(
    ("engine", "output"),
    [
        ("openvino", "{rule: rows}"),
        pytest.param("onnxruntime", "{rule: rows, shape: 'batch, 4'}", marks=pytest.mark.thorough),
    ],
)
def test_a_rule_may_be_stated_before_the_batch_axis_is_found(
    tmp_path: Path, engine: str, output: str
) -> None:
    """The file names no axis, and the YAML no input; the rule is judged with the axis that is tried."""
    node = helper.make_node("Relu", ["x"], ["y"])
    write_onnx(tmp_path / "m.onnx", [node], {"x": [None, 4]}, {"y": [None, 4]})
    text = f"models: [{{name: m, path: m.onnx, engine: {engine}, outputs: {{y: {output}}}}}]\n"
    ran = check(tmp_path, text, "--beside", "none")
    assert (0, "") == (ran.exit_code, ran.stderr)
    assert "  batch: ?, requests share calls along it" in ran.stdout.splitlines()


def test_answers_of_two_engines_that_differ_are_told(tmp_path: Path) -> None:
    """By default, as a warning; not where `--beside none` switches the comparison off."""
    nodes = [helper.make_node("ReduceLogSumExp", ["x"], ["y"], axes=[1], keepdims=0)]
    write_onnx(tmp_path / "m.onnx", nodes, {"x": ["n", 4]}, {"y": ["n"]}, opset=13)
    text = "models: [{name: m, path: m.onnx, batching: {max_batch: 1}}]\n"
    words = "models[0]: output 'y': openvino answers the shape [] and onnxruntime [8] ("
    ran = check(tmp_path, text)
    assert (0, True) == (ran.exit_code, words in ran.stderr), ran.output
    assert "  beside onnxruntime: 1 output differs beyond its tolerance on " in ran.stdout
    (model,) = json.loads(check(tmp_path, text, "--json").stdout)["models"]
    assert ["y"] == [found["output"] for found in model["beside"]["differences"]]
    ran = check(tmp_path, text, "--beside", "none")
    assert "onnxruntime" not in ran.output
    (line,) = check(tmp_path, text, "--beside", "tensorflow").stderr.splitlines()
    assert "--beside: unknown engine 'tensorflow'; known are openvino, onnxruntime" in line


def test_no_other_engine_is_advised_for_a_damaged_file(tmp_path: Path) -> None:
    """No engine reads it."""
    path = relu(tmp_path / "m.onnx")
    path.write_bytes(path.read_bytes()[:-20])
    (problem,) = problems(check(tmp_path, "models: [{name: m, path: m.onnx}]\n"), tmp_path)
    assert "onnxruntime" not in problem


@pytest.mark.parametrize("engine", ENGINES)
def test_sizes_that_a_model_refuses_are_to_be_bounded(tmp_path: Path, engine: str) -> None:
    """`check` accepts what `serve` accepts, and warns with bounds; with them nothing is left to warn of."""
    convolution(tmp_path / "m.onnx")
    text = f"models:\n  - name: m\n    path: m.onnx\n    engine: {engine}\n"
    ran = check(tmp_path, text)
    assert 0 == ran.exit_code, ran.output
    advised = "inputs: {x: {shape: 'batch, 1, length:20..'}}"
    (line,) = ran.stderr.splitlines()
    sizes = "batch 1, length 1; batch 3, length 16"
    assert line.startswith(f"warning: {tmp_path}/x.yaml:2:5: models[0]: failed on made-up inputs, {sizes}: ")
    assert line.endswith(f" (if the model takes no such sizes, bound them, such as by {advised})")
    assert ran.stdout.endswith(
        "ok: 1 model compiled and run, 1 not at all sizes that were tried (see the warning)\n"
    )
    ran = check(tmp_path, f"{text}    {advised}\n")
    assert (0, "") == (ran.exit_code, ran.stderr)


def test_no_bounds_are_advised_that_would_refuse_what_runs(tmp_path: Path) -> None:
    """A model that takes whole blocks of 8 only."""
    blocks = np.array([0, -1, 8])
    nodes = [
        helper.make_node("Reshape", ["x", "blocks"], ["r"]),
        helper.make_node("ReduceMean", ["r"], ["y"], axes=[1, 2]),
    ]
    write_onnx(
        tmp_path / "m.onnx", nodes, {"x": ["batch", "length"]}, {"y": ["batch", 1, 1]}, {"blocks": blocks}
    )
    ran = check(tmp_path, "models: [{name: m, path: m.onnx, engine: onnxruntime}]\n")
    assert (
        "(it takes multiples of 8 only as length: 16, 24 and 32 ran, none between 16 and 24; resize or pad inputs before "
        "they are sent)\n"
    ) in ran.stderr
    assert "bound them" not in ran.stderr


def test_sizes_that_follow_no_step_are_told_as_they_are(tmp_path: Path) -> None:
    """A model that takes divisors of 48 only: no multiple of one number, and no bounds."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "one"], ["length"]),
        helper.make_node("Div", ["whole", "length"], ["parts"]),
        helper.make_node("Concat", ["length", "parts"], ["shape"], axis=0),
        helper.make_node("Reshape", ["table", "shape"], ["r"]),
        helper.make_node("ReduceSum", ["r", "one"], ["weights"], keepdims=0),
        helper.make_node("Mul", ["x", "weights"], ["y"]),
    ]
    known = {"one": np.array([1]), "whole": np.array([48]), "table": np.linspace(1, 2, 48).astype(np.float32)}
    write_onnx(tmp_path / "m.onnx", nodes, {"x": ["batch", "length"]}, {"y": ["batch", "length"]}, known)
    ran = check(tmp_path, "models: [{name: m, path: m.onnx, engine: onnxruntime}]\n")
    assert "multiples" not in ran.stderr


def test_no_more_rows_run_than_the_configuration_allows(tmp_path: Path) -> None:
    """A model that takes one row only is in order with `max_batch: 1`."""
    (tmp_path / "lone.py").write_text("def lone(x):\n    assert len(x) == 1, 'one row'\n    return 2 * x\n")
    ports = "inputs: {x: {shape: 'batch, n', element_type: f32}}, outputs: {y: {shape: 'batch, n', element_type: f32}}"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        model = f"name: m, function: 'lone:lone', {ports}, batching: {{max_batch: 1}}"
        ran = check(tmp_path, f"models: [{{{model}}}]\n")
    assert (0, "") == (ran.exit_code, ran.stderr)
    assert "ran batch 1, n 16: y [1, 16]" in ran.stdout


def test_a_probe_without_the_name_of_its_input_is_told_what_to_write(tmp_path: Path) -> None:
    """A path alone is for all inputs; a description belongs to one, or to `*`."""
    relu(tmp_path / "m.onnx")
    for given, advised in (
        ("samples: f.npz", "f.npz, or {NAME: {samples: f.npz}}, or {'*': {samples: f.npz}} for all"),
        ("uniform: [0, 1]", "{NAME: {uniform: [0, 1]}}, or {'*': {uniform: [0, 1]}} for all"),
    ):
        ran = check(tmp_path, f"models: [{{name: m, path: m.onnx, probe: {{{given}}}}}]\n")
        (problem,) = problems(ran, tmp_path)
        assert problem.endswith(f"describes an input, whose name is missing (write {advised})")


def test_no_axis_of_a_picture_is_advised_as_the_batch(tmp_path: Path) -> None:
    """Lines of a picture are no rows: only their author knows whether an axis of several named ones is."""
    (tmp_path / "grey.py").write_text("def grey(image):\n    return image.mean(axis=-1)\n")
    model = "{name: m, function: 'grey:grey', inputs: {image: {shape: 'height, width, 3', element_type: f32}}"
    text = f"models: [{model}, outputs: {{grey: {{shape: 'height, width', element_type: f32, rule: whole}}}}}}]\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        ran = check(tmp_path, text)
    assert 0 == ran.exit_code, ran.output
    assert "'height, width, 3'" not in ran.stderr
    assert "shape: 'batch" not in ran.stderr
    assert (
        "calls its first axis 'height' in the configuration, not batch (if one axis holds rows that do not depend on each "
        "other, name it batch; else batching: {max_batch: 1} says that this is meant)"
    ) in ran.stderr


@pytest.mark.parametrize("command", [["check"], ["models", "--json"]])
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path, command: list[str]) -> None:
    """After `| head` there is not a word on stderr."""
    relu(tmp_path / "m.onnx")
    (tmp_path / "x.yaml").write_text("models: [{name: m, path: m.onnx}]\n")
    read, written = os.pipe()
    os.close(read)
    name, *options = command
    ran = subprocess.run(
        [sys.executable, "-m", "shapestream_workers", name, str(tmp_path / "x.yaml"), *options],
        stdout=written,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(written)
    assert (1, "") == (ran.returncode, ran.stderr)


def test_no_trace_is_overwritten_or_renamed(tmp_path: Path) -> None:
    """A file that exists is wrong usage, before anything is started."""
    relu(tmp_path / "m.onnx")
    (tmp_path / "x.yaml").write_text("models: [{name: m, path: m.onnx}]\n")
    trace = tmp_path / "t.jsonl"
    trace.write_text("kept")
    ran = CliRunner().invoke(app, ["serve", str(tmp_path / "x.yaml"), "--record-trace", str(trace)])
    assert 2 == ran.exit_code
    words = " ".join(ran.stderr.split())
    assert "exists, and is not overwritten (name another file, or remove it)" in words
    assert ["kept"] == [path.read_text() for path in tmp_path.glob("t*.jsonl")]


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (
            "model.pth",
            "weights of PyTorch without their program (load them into their module, and export it by torch",
        ),
        ("model.pt", "weights or a script of PyTorch (export the module by torch.export.save as .pt2"),
        ("model.pb", "a graph of TensorFlow (export the model as .onnx: python -m tf2onnx.convert"),
        ("model.safetensors", "weights alone (export the folder of the model: optimum-cli export onnx"),
        ("model.bin", "weights alone (of an IR, write its .xml"),
        (
            "https://host.invalid/m.onnx",
            "is a URL, and nothing is downloaded (download it, and write the path",
        ),
        ("s3://bucket/m.onnx", "is a URL, and nothing is downloaded (download it, and write the path"),
        ("${MODELS}/m.onnx", "holds a variable, and none is replaced in this file (write the path itself"),
        ("$MODELS/m.onnx", "holds a variable, and none is replaced in this file (write the path itself"),
        (
            "acme/mini-LM.v2",
            "downloaded before: hf download acme/mini-LM.v2 --local-dir FOLDER, and FOLDER is the path)",
        ),
    ],
)
def test_what_is_no_model_file_has_the_way_out(tmp_path: Path, written: str, words: str) -> None:
    """Weights without a program, formats of others, and addresses: each has its own sentence."""
    if "/" not in written:
        (tmp_path / written).write_bytes(b"weights")
    (problem,) = problems(check(tmp_path, f'models: [{{name: m, path: "{written}"}}]\n'), tmp_path)
    assert problem.startswith("1:20: models[0].path: ")
    assert words in problem


def test_a_file_may_have_any_name_that_the_disk_has(tmp_path: Path) -> None:
    """A dollar or a folder like an owner's name is no reason to refuse what is there."""
    (tmp_path / "$acme").mkdir()
    relu(tmp_path / "$acme" / "m.onnx")
    checked = check(tmp_path, "models: [{name: m, path: $acme/m.onnx, batching: {max_batch: 1}}]\n")
    assert 0 == checked.exit_code, checked.output


@pytest.mark.parametrize(
    ("server", "modules", "status", "line"),
    [
        ("http: 127.0.0.1:0", ["orjson"], 3, "server.http: orjson missing (pip install 'shapestream[http]')"),
        ("grpc: 127.0.0.1:0", ["grpc"], 3, "server.grpc: grpc missing (pip install 'shapestream[grpc]')"),
        (
            "admin: 127.0.0.1:0",
            ["httptools", "prometheus_client"],
            0,
            "server.admin: httptools and prometheus_client missing (pip install 'shapestream[admin]'): served without",
        ),
        ("tracing: http://127.0.0.1:4318", ["requests"], 0, "server.tracing: requests missing (pip install"),
    ],
    ids=["http", "grpc", "admin", "tracing"],
)
def test_an_extra_that_a_port_needs_is_missed_by_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, modules: list[str], status: int, line: str
) -> None:
    """A mistake where `serve` would end, and a warning where it would serve without."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    relu(tmp_path / "m.onnx")
    text = f"server: {{{server}}}\nmodels: [{{name: m, path: m.onnx, batching: {{max_batch: 1}}}}]\n"
    checked = check(tmp_path, text)
    assert status == checked.exit_code, checked.output
    assert any(line in each for each in checked.stderr.splitlines()), checked.stderr


@pytest.mark.parametrize("command", ["stats", "models"])
def test_an_address_without_its_scheme_is_told_what_it_means(command: str) -> None:
    """As the YAML tells it."""
    ran = CliRunner().invoke(app, [command, "127.0.0.1:9090"])
    assert 3 == ran.exit_code, ran.output
    assert (
        "127.0.0.1:9090: no such file (an address has its scheme: write tcp://127.0.0.1:9090, where the server listens for "
        "clients)\n"
    ) == ran.stderr
