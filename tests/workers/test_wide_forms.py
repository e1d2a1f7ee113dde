"""Which models get a wide form, and that a form that answers otherwise is never served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino as ov
import pytest
from onnx import TensorProto, helper, numpy_helper
from openvino import opset13 as ops
from structlog.testing import capture_logs

from shapestream.loading.models import compile_models
from shapestream.loading.wide_forms import Wish, wide_forms
from shapestream.serving.slot_threads import WideForms
from shapestream.settings import load_settings
from shapestream_engine.calibration import ENVIRONMENT
from shapestream_engine.cost_table import CostPoint, CostTable
from shapestream_engine.model import InputSpec, ModelSpec, OutputSpec, compile_model
from shapestream_engine.probing.cache import ENVIRONMENT as PROOFS
from shapestream_workers.costs import prepare

WIDTH = 32


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of costs; that of proofs lies beside it."""
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "costs"))
    monkeypatch.setenv(PROOFS, str(tmp_path / "proofs"))
    return tmp_path / "costs"


def _weights(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float32)


def openvino_model(path: Path, seed: int = 1) -> None:
    """One layer on each row."""
    x = ops.parameter([-1, WIDTH], np.float32)
    x.output(0).get_tensor().set_names({"x"})
    y = ops.tanh(ops.matmul(x, ops.constant(_weights(seed)), False, False))
    y.output(0).get_tensor().set_names({"y"})
    ov.save_model(ov.Model([ops.result(y)], [x]), path, compress_to_fp16=False)


def onnx_model(path: Path) -> None:
    """The same for ONNX Runtime."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Tanh", ["m"], ["y"])]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [numpy_helper.from_array(_weights(1), "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


class Forms:
    """A model of a YAML, compiled and measured for two slots, and its wide form."""

    def __init__(self, folder: Path, more: str = "", file: str = "m.xml") -> None:
        if not (folder / file).exists():  # a file that is written anew has other bytes
            (openvino_model if file == "m.xml" else onnx_model)(folder / file)
        config = folder / "c.yaml"
        config.write_text(
            f"models: [{{name: m, path: {file}, calibration_s: 10, "
            f"inputs: {{x: {{shape: 'batch:1..8, {WIDTH}'}}}}{more}}}]\n"
            "in_process: {slots: 2, threads: 2, wide: true}\n"
        )
        self.loaded = load_settings(config)
        self.models = self.loaded.settings.models
        self.compiled = compile_models(self.loaded, self.models, slots=2, threads=2)
        # Made up: how long calls take is of no interest here.
        points = [CostPoint(sizes=(rows,), seconds=0.001 * rows) for rows in (1, 2, 4, 8)]
        self.costs = {"m": CostTable(key="narrow", dimensions=("batch",), points=tuple(points))}

    def make(
        self, wish: Wish = True, *, slots: int = 2, threads: int = 2, memory_limit: int | None = None
    ) -> tuple[WideForms | None, list[str]]:
        """The forms, and why a model has none."""
        with capture_logs() as log:
            found = wide_forms(
                self.models,
                self.compiled,
                self.costs,
                wish=wish,
                slots=slots,
                threads=threads,
                memory_limit=memory_limit,
            )
        return found, [line["why"] for line in log if line["event"] == "no wide form"]


@pytest.mark.parametrize("file", ["m.xml", "m.onnx"])
def test_a_form_has_all_threads_and_prices_of_its_own(tmp_path: Path, file: str) -> None:
    """On both engines: one call at a time, with as many threads as the process has."""
    engine = "onnxruntime" if file == "m.onnx" else "openvino"
    forms = Forms(tmp_path, f", engine: {engine}", file=file)
    found, why = forms.make()
    assert [] == why
    assert found is not None
    assert {"m"} == set(found.models) == set(found.costs)
    narrow, wide = forms.compiled["m"], found.models["m"]
    assert narrow.signature == wide.signature
    assert narrow.digest == wide.digest
    key = "intra_op_num_threads" if engine == "onnxruntime" else "INFERENCE_NUM_THREADS"
    assert narrow.properties[key] < 2 == wide.properties[key]  # 0 on OpenVINO: in the calling thread
    assert found.costs["m"].key != forms.costs["m"].key


@pytest.mark.parametrize("how", [{"wish": False}, {"slots": 1}, {"threads": 1}])
def test_a_process_may_have_none(tmp_path: Path, how: dict[str, Any]) -> None:
    """Where nobody asks for them, and where a slot has all threads already."""
    assert (None, []) == Forms(tmp_path).make(**how)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (", batching: {max_batch: 2, batch_invariant: true}", "batch_invariant"),
        (", shapes: {strategy: bucketed, batch: [1, 4, 8]}", "prepared for single shapes"),
    ],
)
def test_models_whose_answers_or_shapes_are_fixed_have_none(tmp_path: Path, more: str, why: str) -> None:
    """The log says why."""
    found, [reason] = Forms(tmp_path, more).make()
    assert found is None
    assert why in reason


def test_a_model_without_measured_costs_has_none(tmp_path: Path) -> None:
    """The scheduler could not tell when it pays."""
    forms = Forms(tmp_path)
    forms.costs = {"m": CostTable(key="none", dimensions=("batch",))}
    found, [reason] = forms.make()
    assert found is None
    assert "not measured" in reason


def test_a_form_that_does_not_fit_is_not_compiled(tmp_path: Path) -> None:
    """Its memory is reckoned by the model's files, before anything is read."""
    forms = Forms(tmp_path)
    found, [reason] = forms.make(memory_limit=1)
    assert found is None
    assert "the limit is" in reason


def test_a_form_that_answers_otherwise_is_not_served(tmp_path: Path) -> None:
    """As if other threads made other numbers: here, other weights do."""
    forms = Forms(tmp_path)
    other = tmp_path / "other.xml"
    openvino_model(other, seed=2)
    spec = forms.compiled["m"].signature
    forms.compiled["m"].compile_again = lambda slots, threads: compile_model(
        _spec_of(other, str(spec.inputs[0].shape)), slots=slots, threads=threads
    )
    found, [reason] = forms.make()
    assert found is None
    assert reason.startswith("output 'y' differs from that of the slots by ")


def _spec_of(path: Path, shape: str) -> Any:
    return ModelSpec(
        name="m",
        path=path,
        inputs={"x": InputSpec(shape=shape)},
        outputs={"y": OutputSpec(rule={"rule": "rows"})},
    )


def test_files_that_have_changed_since_make_no_form(tmp_path: Path) -> None:
    """Both forms must be of the same bytes."""
    forms = Forms(tmp_path)
    openvino_model(tmp_path / "m.xml", seed=3)
    found, [reason] = forms.make()
    assert found is None
    assert "files have changed" in reason


def test_what_was_found_is_kept_with_the_costs(tmp_path: Path, kept: Path) -> None:
    """The next start neither compares nor measures; a command prepares it."""
    Forms(tmp_path)
    prepare(load_settings(tmp_path / "c.yaml"), tmp_path / "prepared")
    forms = Forms(tmp_path)
    with capture_logs() as log:
        found = wide_forms(
            forms.models, forms.compiled, forms.costs, wish=True, slots=2, threads=2, memory_limit=None
        )
    assert found is not None
    assert ["wide form"] == [line["event"] for line in log]
    assert not list(kept.glob("*-wide.json"))
