"""Static shapes beside the dynamic model: how they are written and checked, and what runs on which model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openvino as ov
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openvino import opset13 as op
from tests.engine.slot_bench import SlotBench

from shapestream_engine import (
    BatchReport,
    InputPort,
    InputSpec,
    ModelSignature,
    ModelSpec,
    NamedShape,
    OutputPort,
    OutputSpec,
    Rows,
    Strategy,
    compile_model,
)
from shapestream_engine.batching.calls import CallPlanner
from shapestream_engine.errors import SignatureError
from shapestream_engine.probe import Finding
from shapestream_engine.probing.examination import ProbeOptions, examine
from shapestream_engine.strategy import MAX_STATIC, parse_strategy

Array = np.ndarray[Any, Any]


def signature(strategy: Strategy) -> ModelSignature:
    """A model of two dynamic dimensions, `batch` 1..8 and `seq` 1..64."""
    shape = NamedShape.parse("batch:1..8, seq:1..64")
    return ModelSignature(
        "m", (InputPort("x", "f32", shape, {"seq": 0}),), (OutputPort("y", "f32", shape, Rows()),), strategy
    )


def test_a_list_of_sizes_is_a_shape_for_each() -> None:
    """In any order of the names, which is not that of the model's dimensions."""
    strategy = parse_strategy({"static": [{"seq": [8, 16], "batch": 1}, {"batch": 4, "seq": 16}]})
    model = signature(strategy)
    assert ((1, 8), (1, 16), (4, 16)) == model.static_sizes
    planner = CallPlanner(model)
    assert [(1, 16), None] == [planner.prepared_sizes(sizes) for sizes in ((1, 16), (2, 16))]


@given(
    shapes=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 64)), unique=True, max_size=12),
    cap=st.none() | st.integers(2, 99),
)
def test_static_shapes_travel_with_the_signature(shapes: list[tuple[int, int]], cap: int | None) -> None:
    """Whoever reads it from the wire knows the same shapes."""
    strategy = parse_strategy(
        {"max_prepared": cap, "static": [{"batch": rows, "seq": size} for rows, size in shapes]}
    )
    there = ModelSignature.from_dict(signature(strategy).to_dict())
    assert signature(strategy) == there
    assert tuple(shapes) == there.static_sizes


@pytest.mark.parametrize(
    ("static", "words"),
    [
        ([{"batch": 1}], "the size of 'seq' is missing"),
        (
            [{"batch": 1, "seq": 4, "width": 3}],
            "'width' is no dynamic dimension of the model; it has batch, seq",
        ),
        ([{"batch": 1, "seq": 65}], "'seq': 65 is not within 1..64"),
        ([{"batch": 1, "seq": 0}], "'seq': 0 is no size"),
        ([{"batch": True, "seq": 1}], "'batch': True is no size"),
        ([{"batch": 1, "seq": [4, 5, 4]}], "{batch: 1, seq: 4} is listed twice"),
        ([{"batch": 1, "seq": list(range(1, 65))}] * 5, f"no more than {MAX_STATIC} shapes"),
        ({"batch": 1, "seq": 4}, "a list of shapes such as"),
        ([[1, 4]], "a list of shapes such as"),
        ("1", "a list of shapes such as"),
    ],
)
def test_what_cannot_be_meant_is_refused(static: object, words: str) -> None:
    """With the shape and the dimension."""
    with pytest.raises(SignatureError) as caught:
        signature(parse_strategy({"static": static}))
    assert words in str(caught.value)


def doubling(factor: float = 2.0) -> ov.Model:
    """[batch, seq] -> the same, times `factor`, and the sum of each row: [batch]."""
    x = op.parameter([-1, -1], np.float32, name="x")
    twice = op.multiply(x, op.constant(np.float32(factor)))
    total = op.reduce_sum(x, op.constant(np.array([1])))
    for node, name in ((twice, "twice"), (total, "total")):
        node.output(0).get_tensor().set_names({name})
    return ov.Model([op.result(twice), op.result(total)], [x])


class Bench(SlotBench):
    """The doubling model in a slot, whose results are checked."""

    def run(self, *requests: Any, **more: Any) -> BatchReport:
        """One batch; `sizes` as the scheduler chose them."""
        report = super().run(*requests, **more)
        for request, result in zip(requests, self.arrays(report), strict=True):
            np.testing.assert_array_equal(2 * request, result["twice"])
            np.testing.assert_allclose(request.sum(axis=1), result["total"], rtol=1e-6)
        return report


@contextmanager
def bench(strategy: Strategy) -> Iterator[Bench]:
    """The model by a strategy, closed afterwards."""
    spec = ModelSpec(
        name="m",
        model=doubling(),
        inputs={"x": InputSpec(shape="batch:1..8, seq:1..64", pad={"seq": 0})},
        outputs={
            "twice": OutputSpec(shape="batch, seq", rule={"rule": "rows"}),
            "total": OutputSpec(shape="batch", rule={"rule": "rows"}),
        },
        strategy=strategy,
    )
    model = compile_model(spec, threads=1)
    try:
        yield Bench(model)
    finally:
        model.close()


