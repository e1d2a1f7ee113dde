"""All rules, strategies, element types and layouts together, on a slot, against the model run on each request alone.

The model is a function that finds things in each row, and tells of them by every rule that its signature can have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.engine.slot_bench import SlotBench

from shapestream_engine import (
    InputSpec,
    ModelSpec,
    OutputSpec,
    ShapeError,
    Strategy,
    compile_model,
    dtype_of,
    element_type_of,
    parse_strategy,
)

Array = np.ndarray[Any, Any]
MOST_ROWS, MOST_SEQ, WIDTH = 12, 8, 2


class Output(NamedTuple):
    """One output: its shape, as an array of (rows, seq, width) and the places found give it, and its rule."""

    shape: str
    rule: dict[str, Any]
    value: Callable[[Array, Array], Array]
    """Of x as [rows, seq, width], and of the [row, place] that were found."""


def table(x: Array, found: Array) -> Array:
    """Per row the places found in it, and 7 beyond them."""
    given = np.full((len(x), MOST_SEQ * WIDTH), 7)
    for row in range(len(x)):
        own = found[found[:, 0] == row, 1]
        given[row, : len(own)] = own
    return given


OUTPUTS = {
    "doubled": Output("batch, seq, 2", {"rule": "rows"}, lambda x, found: x * 2),
    "turned": Output("seq, batch", {"rule": "rows"}, lambda x, found: x[:, :, 0].T),
    "led": Output("1, batch, seq", {"rule": "rows"}, lambda x, found: x[None, :, :, 1]),
    "sums": Output("batch", {"rule": "rows"}, lambda x, found: x.astype(np.int64).sum(axis=(1, 2))),
    "cells": Output("batch, ?", {"rule": "crop", "to": "batch, seq/2"}, lambda x, found: x[:, ::2, 0]),
    "whole_cells": Output(
        "?, 2, batch",
        {"rule": "crop", "to": "seq//3, 2, batch"},
        lambda x, found: x[:, 2::3].transpose(1, 2, 0),
    ),
    "enlarged": Output(
        "?, batch",
        {"rule": "crop", "to": "seq*2, batch"},
        lambda x, found: np.repeat(x[:, :, 0].T, 2, axis=0),
    ),
    "places": Output("?, 2", {"rule": "index_column"}, lambda x, found: found),
    "rows": Output("?", {"rule": "index_column"}, lambda x, found: found[:, 0]),
    "beside": Output("?", {"rule": "with", "output": "places"}, lambda x, found: found[:, 1] + 1),
    "count": Output(
        "batch, 1",
        {"rule": "rows"},
        lambda x, found: np.bincount(found[:, 0], minlength=len(x))[:, None],
    ),
    "listed": Output("?, 1", {"rule": "counts", "output": "count"}, lambda x, found: found[:, 1:]),
    "table": Output(f"batch, {MOST_SEQ * WIDTH}", {"rule": "padded_counts", "output": "count"}, table),
    "total": Output("1", {"rule": "recount", "output": "places"}, lambda x, found: np.array([len(found)])),
    "table_total": Output("", {"rule": "recount", "output": "table"}, lambda x, found: np.array(len(found))),
    "anchors": Output(
        "3, seq", {"rule": "shared"}, lambda x, found: np.add(np.arange(x.shape[1]), [[0], [10], [20]])
    ),
    "anchor": Output("seq", {"rule": "shared"}, lambda x, found: np.arange(x.shape[1])),
    "classes": Output("3", {"rule": "shared"}, lambda x, found: np.arange(3)),
    "version": Output("", {"rule": "shared"}, lambda x, found: np.array(5)),
}
WHOLE = {
    "doubled": Output("seq, 2", {"rule": "whole"}, lambda x, found: x[0] * 2),
    "turned": Output("2, seq", {"rule": "whole"}, lambda x, found: x[0].T),
    "sum": Output("", {"rule": "whole"}, lambda x, found: np.array(x.astype(np.int64).sum())),
    "places": Output("?, 1", {"rule": "whole"}, lambda x, found: found[:, 1:]),
    "version": Output("1", {"rule": "whole"}, lambda x, found: np.array([5])),
}
LAYOUTS = {"batch, seq, 2": (0, 1, 2), "seq, batch, 2": (1, 0, 2), "2, seq, batch": (2, 1, 0)}
INPUT_TYPES = ["f32", "f64", "f16", "i8", "i32", "u8", "u64", "bf16"]
OUTPUT_TYPES = ["i8", "u8", "bf16", "f32", "f64", "f16", "i16", "i32", "i64", "u16", "u64"]


class Scenario(NamedTuple):
    """A model, and batches of requests for it."""

    layout: str
    """Of the input; without `batch` where the model has none."""
    input_type: str
    outputs: Mapping[str, tuple[Output, str]]
    """With their element types."""
    strategy: Strategy
    padded: bool
    batches: list[list[Array]]
    """Requests as [rows, seq, width]."""


@st.composite
def strategies(draw: st.DrawFn, *, has_batch: bool, padded: bool) -> Strategy:
    """Any that goes with such a model."""
    seq = tuple(sorted(draw(st.sets(st.integers(1, MOST_SEQ - 1), max_size=2)) | {MOST_SEQ}))
    rows = tuple(sorted(draw(st.sets(st.integers(1, 5), min_size=1, max_size=3))))
    kinds = ["native", "alone", "capped", "static"]
    if padded:
        kinds += ["padded", "bucketed"]
    if has_batch:
        kinds += ["filled", "partitioned", "bucketed rows"]
    sized = {"seq": seq} if padded else {}
    match draw(st.sampled_from(kinds)):
        case "native":
            return Strategy()
        case "alone":
            return Strategy(most_rows=1)
        case "capped":
            return Strategy(max_prepared=draw(st.integers(2, 9)))
        case "filled":
            return Strategy(max_prepared=draw(st.integers(2, 9)), fill_rows=True)
        case "static":
            shape = {"seq": list(seq), **({"batch": list(rows)} if has_batch else {})}
            return parse_strategy({"static": [shape]})
        case "padded":
            return Strategy({"seq": seq[-1:], **({"batch": rows[-1:]} if has_batch else {})})
        case "bucketed":
            return Strategy(sized)
        case "partitioned":
            return Strategy({"batch": rows, **sized}, partitioned=True)
        case _:
            return Strategy({"batch": rows, **sized})


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small ones, with rows and sizes of 0 among them."""
    has_batch, padded = draw(st.booleans()), draw(st.booleans())
    known = OUTPUTS if has_batch else WHOLE
    names = draw(st.sets(st.sampled_from(sorted(known)), min_size=1))
    for name in sorted(names):  # and those that they follow
        while (name := known[name].rule.get("output", "")) != "":
            names.add(name)
    strategy = draw(strategies(has_batch=has_batch, padded=padded))
    rows = st.integers(0, 4) if has_batch else st.just(1)
    alone = not has_batch or strategy.alone
    batches = []
    for _ in range(draw(st.integers(1, 4))):
        seq = draw(st.integers(0, MOST_SEQ))
        batch = []
        for _ in range(1 if alone else draw(st.integers(1, 3))):
            size = draw(rows), draw(st.integers(0, MOST_SEQ)) if padded else seq, WIDTH
            values = draw(
                st.lists(st.integers(0, 3), min_size=int(np.prod(size)), max_size=int(np.prod(size)))
            )
            batch.append(np.array(values, np.int64).reshape(size))
        batches.append(batch)
    return Scenario(
        layout=draw(st.sampled_from(sorted(LAYOUTS))) if has_batch else "seq, 2",
        input_type=draw(st.sampled_from(INPUT_TYPES)),
        outputs={name: (known[name], draw(st.sampled_from(OUTPUT_TYPES))) for name in known if name in names},
        strategy=strategy,
        padded=padded,
        batches=batches,
    )


