"""Models that keep a state between calls: it is not kept here, and `check` and the log of `serve` say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo
from typer.testing import CliRunner

from shapestream.loading.models import compile_models
from shapestream.settings import load_settings
from shapestream_workers.cli import app

CONFIG = """\
models:
  - name: m
    path: counter.xml
    trust: TRUST
"""


def counter(path: Path) -> None:
    """An IR that counts its calls, and adds the number to `x`."""
    x = op.parameter([-1, 2], np.float32)
    x.output(0).get_tensor().set_names({"x"})
    info = VariableInfo()
    info.data_shape, info.data_type, info.variable_id = ov.PartialShape([1, 2]), ov.Type.f32, "calls"
    variable = Variable(info)
    count = op.add(
        op.read_value(op.constant(np.zeros((1, 2), np.float32)), variable), op.constant(np.float32(1))
    )
    y = op.add(x, count)
    y.output(0).get_tensor().set_names({"y"})
    ov.save_model(ov.Model([op.result(y)], [op.assign(count, variable)], [x]), path, compress_to_fp16=False)


WORDS = (
    "x.yaml:3:5: models[0].path: the model keeps a state from call to call (calls), but every call here begins with the "
    "initial state (for sequences, export it with the state as an input and an output)"
)


@pytest.mark.parametrize("trust", ["false", "true"])
def test_check_warns_of_a_state_that_is_lost(tmp_path: Path, trust: str) -> None:
    """The variable is named; the model is served all the same, since no answer depends on who came before."""
    counter(tmp_path / "counter.xml")
    config = tmp_path / "x.yaml"
    config.write_text(CONFIG.replace("TRUST", trust))
    ran = CliRunner().invoke(app, ["check", str(config)])
    assert 0 == ran.exit_code
    assert 1 == sum(WORDS in line for line in ran.stderr.splitlines())


@pytest.mark.parametrize("trust", ["false", "true"])
def test_a_worker_warns_of_it_in_its_log(
    tmp_path: Path, trust: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, when the model is compiled."""
    counter(tmp_path / "counter.xml")
    (tmp_path / "x.yaml").write_text(CONFIG.replace("TRUST", trust))
    loaded = load_settings(tmp_path / "x.yaml")
    compiled: Any = compile_models(loaded, loaded.settings.models, slots=1, threads=1)
    compiled["m"].close()
    assert 1 == capsys.readouterr().out.count(WORDS)