def filled(rows: int, seq: int) -> Array:
    """Small whole numbers, whose sums are exact."""
    return np.arange(rows * seq, dtype=np.float32).reshape(rows, seq) % 7


STATIC = parse_strategy({"static": [{"batch": 1, "seq": [8, 16]}, {"batch": 4, "seq": 16}]})


def test_hot_shapes_run_on_models_of_their_own_and_all_others_on_the_dynamic_one() -> None:
    """All of them are there from the start, so no call of a hot shape prepares anything."""
    with bench(STATIC) as ready:
        prepared = ready.pool.prepared
        assert prepared is not None
        hits = prepared.hits
        assert 3 == prepared.preparations
        assert [0, 0, 1, 0] == [
            ready.run(filled(*sizes)).preparations for sizes in ((1, 8), (4, 16), (1, 9), (1, 9))
        ]
        assert 0 == ready.run(*[filled(1, 16) for _ in range(4)]).preparations
        assert (3, hits + 3) == (prepared.preparations, prepared.hits)


def test_smaller_members_are_padded_up_to_the_static_shape_that_was_chosen() -> None:
    """Along every dimension that may be padded, and rows are filled up: what each gets is its own."""
    with bench(STATIC) as ready:
        prepared = ready.pool.prepared
        assert prepared is not None
        hits = prepared.hits
        report = ready.run(filled(1, 11), filled(2, 16), sizes=(4, 16))
        assert ((), None) == (report.calls, report.code), "one call, of the batch's sizes"
        report = ready.run(filled(1, 5), sizes=(1, 8))
        assert ((), None) == (report.calls, report.code)
        assert hits + 2 == prepared.hits


def test_a_shape_that_the_model_cannot_be_compiled_for_is_refused_at_the_start() -> None:
    """With the shape: this one reshapes rows of 4 to pairs."""
    x = op.parameter([-1, -1], np.float32, name="x")
    pairs = op.reshape(x, op.constant(np.array([-1, 4])), special_zero=False)
    pairs.output(0).get_tensor().set_names({"y"})
    spec = ModelSpec(
        name="m",
        model=ov.Model([op.result(pairs)], [x]),
        inputs={"x": InputSpec(shape="batch:1..8, seq:1..64")},
        outputs={"y": OutputSpec(shape="?, 4", rule={"rule": "shared"})},
        strategy=parse_strategy({"static": [{"batch": 1, "seq": 8}, {"batch": 1, "seq": 7}]}),
    )
    with pytest.raises(SignatureError, match=r"static: \{batch: 1, seq: 7\}: "):
        compile_model(spec)


def test_engines_that_prepare_nothing_run_all_shapes_themselves() -> None:
    """The strategy says what may be gained, not what there must be."""
    spec = ModelSpec(
        name="m",
        model=lambda x: 2 * x,
        inputs={"x": InputSpec(shape="batch:1..8, seq:1..64", element_type="f32")},
        outputs={"y": OutputSpec(shape="batch, seq", element_type="f32", rule={"rule": "rows"})},
        strategy=STATIC,
    )
    model = compile_model(spec)
    assert model.prepared is None
    assert STATIC == model.signature.strategy
    model.close()


def proof_of(prepared_by: str) -> list[Finding]:
    """What is found of static shapes when the models for them are made of this one instead."""
    found: list[Finding] = []
    made = [
        compile_model(
            ModelSpec(
                name="m",
                model=doubling(factor),
                inputs={"x": InputSpec(shape="batch:1..8, seq:1..64")},
                outputs={
                    "twice": OutputSpec(shape="batch, seq", rule={"rule": "rows"}),
                    "total": OutputSpec(shape="batch", rule={"rule": "rows"}),
                },
                strategy=strategy,
            ),
            threads=1,
        )
        for factor, strategy in ((2.0, Strategy()), (2.0, STATIC), (2.1, STATIC))
    ]
    plain, served, other = made
    if prepared_by == "another model":
        served.prepared = other.prepared
    examine(plain, ProbeOptions(), found.extend, served=served)
    return [finding for finding in found if finding.treatment.kind == "static"]


def test_static_models_are_compared_with_the_dynamic_one() -> None:
    """Each of their shapes, on what the dynamic model gives the same requests alone."""
    findings = proof_of("the same model")
    assert {"twice": "proved", "total": "proved"} == {each.output: each.verdict for each in findings}
    assert all(each.cases >= 3 * len(STATIC.to_dict()["static"]) for each in findings)


def test_a_static_model_that_gives_other_results_is_refuted() -> None:
    """Here it is five per cent off in one output."""
    findings = {each.output: each for each in proof_of("another model")}
    assert ("refuted", "proved") == (findings["twice"].verdict, findings["total"].verdict)
    assert "running at a static shape, output 'twice': refuted" in str(findings["twice"])
    assert "at its static shape" in findings["twice"].case or "batch 1" in findings["twice"].case
