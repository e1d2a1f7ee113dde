"""From a served request to its simulation: a real server records, `simulate` plays what it recorded."""

from __future__ import annotations

import json
import signal
from typing import Any

import numpy as np
import pytest

from shapestream.telemetry.trace import TraceReader

pytestmark = pytest.mark.e2e

SORT = """\
    server: {listen: [ipc://s.sock], record_trace: traffic.jsonl.gz}
    models:
      - name: sort
        function: numpy:sort
        inputs: {a: {shape: "batch:1..8, n:0..64", element_type: f32}}
        outputs: {sorted: {shape: "batch, n", element_type: f32, rule: rows}}
    in_process: true
"""


def test_a_server_records_what_simulate_plays(workplace: Any) -> None:
    """Relative to the YAML, whole after SIGTERM; the recording is announced."""
    served = workplace.serve(SORT)
    assert 1 == len(served.events("recording a trace of shapes"))
    with served.client() as client:
        for width in (3, 5, 7):
            client.infer("sort", {"a": np.ones((1, width), np.float32)}, deadline=60)
    served.send(signal.SIGTERM)
    assert 0 == served.wait()
    reader = TraceReader(workplace.folder / "traffic.jsonl.gz")
    assert [(1, 3), (1, 5), (1, 7)] == [request.sizes for request in reader]
    assert {"sort": ("batch", "n")} == reader.models
    ran = workplace.run("simulate", "--trace", "traffic.jsonl.gz", "--cost", "fixed_ms=1", "--json")
    assert 0 == ran.returncode, ran.stderr
    assert 3 == json.loads(ran.stdout)["runs"][0]["done"]
