"""Models, requests and seeded errors of test_audit_rounding: do audits call rounding a mismatch, do they find errors?

Offline, with the judgement of the auditor (`probing/tolerances.py`) and kernels of NumPy, ONNX Runtime and OpenVINO. A
comparison is one answer from a call of 16 requests beside the same request alone, at every element. Tolerances come from
inputs around 1, as those of a proof do; live inputs are larger, or cancel. Of right answers, none may be a mismatch. In
others an error is seeded: each such answer should be one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from shapestream_engine.probing.tolerances import (
    RUNS,
    TOLERANCES,
    Movements,
    OutputTolerance,
    changed_values,
    compare,
    distances,
)

Array: TypeAlias = np.ndarray[Any, Any]
Kernel: TypeAlias = Callable[[Array], Array]
"""Rows of one input to rows of one output."""
Draw: TypeAlias = Callable[[np.random.Generator, int], Array]

TOGETHER = 16
"""Requests of a call."""
CHUNK = 1024
"""Answers that are compared at once."""
WIDTH, CLASSES = 256, 64
PROBED = 64
"""Requests that tolerances are learned from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and the requests that it gets."""

    name: str
    kernel: Kernel
    live: Draw
    padded: Kernel | None = None
    """The same over inputs that it pads, where calls of several requests do so."""
    computed_in: str = "f32"
    probe: Draw = field(default=lambda random, count: _f32(random.normal(size=(count, WIDTH))))
    exact: bool = False
    """Whether the output is of whole numbers."""


ERRORS: Mapping[str, Callable[[Array], Array]] = {
    "a neighbour's answer": lambda together: np.roll(together, 1, axis=0),
    "the largest of all": lambda together: np.broadcast_to(together.max(axis=0), together.shape),
    "a tenth is padding": lambda together: _f32(0.9 * together),
    "one per cent off": lambda together: _f32(1.01 * together),
}
"""Seeded errors: what becomes of the answers of a call. Indices have no part, so the last two mean nothing to them."""


# ---------------------------------------------------------------- kernels


def _f32(values: Array) -> Array:
    return np.asarray(values, np.float32)


def _weights(seed: int, rows: int, columns: int, gain: float = 1.0) -> Array:
    return _f32(np.random.default_rng(seed).normal(size=(rows, columns)) * gain * rows**-0.5)


def _cancelling() -> Array:
    """Weights whose columns add up to nothing: of what all inputs have in common, only rounding is left."""
    weights = _weights(2, WIDTH, CLASSES)
    return _f32(weights - weights.mean(axis=0))


def _bf16(values: Array) -> Array:
    bits = np.ascontiguousarray(_f32(values)).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def _f16(values: Array) -> Array:
    return _f32(np.asarray(values, np.float16))


def _product(weights: Array) -> Kernel:
    return lambda x: _f32(x @ weights)


def _in_halves(weights: Array) -> Kernel:
    """A product whose order of sums depends on the rows whatever the machine's kernels do."""
    half = len(weights) // 2

    def run(x: Array) -> Array:
        if len(x) == 1:
            return _f32(x @ weights)
        return _f32(x[:, :half] @ weights[:half] + x[:, half:] @ weights[half:])

    return run


def _softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    return _f32(weights / weights.sum(axis=1, keepdims=True))


def _layers(count: int, held: Callable[[Array], Array] = _f32) -> Kernel:
    """Products with rectifiers between them, each result held in fewer bits."""
    hidden = [held(_weights(number, WIDTH, WIDTH, 1.4)) for number in range(count)]
    last = held(_weights(9, WIDTH, CLASSES))

    def run(x: Array) -> Array:
        x = held(x)
        for weights in hidden:
            x = held(np.maximum(x @ weights, 0))
        return held(x @ last)

    return run


def _layer_norm(x: Array) -> Array:
    """Means by a product with ones, whose order of sums depends on the rows."""
    ones = np.full((WIDTH, 1), 1 / WIDTH, np.float32)
    centred = x - x @ ones
    return _f32(centred / np.sqrt((centred * centred) @ ones + np.float32(1e-5)))


