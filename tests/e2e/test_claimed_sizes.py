"""Requests of no bytes that claim huge sizes, to real processes: they get an answer, and nobody else notices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.e2e.importable.widest import INPUTS

from shapestream.client.opened_models import Failed
from shapestream.errors import TooLarge

pytestmark = pytest.mark.e2e

HUGE = 2**60
WIDEST = """\
    server: {listen: [ipc://s.sock]}
    models:
      - name: widest
        function: widest:sums
        inputs: {INPUTS}
        outputs: {y: {shape: "batch", element_type: f32, rule: rows}}
        batching: {max_batch: 64}
        trust: true
        calibration_s: 0
      - name: filled
        function: widest:doubled
        inputs: {x: {shape: "batch:0..8, n", element_type: f32, pad: {n: 0}}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        shapes: {strategy: bucketed, batch: [8]}
        batching: {max_batch_bytes: 1 MiB}
        trust: true
        calibration_s: 0
      - name: plain
        function: widest:doubled
        inputs: {x: {shape: "batch, n", element_type: f32, pad: {n: 0}}}
        outputs: {y: {shape: "batch, n", element_type: f32, rule: rows}}
        trust: true
        calibration_s: 0
      - name: untold
        function: widest:doubled
        inputs: {x: {shape: "batch, n", element_type: f32}}
        outputs: {y: {shape: "batch, ?", element_type: f32, rule: rows}}
        trust: true
        calibration_s: 0
    workers: [{count: 1, slots: 1, threads: 1}]
"""
PORTS = ", ".join(f'x{number}: {{shape: "batch, n{number}", element_type: f32}}' for number in range(INPUTS))


def serve(workplace: Any) -> Any:
    """The server, once its worker is there."""
    served = workplace.serve(WIDEST.replace("INPUTS", PORTS))
    served.wait_for("workers ready")
    return served


def widest(rows: int, length: int) -> dict[str, Any]:
    """A request of so many rows; without rows no byte stands for the length."""
    return {f"x{number}": np.ones((rows, length), np.float32) for number in range(INPUTS)}


def test_claimed_sizes_end_no_server(workplace: Any) -> None:
    """Twenty inputs of [0, 2**60], once costs are known: answered without a call, as smaller claims are, and others."""
    served = serve(workplace)
    with served.client() as client:
        for _ in range(3):
            assert [2.0 * INPUTS] == client.infer("widest", widest(1, 2))["y"].tolist()
        for _ in range(3):
            assert (0,) == client.infer("widest", widest(0, HUGE))["y"].shape
            assert (0,) == client.infer("widest", widest(0, 2**20))["y"].shape
            with served.client() as other:
                assert [3.0 * INPUTS] == other.infer("widest", widest(1, 3))["y"].tolist()
        assert 0 == client.statistics()["faults"]
    assert served.process.poll() is None


def test_a_claimed_length_makes_no_large_call(workplace: Any) -> None:
    """Where calls have 8 rows, [0, 2**26] would be filled up to 2 GiB: it is answered without one, as elsewhere."""
    served = serve(workplace)
    with served.client() as client:
        stream = [
            {"x": np.ones((rows, length), np.float32)} for rows, length in [(0, 2**26), (1, 4), (0, 2**26)]
        ]
        with client.stream("filled", stream, on_error="yield") as results:
            shapes = [None if isinstance(end, Failed) else end["y"].shape for end in results]
        assert [(0, 2**26), (1, 4), (0, 2**26)] == shapes
        with client.stream("plain", stream, on_error="yield") as results:
            shapes = [None if isinstance(end, Failed) else end["y"].shape for end in results]
        assert [(0, 2**26), (1, 4), (0, 2**26)] == shapes
        assert 0 == client.statistics()["faults"]


def test_where_the_ports_do_not_tell_the_answer_a_huge_claim_is_refused(workplace: Any) -> None:
    """The model is asked at exactly the claimed sizes, and its output could be as large as they are."""
    served = serve(workplace)
    with served.client() as client:
        with pytest.raises(TooLarge):
            client.infer("untold", {"x": np.ones((0, HUGE), np.float32)})
        assert (0, 8) == client.infer("untold", {"x": np.ones((0, 8), np.float32)})["y"].shape
