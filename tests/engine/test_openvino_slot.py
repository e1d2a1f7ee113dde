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

from shapestream_engine import (
    Batch,
    BatchReport,
    CompiledModel,
    InputSpec,
    ModelSpec,
    OutputSpec,
    RequestPool,
    Runner,
    Tensors,
    compile_model,
    dtype_of,
    element_type_of,
)
from shapestream_engine.batching.calls import merge_sizes


class Bench:
    """Slots of one model, and a way to run requests given as arrays by name."""

    def __init__(self, model: CompiledModel, slots: int = 1) -> None:
        self.signature = model.signature
        self.pool = RequestPool(model, slots)
        self.slots = [Runner(str(number), {"m": self.pool}) for number in range(slots)]

    def run(self, *requests: Mapping[str, Any], slot: int = 0) -> BatchReport:
        """One batch on a slot, and its report."""
        numbers = {port.name: number for number, port in enumerate(self.signature.inputs)}
        members = []
        for arrays in requests:
            # An odd offset, as received frames have: nothing may depend on the alignment of a buffer.
            buffers = [memoryview(b"\0" + array.tobytes())[1:] for array in arrays.values()]
            layout = tuple(
                (numbers[name], element_type_of(array.dtype), array.shape) for name, array in arrays.items()
            )
            members.append(Tensors(layout=layout, buffers=buffers))
        shapes = tuple(self.signature.resolve(member.layout) for member in members)
        sizes = merge_sizes(self.signature, [shape.sizes for shape in shapes])
        report = self.slots[slot].run(
            Batch(batch=1, model="m", sizes=sizes, members=tuple(members), shapes=shapes)
        )
        assert report is not None  # nothing withdraws it
        return report

    def results(self, *requests: Mapping[str, Any]) -> list[dict[str, np.ndarray[Any, Any]]]:
        """One batch that runs: each request's outputs by name."""
        report = self.run(*requests)
        assert (None, "") == (report.code, report.message)
        return self.arrays(report)

    def arrays(self, report: BatchReport) -> list[dict[str, np.ndarray[Any, Any]]]:
        """Each member's outputs by name."""
        assert report.outputs is not None
        found = []
        for tensors in report.outputs:
            assert tensors is not None
            found.append(
                {
                    self.signature.outputs[port].name: np.frombuffer(buffer, dtype_of(kind)).reshape(shape)
                    for (port, kind, shape), buffer in zip(tensors.layout, tensors.buffers, strict=True)
                }
            )
        return found


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
    ) -> Bench:
        path = tmp_path / f"{next(made)}.xml"
        ov.save_model(model, path)
        specs = {n: InputSpec(shape=s) if isinstance(s, str) else s for n, s in (inputs or {}).items()}
        spec = ModelSpec(name="m", path=path, inputs=specs, outputs=outputs or {})
        return Bench(compile_model(spec, slots=slots, threads=slots), slots)

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


def assert_each_as_alone(bench: Bench, *requests: Mapping[str, Any]) -> None:
    """What the requests get together is, bit for bit, what each gets alone."""
    together = bench.results(*requests)
    for request, own in zip(requests, together, strict=True):
        (alone,) = bench.results(request)
        assert alone.keys() == own.keys()
        for name, array in alone.items():
            np.testing.assert_array_equal(array, own[name], strict=True)


def test_growing_straight_after_a_large_result_loses_no_byte(served: Any) -> None:
    """Results of every call are whole, before and after the tensors moved, for all of the calls at once."""
    x = parameter("x", [-1, -1])
    bench = served(model_of([x], y=op.add(x, op.constant(np.float32(1)))), {"x": "batch, n"})
    sent = [numbers(rows, 1000, start=rows) for rows in (300, 1, 600, 2, 1200, 601, 2400)]
    received = [bench.results({"x": array})[0]["y"] for array in sent]
    for array, result in zip(sent, received, strict=True):
        np.testing.assert_array_equal(array + 1, result, strict=True)
    assert bench.pool.reallocations >= 3


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


def test_a_model_without_any_dynamic_dimension(served: Any) -> None:
    """One shape, again and again."""
    x = parameter("x", [2, 3])
    bench = served(model_of([x], y=op.relu(x)))
    for start in (0, 5):
        (own,) = bench.results({"x": numbers(2, 3, start=start)})
        np.testing.assert_array_equal(numbers(2, 3, start=start), own["y"], strict=True)


def test_integers_booleans_and_halves(served: Any) -> None:
    """Inputs of other element types than f32 are gathered and split as they are (i64 within OpenVINO's 32 bits)."""
    ids, keep = parameter("ids", [-1, -1], np.int64), parameter("keep", [-1, -1], np.bool_)
    half = parameter("half", [-1, -1], np.float16)
    chosen = op.select(keep, ids, op.constant(np.int64(-1)))
    nodes = {
        "chosen": chosen,
        "kept": op.logical_not(keep),
        "halved": op.multiply(half, op.constant(np.float16(0.5))),
    }
    bench = served(model_of([ids, keep, half], **nodes), dict.fromkeys(("ids", "keep", "half"), "batch, n"))
    requests = []
    for rows in (2, 1):
        flags = numbers(rows, 4).astype(int) % 2 == 0
        values = numbers(rows, 4, start=2**20).astype(np.int64)
        requests.append({"ids": values, "keep": flags, "half": numbers(rows, 4).astype(np.float16)})
    for request, own in zip(requests, bench.results(*requests), strict=True):
        np.testing.assert_array_equal(
            np.where(request["keep"], request["ids"], -1), own["chosen"], strict=True
        )
        np.testing.assert_array_equal(~request["keep"], own["kept"], strict=True)
        np.testing.assert_array_equal(request["half"] / np.float16(2), own["halved"], strict=True)


def test_sizes_of_zero(served: Any) -> None:
    """A request without rows among others, and one without elements, get answers of that shape."""
    x = parameter("x", [-1, -1])
    bench = served(model_of([x], y=op.relu(x)), {"x": "batch, n"})
    shapes = [(0, 3), (2, 3), (0, 3)]
    assert shapes == [own["y"].shape for own in bench.results(*({"x": numbers(*shape)} for shape in shapes))]
    assert (2, 0) == bench.results({"x": numbers(2, 0)})[0]["y"].shape
    assert (0, 0) == bench.results({"x": numbers(0, 0)})[0]["y"].shape


def test_rows_that_depend_on_the_data_find_their_request(served: Any) -> None:
    """NonZero's batch index is rewritten to each request's own, and rows beside it go the same way."""
    x = parameter("x", [-1, -1])
    index = op.transpose(op.non_zero(x), op.constant(np.array([1, 0])))
    outputs = {
        "peaks": OutputSpec(rule={"rule": "index_column", "column": 0}),
        "scores": OutputSpec(rule={"rule": "with", "output": "peaks"}),
    }
    bench = served(model_of([x], peaks=index, scores=op.gather_nd(x, index)), {"x": "batch:1..8, n"}, outputs)
    random = np.random.default_rng(3)
    arrays = [random.integers(0, 3, (rows, 6)).astype(np.float32) for rows in (2, 1, 3, 1)]
    arrays[1][:] = 0
    for array, own in zip(arrays, bench.results(*({"x": array} for array in arrays)), strict=True):
        np.testing.assert_array_equal(np.argwhere(array), own["peaks"], strict=True)
        np.testing.assert_array_equal(array[np.nonzero(array)], own["scores"], strict=True)
