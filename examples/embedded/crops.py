"""Crops of photographs, and the recogniser's answers for each of them alone, by OpenVINO itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov

from examples import model_file
from examples.detector.pictures import load_photographs, make_workload
from examples.reading import model as recogniser

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "recogniser.xml"
CONFIG = Path(__file__).parent / "models.yaml"
# Sums of whole numbers are exact; their mean is rounded once.
TOLERANCE = 1e-5

Crop = npt.NDArray[np.uint8]
Edges = npt.NDArray[np.float32]


def make_crops(per_size: int) -> list[Crop]:
    """Crops [1, height, width] of many sizes; the model's file is made besides."""
    model_file.ensure(MODEL, recogniser, recogniser.build)
    pictures = make_workload(load_photographs(), crops_per_size=per_size)
    return [row for picture in pictures if picture.is_crop for row in picture.image]


def alone(crops: list[Crop]) -> list[Edges]:
    """The answer [4] for each crop, in a call of its own."""
    compiled = ov.Core().compile_model(ov.Core().read_model(MODEL), "CPU")
    return [np.array(compiled(crop[None])["edges"][0], np.float32) for crop in crops]


def wrong(found: list[Edges], expected: list[Edges]) -> int:
    """The number of answers that differ."""
    assert len(found) == len(expected)
    return sum(
        not np.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)
        for one, other in zip(found, expected, strict=True)
    )
