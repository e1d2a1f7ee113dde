"""The ONNX Runtime engine: ONNX files with the dynamic axes that they have, run on memory of our own.

This folder is the only place that imports `onnxruntime`. `compiling` (properties, and file to session and signature),
`request` (the calls, bound to the request's own input tensors).
"""

import os

# ONNX Runtime reads it when it is imported. Else it writes a device id into the home folder, and sends events.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from shapestream_engine.backends.onnxruntime.compiling import OnnxRuntimeModel, compile_spec
from shapestream_engine.backends.onnxruntime.request import OnnxRuntimeRequest

__all__ = ["OnnxRuntimeModel", "OnnxRuntimeRequest", "compile_spec"]
