"""From a served request to its simulation: a real server records, `simulate` plays what it recorded."""

from __future__ import annotations

import json
import signal
from typing import Any

import numpy as np
import pytest

from shapestream.telemetry.trace import TraceReader, TraceStage

pytestmark = pytest.mark.e2e

SORT = """\
    server: {listen: [ipc://s.sock]}
    models:
      - name: sort
        function: numpy:sort
        inputs: {a: {shape: "batch:1..8, n:0..64", element_type: f32}}
        outputs: {sorted: {shape: "batch, n", element_type: f32, rule: rows}}
    in_process: true
"""


READING = """\
    server: {listen: [ipc://s.sock]}
    models:
      - name: find
        function: numpy:sort
        inputs: {a: {shape: "n:0..64", element_type: f32}}
        outputs: {sorted: {shape: "n", element_type: f32}}
      - name: read
        function: numpy:cumsum
        inputs: {a: {shape: "", element_type: f32}}
        outputs: {sums: {shape: "1", element_type: f32}}
    chains:
      - name: reading
        inputs: {a: find.a}
        stages:
          - {name: find, model: find, inputs: {a: a}}
          - {name: read, model: read, inputs: {a: find.sorted}, each: row of find.sorted, at_most: 32}
        outputs: {sums: read.sums}
    in_process: true
"""


def test_a_trace_says_which_requests_are_for_which_chain(workplace: Any) -> None:
    """Each stage's, of a chain without rows, too; `simulate` plays one stage after the other."""
    served = workplace.serve(READING, record_trace=str(workplace.folder / "traffic.jsonl"))
    with served.client() as client:
        for rows in (3, 0):
            client.infer("reading", {"a": np.ones(rows, np.float32)}, deadline=60)
        client.infer("find", {"a": np.ones(2, np.float32)}, deadline=60)
    served.send(signal.SIGTERM)
    assert 0 == served.wait()
    reader = TraceReader(workplace.folder / "traffic.jsonl")
    three, none, alone = reader.sent()
    assert [[(0, (3,))], [(1, ())] * 3] == three.rows
    assert [[(0, (0,))], []] == none.rows
    assert ((2,), None) == (alone.sizes, alone.part)
    assert [("reading", {"find": TraceStage(()), "read": TraceStage(("find",), 32)})] == reader.chains
    ran = workplace.run("simulate", "--trace", "traffic.jsonl", "--cost", "fixed_ms=1", "--json")
    assert 0 == ran.returncode, ran.stderr
    (run,) = json.loads(ran.stdout)["runs"]
    assert (3, 2) == (run["done"], run["chains"]["reading"]["done"])
    assert 0.0039 < run["max_s"]  # find, then three rows, on one slot


def test_a_server_records_what_simulate_plays(workplace: Any) -> None:
    """Whole after SIGTERM; the recording is announced."""
    served = workplace.serve(SORT, record_trace=str(workplace.folder / "traffic.jsonl.gz"))
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
