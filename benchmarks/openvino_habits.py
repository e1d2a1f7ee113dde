"""`python -m benchmarks.openvino_habits`: what plain OpenVINO does where shapestream does not let it.

docs/backends.md and the engine rely on these habits. They differ by version, precision and instruction set, so no test
asserts them: this program tells them and never fails. Each is tried in a process of its own, since some end it.

    python -m benchmarks.openvino_habits                                # with this CPU's instructions
    make build/avx2.so                                                  # once; needs a C compiler
    LD_PRELOAD=build/avx2.so python -m benchmarks.openvino_habits       # as on a CPU with AVX2 alone
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

import numpy as np
import typer
from rich.console import Console

import shapestream_engine.backends.openvino  # noqa: F401 - imports openvino without its telemetry

# isort: split
import openvino as ov
from openvino import opset15 as ops

from benchmarks.report import Report

Array: TypeAlias = np.ndarray[Any, Any]

MOST_S = 60.0
"""A habit that takes longer is told as one that does not end: each takes below 2 s on an idle core."""
DEPTH = 30
"""Products of matrices in a chain: enough for its call to run while another thread resizes a tensor."""
RIGHT, WRONG, RAISES = "right", "wrong numbers", "raises"
BAD, BAD_OF_SAME_ROWS = (3, 4), (8, 9)
"""Shapes that a chain does not take; calls of 8 x 8 come before and after."""


# ---------------------------------------------------------------- a call after a failed one


def _chain(*, first: bool = False) -> ov.Model:
    """Thirty times x = relu(x @ x); `first`: after one more relu, so that another operation comes before what fails."""
    x = node = ops.parameter([-1, -1], np.float32)
    node = ops.relu(node) if first else node
    for _ in range(DEPTH):
        node = ops.relu(ops.matmul(node, node, False, False))
    return ov.Model([ops.result(node)], [x])


def _compiled(model: ov.Model, **properties: Any) -> ov.CompiledModel:
    return ov.Core().compile_model(model, "CPU", {"NUM_STREAMS": "1"} | properties)


def _unit(size: int) -> Array:
    return np.eye(size, dtype=np.float32)


def _call(request: ov.InferRequest, expected: Array, *inputs: Array) -> str:
    """How a call ends: right, with wrong numbers, or with an error."""
    try:
        request.start_async(list(inputs))
        request.wait()
    except RuntimeError:
        return RAISES
    found = request.get_output_tensor(0).data
    return RIGHT if np.array_equal(expected, found) else WRONG


def _after_failure(
    bad: tuple[int, int],
    *,
    first: bool = False,
    between: Callable[[ov.CompiledModel, ov.InferRequest], ov.InferRequest] = lambda _, request: request,
    **properties: Any,
) -> str:
    compiled = _compiled(_chain(first=first), **properties)
    request = compiled.create_infer_request()
    small = _unit(8)
    assert _call(request, small, small) == RIGHT
    assert _call(request, small, np.ones(bad, np.float32)) == RAISES
    return _call(between(compiled, request), small, small)


def _released(compiled: ov.CompiledModel, request: ov.InferRequest) -> ov.InferRequest:
    compiled.release_memory()
    return request


def _called(_: ov.CompiledModel, request: ov.InferRequest) -> ov.InferRequest:
    assert _call(request, _unit(2), _unit(2)) == RIGHT
    return request


def _call_that_does_not_heal() -> str:
    """Rows beyond the fourth are cut off, so calls of 8 and of 6 rows give the relu the same shape."""
    x, weights = (ops.parameter([-1, -1], np.float32) for _ in range(2))
    begin, end, step, axis = (ops.constant(np.array([number], np.int64)) for number in (0, 4, 1, 0))
    kept = ops.relu(ops.slice(x, begin, end, step, axis))
    model = ov.Model([ops.result(ops.matmul(kept, weights, False, False))], [x, weights])
    request = _compiled(model).create_infer_request()
    eight, six = _unit(8), _unit(8)[:6]
    assert _call(request, eight[:4], eight, eight) == RIGHT
    assert _call(request, eight, _unit(3), _unit(5)) == RAISES
    return _call(request, six[:4], six, eight)


# ---------------------------------------------------------------- errors, answers, memory


def _infer_of_a_failing_call(**properties: Any) -> str:
    request = _compiled(_chain(), **properties).create_infer_request()
    request.infer([_unit(8)], share_outputs=True)
    try:
        (result,) = request.infer([np.ones(BAD, np.float32)], share_outputs=True).values()
    except RuntimeError:
        return RAISES
    return "returns the answer before" if np.array_equal(_unit(8), result) else WRONG


def _attention(device: str = "CPU", *, in_core: bool = False, **properties: Any) -> str:
    """softmax(x xT) x of length 16, after a first call of length 1."""
    x = ops.parameter([-1, -1, 64], np.float32)
    weights = ops.softmax(ops.matmul(x, x, False, True), -1)
    model = ov.Model([ops.result(ops.matmul(weights, x, False, False))], [x])
    core = ov.Core()
    core.get_property("CPU", "SUPPORTED_PROPERTIES")  # loads the device, which takes properties from then on
    if in_core:
        core.set_property("CPU", {"SNIPPETS_MODE": "DISABLE"})
    request = core.compile_model(model, device, properties).create_infer_request()
    request.infer([np.full((1, 1, 64), 0.1, np.float32)])
    request.infer([np.full((1, 16, 64), 0.1, np.float32)])
    found = request.get_output_tensor(0).data
    return RIGHT if np.allclose(found, 0.1, rtol=0, atol=0.01) else WRONG


def _nms(boxes: int) -> ov.InferRequest:
    places = ops.parameter([1, boxes, 4], np.float32)
    scores = ops.parameter([1, 1, boxes], np.float32)
    found = ops.multiclass_nms(
        places, scores, sort_result_type="score", output_type="i32", iou_threshold=0.4
    ).output(0)
    return _compiled(ov.Model([ops.result(found)], [places, scores])).create_infer_request()


def _boxes(count: int) -> Array:
    corners = 2 * np.arange(count, dtype=np.float32)[:, None] + np.array([0, 0, 1, 1], np.float32)
    return corners[None]


def _order_of_close_scores() -> str:
    request = _nms(2)
    request.infer([_boxes(2), np.array([[[0.9 - 6e-8, 0.9]]], np.float32)])
    scores = request.get_output_tensor(0).data[:, 1]
    return "the greater first" if scores[0] > scores[1] else "the lesser first"


def _sorts_close_scores() -> str:
    request, random = _nms(64), np.random.default_rng(0)
    for _ in range(200):
        scores = 0.9 + 6e-8 * random.integers(0, 16, (1, 1, 64))
        request.infer([_boxes(64), scores.astype(np.float32)])
    return "ends well"


def _large_integer() -> str:
    x = ops.parameter([-1], np.int64)
    request = _compiled(
        ov.Model([ops.result(ops.add(x, ops.constant(np.int64(1))))], [x])
    ).create_infer_request()
    request.infer([np.array([2**33], np.int64)])
    found = int(request.get_output_tensor(0).data[0])
    return RIGHT if found == 2**33 + 1 else WRONG


def _zero_byte() -> str:
    tensor = ov.Tensor(ov.Type.string, [1])
    tensor.str_data = np.array(["a\0"])
    return "kept" if tensor.str_data[0] == "a\0" else "dropped"


def _output_before_the_first_call() -> str:
    shape = list(_compiled(_chain()).create_infer_request().get_output_tensor(0).shape)
    return f"has the shape {shape}"


def _resized_while_it_runs() -> str:
    request = _compiled(_chain()).create_infer_request()
    large = _unit(400)
    tensor = ov.Tensor(large.copy())
    request.set_input_tensor(0, tensor)
    request.start_async()
    try:
        tensor.shape = [900, 900]
        words = "is let"
    except RuntimeError:
        words = RAISES
    try:
        request.wait()
    except RuntimeError:
        return f"{words}, and the call {RAISES}"
    found = request.get_output_tensor(0).data
    return words if np.array_equal(large, found) else f"{words}, {WRONG}"


def _after_a_failed_allocation() -> str:
    tensor = _compiled(_chain()).create_infer_request().get_input_tensor(0)
    try:
        tensor.shape = [2**45, 4]
    except RuntimeError:
        return (
            "has that shape, and no memory" if tensor.byte_size == 2**49 else f"has the shape {tensor.shape}"
        )
    return "takes the shape"


def _signal_after_the_last_core() -> str:
    faulthandler.enable()  # handlers run on the signal stack, as Python's own do
    x = ops.parameter([-1, 16], np.float32)
    model = ov.Model(
        [ops.result(ops.matmul(x, ops.constant(np.ones((16, 16), np.float32)), False, False))], [x]
    )
    held = [ov.Core()]
    held.append(held[0].compile_model(model, "CPU"))

    def free() -> None:
        held.clear()
        gc.collect()

    thread = threading.Thread(target=free)
    thread.start()
    thread.join()
    taken: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: taken.append(number))
    signal.raise_signal(signal.SIGTERM)
    return "is handled" if taken else "is lost"


HABITS: Mapping[str, Callable[[], str]] = {
    "[8, 8] after [8, 9], which fails": lambda: _after_failure(BAD_OF_SAME_ROWS),
    "[8, 8] after [3, 4], which fails": lambda: _after_failure(BAD),
    "the same in bf16 (`INFERENCE_PRECISION_HINT`)": lambda: _after_failure(
        BAD, INFERENCE_PRECISION_HINT="bf16"
    ),
    "the same in f32, with an operation before the one that fails": lambda: _after_failure(BAD, first=True),
    "the same, by a new `InferRequest`": lambda: _after_failure(
        BAD, first=True, between=lambda compiled, _: compiled.create_infer_request()
    ),
    "the same, after `release_memory`": lambda: _after_failure(BAD, first=True, between=_released),
    "the same, after a call of [2, 2]": lambda: _after_failure(BAD, first=True, between=_called),
    "other sizes after the failed call, of which an operation sees the old ones": _call_that_does_not_heal,
    "`infer` of a call that fails, no streams": lambda: _infer_of_a_failing_call(NUM_STREAMS="0"),
    "the same, one stream of one thread": lambda: _infer_of_a_failing_call(INFERENCE_NUM_THREADS=1),
    "the same, one stream of two threads": lambda: _infer_of_a_failing_call(INFERENCE_NUM_THREADS=2),
    "attention of length 16, after a first call of length 1": _attention,
    "the same with `SNIPPETS_MODE: DISABLE`": lambda: _attention(SNIPPETS_MODE="DISABLE"),
    "the same on `AUTO`": lambda: _attention("AUTO", SNIPPETS_MODE="DISABLE"),
    "the same on `AUTO`, the property set in the core": lambda: _attention("AUTO", in_core=True),
    "`MulticlassNms` of two scores, 6e-8 apart": _order_of_close_scores,
    "200 calls of 64 such scores": _sorts_close_scores,
    "`i64` beyond 2^31": _large_integer,
    "the zero byte at the end of a string": _zero_byte,
    "a dynamic output before the first call": _output_before_the_first_call,
    "an input that is resized during a call": _resized_while_it_runs,
    "a tensor after [2^45, 4], which cannot be allocated": _after_a_failed_allocation,
    "a signal after the last model and core were freed on another thread": _signal_after_the_last_core,
}
"""What is tried, and what tells the outcome in a few words."""


def told(habit: str) -> str:
    """Try one habit in a process of its own, and return what came of it."""
    command = [sys.executable, "-m", "benchmarks.openvino_habits", "--only", habit]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S, check=False)
    except subprocess.TimeoutExpired:
        return f"does not end within {MOST_S:.0f} s"
    if ran.returncode < 0:
        return f"ends the process ({signal.Signals(-ran.returncode).name})"
    lines = ran.stdout.splitlines()
    if ran.returncode == 0 and lines:
        return lines[-1]
    error = ran.stderr.strip().splitlines()
    return f"cannot be tried: {error[-1] if error else 'no word'}"


def instructions() -> str:
    """Return what OpenVINO may use: the widest vectors that CPUID tells, bf16, and oneDNN's limit where there is one."""
    # NumPy's public list of these names groups them by levels, which change with its versions.
    features = importlib.import_module("numpy._core._multiarray_umath").__cpu_features__
    widest = next((name for name in ("AVX512F", "AVX2") if features.get(name)), "below AVX2")
    capabilities = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    return ", ".join(
        [widest, "BF16" if "BF16" in capabilities else "no BF16"]
        + ([f"ONEDNN_MAX_CPU_ISA={limit}"] if limit else [])
    )


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
    only: Annotated[str, typer.Option(help="Try this habit alone, in this process.")] = "",
) -> None:
    """Tells what plain OpenVINO does where shapestream relies on it, or avoids it; seconds for each habit."""
    if only:
        print(HABITS[only]())
        return
    title = f"OpenVINO {ov.__version__}, {instructions()}"
    answers: dict[str, str] = {}
    with Console(stderr=True).status("") as status:
        for habit in HABITS:
            status.update(habit)
            answers[habit] = told(habit)
    if as_json:
        print(json.dumps({"title": title, "rows": answers}))
    else:
        report = Report(title=title, columns=("what is tried", "what comes of it"), rows=[*answers.items()])
        Console(width=160).print(report.table())


if __name__ == "__main__":
    typer.run(main)
