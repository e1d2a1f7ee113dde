"""Model files are written whole, and anew when the code that makes them is newer."""

from __future__ import annotations

import os
from pathlib import Path

import openvino as ov
from examples import model_file
from examples.detector import model

from shapestream_engine.backends.openvino.runtime import core


def test_written_when_missing_or_older(tmp_path: Path) -> None:
    """A current file is left alone; one that is older than its source is written again; nothing else is left over."""
    path = tmp_path / "deep" / "detector.xml"
    built = []

    def build() -> ov.Model:
        built.append(1)
        return model.build()

    for _ in range(2):
        model_file.ensure(path, model, build)
    assert 1 == len(built)
    assert ["detector.bin", "detector.xml"] == sorted(file.name for file in path.parent.iterdir())
    os.utime(path, (0, 0))
    model_file.ensure(path, model, build)
    assert 2 == len(built)
    assert ["image"] == [port.any_name for port in core().read_model(path).inputs]
