"""What every engine does alike: shapes set in place, results of the true size, failures that end with their call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.conformance.engines import ABSENT, DEMANDED, Engine
from tests.engine.conformance.models import (
    AFFINE,
    DOUBLED,
    PAIR,
    PLACES,
    SCALED,
    Array,
    affine,
    pair,
)

from shapestream_engine import (
    ELEMENT_TYPES,
    BatchInputs,
    InferenceError,
    ModelLoadError,
    ModelSpec,
    RequestPool,
    Runner,
    ShapeError,
    SignatureError,
    Tensors,
    compile_model,
)
from shapestream_engine.batching.assembly import Assembly
from shapestream_engine.batching.calls import merge_sizes
from shapestream_engine.infer_request import InferRequest
from shapestream_engine.strategy import parse_strategy

RequestOf = Callable[..., InferRequest]


def run(request: InferRequest, *arrays: Array) -> list[Array]:
    """Resizes, fills, runs, and copies the outputs."""
    fill(request, *arrays)
    request.infer()
    return [output.copy() for output in request.outputs()]


def fill(request: InferRequest, *arrays: Array) -> None:
    """Resizes and fills the inputs."""
    for tensor, array in zip(request.input_tensors, arrays, strict=True):
        tensor.shape = array.shape
        tensor.data[...] = array


def counting(*shape: int) -> Array:
    """Every element different, and exact in every float."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 1021


@pytest.mark.parametrize("engine", ABSENT, ids=lambda engine: engine.name)
def test_engines_that_cannot_be_tested_here_are_named(engine: Engine) -> None:
    """One line each says what is left out, and why; where an engine is demanded, that is a failure."""
    assert engine.name not in DEMANDED, engine.missing()
    pytest.skip(f"{engine.name}: {engine.missing()}")


def test_ports_and_dimensions_are_named(engine: Engine, tmp_path: Path) -> None:
    """The signature has the model's ports in their order, their types, and names for what is dynamic."""
    signature = compile_model(engine.spec(PAIR, tmp_path)).signature
    assert [("a", "f32"), ("b", "f32")] == [(port.name, port.element_type) for port in signature.inputs]
    assert [("total", "f32"), ("sums", "f32")] == [
        (port.name, port.element_type) for port in signature.outputs
    ]
    assert ("batch", "n") == signature.dimensions
    assert [("batch", "n"), ("batch",)] == [port.shape.names for port in signature.outputs]


def test_before_the_first_call_everything_dynamic_is_empty(request_of: RequestOf) -> None:
    """Inputs and outputs have 0 in each dynamic dimension, and their fixed sizes elsewhere."""
    request = request_of(AFFINE)
    assert (0, 4) == request.input_tensor("x").shape
    assert (0, 4) == request.output_tensor("y").shape


def test_any_shape_gives_the_right_answer(engine: Engine, request_of: RequestOf) -> None:
    """Outputs follow the shape of each call, growing and shrinking."""
    random = np.random.default_rng(0)
    request = request_of(PAIR)
    for _ in range(engine.many):
        shape = int(random.integers(1, 17)), int(random.integers(1, 65))
        a, b = random.integers(0, 9, shape).astype(np.float32), counting(*shape)
        for expected, output in zip(pair(a, b).values(), run(request, a, b), strict=True):
            np.testing.assert_array_equal(expected, output)


def test_within_small_bounds_tensors_stay_where_they_are(engine: Engine, request_of: RequestOf) -> None:
    """The bound is reserved at once: each shape is set in place, at the same address, and nothing is counted."""
    request = request_of(AFFINE, {"x": "batch:0..64, 4"})
    addresses = set()
    for rows in (1, 64, 3, 64, 17)[: engine.many]:
        run(request, counting(rows, 4))
        addresses.add(request.input_tensor("x").data.ctypes.data)
    assert 1 == len(addresses)
    assert 0 == request.reallocations


def test_without_bounds_nothing_grows_once_warm(engine: Engine, request_of: RequestOf) -> None:
    """After the largest shape has come, no shape makes a tensor move."""
    random = np.random.default_rng(0)
    request = request_of(AFFINE)
    run(request, counting(500, 4))
    warm = request.reallocations
    for _ in range(engine.many):
        run(request, counting(int(random.integers(1, 501)), 4))
    assert warm == request.reallocations


def test_growth_after_a_large_result_spoils_nothing(request_of: RequestOf) -> None:
    """Results that the engine holds, and inputs that move, share no memory: every element is right."""
    request = request_of(AFFINE)
    for rows in (2, 20_000, 3, 50_000, 20_001):
        array = counting(rows, 4)
        (output,) = run(request, array)
        np.testing.assert_array_equal(affine(array), output)


