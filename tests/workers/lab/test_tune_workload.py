"""What is read of a trace, and what is told of one that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from shapestream.errors import ConfigurationError
from shapestream.serving.models import ModelOptions, ServedModel
from shapestream.telemetry.trace import TraceRequest, header_line, request_line
from shapestream_engine.cost_table import CostPoint, CostTable
from shapestream_engine.signature import ModelSignature
from shapestream_engine.strategy import Strategy
from shapestream_workers.lab.tune_candidates import Candidate, Placement, ShapeChoice
from shapestream_workers.lab.tune_first_stage import planned_signature
from shapestream_workers.lab.tune_prediction import predict
from shapestream_workers.lab.tune_workload import read_workload

SIGNATURE = ModelSignature.from_dict(
    {
        "name": "m",
        "inputs": [{"name": "x", "element_type": "f32", "shape": "batch:1..8, seq:1..64", "pad": {"seq": 0}}],
        "outputs": [{"name": "y", "element_type": "f32", "shape": "batch, 4", "rule": {"rule": "rows"}}],
    }
)


def write(
    path: Path, requests: list[TraceRequest], models: Mapping[str, tuple[str, ...]] | None = None
) -> Path:
    """A trace, by default of the model m alone."""
    lines = [header_line(models or {"m": ("batch", "seq")}), *map(request_line, requests)]
    path.write_text("".join(lines))
    return path


def test_one_models_requests_are_read(tmp_path: Path) -> None:
    """In order, with their times; those of other models are left out."""
    requests = [TraceRequest(number / 10, number % 2, 0, (1, 1 + number)) for number in range(10)]
    models = {"other": ("batch", "seq"), "m": ("batch", "seq")}
    workload = read_workload(write(tmp_path / "t", requests, models), "m", SIGNATURE)
    assert [2, 4, 6, 8, 10] == [request.sizes[1] for request in workload.requests]
    assert [0.1, 0.3, 0.5, 0.7, 0.9] == pytest.approx([request.at_s for request in workload.requests])
    assert {2: 1, 4: 1, 6: 1, 8: 1, 10: 1} == workload.counts_along(1)


@pytest.mark.parametrize(
    ("models", "sizes", "words"),
    [
        ({"other": ("batch", "seq")}, (1, 1), "no request of the model 'm'; it is about other"),
        ({"m": ("batch", "length")}, (1, 1), r"\[batch, length\], but the model has \[batch, seq\]"),
        ({"m": ("seq",)}, (1,), "a trace of another model"),
        ({"m": ("batch", "seq")}, (1, 65), r"seq 65: the model takes 1\.\.64"),
        ({"m": ("batch", "seq")}, (9, 1), "batch 9: the model takes"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(
    tmp_path: Path, models: Mapping[str, tuple[str, ...]], sizes: tuple[int, ...], words: str
) -> None:
    """With the file, and what does not fit."""
    path = write(tmp_path / "t", [TraceRequest(0.0, 0, 0, sizes)], models)
    with pytest.raises(ConfigurationError, match=words) as raised:
        read_workload(path, "m", SIGNATURE)
    assert str(path) in str(raised.value)


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    """Nothing can be learned from it."""
    with pytest.raises(ConfigurationError, match="no request"):
        read_workload(write(tmp_path / "t", []), "m", SIGNATURE)


def test_more_slots_and_cheaper_calls_are_predicted_to_do_more() -> None:
    """The scheduler over the trace at measured costs: goodput near the sum of the slots, p99 no less than a call."""
    requests = [TraceRequest(number * 0.02, 0, 0, (1, 8 + number % 8)) for number in range(200)]

    def table(fixed_s: float) -> CostTable:
        points = [
            CostPoint(sizes=(rows, seq), seconds=fixed_s + 1e-4 * rows * seq)
            for rows in (1, 2, 4, 8)
            for seq in (1, 8, 16, 64)
        ]
        return CostTable(key="k", dimensions=("batch", "seq"), points=tuple(points))

    def goodput(fixed_s: float, slots: int) -> float:
        options = ModelOptions(max_batch=8)
        common: Any = {"slots": slots, "in_flight": 32}
        p99_s = predict(SIGNATURE, options, table(fixed_s), requests, objective="latency", **common)
        assert fixed_s + 8e-4 <= p99_s < inf
        return predict(SIGNATURE, options, table(fixed_s), requests, objective="throughput", **common)

    slow, fast = goodput(0.010, 1), goodput(0.001, 1)
    assert fast > 1.5 * slow
    assert goodput(0.010, 2) > 1.5 * slow


def test_a_cap_on_shapes_is_planned_with() -> None:
    """Though the process that measured knew nothing of it, or of another one."""
    place = Placement(processes=None, slots=1, threads=1)
    for measured in (Strategy(), Strategy(max_prepared=32), Strategy(most_rows=8), Strategy(most_rows=1)):
        plain = replace(SIGNATURE, strategy=measured).to_dict()
        for cap in (None, 16):
            candidate = Candidate(placement=place, shapes=ShapeChoice(max_prepared=cap))
            served = ServedModel(0, "m", planned_signature(plain, candidate), ModelOptions())
            assert (cap is None) == (served.profile.max_shapes is None)
