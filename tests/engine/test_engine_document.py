"""The example of docs/engine.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import openvino as ov
import pytest
from openvino import opset13 as op

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "engine.md"


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints what its comments say, and the array holds the result."""
    x = op.parameter([-1, -1], ov.Type.f32, name="x")
    x.output(0).tensor.names = {"x"}
    ov.save_model(ov.Model([op.result(op.relu(x))], [x]), tmp_path / "model.xml")
    monkeypatch.chdir(tmp_path)
    example = "".join(re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL))
    names: dict[str, object] = {}
    exec(example, names)
    promised = re.findall(r"print\(.*?\) +# (\[.*\])", example)
    printed = capsys.readouterr().out.splitlines()
    assert promised == [line for line in printed if line in promised]
    assert [2] * 64 == names["results"].reshape(-1)[:64].tolist()  # type: ignore[attr-defined]