def test_a_size_of_zero_is_an_ordinary_size(request_of: RequestOf) -> None:
    """No rows in, no rows out; afterwards rows again."""
    request = request_of(PAIR)
    assert [(0, 3), (0,)] == [output.shape for output in run(request, counting(0, 3), counting(0, 3))]
    assert [(2, 0), (2,)] == [output.shape for output in run(request, counting(2, 0), counting(2, 0))]
    total, sums = run(request, counting(2, 3), counting(2, 3))
    np.testing.assert_array_equal(2 * counting(2, 3), total)
    np.testing.assert_array_equal([3, 12], sums)


@pytest.mark.parametrize("element_type", ELEMENT_TYPES)
def test_element_types_arrive_and_leave_as_they_are(
    engine: Engine, request_of: RequestOf, element_type: str
) -> None:
    """Every element type goes through a call unchanged."""
    if element_type not in engine.element_types:
        pytest.skip(f"{engine.name} has no operations on {element_type}")
    request = request_of(DOUBLED[element_type])
    tensor = request.input_tensor(0)
    assert element_type == tensor.element_type == request.output_tensor(0).element_type
    for rows in (2, 3):
        tensor.shape = (rows, 3)
        tensor.data[...] = (counting(rows, 3) % 2).astype(tensor.data.dtype)
        request.infer()
        output = request.output_tensor(0).data
        assert tensor.data.dtype == output.dtype
        np.testing.assert_array_equal(np.concatenate([tensor.data, tensor.data], 1), output)


def test_scalars_and_fixed_shapes(request_of: RequestOf) -> None:
    """A model without any dynamic dimension, and with an input of rank 0."""
    request = request_of(SCALED)
    assert [(3,), ()] == [tensor.shape for tensor in request.input_tensors]
    (output,) = run(request, np.array([1, 2, 3], np.float32), np.array(2, np.float32))
    assert [2, 4, 6] == output.tolist()


def test_outputs_whose_shape_depends_on_the_data(request_of: RequestOf) -> None:
    """As many rows as there are elements that are not zero: their true number, none included."""
    request = request_of(PLACES)
    assert [[1], [2]] == run(request, np.array([0, 5, 5], np.float32))[0].tolist()
    assert (0, 1) == run(request, np.zeros(3, np.float32))[0].shape
    assert [[0]] == run(request, np.array([7, 0, 0], np.float32))[0].tolist()
    assert (100, 1) == run(request, np.ones(100, np.float32))[0].shape


@pytest.mark.parametrize("shape", [(2, 5), (2,), (2, 4, 1), (-1, 4), (65, 4), (2.0, 4), (True, 4)])
def test_a_shape_that_the_port_does_not_take_is_refused_at_once(
    request_of: RequestOf, shape: tuple[Any, ...]
) -> None:
    """The tensor says so when it is set, and stays as it was."""
    request = request_of(AFFINE, {"x": "batch:0..64, 4"})
    request.input_tensor(0).shape = (3, 4)
    with pytest.raises(ShapeError, match=r"input 'x' takes \[batch:..64, 4\]"):
        request.input_tensor(0).shape = shape
    assert (3, 4) == request.input_tensor(0).shape


def test_sizes_that_numpy_has_counted_are_sizes(request_of: RequestOf) -> None:
    """Such as those of `np.prod` and `ndarray.max`: the shape holds Python's own integers afterwards."""
    request = request_of(AFFINE, {"x": "batch:0..64, 4"})
    request.input_tensor(0).shape = (np.int64(3), np.uint8(4))
    assert [(3, int), (4, int)] == [(size, type(size)) for size in request.input_tensor(0).shape]


def infer(request: InferRequest) -> None:
    """The synchronous way."""
    request.infer()


def start_and_wait(request: InferRequest) -> None:
    """The asynchronous way."""
    request.start_async()
    request.wait()


@pytest.mark.parametrize("way", [infer, start_and_wait])
def test_a_call_that_fails_says_so_and_leaves_the_request_usable(request_of: RequestOf, way: Any) -> None:
    """Inputs that do not fit together fail that call; the next one, of another shape, is right."""
    request = request_of(PAIR)
    for columns in (3, 5):
        fill(request, counting(2, columns), counting(2, columns + 1))
        with pytest.raises(InferenceError, match=r"."):
            way(request)
        fill(request, counting(2, columns), counting(2, columns))
        way(request)
        np.testing.assert_array_equal(2 * counting(2, columns), request.outputs()[0])


def test_started_calls_end_with_wait(request_of: RequestOf) -> None:
    """`start_async` returns, `wait` ends when the results are there; any number of times."""
    request = request_of(AFFINE)
    for rows in (1, 4, 2):
        fill(request, counting(rows, 4))
        request.start_async()
        request.wait()
        np.testing.assert_array_equal(affine(counting(rows, 4)), request.outputs()[0])


