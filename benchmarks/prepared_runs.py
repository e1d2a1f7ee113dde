"""One measurement of `benchmarks.preparations` in a process of its own, since what a device has prepared stays with it.

`python -m benchmarks.prepared_runs NAME COUNT` prints its figures as a line of JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np

from shapestream.scheduling.boundaries import grid_sizes
from shapestream_engine import (
    BatchInputs,
    InputSpec,
    ModelSpec,
    RequestPool,
    Runner,
    Tensors,
    compile_model,
)
from shapestream_engine.compiled_model import CompiledModel
from shapestream_engine.strategy import Strategy, parse_strategy

_Array: TypeAlias = "np.ndarray[Any, Any]"
Figures: TypeAlias = dict[str, float]

WIDTHS = (256, 1024, 1024, 10)
"""Of the MLP: features, two hidden layers, classes."""
MOST_ROWS = 512
BUCKETS = (32, 64, 128, 256, 384, 512)
FEATURES = 64
MOST_BATCH, MOST_SEQ = 32, 256
CAP = 64
"""Shapes that rounding leaves."""


class Serving:
    """A model behind a slot, as a worker runs it: requests in, results out, one batch at a time."""

    def __init__(self, model: CompiledModel) -> None:
        self.model = model
        self._runner = Runner("0", {"m": RequestPool(model, 1)})
        cap = model.signature.strategy.max_prepared
        # As a scheduler does that has learned nothing yet.
        ends = [(bound.minimum, bound.maximum or bound.minimum) for bound in model.signature.bounds]
        self._grid = None if cap is None else grid_sizes(ends, cap)

    def run(self, x: _Array) -> _Array:
        """One request; its output, or the error that it met."""
        member = Tensors(layout=((0, "f32", x.shape),), buffers=(x.tobytes(),))
        shape = self.model.signature.resolve(member.layout)
        sizes = shape.sizes
        if self._grid is not None:
            sizes = tuple(axis[bisect_left(axis, own)] for axis, own in zip(self._grid, sizes, strict=True))
        report = self._runner.run(
            BatchInputs(batch=0, model="m", sizes=sizes, members=(member,), shapes=(shape,))
        )
        assert report is not None  # nothing withdraws it
        if report.outputs is None or report.outputs[0] is None:
            raise RuntimeError(report.message)
        (_, _, given), buffer = report.outputs[0].layout[0], report.outputs[0].buffers[0]
        return np.frombuffer(buffer, np.float32).reshape(given)


def _weights() -> list[_Array]:
    draw = np.random.default_rng(0)
    return [(draw.standard_normal(size) / np.sqrt(size[0])).astype(np.float32) for size in pairwise(WIDTHS)]


def _mlp(x: _Array, weights: list[_Array]) -> _Array:
    """The reference."""
    for weight in weights[:-1]:
        x = np.maximum(x @ weight, 0)
    return x @ weights[-1]


def _xla(strategy: Strategy, iterations: int) -> Figures:
    """The MLP on row counts drawn at random: what it takes from the first request to the last, compilations included."""
    weights = _weights()
    spec = ModelSpec(
        name="mlp",
        path=_export(weights),
        device="xla",
        inputs={"x": InputSpec(shape=f"batch:1..{MOST_ROWS}, {WIDTHS[0]}")},
        strategy=strategy,
    )
    runner = Serving(compile_model(spec, slots=1))
    chance = random.Random(7)
    rows = [chance.randint(1, MOST_ROWS) for _ in range(iterations)]
    inputs = np.random.default_rng(1).standard_normal((MOST_ROWS, WIDTHS[0])).astype(np.float32)
    expected = _mlp(inputs, weights)
    began = perf_counter()
    results = [runner.run(inputs[:count]) for count in rows]
    elapsed = perf_counter() - began
    for count, result in zip(rows, results, strict=True):
        np.testing.assert_allclose(expected[:count], result, rtol=1e-3, atol=1e-3)
    prepared = runner.model.preparations
    assert prepared is not None
    return {
        "seconds": elapsed,
        "compilations": prepared.count,
        "hits": prepared.hits,
        "shapes": len(set(rows)),
    }


def _export(weights: list[_Array]) -> Path:
    """The MLP as a program of `torch.export`, its rows dynamic."""
    import torch

    class Mlp(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not among what is checked
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList([torch.from_numpy(weight) for weight in weights])

        def forward(self, x: Any) -> Any:
            for weight in self.weights[:-1]:
                x = torch.relu(x @ weight)
            return {"y": x @ self.weights[-1]}

    rows = torch.export.Dim("rows", min=1, max=MOST_ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Mlp(), (torch.ones(3, WIDTHS[0]),), dynamic_shapes={"x": {0: rows}})
        path = Path(tempfile.mkdtemp(prefix="ss-bench-")) / "mlp.pt2"
        torch.export.save(program, path)
    return path


def _positionwise(strategy: Strategy) -> Serving:
    """OpenVINO on `[batch, seq, 64]`: a normalisation and two layers at each position, which padding leaves alone."""
    import shapestream_engine.backends.openvino  # noqa: F401 - imports openvino without its telemetry

    # isort: split
    import openvino as ov
    from openvino import opset13 as ops

    draw = np.random.default_rng(0)
    x = ops.parameter([-1, -1, FEATURES], np.float32, name="x")
    x.output(0).set_names({"x"})
    normed = ops.mvn(x, np.array([2]), True, 1e-5, "INSIDE_SQRT")
    wide = ops.constant((draw.standard_normal((FEATURES, 256)) / 8).astype(np.float32))
    narrow = ops.constant((draw.standard_normal((256, FEATURES)) / 16).astype(np.float32))
    hidden = ops.gelu(ops.matmul(normed, wide, False, False), "erf")
    y = ops.add(x, ops.matmul(hidden, narrow, False, False))
    y.output(0).set_names({"y"})
    shape = f"batch:1..{MOST_BATCH}, seq:1..{MOST_SEQ}, {FEATURES}"
    spec = ModelSpec(
        name="positionwise",
        model=ov.Model([y], [x], "positionwise"),
        engine="openvino",
        inputs={"x": InputSpec(shape=shape, pad={"seq": 0})},
        strategy=strategy,
    )
    return Serving(compile_model(spec, slots=1, threads=1))


def _distinct_shapes(count: int) -> Iterator[tuple[int, int]]:
    every = [(batch, seq) for batch in range(1, MOST_BATCH + 1) for seq in range(1, MOST_SEQ + 1)]
    yield from random.Random(3).sample(every, count)


def _first_and_repeated(count: int) -> Figures:
    """A call of a shape that is new against calls of the same shape afterwards, on OpenVINO's CPU device."""
    runner = _positionwise(Strategy())
    first, repeated = [], []
    runner.run(np.ones((2, 3, FEATURES), np.float32))  # whatever is made for the first call of all
    for shape in _distinct_shapes(count):
        x = np.ones((*shape, FEATURES), np.float32)
        times = []
        for _ in range(6):
            began = perf_counter()
            runner.run(x)
            times.append(perf_counter() - began)
        first.append(times[0])
        repeated.append(statistics.median(times[1:]))
    return {
        "first_ms": statistics.median(first) * 1e3,
        "repeated_ms": statistics.median(repeated) * 1e3,
        "extra_ms": statistics.median(a - b for a, b in zip(first, repeated, strict=True)) * 1e3,
    }


