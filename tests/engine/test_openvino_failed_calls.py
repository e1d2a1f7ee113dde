"""A request whose calls failed is freed without harm: OpenVINO 2026.4.1 corrupts memory where its own tensor outlives it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from onnx import helper
from tests.onnx_files import write_onnx

PROGRAM = """
import gc, sys
from shapestream_engine import InferenceError, InputSpec, ModelSpec, compile_model

spec = ModelSpec(path=sys.argv[1], inputs={"x": InputSpec(shape="batch, 1, length")})
model = compile_model(spec, slots=1, threads=2)
failed = 0
for _ in range(6):
    request = model.create_infer_request()
    for rows, length in ((1, 8), (1, 8), (1, 32), (4, 32)):
        tensor = request.input_tensor("x")
        tensor.shape = (rows, 1, length)
        tensor.data[...] = 1
        try:
            request.infer()
        except InferenceError:
            failed += 1
    del request, tensor
    gc.collect()
print(failed)
"""


def test_requests_with_failed_calls_can_be_freed(tmp_path: Path) -> None:
    """In a process of its own, which ended with SIGABRT or SIGSEGV in nearly every run."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], strides=[2]),
        helper.make_node("ReduceMean", ["c"], ["y"], axes=[2], keepdims=0),
    ]
    weights = np.linspace(-1, 1, 40).reshape(2, 1, 20).astype(np.float32)
    path = write_onnx(
        tmp_path / "m.onnx", nodes, {"x": ["batch", 1, "length"]}, {"y": ["batch", 2]}, {"w": weights}
    )
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (0, "12\n") == (ran.returncode, ran.stdout), ran.stderr
