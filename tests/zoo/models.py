"""The table of the zoo: where each model's file is, and how to make a request of the kind that it is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from tests.zoo.made import WRITERS

BUILD = Path(__file__).resolve().parents[2] / "build"
UNPACKED = BUILD / "zoo"
"""Wheels, unpacked by `make zoo`."""
EXPORTED = BUILD / "exported"
"""Models of scikit-learn and LightGBM, by `make build/exported`."""

Array: TypeAlias = np.ndarray[Any, Any]
Inputs: TypeAlias = Mapping[str, Array]
Random: TypeAlias = np.random.Generator

_WORDS = ("red", "green", "blue", "violet", "")
"""Those of the pipeline, and one that it does not know."""


@dataclass(frozen=True)
class Kept:
    """A model, and how to make a request of the kind that it is for."""

    path: Path
    request: Callable[[Random], Inputs]
    shares: bool = True
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


def _of_one_rate(random: Random) -> Inputs:
    return _speech(random, has_rate=False)


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


def _captcha(random: Random) -> Inputs:
    width = 8 * int(random.integers(8, 32))
    return {"input1": random.uniform(0, 1, (1, 1, 64, width)).astype(np.float32)}


def _photograph(random: Random) -> Inputs:
    return {"images": random.uniform(0, 255, (1, 3, 416, 416)).astype(np.float32)}


def _features(random: Random) -> Inputs:
    rows = int(random.integers(1, 5))
    return {"X": np.round(random.normal(scale=1.5, size=(rows, 12)), 1).astype(np.float32)}


def _record(random: Random) -> Inputs:
    rows = int(random.integers(1, 5))
    return {
        "words": random.choice(_WORDS, (rows, 2)).astype(object),
        "numbers": random.normal(size=(rows, 3)).astype(np.float32),
    }


def _picture(random: Random) -> Inputs:
    height, width = (8 * int(size) for size in random.integers(4, 12, 2))
    return {"image": random.uniform(-1, 1, (1, 3, height, width)).astype(np.float32)}


def _patch(random: Random) -> Inputs:
    return {"image": random.normal(size=(int(random.integers(1, 4)), 1, 24, 24)).astype(np.float32)}


def _text(random: Random) -> Inputs:
    rows, length = int(random.integers(1, 4)), int(random.integers(1, 40))
    mask = np.arange(length) < random.integers(1, length + 1, (rows, 1))
    return {"input_ids": random.integers(0, 500, (rows, length)), "attention_mask": mask.astype(np.int64)}


def _sized(random: Random) -> Inputs:
    height, width = (16 * int(size) for size in random.integers(2, 6, 2))
    return {"image": random.uniform(-1, 1, (1, 3, height, width)).astype(np.float32)}


_TORCH = {
    "cnn": _sized,
    "detector": _patch,
    "detector-legacy": _patch,
    "encoder": _text,
    "encoder-legacy": _text,
}
_RAPID = UNPACKED / "rapidocr_onnxruntime" / "models"
_SILERO = UNPACKED / "silero_vad" / "data"
WHEELS = {
    "magika": Kept(UNPACKED / "magika/models/standard_v3_3/model.onnx", _bytes),
    "silero": Kept(_SILERO / "silero_vad.onnx", _of_both_rates),
    "silero-ifless": Kept(_SILERO / "silero_vad_op18_ifless.onnx", _of_both_rates),
    "silero-half": Kept(_SILERO / "silero_vad_half.onnx", _of_one_rate),
    "swift-f0": Kept(UNPACKED / "swift_f0/model.onnx", _pitch, shares=False),
    "rapidocr-angle": Kept(_RAPID / "ch_ppocr_mobile_v2.0_cls_infer.onnx", _line),
    "rapidocr-lines": Kept(_RAPID / "ch_PP-OCRv4_rec_infer.onnx", _crop),
    "rapidocr-pages": Kept(_RAPID / "ch_PP-OCRv4_det_infer.onnx", _page),
    "ddddocr-old": Kept(UNPACKED / "ddddocr/common_old.onnx", _captcha, shares=False),
    "ddddocr": Kept(UNPACKED / "ddddocr/common.onnx", _captcha, shares=False),
    "ddddocr-boxes": Kept(UNPACKED / "ddddocr/common_det.onnx", _photograph, shares=False),
}
"""Models out of wheels of PyPI."""
MADE = {
    "forest": Kept(EXPORTED / "forest_2.onnx", _features),
    "gradient-boosting": Kept(EXPORTED / "gradient_boosting_2.onnx", _features),
    "lightgbm": Kept(EXPORTED / "lightgbm_2.onnx", _features),
    "pipeline": Kept(EXPORTED / "pipeline.onnx", _record),
    **{
        name: Kept(BUILD / "made" / f"{name}.onnx", request)
        for name, request in zip(WRITERS, (_picture, _picture, _patch, _text), strict=True)
    },
    **{
        f"torch-{name}": Kept(Path(__file__).parent / "torch" / f"{name}.onnx", request)
        for name, request in _TORCH.items()
    },
}
"""Models that were trained, written or exported here; 2 MB together."""