def _attention(padding: int) -> Kernel:
    """One head over eight positions, and over others that are masked."""

    def run(x: Array) -> Array:
        places = np.pad(x.reshape(len(x), 8, WIDTH // 8), ((0, 0), (0, padding), (0, 0)))
        query, key, value = [(places.reshape(-1, WIDTH // 8) @ head).reshape(places.shape) for head in _HEADS]
        scores = query @ key.transpose(0, 2, 1)
        scores[..., 8:] = -1e30
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return _f32(weights @ value)[:, :8].reshape(len(x), -1)

    return run


_HEADS = [_weights(20 + number, WIDTH // 8, WIDTH // 8) for number in range(3)]
_TABLE = _weights(30, 1000, WIDTH, 30.0)


def _of_ids(ids: Array) -> Array:
    """A mean of embeddings, and a product: nothing of it can be changed a little."""
    return _f32(_TABLE[ids].mean(axis=1) @ _CLASSES)


_CLASSES = _weights(1, WIDTH, CLASSES)


def _onnxruntime(normalised: bool) -> Kernel:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    nodes = [helper.make_node("MatMul", ["z" if normalised else "x", "w"], ["y"])]
    if normalised:
        nodes.insert(0, helper.make_node("LayerNormalization", ["x", "scale"], ["z"], axis=1))
    known = {"w": _CLASSES}
    if normalised:
        known["scale"] = np.ones(WIDTH, np.float32)
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(values, name) for name, values in known.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return lambda x: np.asarray(session.run(None, {"x": x})[0])


def _openvino(hint: str, layers: int, *, softmax: bool = False) -> Kernel:
    import openvino
    import openvino.opset13 as ops

    x = ops.parameter([-1, WIDTH], np.float32)
    node = x
    for number in range(layers):
        weights = ops.constant(_weights(number, WIDTH, WIDTH, 1.4))
        node = ops.relu(ops.matmul(node, weights, False, False))
    node = ops.matmul(node, ops.constant(_CLASSES), False, False)
    node = ops.softmax(node, 1) if softmax else node
    properties = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": hint}
    request = (
        openvino.Core().compile_model(openvino.Model([node], [x]), "CPU", properties).create_infer_request()
    )

    def run(rows: Array) -> Array:
        request.infer([rows])
        return np.array(request.get_output_tensor(0).data)

    return run


def _uniform(most: float, least: float = 0.0) -> Draw:
    return lambda random, count: _f32(least + random.random((count, WIDTH)) * (most - least))


def _normal(scale: float) -> Draw:
    return lambda random, count: _f32(random.normal(size=(count, WIDTH)) * scale)


def _near(constant: float, spread: float) -> Draw:
    return lambda random, count: _f32(constant + random.normal(size=(count, WIDTH)) * spread)


def _whole(random: np.random.Generator, count: int) -> Array:
    return _f32(random.integers(0, 10_000, (count, WIDTH)))


def _ids(random: np.random.Generator, count: int) -> Array:
    return random.integers(0, 1000, (count, 12))


def cases() -> Iterator[Case]:
    """All of them."""
    product = _product(_CLASSES)
    for scale in (1e4, 1e5, 1e6):
        yield Case(name=f"product, 0..{scale:g}", kernel=product, live=_uniform(scale))
    yield Case(name="product in halves", kernel=_in_halves(_CLASSES), live=_uniform(1e6))
    yield Case(name="product in halves, whole numbers", kernel=_in_halves(_CLASSES), live=_whole)
    yield Case(name="product of one column", kernel=_product(_weights(3, WIDTH, 1)), live=_uniform(1e4))
    yield Case(name="product, cancelling", kernel=_product(_cancelling()), live=_uniform(1e4 + 1, 1e4))
    yield Case(name="seven products", kernel=_layers(6), live=_uniform(1e4))
    yield Case(
        name="index of the largest",
        kernel=lambda x: (x @ _CLASSES).argmax(axis=1)[:, None],
        live=_normal(1.0),
        exact=True,
    )
    yield Case(name="softmax, saturated", kernel=lambda x: _softmax(x @ _CLASSES), live=_normal(1e4))
    yield Case(
        name="attention, saturated, padded", kernel=_attention(0), padded=_attention(5), live=_normal(30.0)
    )
    for constant, spread in ((1.0, 1e-4), (1e3, 1e-2), (1e5, 0.1)):
        name = f"layer norm, {constant:g} +- {spread:g}"
        yield Case(name=name, kernel=lambda x: _f32(_layer_norm(x) @ _CLASSES), live=_near(constant, spread))
    yield Case(name="embeddings of ids", kernel=_of_ids, live=_ids, probe=_ids)
    yield Case(name="f16 held", kernel=_layers(4, _f16), live=_uniform(100.0), computed_in="f16")
    yield Case(name="bf16 held", kernel=_layers(4, _bf16), live=_uniform(1e4), computed_in="bf16")
    yield Case(name="ONNX Runtime, product", kernel=_onnxruntime(normalised=False), live=_uniform(1e4))
    yield Case(name="ONNX Runtime, layer norm", kernel=_onnxruntime(normalised=True), live=_near(1e3, 1e-2))
    yield Case(name="OpenVINO, five products", kernel=_openvino("f32", 4), live=_uniform(1e4))
    yield Case(name="OpenVINO, softmax", kernel=_openvino("f32", 0, softmax=True), live=_normal(1e4))
    yield Case(
        name="OpenVINO, hint bf16", kernel=_openvino("bf16", 4), live=_uniform(1e4), computed_in="bf16"
    )


# ---------------------------------------------------------------- the judgement


def learned(case: Case, random: np.random.Generator) -> OutputTolerance:
    """The tolerance that a proof would have of the case."""
    results = [case.kernel(row[None]) for row in case.probe(random, PROBED)]
    return OutputTolerance.of(None if case.exact else TOLERANCES[case.computed_in], results)


def judged(case: Case, tolerance: OutputTolerance, row: Array, alone: Array, answer: Array) -> str:
    """The auditor's judgement of one answer: `within`, `rounding` or `mismatch`."""
    if compare(alone, answer, tolerance).within:
        return "within"
    movements = Movements([alone], [answer], [tolerance])
    for number in range(RUNS):
        other = _changed(case, row, number)
        if other.tobytes() == row.tobytes():
            break
        if movements.changed([case.kernel(other[None])]):
            return "rounding"
    for copies in (TOGETHER, 2, 3):
        if movements.beside_copies([case.kernel(np.repeat(row[None], copies, axis=0))[:1]]):
            return "rounding"
    return "mismatch"


def examine(case: Case, answers: int, error: str | None, seed: int) -> Counter[str]:
    """How many answers of a case, right or with an error, were judged in which way."""
    random = np.random.default_rng(seed)
    tolerance = learned(case, random)
    found: Counter[str] = Counter()
    while found.total() < answers:
        rows = case.live(random, min(CHUNK, -(-(answers - found.total()) // TOGETHER) * TOGETHER))
        alone = np.concatenate([case.kernel(row[None]) for row in rows])
        shared = case.padded or case.kernel
        calls = [shared(rows[start : start + TOGETHER]) for start in range(0, len(rows), TOGETHER)]
        if error is not None:
            calls = [ERRORS[error](call) for call in calls]
        together = np.concatenate(calls)
        off = distances(alone, together)
        # The least that is allowed of any answer, and what any change moves at once: hardly an answer is beyond both.
        least = tolerance.allowed(np.zeros(alone[:1].shape))
        if tolerance.tolerance is not None:
            least = least + tolerance.tolerance.of_magnitude * np.abs(alone.astype(np.float64))
        beyond = np.flatnonzero((off > least).any(axis=1))
        found["within"] += len(rows) - len(beyond)
        if error is None:
            left = _unexplained(case, rows[beyond], alone[beyond], (off - least)[beyond])
            found["rounding"] += len(beyond) - len(left)
            beyond = beyond[left]
        for place in beyond.tolist():
            one = slice(place, place + 1)
            found[judged(case, tolerance, rows[place], alone[one], together[one])] += 1
    return found


def _unexplained(case: Case, rows: Array, alone: Array, excess: Array) -> Array:
    """The places of the answers that exceed their tolerance by more than changed inputs move them; quickly, for many."""
    left = np.arange(len(rows))
    moved = np.zeros(alone.shape)
    for number in range(RUNS):
        others = [_changed(case, rows[place], number) for place in left]
        for place, other in zip(left, others, strict=True):
            if other.tobytes() == rows[place].tobytes():
                continue
            one = slice(place, place + 1)
            moved[one] = np.maximum(moved[one], distances(alone[one], case.kernel(other[None])))
        left = left[(excess[left] > moved[left]).any(axis=1)]
    return left


def _changed(case: Case, row: Array, number: int) -> Array:
    if row.dtype.kind != "f":
        return row
    return changed_values(row, TOLERANCES[case.computed_in].of_magnitude, np.random.default_rng(number))
