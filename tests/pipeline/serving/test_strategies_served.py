"""Strategies through the whole server, on the real OpenVINO: who shares a call, what is counted, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest
from tests.entries import Failure, RequestEntry, ResultEntry, request_of
from tests.pipeline.serving.clocks import real_time
from tests.pipeline.serving.echo_model import model_settings
from tests.pipeline.serving.harness import memory_serving

from shapestream.serving.slot_threads import SlotThreads
from shapestream.settings import ModelSettings
from shapestream_engine import InputSpec, ModelSpec, Strategy, compile_model
from shapestream_engine.layout import Tensors
from shapestream_engine.strategy import parse_strategy

Array = np.ndarray[Any, Any]


def sums() -> ov.Model:
    """The sum of each row's elements, which zeros do not change."""
    x = ops.parameter([-1, -1], ov.Type.f32, name="x")
    result = ops.reduce_sum(x, ops.constant(np.array([1], np.int64)))
    result.output(0).set_names({"y"})
    return ov.Model([result], [x], "sums")


def request(sequence: int, array: Array) -> RequestEntry:
    """A request without a deadline."""
    tensors = Tensors(layout=((0, "f32", array.shape),), buffers=(array.tobytes(),))
    return request_of(sequence, tensors)


async def serve(
    strategy: Strategy,
    arrays: Sequence[Array],
    options: ModelSettings | None = None,
    shape: str = "batch:1..32, seq:1..128",
) -> tuple[list[Any], dict[str, Any]]:
    """All arrays in one message; the answers by sequence, and the statistics."""
    spec = ModelSpec(
        name="sums",
        model=sums(),
        strategy=strategy,
        inputs={"x": InputSpec(shape=shape, pad={"seq": 0})},
    )
    local = SlotThreads(models={"sums": compile_model(spec, threads=1)})
    known = {} if options is None else {"sums": options}
    answers: dict[int, ResultEntry | Failure] = {}
    async with memory_serving(local, models=known) as running:
        client = await running.greeted(model="sums")
        client.say(*[request(number, array) for number, array in enumerate(arrays)])
        while len(answers) < len(arrays):
            answer: ResultEntry | Failure = await client.hear((ResultEntry, Failure))  # type: ignore[arg-type] # either of them
            answers[answer.sequence] = answer
        return [answers[number] for number in range(len(arrays))], running.server.statistics()


def check(answers: Sequence[Any], arrays: Sequence[Array]) -> None:
    """Each answer is the sums of its own rows."""
    for answer, array in zip(answers, arrays, strict=True):
        assert isinstance(answer, ResultEntry), answer
        got = np.frombuffer(answer.tensors.buffers[0], np.float32)
        np.testing.assert_allclose(got, array.sum(axis=1), rtol=1e-5)


def ones(*shapes: tuple[int, int]) -> list[Array]:
    """Requests that differ in every element."""
    return [np.random.default_rng(7).standard_normal(shape).astype(np.float32) for shape in shapes]


@real_time
async def test_requests_of_one_bucket_share_a_call() -> None:
    """They will be padded to the same size, so nothing speaks against it, however much each of them is padded."""
    arrays = ones((1, 33), (1, 64), (2, 40))
    answers, statistics = await serve(Strategy({"seq": (64, 128)}), arrays)
    check(answers, arrays)
    assert (1, 1, 1) == (statistics["batches"], statistics["calls"], statistics["distinct_shapes"])


@real_time
async def test_padding_is_counted_by_the_real_sizes() -> None:
    """33 + 64 + 80 elements in a call of 4 rows of 64."""
    _, statistics = await serve(Strategy({"seq": (64, 128)}), ones((1, 33), (1, 64), (2, 40)))
    assert round(1 - (33 + 64 + 80) / 256, 4) == statistics["padding_ratio"]
    assert (0, 1) == (statistics["preparations"], statistics["prepared_hits"])


