"""Verdicts on disk: what makes one void, and what does not."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from shapestream_engine import (
    CompiledModel,
    InputSpec,
    ModelSpec,
    OutputSpec,
    PreparedLimits,
    compile_model,
)
from shapestream_engine.machine import runtime_of
from shapestream_engine.pooling import Pooling
from shapestream_engine.postprocess import Postprocess, Steps
from shapestream_engine.probe import Finding, ProbeOptions, ProbeReport, ProofCache, Treatment, prove
from shapestream_engine.probing.cache import BRIEF_S, proof_key
from shapestream_engine.probing.child import Task
from shapestream_engine.probing.inputs import Samples, Uniform
from shapestream_engine.strategy import Strategy

REPORT = ProbeReport(
    model="m",
    findings=(
        Finding(
            treatment=Treatment(kind="batching"),
            output="y",
            verdict="proved",
            cases=7,
            largest=0.5,
            allowed=1.0,
        ),
        Finding(
            treatment=Treatment(kind="padding", dimensions=("seq",)), output=None, verdict="refuted", why="so"
        ),
        Finding(
            treatment=Treatment(kind="strategy", name="padded"), output="y", verdict="unproved", why="empty"
        ),
    ),
    inputs={"x": "normal 0 +- 1"},
    sizes=("batch 1", "batch 2"),
    follows={"y": "batch, 4"},
    rules={"y": {"rule": "rows"}},
    notes=("a note",),
)


def model(function: str, **changes: object) -> tuple[ModelSpec, CompiledModel]:
    """A function over rows, and its compiled self."""
    spec = ModelSpec(
        name="m",
        function=function,
        inputs={"a": InputSpec(shape="batch:1..8, n:1..64", element_type="f32")},
        outputs={"y": OutputSpec(shape="batch, n", element_type="f32")},
    )
    spec = replace(spec, **changes)  # type: ignore[arg-type]  # the test's own names
    return spec, compile_model(spec)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable module that a test may change."""
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    module = folder / "changeable.py"
    module.write_text("def same(a):\n    return a\n")
    return module


def test_a_report_survives_the_disk() -> None:
    """As plain data and back, all of it."""
    assert REPORT == ProbeReport.from_dict(REPORT.to_dict())


def test_a_proof_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time it is read, and no process is started."""
    spec, compiled = model("numpy:sort")
    cache = ProofCache(tmp_path)
    first = prove(spec, compiled, ProbeOptions(), cache=cache)
    monkeypatch.setattr("shapestream_engine.probe.run_child", None)
    assert first == prove(spec, compiled, ProbeOptions(), cache=cache)
    renamed = replace(spec, name="other")
    assert first.findings == prove(renamed, compile_model(renamed), ProbeOptions(), cache=cache).findings


def kept(
    folder: Path, spec: ModelSpec, compiled: CompiledModel, make: Callable[[], ProbeReport] = lambda: REPORT
) -> ProbeReport:
    """The proof of a model that lies in this folder, else the one that is made now."""
    task = Task(spec=spec, options=ProbeOptions(), threads=None)
    return ProofCache(folder).kept(task, compiled.signature, make)


def test_whoever_comes_at_the_same_time_waits(tmp_path: Path) -> None:
    """Several workers that start together make one proof."""
    spec, compiled = model("numpy:sort")
    proofs = []

    def counted() -> ProbeReport:
        proofs.append(threading.current_thread().name)
        return REPORT

    threads = [threading.Thread(target=kept, args=(tmp_path, spec, compiled, counted)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 == len(proofs)


def key_of(spec: ModelSpec, compiled: CompiledModel, options: ProbeOptions) -> str:
    """The key that a verdict is kept under."""
    return proof_key(Task(spec=spec, options=options, threads=None), compiled.signature)


def test_the_code_of_a_function_is_part_of_the_question_and_its_name_is_not(own_module: Path) -> None:
    """A change of the file makes the verdict void."""
    spec, compiled = model("changeable:same")
    first = key_of(spec, compiled, ProbeOptions())
    assert first == key_of(replace(spec, name="other"), compiled, ProbeOptions())
    own_module.write_text("def same(a):\n    return a + a.mean()\n")
    assert first != key_of(spec, compiled, ProbeOptions())


CHANGED: dict[type, dict[str, object]] = {
    Task: {
        "spec": None,
        "options": None,
        "threads": 3,
        "skip": frozenset({"batching"}),
        "guess": True,
        "beside": "onnxruntime",
        "choose": True,
    },
    ModelSpec: {
        "function": "numpy:sinc",
        "engine": "function",
        "device": "GPU",
        "inputs": {"a": InputSpec(shape="batch:1..8, n:1..32", element_type="f32")},
        "outputs": {"y": OutputSpec(shape="batch, n", element_type="f64")},
        "properties": {"INFERENCE_PRECISION_HINT": "bf16"},
        "strategy": Strategy({"batch": (4,)}),
        "prepared": PreparedLimits(max_prepared=3),
        "pooling": Pooling(mode="mean"),
        "postprocess": Postprocess({"y": Steps(softmax=True)}),
    },
    ProbeOptions: {
        "values": {"a": Uniform(0, 1)},
        "samples": {"a": Path(__file__)},
        "max_batch": 2,
        "batch_invariant": True,
        "budget_s": 7.0,
        "hang_s": 7.0,
        "seed": 1,
    },
    InputSpec: {
        "shape": "batch, n",
        "element_type": "f64",
        "pad": {"n": 1},
        "mask_of": "b",
        "at_most_bytes": 64,
        "value": 2,
    },
    OutputSpec: {"rule": {"rule": "shared"}, "shape": "n", "element_type": "f64"},
}
"""Another value for each field of what describes a question."""
NAMES_ONLY = {(ModelSpec, "name"), (ModelSpec, "path"), (ModelSpec, "model")}
"""What says nothing about a model: a path's file is digested, and a model in memory is not proved."""


