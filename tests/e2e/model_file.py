"""A model in a file, and the YAML that serves it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops


def doubling_model(path: Path) -> None:
    """An IR that doubles `x`."""
    x = ops.parameter([-1, 4], np.float32)
    x.output(0).get_tensor().set_names({"x"})
    y = ops.add(x, x)
    y.output(0).get_tensor().set_names({"y"})
    ov.save_model(ov.Model([ops.result(y)], [x]), path, compress_to_fp16=False)


def model_yaml(path: str, extra: str = "") -> str:
    """One model, from that file."""
    return f"models:\n  - name: m\n    path: {path}\n{extra}"