@real_time
async def test_a_request_larger_than_any_call_is_divided_and_rejoined() -> None:
    """21 rows as 8 + 8 + 4 + 1, in one batch."""
    arrays = ones((21, 100))
    answers, statistics = await serve(
        Strategy({"batch": (1, 2, 4, 8), "seq": (128,)}, partitioned=True), arrays
    )
    check(answers, arrays)
    assert (1, 4, 3) == (statistics["batches"], statistics["calls"], statistics["distinct_shapes"])
    # The largest and the smallest call were prepared at the start.
    assert (1, 3) == (statistics["preparations"], statistics["prepared_hits"])


@real_time
async def test_a_size_that_no_call_has_is_refused() -> None:
    """With the size that would be taken; the others of its message are served."""
    arrays = ones((1, 10), (1, 100), (1, 64))
    answers, _ = await serve(Strategy({"seq": (16, 64)}), arrays)
    assert isinstance(answers[1], Failure)
    assert "invalid" == answers[1].code
    assert "dimension 'seq' is 100, which is more than 64, the largest size" in answers[1].message
    check([answers[0], answers[2]], [arrays[0], arrays[2]])


@real_time
async def test_a_batch_is_no_larger_than_the_largest_call() -> None:
    """So that other slots get some of it: sixteen rows of one each are two batches."""
    arrays = ones(*[(1, 7)] * 16)
    answers, statistics = await serve(Strategy({"batch": (1, 8)}, partitioned=True), arrays)
    check(answers, arrays)
    assert (2, 2) == (statistics["batches"], statistics["calls"])


@real_time
async def test_hot_shapes_are_served_by_static_models_and_all_others_by_the_dynamic_one() -> None:
    """Both give each request its own results; a static model is there before the first call, so none prepares it."""
    arrays = ones((1, 16), (1, 33), (3, 16), (1, 100), (1, 16))
    answers, statistics = await serve(parse_strategy({"static": [{"batch": [1, 2, 4], "seq": 16}]}), arrays)
    check(answers, arrays)
    assert statistics["calls"] == statistics["preparations"] + statistics["prepared_hits"]


@real_time
async def test_a_process_never_meets_more_shapes_than_its_cap() -> None:
    """Requests of 60 different sizes, as the scheduler rounds them."""
    arrays = ones(*[(1 + number % 3, 1 + 2 * number) for number in range(60)])
    answers, statistics = await serve(Strategy(max_prepared=16, fill_rows=True), arrays)
    check(answers, arrays)
    assert 1 < statistics["distinct_shapes"] <= 13


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(),
        Strategy(max_prepared=16),
        Strategy({"batch": (2, 4), "seq": (64, 128)}),
        Strategy({"batch": (1, 8)}, partitioned=True),
    ],
    ids=["native", "capped", "bucketed", "partitioned"],
)
@real_time
async def test_what_may_not_run_twice_runs_alone_under_every_strategy(strategy: Strategy) -> None:
    """Also with more rows than a call of one row, and more than the largest call, takes."""
    arrays = ones((1, 33), (3, 64), (1, 33), (21, 7))
    answers, statistics = await serve(strategy, arrays, model_settings(idempotent=False))
    check(answers, arrays)
    assert (4, 1.0) == (statistics["batches"], statistics["mean_batch_requests"])


@pytest.mark.parametrize(
    "strategy",
    [Strategy(), Strategy({"batch": (2, 4)}), Strategy({"batch": (1, 8)}, partitioned=True)],
    ids=str,
)
@real_time
async def test_requests_without_rows_cost_no_call_whatever_they_claim(strategy: Strategy) -> None:
    """Each gets its empty answer, alone and in the company of one that runs as it is."""
    arrays = [np.empty((0, 1 << 40), np.float32), *ones((2, 7)), np.empty((0, 3), np.float32)]
    answers, _ = await serve(strategy, arrays, shape="batch, seq")
    for answer, rows in zip(answers, (0, 2, 0), strict=True):
        assert isinstance(answer, ResultEntry), answer
        assert (rows,) == answer.tensors.layout[0][2]
    np.testing.assert_allclose(
        np.frombuffer(answers[1].tensors.buffers[0], np.float32), arrays[1].sum(axis=1), rtol=1e-5
    )