@pytest.mark.parametrize("kind", CHANGED)
def test_every_field_of_the_question_makes_another_key(kind: type) -> None:
    """A field that is added to any of them needs a line here, and changes the key without one in the cache."""
    spec, compiled = model("numpy:sort")
    asked = Task(spec=spec, options=ProbeOptions(), threads=None)

    def with_field(name: str, value: object) -> Task:
        if kind is Task:
            return replace(asked, **{name: value})  # type: ignore[arg-type]  # of that field
        if kind is ProbeOptions:
            return replace(asked, options=replace(asked.options, **{name: value}))  # type: ignore[arg-type]
        if kind is ModelSpec:
            return replace(asked, spec=replace(spec, **{name: value}))  # type: ignore[arg-type]
        ports, port = ("inputs", "a") if kind is InputSpec else ("outputs", "y")
        changed = replace(getattr(spec, ports)[port], **{name: value})
        return replace(asked, spec=replace(spec, **{ports: {port: changed}}))  # type: ignore[arg-type]

    keys = {proof_key(asked, compiled.signature)}
    names = [field.name for field in fields(kind) if (kind, field.name) not in NAMES_ONLY]
    assert sorted(names) == sorted(CHANGED[kind])
    parts = [name for name in names if CHANGED[kind][name] is not None]
    keys |= {proof_key(with_field(name, CHANGED[kind][name]), compiled.signature) for name in parts}
    assert 1 + len(parts) == len(keys)


def test_the_signature_is_part_of_the_question() -> None:
    """What the file says of the model may change without a change of its settings."""
    spec, compiled = model("numpy:sort")
    other = replace(spec, inputs={"a": InputSpec(shape="batch:1..8, n:1..9", element_type="f32")})
    options = ProbeOptions()
    assert key_of(spec, compiled, options) != key_of(spec, compile_model(other), options)


def test_values_of_one_look_are_told_apart() -> None:
    """A property may be true, 1, 1.0 or "1"; samples of other shapes may have the same bytes."""
    spec, compiled = model("numpy:sort")
    properties = [{"a": value} for value in (True, 1, 1.0, "1", "True", None)]
    found = {key_of(replace(spec, properties=each), compiled, ProbeOptions()) for each in properties}
    assert len(properties) == len(found)
    rows = [(np.zeros((1, 4), np.float32),), (np.zeros((1, 2), np.float32),) * 2]
    samples = [ProbeOptions(values={"a": Samples(each, 0)}) for each in rows]
    assert 2 == len({key_of(spec, compiled, each) for each in samples})


@pytest.mark.parametrize("distribution", ["onnxruntime-gpu", "ort-nightly"])
def test_another_distribution_of_a_runtime_is_another_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distribution: str
) -> None:
    """Of the same module and version: it brings other kernels."""
    _, compiled = model("numpy:sort")
    (tmp_path / "m.onnx").write_bytes(b"")
    spec = ModelSpec(name="m", path=tmp_path / "m.onnx", engine="onnxruntime")
    keys = set()
    for name, version in (("onnxruntime", "1.20.0"), (distribution, "1.20.0"), (distribution, "1.20.1")):
        site = tmp_path / f"{name}-{version}"
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "top_level.txt").write_text("onnxruntime\n")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(site)])
            keys.add(key_of(spec, compiled, ProbeOptions()))
    assert 3 == len(keys)


