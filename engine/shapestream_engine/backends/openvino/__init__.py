"""The OpenVINO engine: IR and ONNX files, and models built in memory, with native dynamic shapes.

This folder is the only place that imports `openvino`, in `runtime` for the first time. The way of a model: `compiling` (file
to `ov.Model`, properties and device), `ports` (the file's ports, their shapes, and which output axes follow which inputs),
`request` and `tensor` (the calls, and the tensors that are resized in place).

OpenVINO's own behaviour, which cannot be changed here: its CPU device computes i64 in 32 bits (2026.4), so values beyond
2^31 do not survive a call.
"""

from shapestream_engine.backends.openvino import runtime  # noqa: F401 - the first import of `openvino`

# isort: split
from shapestream_engine.backends.openvino.compiling import OpenVinoModel, compile_spec, read_spec
from shapestream_engine.backends.openvino.input_tensor import OpenVinoTensor
from shapestream_engine.backends.openvino.request import OpenVinoRequest

__all__ = ["OpenVinoModel", "OpenVinoRequest", "OpenVinoTensor", "compile_spec", "read_spec"]
