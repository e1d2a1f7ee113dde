"""The seeds' claims about doing without dynamic shapes: padding, prepared models, partitions; on the real OpenVINO.

The numbers are those of tests/engine/seeds.md, which says what each claim is and how it fares.
"""

from __future__ import annotations

from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openvino import opset13 as op
from tests.engine.seed_models import in_memory, masked_mean, plain_mean, plus_one, serve

from shapestream_engine import (
    InferenceError,
    InputSpec,
    ModelSpec,
    OutputSpec,
    PreparedLimits,
    compile_model,
    parse_strategy,
)
from shapestream_engine.batching.calls import CallPlanner
from shapestream_engine.probe import ProbeOptions, prove
from shapestream_engine.strategy import Strategy

MASKED = {
    "x": InputSpec(shape="batch:1..8, seq:1..64", pad={"seq": 0}),
    "mask": InputSpec(shape="batch, seq", mask_of="x"),
}
ROWS = {"x": InputSpec(shape="batch:1..64, 3")}


def sequences(*lengths: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Requests of one sequence each, of these lengths, without a mask."""
    random = np.random.default_rng(0)
    return [{"x": random.random((1, length), np.float32) + 1} for length in lengths]


def computed(report: Any) -> int:
    """Elements of x in all calls together."""
    return sum(count * int(np.prod(sizes)) for count, sizes in report.calls)


@pytest.mark.seeds("S000-01", "S001-01", "S003-09")
def test_shapes_are_native_unless_a_strategy_is_asked_for() -> None:
    """Every shape is run as it comes; nothing is padded, prepared or divided by itself."""
    assert Strategy() == parse_strategy({}) == plus_one().spec.strategy
    assert plus_one(inputs=ROWS).compile().signature.runs_exactly((5,))


@pytest.mark.seeds("S000-02", "S001-02", "S002-04", "S003-05")
def test_padding_with_a_mask_changes_nothing() -> None:
    """Compiled once for one long shape, the model gives every sequence what it gives it at its own length."""
    requests = sequences(3, 16, 7, 1)
    unpadded = {"x": InputSpec(shape="batch:1..8, seq:1..64"), "mask": MASKED["mask"]}
    native, _ = serve(masked_mean(inputs=unpadded), *requests[:1])
    padded, report = serve(
        masked_mean(inputs=MASKED, strategy=parse_strategy({"strategy": "padded", "seq": 16, "batch": 4})),
        *requests,
    )
    np.testing.assert_allclose(native[0], padded[0], rtol=1e-6)
    for request, result in zip(requests, padded, strict=True):
        np.testing.assert_allclose(request["x"].mean(keepdims=True), result, rtol=1e-6)
    assert ((1, (4, 16)),) == report.calls


@pytest.mark.seeds("S000-03", "S000-04", "S001-03", "S001-04", "S002-05")
def test_a_model_that_does_not_know_of_padding_is_scrambled_by_it() -> None:
    """The mean of a sequence of 2, padded to 16, is an eighth of what it should be."""
    inputs = {"x": InputSpec(shape="batch:1..8, seq:1..64", pad={"seq": 0})}
    strategy = parse_strategy({"strategy": "padded", "seq": 16})
    ((result,), _) = serve(plain_mean(inputs=inputs, strategy=strategy), {"x": np.ones((1, 2), np.float32)})
    assert [[0.125]] == result.tolist()


@pytest.mark.seeds("S000-05", "S001-05", "S002-06")
def test_padding_may_fail_the_call() -> None:
    """A model that works on blocks of four runs eight elements, and fails on the same eight padded to ten."""
    x = op.parameter([-1, -1], np.float32, name="x")
    blocks = op.reshape(x, op.constant([-1, 4]), False)
    request = (
        in_memory([blocks], [x], inputs={"x": InputSpec(shape="1, seq:1..64")})
        .compile()
        .create_infer_request()
    )
    eight = np.arange(8, dtype=np.float32).reshape(1, 8)
    request.infer([eight])
    np.testing.assert_array_equal(eight.reshape(2, 4), request.output_tensor().data)
    with pytest.raises(InferenceError):
        request.infer([np.pad(eight, ((0, 0), (0, 2)))])


@pytest.mark.seeds("S000-06", "S001-06", "S002-07")
def test_nobody_has_to_know_the_models_insides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is tried on the model itself: the one that ignores its mask is found out, the one that heeds it is not."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "importable"))
    inputs = {
        "ids": InputSpec(shape="batch:1..8, seq:1..64", element_type="i64", pad={"seq": 0}),
        "mask": InputSpec(shape="batch, seq", element_type="i64", mask_of="ids"),
    }
    for function, columns, refused in (("mean_of_all", 1, True), ("attend", 4, False)):
        outputs = {"y": OutputSpec(shape=f"batch, {columns}", element_type="f32")}
        spec = ModelSpec(name="m", function=f"breakable:{function}", inputs=inputs, outputs=outputs)
        report = prove(spec, compile_model(spec), ProbeOptions())
        assert refused == bool(report.of("refuted"))


@pytest.mark.seeds("S000-07", "S001-07", "S002-08")
def test_what_is_padded_is_computed_too() -> None:
    """A sequence of 2 in a call of 64 costs 64, though the mask keeps the rest out of the result."""
    strategy = parse_strategy({"strategy": "padded", "seq": 64})
    _, report = serve(masked_mean(inputs=MASKED, strategy=strategy), *sequences(2, 2))
    assert 2 * 64 == computed(report)


@pytest.mark.seeds("S000-08", "S000-09", "S001-08", "S001-09", "S002-09")
def test_several_prepared_models_each_of_them_paid_for() -> None:
    """One preparation per shape, the first time; every further shape is a model more, in time and in memory."""
    limits = PreparedLimits(warm_up=True)
    strategy = parse_strategy({"strategy": "bucketed", "seq": [8, 16, 32], "batch": [1, 4]})
    model = masked_mean(inputs=MASKED, strategy=strategy, prepared=limits).compile()
    assert model.prepared is not None
    assert (6, 0) == (model.prepared.preparations, model.prepared.hits)
    assert model.prepared.nbytes > 0
    request, new = model.prepared.lease((4, 16))
    assert not new
    request.infer({"x": np.ones((4, 16)), "mask": np.ones((4, 16))})
    assert [[1]] * 4 == request.output_tensor().data.tolist()


@pytest.mark.seeds("S000-10", "S000-11", "S001-10", "S001-11", "S002-10")
def test_the_most_suitable_prepared_shape_is_chosen() -> None:
    """The smallest that holds the sequence: less padding than one model for all, and the same results."""
    for length, bucket in ((1, 8), (8, 8), (9, 16), (17, 64)):
        results = []
        for sizes in ([8, 16, 64], [64]):
            strategy = parse_strategy({"strategy": "bucketed", "seq": sizes})
            (result,), report = serve(masked_mean(inputs=MASKED, strategy=strategy), *sequences(length))
            results.append(result)
            assert (bucket if len(sizes) > 1 else 64) == computed(report)
        np.testing.assert_allclose(*results, rtol=1e-6)


@pytest.mark.seeds("S000-12", "S000-14", "S001-12", "S001-14", "S002-11", "S002-12")
def test_five_rows_on_one_two_four_and_eight_are_two_calls() -> None:
    """The rows of one request are divided along the batch, run as 4 + 1, and put together again."""
    strategy = parse_strategy({"strategy": "partitioned", "batch": [1, 2, 4, 8]})
    rows = np.arange(15, dtype=np.float32).reshape(5, 3)
    (result,), report = serve(plus_one(inputs=ROWS, strategy=strategy), {"x": rows})
    np.testing.assert_array_equal(rows + 1, result)
    assert [(1, (1,)), (1, (4,))] == sorted(report.calls, key=lambda call: call[1])


@pytest.mark.seeds("S000-13", "S001-13", "S002-11")
def test_no_fewer_calls_would_do() -> None:
    """For every number of rows up to 40, against all ways to choose prepared sizes."""
    sizes = (1, 2, 4, 8)
    model = plus_one(inputs=ROWS, strategy=parse_strategy({"strategy": "partitioned", "batch": list(sizes)}))
    planner = CallPlanner(model.signature)
    for rows in range(1, 41):
        calls = planner.plan((rows,))
        assert rows == sum(call.stop - call.start for call in calls) == sum(call.sizes[0] for call in calls)
        fewer = range(1, len(calls))
        assert not any(
            rows == sum(choice) for n in fewer for choice in combinations_with_replacement(sizes, n)
        )


@pytest.mark.seeds("S000-15", "S001-15", "S002-31")
def test_one_model_for_single_rows_is_enough_where_batches_gain_nothing() -> None:
    """Every row on the one prepared model, one after the other."""
    strategy = parse_strategy({"strategy": "partitioned", "batch": [1]})
    rows = np.arange(15, dtype=np.float32).reshape(5, 3)
    (result,), report = serve(plus_one(inputs=ROWS, strategy=strategy), {"x": rows})
    np.testing.assert_array_equal(rows + 1, result)
    assert ((5, (1,)),) == report.calls
