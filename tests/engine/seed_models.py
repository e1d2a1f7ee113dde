"""OpenVINO models for the tests of the seeds' claims, and short ways to read and run them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import openvino as ov
from openvino import opset13 as op
from tests.engine.slot_bench import SlotBench

from shapestream_engine import BatchReport, InferRequest, ModelSpec, ReadModel, read_model

_Array: TypeAlias = "np.ndarray[Any, Any]"


def in_memory(nodes: list[Any], parameters: list[Any], **given: Any) -> ReadModel:
    """A graph as a read model."""
    model = ov.Model([op.result(node) for node in nodes], parameters)
    return read_model(ModelSpec(name="m", model=model, **given))


def plus_one(*shape: Any, **given: Any) -> ReadModel:
    """x + 1, for x of this shape; of two open dimensions without one."""
    x = op.parameter(ov.PartialShape(list(shape or (-1, -1))), np.float32, name="x")
    return in_memory([op.add(x, np.float32(1))], [x], **given)


def two_by_two() -> ReadModel:
    """Two inputs with two outputs: the rows of a and b joined, and b doubled."""
    a = op.parameter([-1, 3], np.float32, name="a")
    b = op.parameter([-1, 3], np.float32, name="b")
    joined, doubled = op.concat([a, b], 0), op.add(b, b)
    joined.output(0).set_names({"joined"})
    doubled.output(0).set_names({"doubled"})
    return in_memory([joined, doubled], [a, b])


def nonzero(*shape: Any) -> ReadModel:
    """The places of what is not zero, one per row: as many rows as the data gives."""
    x = op.parameter(ov.PartialShape(list(shape)), np.int64, name="x")
    return in_memory([op.transpose(op.non_zero(x), op.constant([1, 0]))], [x])


def plain_mean(**given: Any) -> ReadModel:
    """The mean of each row, whatever in it is padding."""
    x = op.parameter([-1, -1], np.float32, name="x")
    return in_memory([op.reduce_mean(x, op.constant([1]), keep_dims=True)], [x], **given)


def masked_mean(**given: Any) -> ReadModel:
    """The mean of what the mask says is no padding, in each row."""
    x, mask = (op.parameter([-1, -1], np.float32, name=name) for name in ("x", "mask"))
    total = op.reduce_sum(op.multiply(x, mask), op.constant([1]), keep_dims=True)
    count = op.reduce_sum(mask, op.constant([1]), keep_dims=True)
    return in_memory([op.divide(total, count)], [x, mask], **given)


def one_request(model: ReadModel) -> InferRequest:
    """A request of the model, compiled."""
    return model.compile().create_infer_request()


def serve(model: ReadModel, *requests: dict[str, _Array]) -> tuple[list[_Array], BatchReport]:
    """The requests as one batch in a slot: the first output of each, and the report."""
    compiled = model.compile()
    bench = SlotBench(compiled)
    batch = bench.batch(*requests)
    try:
        report = bench.run(*requests)
    finally:
        compiled.close()
    first = [next(iter(result.values())) for result in bench.arrays(report)]
    return first, replace(report, calls=report.calls or ((1, batch.sizes),))