def _memory(strategy: Strategy, count: int) -> Figures:
    """Resident memory of the process over distinct shapes, from after the first hundredth of them."""
    runner = _positionwise(strategy)
    resident = []
    began = perf_counter()
    for number, shape in enumerate(_distinct_shapes(count)):
        x = np.full((*shape, FEATURES), number, np.float32)
        y = runner.run(x)
        # A constant row is normalised to zeros, which the layers leave zeros.
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
        if (number + 1) % max(1, count // 100) == 0:
            resident.append(_resident_mb())
    elapsed = perf_counter() - began
    quarter = len(resident) // 4
    return {
        "start_mb": resident[0],
        "quarter_mb": resident[quarter - 1],
        "end_mb": resident[-1],
        "seconds": elapsed,
    }


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


RUNS: dict[str, Callable[[int], Figures]] = {
    "xla-exact": lambda count: _xla(Strategy(), count),
    "xla-bucketed": lambda count: _xla(
        parse_strategy({"strategy": "bucketed", "batch": list(BUCKETS)}), count
    ),
    "openvino-first": _first_and_repeated,
    "openvino-native": lambda count: _memory(Strategy(), count),
    "openvino-rounded": lambda count: _memory(Strategy(max_prepared=CAP, fill_rows=True), count),
}
"""By name: how often to do it -> figures."""

if __name__ == "__main__":
    print(json.dumps(RUNS[sys.argv[1]](int(sys.argv[2]))))
