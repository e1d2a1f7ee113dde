"""Mistakes in chains: each is found at its place, with what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.pipeline.chains.models import SIGNATURES

from shapestream.chains.plan import ChainRefused, plan_chain
from shapestream.chains.spec import ChainSpec, StageSpec
from shapestream_engine.output_rules import Whole
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature

SPLIT = StageSpec(name="cut", model="split", inputs={"x": "x"})
NORM = StageSpec(name="read", model="norm", inputs={"x": "cut.parts"}, each=["item of cut.parts"])
GOOD = ChainSpec(
    name="c", inputs={"x": "cut.x"}, stages=[SPLIT, NORM], outputs={"a": "read.a", "b": "read.b"}
)


def _with(**changes: Any) -> ChainSpec:
    """The good chain, its second stage changed."""
    return replace(GOOD, stages=[SPLIT, replace(NORM, **changes)])


def test_the_chain_that_the_others_differ_from_is_right() -> None:
    """So what they say is due to the difference."""
    assert "c" == plan_chain(GOOD, SIGNATURES).name


@pytest.mark.parametrize(
    ("spec", "place", "words"),
    [
        (_with(model="nix"), ("stages", 1, "model"), 'no model "nix"'),
        (_with(name="cut"), ("stages", 1, "name"), 'has the name "cut" too'),
        (_with(inputs={"x": "cut.nix"}, each=[]), ("stages", 1, "inputs", "x"), 'no "cut.nix"'),
        (_with(inputs={"x": "nix.parts"}, each=[]), ("stages", 1, "inputs", "x"), 'no stage "nix"'),
        (_with(inputs={"x": "nix"}, each=[]), ("stages", 1, "inputs", "x"), 'no input "nix"'),
        (_with(inputs={"y": "cut.parts"}), ("stages", 1, "inputs"), 'needs the input "x"'),
        (_with(each=["items of cut.parts"]), ("stages", 1, "each"), "says no way"),
        (_with(each=["item of cut.nix"]), ("stages", 1, "each"), "no input of"),
        (_with(each=[]), ("stages", 1, "inputs", "x"), "list of f32"),
        (_with(each=["row of cut.parts"]), ("stages", 1, "inputs", "x"), "each: item of"),
        (_with(inputs={"x": "x"}, each=["item of x"]), ("stages", 1, "inputs", "x"), "no items"),
        (_with(inputs={"x": "read.b"}, each=[]), ("stages", 1, "inputs"), "circle"),
        (replace(GOOD, inputs={"x": "read.x"}), ("inputs", "x"), "takes its tensors elsewhere"),
        (replace(GOOD, inputs={"x": "x"}), ("inputs", "x"), "no input of a stage"),
        (replace(GOOD, outputs={"a": "x"}), ("outputs", "a"), "an input of the chain"),
        (replace(GOOD, outputs={"a": "read.nix"}), ("outputs", "a"), 'no "read.nix"'),
        (
            replace(
                GOOD,
                stages=[
                    replace(SPLIT, name="twice", inputs={"x": "x"}, each=["row of x"]),
                    replace(SPLIT, name="cut"),
                ],
                outputs={"a": "twice.parts"},
            ),
            ("stages", 0, "inputs", "x"),
            "takes [n, w:1..9]",
        ),
    ],
)
def test_each_mistake_has_its_place(spec: ChainSpec, place: tuple[str | int, ...], words: str) -> None:
    """The place in the YAML, and words that name the remedy or what is there."""
    with pytest.raises(ChainRefused) as refused:
        plan_chain(spec, SIGNATURES)
    assert any(place == where and words in text for where, text in refused.value.problems), (
        refused.value.problems
    )


def test_a_list_of_lists_is_no_output() -> None:
    """A stage that fans out has no outputs that are lists themselves."""
    stages = [
        StageSpec(name="made", model="blocks", inputs={"x": "x"}),
        StageSpec(name="cut", model="split", inputs={"x": "made.tables"}, each=["item of made.tables"]),
    ]
    spec = ChainSpec(name="c", inputs={"x": "made.x"}, stages=stages, outputs={"o": "cut.parts"})
    with pytest.raises(ChainRefused, match=r'no "cut.parts"'):
        plan_chain(spec, SIGNATURES)


SCORE = ModelSignature(
    "score",
    (InputPort("x", "f32", NamedShape.parse("n, w:1..9")),),
    (
        OutputPort("total", "f32", NamedShape.parse(""), Whole()),
        OutputPort("ok", "f32", NamedShape.parse("3"), Whole()),
        OutputPort("count", "i64", NamedShape.parse("3"), Whole()),
        OutputPort("wide", "f32", NamedShape.parse("2, 12"), Whole()),
    ),
)
SCALAR = ModelSignature(
    "scalar",
    (InputPort("v", "f32", NamedShape.parse("")),),
    (OutputPort("o", "f32", NamedShape.parse("3"), Whole()),),
)
SCORED = StageSpec(name="score", model="score", inputs={"x": "x"})


@pytest.mark.parametrize(
    ("model", "source", "each", "words"),
    [
        ("flat", "score.count", "", '"v" takes f32, and score.count is i64 [3]'),
        ("flat", "score.total", "", '"v" takes [k], and score.total is f32 []'),
        ("norm", "score.wide", "", '"x" takes 1..9 along axis 1, and score.wide has 12'),
        ("scalar", "score.total", "row", "score.total is f32 [], which has no rows"),
        ("scalar", "score.total", "batch", "score.total is f32 [], which has no rows"),
    ],
)
def test_each_edge_has_one_type(model: str, source: str, each: str, words: str) -> None:
    """Its element type, rank and dimensions; what has no axis has no rows, one by one or as a batch."""
    signatures = SIGNATURES | {"score": SCORE, "scalar": SCALAR}
    (port,) = signatures[model].inputs
    after = StageSpec(
        name="after", model=model, inputs={port.name: source}, each=[f"{each} of {source}"] if each else []
    )
    output = signatures[model].outputs[0].name
    spec = ChainSpec(
        name="c", inputs={"x": "score.x"}, stages=[SCORED, after], outputs={"o": f"after.{output}"}
    )
    with pytest.raises(ChainRefused) as refused:
        plan_chain(spec, signatures)
    assert [(("stages", 1, "inputs", port.name), words)] == [*refused.value.problems]


def test_a_model_with_an_output_called_ok_cannot_skip_rows() -> None:
    """Only where rows can be skipped: one request of the stage has no rows."""
    one = ChainSpec(name="c", inputs={"x": "score.x"}, stages=[SCORED], outputs={"o": "score.ok"}, skips=True)
    assert "f32 [3]" in [*plan_chain(one, {"score": SCORE}).lines()][3]
    made = StageSpec(name="made", model="blocks", inputs={"x": "x"})
    several = replace(SCORED, inputs={"x": "made.tables"}, each=["item of made.tables"])
    spec = replace(one, inputs={"x": "made.x"}, stages=[made, several])
    with pytest.raises(ChainRefused, match=r'"score" has an output "ok"'):
        plan_chain(spec, SIGNATURES | {"score": SCORE})
