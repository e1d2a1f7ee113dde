"""Every strategy on the real runtime: the same results as the dynamic model gives, from models of prepared shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op
from tests.engine.detectors import PORTS, pictures, ssd
from tests.engine.slot_bench import SlotBench

from shapestream_engine import InputSpec, ModelSpec, OutputSpec, PreparedLimits, Strategy, compile_model
from shapestream_engine.errors import SignatureError

Array = np.ndarray[Any, Any]


def pooling() -> ov.Model:
    """Token ids to a mean of their embeddings under a mask, as a text model does: [batch, seq] -> [batch, 8]."""
    ids = op.parameter([-1, -1], np.int64, name="ids")
    mask = op.parameter([-1, -1], np.float32, name="mask")
    table = op.constant(np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32))
    rows = op.gather(table, ids, op.constant(np.int64(0)))
    weights = op.unsqueeze(mask, op.constant(np.int64(2)))
    total = op.reduce_sum(op.multiply(rows, weights), op.constant(np.array([1])))
    count = op.reduce_sum(mask, op.constant(np.array([1])), keep_dims=True)
    mean = op.divide(total, count)
    tokens = op.multiply(rows, weights)
    for node, name in ((mean, "mean"), (tokens, "tokens")):
        node.output(0).get_tensor().set_names({name})
    return ov.Model([op.result(mean), op.result(tokens)], [ids, mask])


@contextmanager
def text(strategy: Strategy, limits: PreparedLimits = PreparedLimits()) -> Iterator[SlotBench]:  # noqa: B008
    """The pooling model."""
    model = compile_model(
        ModelSpec(
            name="m",
            model=pooling(),
            strategy=strategy,
            prepared=limits,
            inputs={
                "ids": InputSpec(shape="batch:1..64, seq:1..128", pad={"seq": 0}),
                "mask": InputSpec(shape="batch, seq", mask_of="ids"),
            },
        ),
        threads=1,
    )
    try:
        yield SlotBench(model)
    finally:
        model.close()


def tokens(*shapes: tuple[int, int]) -> list[Array]:
    """Requests of token ids."""
    random = np.random.default_rng(len(shapes))
    return [random.integers(1, 100, shape) for shape in shapes]


def check_same(expected: Sequence[Mapping[str, Array]], found: Sequence[Mapping[str, Array]]) -> None:
    """Integers exactly; floats up to the order in which kernels of another size may add."""
    assert len(expected) == len(found)
    for own, other in zip(expected, found, strict=True):
        assert own.keys() == other.keys()
        for name, array in own.items():
            assert array.shape == other[name].shape, name
            np.testing.assert_allclose(other[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


BATCHES = [
    tokens((1, 1)),
    tokens((5, 100)),
    tokens((2, 7), (1, 64), (3, 33), (1, 1)),
    tokens(*[(1, 3 + number) for number in range(20)]),
    tokens((29, 12), (2, 65)),
]
STRATEGIES = [
    Strategy({"seq": (128,), "batch": (8,)}),
    Strategy({"seq": (128,)}),
    Strategy({"seq": (16, 64, 128)}),
    Strategy({"seq": (64, 128), "batch": (4, 16)}),
    Strategy({"batch": (1, 2, 4, 8)}, partitioned=True),
    Strategy({"batch": (2, 8), "seq": (64, 128)}, partitioned=True),
    Strategy(max_prepared=4),
    Strategy(max_prepared=4, fill_rows=True),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_same_as_the_dynamic_model(strategy: Strategy) -> None:
    """Of every batch: of one and of many rows, of short and of long requests, of more than any call takes."""
    with text(Strategy()) as native, text(strategy) as prepared:
        for batch in BATCHES:
            check_same(native.results(*batch), prepared.results(*batch))


def test_five_rows_run_on_the_models_for_four_and_one() -> None:
    """The seeds' example: two calls, on models that are static in every dimension."""
    with text(Strategy({"batch": (1, 2, 4, 8), "seq": (128,)}, partitioned=True)) as bench:
        report = bench.run(*tokens((5, 100)))
        assert ((1, (4, 128)), (1, (1, 128))) == report.calls
        assert 0 == report.reallocations
        prepared = bench.model.prepared
        assert prepared is not None
        request, _ = prepared.lease((4, 128))
        assert [[4, 128], [4, 128]] == [
            list(port.shape)
            for port in request.engine_request.model_inputs  # type: ignore[attr-defined] # OpenVINO's
        ]
        prepared.give_back((4, 128), request)


