"""`shapestream tune` on a real model: measured in real processes, within its budget, and a file that can be served."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import psutil
import pytest
import yaml
from openvino import opset13 as ops
from tests.e2e.conftest import until
from tests.workers.lab.worlds import write_trace

from shapestream.telemetry.trace import TraceRequest
from shapestream_engine.backends.openvino.runtime import core

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

BUDGET_S = 16


def summing_model(path: Path) -> None:
    """y[row] = the sum over seq of x[row, seq] @ w: padding with zeros changes nothing."""
    weights = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    x = ops.parameter([-1, -1, 16], np.float32)
    x.output(0).get_tensor().set_names({"x"})
    y = ops.reduce_sum(ops.matmul(x, ops.constant(weights), False, False), ops.constant([1]))
    y.output(0).get_tensor().set_names({"y"})
    ov.save_model(ov.Model([ops.result(y)], [x]), path, compress_to_fp16=False)


YAML = """\
# Sums.
models:
  - name: sums   # its name
    path: sums.xml
    inputs:
      x: {shape: "batch:1..16, seq:1..128, 16", pad: {seq: 0}}
in_process: true
"""


@pytest.fixture
def prepared(workplace: Any) -> Any:
    """A folder with a model, its YAML and a trace of three common lengths."""
    summing_model(workplace.folder / "sums.xml")
    workplace.write("server: {listen: [ipc://s.sock]}\n" + YAML, "sums.yaml")
    lengths = (8, 8, 8, 24, 24, 100)
    requests = [TraceRequest(n * 0.002, 0, 0, (1, lengths[n % 6])) for n in range(600)]
    write_trace(workplace.folder / "sums.trace", requests, {"sums": ("batch", "seq")})
    return workplace


def test_a_precision_is_tried_where_the_user_accepts_it_and_what_was_not_measured_is_said_first(
    prepared: Any,
) -> None:
    """With the least budget not all can be measured. The precision is a candidate with properties of its own."""
    tune = ("tune", "sums.yaml", "--trace", "sums.trace", "--budget", "5", "--precision", "bf16")
    ran = prepared.run(*tune)
    assert 0 == ran.returncode, ran.stderr
    first = ran.stdout.splitlines()[0]
    assert first.startswith("Not measured, or not in all rounds, for lack of time: ")
    assert "native, bf16" in ran.stdout
    text = (prepared.folder / "sums.tuned.yaml").read_text()
    assert first in text.splitlines()[1]
    report = json.loads(prepared.run(*tune, "--json").stdout)
    (bf16,) = [each for each in report["candidates"] if each["properties"] and not each["shapes"]]
    assert {"INFERENCE_PRECISION_HINT": "bf16"} == bf16["properties"]
    assert report["lacked_time"] >= 1


def test_a_tuned_file_is_written_with_what_justifies_it(prepared: Any) -> None:
    """The user's file is measured too, something is chosen among what was measured, and the result can be used."""
    folder = prepared.folder
    ran = prepared.run(*("tune", "sums.yaml", "--trace", "sums.trace", "--budget", str(BUDGET_S), "--json"))
    assert 0 == ran.returncode, ran.stderr
    report = json.loads(ran.stdout)
    candidates = report["candidates"]
    (chosen,) = [each for each in candidates if each["chosen"]]
    (as_it_is,) = [each for each in candidates if each["as_it_is"]]
    for each in (chosen, as_it_is):
        assert each["measured"] > 0
        assert each["alone"] > 0
        assert each["memory_bytes"] > 1 << 20
    for each in candidates:
        assert each["measured"] or each["problem"] or each["skipped"]
    has_bf16 = "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    assert has_bf16 == any(note.startswith("bf16: ") for note in report["notes"])
    text = (folder / "sums.tuned.yaml").read_text()
    assert text.startswith("# Made by `shapestream tune` from sums.yaml and sums.trace.")
    assert "# its name" in text
    tuned = yaml.safe_load(text)
    if not chosen["as_it_is"]:
        assert chosen["placement"]["slots"] == tuned["in_process"]["slots"]
    checked = prepared.run("check", "sums.tuned.yaml")
    assert 0 == checked.returncode, checked.stderr


def test_an_interrupted_run_leaves_nothing_behind(prepared: Any) -> None:
    """Ctrl-C ends the processes that it started; nothing is written."""
    folder = prepared.folder
    command = prepared.start("tune", str(folder / "sums.yaml"), "--trace", str(folder / "sums.trace"))
    until("the first measurement", lambda: "serving: " in command.log.read_text())
    children = until("its process", lambda: psutil.Process(command.pid).children())
    command.family |= {child.pid for child in children}
    command.send(signal.SIGINT)
    assert 1 == command.wait()
    assert "interrupted" in command.log.read_text()
    until("the end of its processes", command.family_is_gone)
    assert not (folder / "sums.tuned.yaml").exists()
