"""Failed calls: each raises its error, and the request is freed without harm.

OpenVINO 2026.4.1 corrupts memory where its own tensor outlives a request with a failed call.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from onnx import helper
from openvino import opset13 as op
from tests.onnx_files import write_onnx

from shapestream_engine import InferenceError, InputSpec, ModelSpec, compile_model

PROGRAM = """
import gc, sys
from shapestream_engine import InferenceError, InputSpec, ModelSpec, compile_model

spec = ModelSpec(path=sys.argv[1], inputs={"x": InputSpec(shape="batch, 1, length")})
model = compile_model(spec, slots=1, threads=int(sys.argv[2]))
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


@pytest.mark.parametrize("threads", [1, 2])
def test_requests_with_failed_calls_can_be_freed(tmp_path: Path, threads: int) -> None:
    """In a process of its own, which ended with SIGABRT or SIGSEGV in nearly every run."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], strides=[2]),
        helper.make_node("ReduceMean", ["c"], ["y"], axes=[2], keepdims=0),
    ]
    weights = np.linspace(-1, 1, 40).reshape(2, 1, 20).astype(np.float32)
    path = write_onnx(
        tmp_path / "m.onnx", nodes, {"x": ["batch", 1, "length"]}, {"y": ["batch", 2]}, {"w": weights}
    )
    arguments = [sys.executable, "-c", PROGRAM, str(path), str(threads)]
    ran = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert (0, "12\n") == (ran.returncode, ran.stdout), ran.stderr


@pytest.mark.parametrize(("streams", "threads"), [("0", 1), ("1", 2)])
def test_infer_of_openvino_raises_the_error_of_each_failed_call(streams: str, threads: int) -> None:
    """A thousand of them: requests use it where it computes in the calling thread (`_computes_in_caller`)."""
    x, wanted = op.parameter([-1], np.float32, name="x"), op.parameter([2], np.int64, name="wanted")
    model = ov.Model([op.result(op.reshape(op.relu(x), wanted, False))], [x, wanted])
    properties = {"NUM_STREAMS": streams, "INFERENCE_NUM_THREADS": threads}
    request = ov.Core().compile_model(model, "CPU", properties).create_infer_request()
    raised = 0
    for number in range(1000):
        right = np.arange(number % 5 + 1, dtype=np.float32)
        request.set_input_tensor(0, ov.Tensor(right))
        request.set_input_tensor(1, ov.Tensor(np.array([1, right.size])))
        (result,) = request.infer(share_outputs=True).values()
        np.testing.assert_array_equal(right[None], result)
        request.set_input_tensor(1, ov.Tensor(np.array([7, 11])))
        try:
            request.infer(share_outputs=True)
        except RuntimeError:
            raised += 1
    assert 1000 == raised


@pytest.mark.seeds("S002-21", "S003-34")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bad", [(3, 5), (8, 9), (6, 7)], ids=str)
def test_answers_after_a_failed_call_are_right(bad: tuple[int, int], threads: int) -> None:
    """Of sizes before the failed call and of others. Rows beyond the fourth are cut off, so operations see the old sizes
    in calls of other ones; without a new compilation such calls fail, or give wrong numbers."""
    x, weights = (op.parameter([-1, -1], np.float32, name=name) for name in ("x", "weights"))
    begin, end, step, axis = (op.constant(np.array([number], np.int64)) for number in (0, 4, 1, 0))
    kept = op.relu(op.slice(x, begin, end, step, axis))
    model = compile_model(
        ModelSpec(
            name="m",
            model=ov.Model([op.result(op.matmul(kept, weights, False, False))], [x, weights]),
            inputs={"x": InputSpec(shape="rows, n"), "weights": InputSpec(shape="k, m")},
        ),
        slots=1,
        threads=threads,
    )
    request = model.create_infer_request()
    random = np.random.default_rng(1)

    def is_right(rows: int, width: int) -> bool:
        left, right = random.random((rows, width), np.float32), random.random((width, width), np.float32)
        request.infer([left, right])
        return np.allclose(left[:4] @ right, request.outputs()[0], rtol=1e-5)

    assert is_right(8, 8)
    for after in ((8, 8), (6, 8), (2, 2)):
        with pytest.raises(InferenceError):
            request.infer([np.ones(bad, np.float32), np.ones((8, 8), np.float32)])
        assert is_right(*after)
        assert is_right(8, 8)