def test_requests_of_one_model_run_side_by_side(
    request_of: RequestOf, engine: Engine, tmp_path: Path
) -> None:
    """Two threads with a request each get the results of their own inputs."""
    model = compile_model(engine.spec(AFFINE, tmp_path), slots=2, threads=2)
    wrong: list[int] = []

    def work(own: int) -> None:
        request = model.create_infer_request()
        for number in range(20):
            array = counting(1 + (own + number) % engine.many % 7, 4) + own
            (output,) = run(request, array)
            if not np.array_equal(affine(array), output):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(own,)) for own in (1, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == wrong


def test_requests_that_share_a_call_get_their_own_rows(engine: Engine, tmp_path: Path) -> None:
    """Gathered, run and split by the rules that the engine found: the same as each request alone."""
    model = compile_model(engine.spec(PAIR, tmp_path))
    signature, request = model.signature, model.create_infer_request()
    members, shapes = [], []
    for rows in (1, 3, 2):
        array = counting(rows, 5) + rows
        layout = ((0, "f32", array.shape), (1, "f32", array.shape))
        members.append((layout, array))
        shapes.append(signature.resolve(layout))
    assembly = Assembly(signature)
    sizes = merge_sizes(signature, [shape.sizes for shape in shapes])
    tensors = [Tensors(layout=layout, buffers=(array.tobytes(),) * 2) for layout, array in members]
    assembly.gather(sizes, tensors, shapes, request.input_tensors)
    request.infer()
    results = assembly.split(sizes, shapes, request.outputs())
    for (_, array), result in zip(members, results, strict=True):
        total, sums = (
            np.frombuffer(buffer, np.float32).reshape(shape)
            for buffer, (_, _, shape) in zip(result.buffers, result.layout, strict=True)
        )
        np.testing.assert_array_equal(2 * array, total)
        np.testing.assert_array_equal(array.sum(axis=1), sums)


def test_a_batch_runs_at_the_sizes_that_its_strategy_allows(engine: Engine, tmp_path: Path) -> None:
    """Six rows in calls of four: filled up where too few are left, and divided among the requests as they came."""
    strategy = parse_strategy({"strategy": "bucketed", "batch": [4]})
    model = compile_model(replace(engine.spec(PAIR, tmp_path), strategy=strategy))
    runner = Runner("s", {"pair": RequestPool(model, 1)})
    arrays = [counting(rows, 5) + rows for rows in (1, 3, 2)]
    members = tuple(
        Tensors(layout=((0, "f32", array.shape), (1, "f32", array.shape)), buffers=(array.tobytes(),) * 2)
        for array in arrays
    )
    shapes = tuple(model.signature.resolve(member.layout) for member in members)
    report = runner.run(BatchInputs(batch=1, model="pair", sizes=(6, 5), members=members, shapes=shapes))
    assert report is not None  # nothing withdraws it
    assert (None, ((2, (4, 5)),)) == (report.code, report.calls)
    assert report.outputs is not None
    for array, result in zip(arrays, report.outputs, strict=True):
        assert result is not None
        np.testing.assert_array_equal(
            2 * array, np.frombuffer(result.buffers[0], np.float32).reshape(array.shape)
        )
        np.testing.assert_array_equal(array.sum(axis=1), np.frombuffer(result.buffers[1], np.float32))


def test_a_shape_of_another_rank_than_the_files_is_refused(engine: Engine, tmp_path: Path) -> None:
    """A configuration that contradicts the model file is refused, naming the input."""
    if engine.files is None:
        pytest.skip("a callable has no file to contradict")
    with pytest.raises(SignatureError, match=r"'x'.* 2 axes"):
        compile_model(engine.spec(AFFINE, tmp_path, {"x": "batch, 4, 1"}))


def test_a_file_that_is_missing_or_damaged_is_named(engine: Engine, tmp_path: Path) -> None:
    """The error holds the path and the reason."""
    if engine.files is None:
        pytest.skip("a callable has no file")
    suffix = engine.spec(AFFINE, tmp_path).path.suffix  # type: ignore[union-attr]
    damaged = tmp_path / f"damaged{suffix}"
    damaged.write_bytes(b"no model")
    for path in (tmp_path / f"missing{suffix}", damaged):
        with pytest.raises(ModelLoadError, match=path.name):
            compile_model(ModelSpec(name="m", path=path, engine=engine.engine, device=engine.device))


def test_a_property_that_the_engine_does_not_know_is_refused(engine: Engine, tmp_path: Path) -> None:
    """A mistyped property never goes unnoticed."""
    spec = replace(engine.spec(AFFINE, tmp_path), properties={"NO_SUCH_PROPERTY": "1"})
    with pytest.raises((SignatureError, ModelLoadError), match=r"propert|NO_SUCH_PROPERTY"):
        compile_model(spec)