def test_shapes_are_prepared_when_they_are_needed_and_no_more_are_kept_than_allowed() -> None:
    """At the start only the smallest and the largest are; a report tells of each that was prepared for it."""
    with text(Strategy({"seq": (16, 32, 64, 128)}), PreparedLimits(max_prepared=2)) as bench:
        prepared = bench.model.prepared
        assert prepared is not None
        assert 2 == prepared.preparations
        prepares = [bench.run(*tokens((1, size))).preparations for size in (128, 16, 20, 25, 128, 20)]
        assert [0, 0, 1, 0, 1, 0] == prepares
        assert "2 prepared, 0 leased" == repr(prepared)
        assert prepared.nbytes > 2 * 100 * 8 * 4


def test_prepared_models_have_the_engines_effective_properties() -> None:
    """As there is no other model whose properties could be logged."""
    with text(Strategy({"seq": (128,)})) as bench:
        assert "f32" == bench.model.properties["INFERENCE_PRECISION_HINT"]


def test_a_model_that_cannot_take_the_shape_is_refused_at_once() -> None:
    """Not when the first request comes: here the model itself asks for two equal halves."""
    x = op.parameter([-1, -1], np.float32, name="x")
    halves = op.split(x, op.constant(np.int64(1)), 2)
    model = ov.Model([op.result(op.concat([halves.output(0), halves.output(1)], 1))], [x])
    with pytest.raises(SignatureError, match=r"does not take the shapes x \[batch:1..8, n:9\]"):
        compile_model(
            ModelSpec(
                name="m",
                model=model,
                inputs={"x": InputSpec(shape="batch:1..8, n:1..64", pad={"n": 0})},
                outputs={"output0": OutputSpec(shape="batch, n")},
                strategy=Strategy({"n": (8, 9)}),
            )
        )


RULES: dict[str, dict[str, Any]] = {
    "selected": {"rule": "index_column", "column": 0},
    "confidence": {"rule": "index_column", "column": 0},
    "total": {"rule": "recount", "output": "selected"},
    "anchors": {"rule": "shared"},
}


@contextmanager
def detecting(strategy: Strategy) -> Iterator[SlotBench]:
    """A detector with NonMaxSuppression, on pictures of one size or of any."""
    model = compile_model(
        ModelSpec(
            name="m",
            model=ssd({name: name for name in PORTS}),
            strategy=strategy,
            inputs={"image": InputSpec(shape="batch:0..32, 1, height:4..64, width:4..64")},
            outputs={name: OutputSpec(rule=rule) for name, rule in RULES.items()},
        ),
        threads=1,
    )
    try:
        yield SlotBench(model)
    finally:
        model.close()


def by_picture(result: Mapping[str, Array]) -> dict[str, Array]:
    """The selected rows in the order of the pictures: of several calls they stand call by call."""
    order = np.argsort(result["selected"][:, 0], kind="stable")
    return {
        name: array[order] if name in ("selected", "confidence") else array for name, array in result.items()
    }


@pytest.mark.parametrize("rows", [[1], [5], [1, 3, 7, 1], [19]], ids=str)
def test_detections_of_divided_requests(rows: list[int]) -> None:
    """A request over several calls gets its detections with the index of its own pictures, and their number."""
    random = np.random.default_rng(sum(rows))
    images = [pictures(random, count, 24, 20) for count in rows]
    with (
        detecting(Strategy()) as native,
        detecting(Strategy({"batch": (1, 2, 4)}, partitioned=True)) as divided,
    ):
        check_same(
            [by_picture(result) for result in native.results(*images)],
            [by_picture(result) for result in divided.results(*images)],
        )
