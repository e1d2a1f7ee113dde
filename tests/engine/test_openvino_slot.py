"""Slots that run real OpenVINO models, read from files, on requests as they arrive: bytes in, bytes out."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op
from tests.engine.slot_bench import SlotBench

from shapestream_engine import InputSpec, ModelSpec, OutputSpec, compile_model


@pytest.fixture
def served(tmp_path: Path) -> Any:
    """Saves a model as IR, compiles it from the file, and gives it slots."""
    made = count()

    def serve(
        model: ov.Model,
        inputs: Mapping[str, InputSpec | str] | None = None,
        outputs: Mapping[str, OutputSpec] | None = None,
        *,
        slots: int = 1,
    ) -> SlotBench:
        path = tmp_path / f"{next(made)}.xml"
        ov.save_model(model, path)
        specs = {n: InputSpec(shape=s) if isinstance(s, str) else s for n, s in (inputs or {}).items()}
        spec = ModelSpec(name="m", path=path, inputs=specs, outputs=outputs or {})
        return SlotBench(compile_model(spec, slots=slots, threads=slots), slots)

    return serve


def parameter(name: str, shape: list[int], element_type: Any = np.float32) -> Any:
    """An input of a model."""
    return op.parameter(shape, element_type, name=name)


def model_of(parameters: list[Any], **nodes: Any) -> ov.Model:
    """A model with these outputs."""
    for name, node in nodes.items():
        node.output(0).get_tensor().set_names({name})
    return ov.Model([op.result(node) for node in nodes.values()], parameters)


def numbers(*shape: int, start: float = 0) -> np.ndarray[Any, Any]:
    """An array in which every element is another."""
    return (np.arange(np.prod(shape)) + start).astype(np.float32).reshape(shape)


def assert_each_as_alone(bench: SlotBench, *requests: Mapping[str, Any]) -> None:
    """What the requests get together is, bit for bit, what each gets alone."""
    together = bench.results(*requests)
    for request, own in zip(requests, together, strict=True):
        (alone,) = bench.results(request)
        assert alone.keys() == own.keys()
        for name, array in alone.items():
            np.testing.assert_array_equal(array, own[name], strict=True)


def test_a_model_that_hands_its_input_back_unchanged(served: Any) -> None:
    """The output lies in the input's own memory, which the next call overwrites."""
    x = parameter("x", [-1, -1])
    bench = served(ov.Model([op.result(x)], [x]), {"x": "batch, n"})
    sent = [numbers(rows, 100, start=rows) for rows in (10, 100, 3, 1000)]
    received = [next(iter(bench.results({"x": array})[0].values())) for array in sent]
    for array, result in zip(sent, received, strict=True):
        np.testing.assert_array_equal(array, result, strict=True)


def test_a_real_inference_fails_and_the_slot_answers_and_is_used_again(served: Any) -> None:
    """The report holds OpenVINO's words; the next batch runs on the same request."""
    x, wanted = parameter("x", [-1, -1]), parameter("wanted", [2], np.int64)
    bench = served(model_of([x, wanted], y=op.reshape(x, wanted, False)))
    array = numbers(2, 3)
    for shape in ([3, 2], [4, 7], [6, 1], [9, 9], [1, 6]):
        report = bench.run({"x": array, "wanted": np.array(shape)})
        if shape[0] * shape[1] == 6:
            np.testing.assert_array_equal(array.reshape(shape), bench.arrays(report)[0]["y"], strict=True)
        else:
            assert "model_error" == report.code
            assert "conflicts with the reshape pattern" in report.message
            assert report.outputs is None
        assert "0 leased, 1 free" == repr(bench.pool)


def test_random_shapes_within_the_bounds_never_reallocate(served: Any) -> None:
    """Batches of random requests, padded together, each with the answer that it gets alone; nothing moves."""
    x, mask = parameter("x", [-1, -1]), parameter("mask", [-1, -1])
    inputs = {
        "x": InputSpec(shape="batch:1..32, seq:1..50", pad={"seq": 9.0}),
        "mask": InputSpec(shape="batch, seq", mask_of="x"),
    }
    total = op.reduce_sum(op.multiply(x, mask), op.constant(np.array([1])), True)
    bench = served(model_of([x, mask], total=total, masked=op.multiply(x, mask)), inputs)
    random = np.random.default_rng(7)
    for _ in range(60):
        shapes = [
            (int(random.integers(1, 4)), int(random.integers(1, 51)))
            for _ in range(int(random.integers(1, 9)))
        ]
        requests = [{"x": random.integers(0, 100, shape).astype(np.float32)} for shape in shapes]
        for request, own in zip(requests, bench.results(*requests), strict=True):
            np.testing.assert_array_equal(request["x"].sum(1, keepdims=True), own["total"], strict=True)
            np.testing.assert_array_equal(request["x"], own["masked"], strict=True)
    assert 0 == bench.pool.reallocations


def test_two_slots_run_at_the_same_time(served: Any) -> None:
    """Slots that share a compiled model never see each other's data, whatever their shapes."""
    x = parameter("x", [-1, -1])
    squared = op.reduce_sum(op.multiply(x, x), op.constant(np.array([1])), True)
    bench = served(model_of([x], y=squared), {"x": "batch, n"}, slots=2)

    def run(slot: int) -> None:
        for batch in range(slot, 200, 2):
            array = numbers(1 + batch % 7, 1 + batch % 11, start=batch)
            expected = (array * array).sum(1, keepdims=True)
            (result,) = bench.arrays(bench.run({"x": array}, slot=slot))
            np.testing.assert_array_equal(expected, result["y"], strict=True)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2)))


def test_the_batch_axis_may_come_second(served: Any) -> None:
    """Requests are put together along the axis named batch, wherever it stands, on both sides."""
    x = parameter("x", [-1, -1, 2])
    bench = served(model_of([x], y=op.relu(x), first=op.reduce_max(x, op.constant(np.array([0])), False)),
                   {"x": "seq, batch:1..8, 2"})  # fmt: skip
    assert ("batch", "seq") == bench.signature.dimensions
    assert_each_as_alone(bench, *({"x": numbers(3, rows, 2, start=rows)} for rows in (1, 3, 2)))


def test_two_inputs_with_dimensions_of_their_own(served: Any) -> None:
    """Each input has a dynamic dimension that the other has not."""
    left, right = parameter("left", [-1, -1, 4]), parameter("right", [-1, 4, -1])
    bench = served(
        model_of([left, right], y=op.matmul(left, right, False, False)),
        {"left": "batch:1..8, rows, 4", "right": "batch, 4, columns"},
    )
    assert "batch, rows, columns" == ", ".join(name or "?" for name in bench.signature.outputs[0].shape.names)
    requests = [{"left": numbers(n, 3, 4, start=n), "right": numbers(n, 4, 5, start=n)} for n in (1, 2, 1)]
    assert_each_as_alone(bench, *requests)


def test_a_model_without_a_batch_axis_runs_one_request_per_call(served: Any) -> None:
    """Its outputs are the caller's as they are."""
    x = parameter("x", [-1])
    bench = served(
        model_of([x], y=op.multiply(x, x), total=op.reduce_sum(x, op.constant(np.array([0])), False))
    )
    assert not bench.signature.has_batch
    for size in (5, 1, 100, 0):
        (own,) = bench.results({"x": numbers(size)})
        np.testing.assert_array_equal(numbers(size) ** 2, own["y"], strict=True)
        assert numbers(size).sum() == own["total"]
