"""The ONNX Runtime engine: ONNX files with their dynamic axes, on memory that this package allocates.

This folder is the only code that imports `onnxruntime`. `compiling` reads properties and files, and runs calls on a
request's input tensors.
"""

import os

# ONNX Runtime reads this variable at import. Otherwise it writes a device id into the home folder and sends events.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from shapestream_engine.backends.onnxruntime.compiling import (
    OnnxRuntimeRequest,
    check_spec,
    compile_spec,
    read_spec,
)

__all__ = ["OnnxRuntimeRequest", "check_spec", "compile_spec", "read_spec"]
