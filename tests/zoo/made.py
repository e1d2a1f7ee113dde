"""Models that no wheel holds, written here: a CNN, the same quantized to 8 bits, a detector and a masked text encoder.

Their weights are random. What scikit-learn and LightGBM export comes from `tests/exporters/export.py`, what PyTorch exports
from `export_torch.py`, whose files are kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
from tests.exporters.graphs import write_rows
from tests.onnx_files import write_onnx
from tests.text_encoders import write_encoder

CLASSES = 10
_CALIBRATED_ON = 16
"""Pictures from which the quantization takes the ranges of its tensors."""


def write_cnn(path: Path) -> Path:
    """Write a classifier of pictures of any size: four convolutions, the mean over all places, softmax."""
    random = np.random.default_rng(21)
    known: dict[str, np.ndarray[Any, Any]] = {}
    nodes = []
    last, channels = "image", 3
    for number, width in enumerate((16, 32, 64, 64)):
        weights = random.normal(size=(width, channels, 3, 3)) / np.sqrt(channels * 9 / 2)
        known[f"weights{number}"] = weights.astype(np.float32)
        known[f"bias{number}"] = random.normal(scale=0.1, size=width).astype(np.float32)
        stride = [2, 2] if number else [1, 1]
        nodes += [
            helper.make_node(
                "Conv",
                [last, f"weights{number}", f"bias{number}"],
                [f"convolved{number}"],
                pads=[1] * 4,
                strides=stride,
            ),
            helper.make_node("Relu", [f"convolved{number}"], [f"active{number}"]),
        ]
        last, channels = f"active{number}", width
    known["head"] = random.normal(scale=0.5, size=(channels, CLASSES)).astype(np.float32)
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("MatMul", ["flat", "head"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    sizes = {"image": ["batch", 3, "height", "width"]}
    return write_onnx(path, nodes, sizes, {"probabilities": ["batch", CLASSES]}, known)


class _Pictures(CalibrationDataReader):  # type: ignore[misc] # onnxruntime has no types
    def __init__(self) -> None:
        random = np.random.default_rng(22)
        self._left: Iterator[Mapping[str, Any]] = iter(
            [
                {"image": random.uniform(-1, 1, (1, 3, 64, 64)).astype(np.float32)}
                for _ in range(_CALIBRATED_ON)
            ]
        )

    def get_next(self) -> Mapping[str, Any] | None:
        """Return the next inputs, None after the last."""
        return next(self._left, None)


def write_quantized_cnn(path: Path) -> Path:
    """Write `write_cnn`'s model with weights and activations of 8 bits, between QuantizeLinear and DequantizeLinear."""
    with tempfile.TemporaryDirectory() as folder:
        plain = write_cnn(Path(folder) / "cnn.onnx")
        quantize_static(plain, path, _Pictures(), quant_format=QuantFormat.QDQ)
    return path


def _write_encoder(path: Path) -> Path:
    return write_encoder(path, vocabulary=500, hidden=64)


WRITERS: Mapping[str, Callable[[Path], Path]] = {
    "cnn": write_cnn,
    "cnn-int8": write_quantized_cnn,
    "detector": write_rows,
    "encoder": _write_encoder,
}
