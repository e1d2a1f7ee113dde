"""Lone requests run on all threads of their process, through the real server; their answers are those of the slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from shapestream.scheduling.wide_slots import FIRST_RUNS

pytestmark = pytest.mark.e2e

WIDTH = 256
PLACES = {
    "in process": "in_process: {slots: 2, threads: 2, wide: true}",
    "worker": "workers: [{slots: 2, threads: 2, wide: true}]",
}


def _layers(path: Path) -> None:
    """Three layers on each row: enough work for two threads to share."""
    rng = np.random.default_rng(1)
    x = ops.parameter([-1, -1, WIDTH], np.float32)
    x.output(0).get_tensor().set_names({"x"})
    y = x
    for _ in range(3):
        weights = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / np.float32(np.sqrt(WIDTH))
        y = ops.tanh(ops.matmul(y, ops.constant(weights), False, False))
    y.output(0).get_tensor().set_names({"y"})
    label = ops.convert(ops.topk(y, ops.constant(np.int32(1)), 2, "max", "value").output(1), "i64")
    label.output(0).get_tensor().set_names({"label"})
    ov.save_model(ov.Model([ops.result(y), ops.result(label)], [x]), path, compress_to_fp16=False)


def _yaml(place: str, more: str = "") -> str:
    return f"""\
    models:
      - name: layers
        path: layers.xml
        calibration_s: 1.0
        inputs: {{x: {{shape: "batch:1..8, n:1..64, {WIDTH}"}}}}
        {more}
    {place}
"""


@pytest.mark.parametrize(
    "place",
    [pytest.param(PLACES["in process"], marks=pytest.mark.thorough), PLACES["worker"]],
    ids=["in process", "worker"],
)
def test_lone_requests_run_wide_and_are_answered_alike(workplace: Any, place: str) -> None:
    """Until lone runs are known, half of them are wide. Which slot a request ran on is told with its answer."""
    _layers(workplace.folder / "layers.xml")
    served = workplace.serve(_yaml(place))
    [form] = served.wait_for("wide form")
    assert ("layers", 2) == (form["model"], form["threads"])
    x = np.random.default_rng(2).standard_normal((1, 48, WIDTH)).astype(np.float32)
    answers: dict[bool, Any] = {}
    with served.client() as client:
        for _ in range(FIRST_RUNS):
            answer = client.infer("layers", {"x": x})
            answers[answer.timings.worker.endswith("/wide")] = answer
        assert {True, False} == set(answers)
        statistics = client.statistics()
    assert np.array_equal(answers[True]["label"], answers[False]["label"])
    np.testing.assert_allclose(answers[True]["y"], answers[False]["y"], rtol=1e-4, atol=1e-5)
    slots = {name.partition("/")[2]: told["batches"] for name, told in statistics["slots"].items()}
    assert {"0", "1", "wide"} == set(slots)
    assert FIRST_RUNS == sum(slots.values())
    assert 2 == statistics["scheduler"]["slots"]
    assert slots["wide"] == statistics["batches_wide"]


def test_a_batch_invariant_model_is_never_wide(workplace: Any) -> None:
    """Its answers must not depend on what else runs. The log says why it has no wide form."""
    _layers(workplace.folder / "layers.xml")
    served = workplace.serve(_yaml(PLACES["in process"], "batching: {max_batch: 2, batch_invariant: true}"))
    [none] = served.wait_for("no wide form")
    assert "batch_invariant" in none["why"]
    x = np.ones((1, 4, WIDTH), np.float32)
    with served.client() as client:
        workers = {client.infer("layers", {"x": x}).timings.worker for _ in range(4)}
    assert not [name for name in workers if name.endswith("/wide")]