def test_a_runtime_without_a_distribution_is_told_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacked from an archive and put on the path."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    assert [] == runtime_of("torch")["torch_xla"]
    (tmp_path / "torch_xla.py").write_text("")
    importlib.invalidate_caches()
    first = runtime_of("torch")["torch_xla"]
    (tmp_path / "torch_xla.py").write_text("version = 2")
    second = runtime_of("torch")["torch_xla"]
    assert first != second
    assert str(tmp_path) in second[0]


@pytest.mark.parametrize(
    ("name", "engine", "counts"),
    [
        ("m.xml", "openvino", "m.bin"),
        ("m[1].onnx", "onnxruntime", "m[1].onnx"),
        ("m*.onnx", "onnxruntime", "m*.onnx"),
        ("?.onnx", "onnxruntime", "?.onnx"),
        ("m.onnx", "onnxruntime", "weights of another name.bin"),
        ("m.onnx", "onnxruntime", f"{'long' * 50}.bin"),
        ("m.onnx", "onnxruntime", "äö/w.bin"),
    ],
)
def test_all_files_of_a_model_count_and_no_others(
    tmp_path: Path, name: str, engine: str, counts: str
) -> None:
    """Weights beside the graph of an IR, those that an ONNX file names, and a file that is called like a pattern."""
    onnx = pytest.importorskip("onnx")
    _, compiled = model("numpy:sort")
    tensor = onnx.TensorProto(name="w", dims=[1], data_type=1, data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=counts)
    graph = onnx.GraphProto(initializer=[tensor] if counts != name else [])
    (tmp_path / name).write_bytes(onnx.ModelProto(graph=graph).SerializeToString())
    file = tmp_path / counts
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(
        (file.read_bytes() if counts == name else b"") + b"\x08\x07"
    )  # the version of an ONNX model
    spec = ModelSpec(name="m", path=tmp_path / name, engine=engine)
    first = key_of(spec, compiled, ProbeOptions())
    (tmp_path / "other.bin").write_text("of another model")
    assert first == key_of(spec, compiled, ProbeOptions())
    file.write_bytes(file.read_bytes()[:-1] + b"\x08")
    assert first != key_of(spec, compiled, ProbeOptions())


def test_what_would_perhaps_not_happen_again_is_not_kept(tmp_path: Path) -> None:
    """A crash may have been the memory's fault, a hang the machine's."""
    spec, compiled = model("numpy:sort")
    kept(tmp_path, spec, compiled, lambda: replace(REPORT, conclusive=False))
    assert [] == list(tmp_path.glob("*.json"))


def test_a_verdict_that_time_cut_short_is_kept_for_the_workers_of_one_start(tmp_path: Path) -> None:
    """Ten minutes later another proof may try larger calls."""
    spec, compiled = model("numpy:sort")
    short = replace(REPORT, conclusive=False, ran_short=True)
    made: list[ProbeReport] = []

    def make() -> ProbeReport:
        made.append(short)
        return short

    for _ in range(2):
        assert short == kept(tmp_path, spec, compiled, make)
    assert [short] == made
    (entry,) = tmp_path.glob("*.json")
    plain = json.loads(entry.read_text())
    entry.write_text(json.dumps({**plain, "until": plain["until"] - BRIEF_S}))
    assert short == kept(tmp_path, spec, compiled, make)
    assert [short, short] == made


@pytest.mark.parametrize("rubbish", ["", "{", "[]", "7", '{"model": "m"}'])
def test_an_entry_that_cannot_be_read_is_made_anew(tmp_path: Path, rubbish: str) -> None:
    """Cut short by a full disk, or written by a version that nobody knows."""
    spec, compiled = model("numpy:sort")
    kept(tmp_path, spec, compiled)
    (entry,) = tmp_path.glob("*.json")
    entry.write_text(rubbish)
    assert REPORT == kept(tmp_path, spec, compiled)
    assert REPORT == ProbeReport.from_dict(json.loads(entry.read_text()))


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    spec, compiled = model("numpy:sort")
    (tmp_path / "file").touch()
    assert REPORT == kept(tmp_path / "file" / "probe", spec, compiled)
