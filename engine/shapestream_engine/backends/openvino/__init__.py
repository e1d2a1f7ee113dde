"""The OpenVINO engine: IR and ONNX files, and models in memory, with dynamic shapes.

This folder is the only code that imports `openvino`; `runtime` imports it first. The way of a model: `compiling` (file to
`ov.Model`, properties, device), `model_ports` (ports, shapes, and the output axes that follow inputs), `request` and
`input_tensor` (calls, and tensors that are resized in place).

OpenVINO's CPU device computes some element types as narrower ones: `narrowing`.
"""

from shapestream_engine.backends.openvino import runtime  # noqa: F401 - the first import of `openvino`

# isort: split
from shapestream_engine.backends.openvino.compiling import (
    OpenVinoModel,
    check_spec,
    compile_spec,
    faster_precision,
    read_spec,
)
from shapestream_engine.backends.openvino.input_tensor import OpenVinoTensor
from shapestream_engine.backends.openvino.request import OpenVinoRequest

__all__ = [
    "OpenVinoModel",
    "OpenVinoRequest",
    "OpenVinoTensor",
    "check_spec",
    "compile_spec",
    "faster_precision",
    "read_spec",
]