def outputs_of(scenario: Scenario, x: Array) -> dict[str, Array]:
    """What the model gives for an input as [rows, seq, width]."""
    found = np.argwhere(x == 3)
    places = np.stack([found[:, 0], found[:, 1] * WIDTH + found[:, 2]], axis=1)
    return {
        name: np.asarray(output.value(x, places)).astype(dtype_of(kind))
        for name, (output, kind) in scenario.outputs.items()
    }


def as_input(scenario: Scenario, x: Array) -> Array:
    """A request in the layout and type of the model's input."""
    if "batch" not in scenario.layout:
        return x[0].astype(dtype_of(scenario.input_type))
    turned = x.transpose(LAYOUTS[scenario.layout])
    return np.ascontiguousarray(turned).astype(dtype_of(scenario.input_type))


def expected_of(scenario: Scenario, x: Array) -> dict[str, Array]:
    """What a request gets: what the model gives for it alone, tables trimmed by hand."""
    outputs = outputs_of(scenario, x)
    if "table" in outputs:
        counts = [int((row == 3).sum()) for row in x]
        own = outputs["table"][:, : max(counts, default=0)].copy()
        for row, count in enumerate(counts):
            own[row, count:] = 0
        outputs["table"] = own
    return outputs


def spec_of(scenario: Scenario) -> ModelSpec:
    """The model, which notices rows and columns that hold nothing sensible."""

    def model(x: Array) -> dict[str, Array]:
        array = x.astype(np.int64)
        plain = array.transpose(LAYOUTS[scenario.layout]) if "batch" in scenario.layout else array[None]
        assert ((plain >= 0) & (plain <= 3)).all(), "the call holds what no request sent"
        return outputs_of(scenario, plain)

    shape = scenario.layout.replace("batch", f"batch:0..{MOST_ROWS}").replace("seq", f"seq:0..{MOST_SEQ}")
    return ModelSpec(
        name="m",
        model=model,
        strategy=scenario.strategy,
        inputs={
            "x": InputSpec(
                shape=shape,
                element_type=scenario.input_type,
                pad={"seq": 0} if scenario.padded else {},
            )
        },
        outputs={
            name: OutputSpec(shape=output.shape, element_type=kind, rule=output.rule)
            for name, (output, kind) in scenario.outputs.items()
        },
    )


@settings(max_examples=150)
@given(scenarios())
def test_every_request_gets_what_the_model_gives_it_alone(scenario: Scenario) -> None:
    """To the bit, in shape and type, whoever shares the call, however it is padded, filled up and divided."""
    event(scenario.strategy.name)
    bench = SlotBench(compile_model(spec_of(scenario)))
    for number, batch in enumerate(scenario.batches):
        taken, arrays = [], []
        for x in batch:
            array = as_input(scenario, x)
            try:
                bench.batch(array)
            except ShapeError:
                # Only what has no elements, and would be a call of nothing but padding.
                assert 0 == x.size
                assert scenario.strategy.sizes or scenario.strategy.max_prepared
                continue
            taken.append(x)
            arrays.append(array)
        if not arrays:
            continue
        for x, result in zip(taken, bench.results(*arrays, batch=number), strict=True):
            for name, array in expected_of(scenario, x).items():
                assert (scenario.outputs[name][1], array.shape) == (
                    element_type_of(result[name].dtype),
                    result[name].shape,
                ), name
                assert array.tobytes() == result[name].tobytes(), name
