"""Verdicts on disk: what makes one void, and what does not."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from shapestream_engine import CompiledModel, InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.probe import Finding, ProbeOptions, ProbeReport, ProofCache, Treatment, prove
from shapestream_engine.probing import cache as cache_module
from shapestream_engine.probing.cache import ENVIRONMENT
from shapestream_engine.probing.values import Uniform

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


def test_whoever_comes_at_the_same_time_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several workers that start together make one proof."""
    spec, compiled = model("numpy:sort")
    proofs = []
    made = cache_module.ProofCache(tmp_path)

    def counted(*_: object) -> ProbeReport:
        proofs.append(threading.current_thread().name)
        return REPORT

    monkeypatch.setattr("shapestream_engine.probe._prove", counted)
    threads = [
        threading.Thread(target=prove, args=(spec, compiled, ProbeOptions()), kwargs={"cache": made})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 == len(proofs)


def entry_name(tmp_path: Path, spec: ModelSpec, compiled: CompiledModel, options: ProbeOptions) -> str:
    """The file that a verdict is kept in."""
    with ProofCache(tmp_path).entry(spec, options, compiled.signature) as entry:
        assert entry.path is not None
        return entry.path.name


def test_what_the_verdict_may_depend_on_makes_it_void(tmp_path: Path, own_module: Path) -> None:
    """The code, the shapes, what is realistic, and how many rows share a call; not the name."""
    spec, compiled = model("changeable:same")
    options = ProbeOptions()
    first = entry_name(tmp_path, spec, compiled, options)
    assert first == entry_name(tmp_path, replace(spec, name="other"), compiled, options)
    others = {
        entry_name(tmp_path, spec, compiled, ProbeOptions(values={"a": Uniform(0, 1)})),
        entry_name(tmp_path, spec, compiled, ProbeOptions(max_batch=2)),
        entry_name(tmp_path, replace(spec, properties={"a": "b"}), compiled, options),
    }
    own_module.write_text("def same(a):\n    return a + a.mean()\n")
    others.add(entry_name(tmp_path, spec, compiled, options))
    assert 4 == len(others - {first})


def test_weights_beside_the_graph_count(tmp_path: Path) -> None:
    """An IR is two files."""
    _, compiled = model("numpy:sort")
    spec = ModelSpec(name="m", path=tmp_path / "m.xml", engine="openvino")
    (tmp_path / "m.xml").write_text("graph")
    (tmp_path / "m.bin").write_text("weights")
    first = entry_name(tmp_path, spec, compiled, ProbeOptions())
    (tmp_path / "m.bin").write_text("Weights")
    assert first != entry_name(tmp_path, spec, compiled, ProbeOptions())


@pytest.mark.parametrize("name", ["m[1].onnx", "m*.onnx", "?.onnx"])
def test_a_file_of_any_name_counts(tmp_path: Path, name: str) -> None:
    """Also one that is called like a pattern."""
    _, compiled = model("numpy:sort")
    spec = ModelSpec(name="m", path=tmp_path / name, engine="onnxruntime")
    (tmp_path / name).write_text("graph")
    first = entry_name(tmp_path, spec, compiled, ProbeOptions())
    (tmp_path / name).write_text("Graph")
    assert first != entry_name(tmp_path, spec, compiled, ProbeOptions())


@pytest.mark.parametrize("weights", ["w", "weights of another name.bin", f"{'long' * 50}.bin", "äö/w.bin"])
def test_weights_that_an_onnx_file_names_count(tmp_path: Path, weights: str) -> None:
    """Wherever they are; other files do not."""
    onnx = pytest.importorskip("onnx")
    _, compiled = model("numpy:sort")
    path = tmp_path / "m.onnx"
    tensor = onnx.TensorProto(name="w", dims=[1], data_type=1, data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=weights)
    path.write_bytes(onnx.ModelProto(graph=onnx.GraphProto(initializer=[tensor])).SerializeToString())
    (tmp_path / weights).parent.mkdir(exist_ok=True)
    (tmp_path / weights).write_text("weights")
    spec = ModelSpec(name="m", path=path, engine="onnxruntime")
    first = entry_name(tmp_path, spec, compiled, ProbeOptions())
    (tmp_path / "other.bin").write_text("of another model")
    assert first == entry_name(tmp_path, spec, compiled, ProbeOptions())
    (tmp_path / weights).write_text("Weights")
    assert first != entry_name(tmp_path, spec, compiled, ProbeOptions())


def test_what_would_perhaps_not_happen_again_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash may have been the memory's fault, a hang the machine's."""
    spec, compiled = model("numpy:sort")
    monkeypatch.setattr("shapestream_engine.probe._prove", lambda *_: replace(REPORT, conclusive=False))
    prove(spec, compiled, ProbeOptions(), cache=ProofCache(tmp_path))
    assert [] == list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("rubbish", ["", "{", "[]", '{"model": "m"}'])
def test_an_entry_that_cannot_be_read_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rubbish: str
) -> None:
    """Cut short by a full disk, or written by a version that nobody knows."""
    spec, compiled = model("numpy:sort")
    monkeypatch.setattr("shapestream_engine.probe._prove", lambda *_: REPORT)
    prove(spec, compiled, ProbeOptions(), cache=ProofCache(tmp_path))
    (entry,) = tmp_path.glob("*.json")
    entry.write_text(rubbish)
    assert REPORT == prove(spec, compiled, ProbeOptions(), cache=ProofCache(tmp_path))
    assert REPORT == ProbeReport.from_dict(json.loads(entry.read_text()))


def test_a_folder_that_cannot_be_written_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where the folder should be."""
    spec, compiled = model("numpy:sort")
    (tmp_path / "file").touch()
    monkeypatch.setattr("shapestream_engine.probe._prove", lambda *_: REPORT)
    assert REPORT == prove(spec, compiled, ProbeOptions(), cache=ProofCache(tmp_path / "file" / "probe"))


def test_the_environment_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder, nowhere, or the user's cache."""
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    assert tmp_path == ProofCache.of_environment().folder
    monkeypatch.setenv(ENVIRONMENT, "off")
    assert ProofCache.of_environment().folder is None
    monkeypatch.delenv(ENVIRONMENT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path / "shapestream" / "probe" == ProofCache.of_environment().folder
