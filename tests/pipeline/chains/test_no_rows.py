"""Batches without rows, and rows without a result: what comes out has a shape that the signature allows, or nothing does."""

from __future__ import annotations

import numpy as np
import pytest
from tests.pipeline.chains.models import SIGNATURES, arrays_of, lists_of, run, tensors_of

from shapestream.chains.plan import Chain, plan_chain
from shapestream.chains.run import ChainRun, RunState
from shapestream.chains.spec import ChainSpec, StageSpec
from shapestream_engine.output_rules import Rows, Rule, Whole
from shapestream_engine.ports import InputPort, OutputPort
from shapestream_engine.shapes import NamedShape
from shapestream_engine.signature import ModelSignature


def chain_of(shape: str, *, skips: bool = False, rows: str = "n:1..9") -> Chain:
    """The rows that begin with a positive number go to `score` as one batch; its output has this shape."""
    rule: Rule = Rows() if rows.startswith("batch") else Whole()
    score = ModelSignature(
        "score",
        (InputPort("x", "f32", NamedShape.parse(f"{rows}, w")),),
        (OutputPort("o", "f32", NamedShape.parse(shape), rule),),
    )
    stages = [
        StageSpec(name="pick", model="pick", inputs={"x": "x"}),
        StageSpec(name="score", model="score", inputs={"x": "pick.rows"}, each=["batch of pick.rows"]),
    ]
    spec = ChainSpec(name="c", inputs={"x": "pick.x"}, stages=stages, outputs={"o": "score.o"}, skips=skips)
    return plan_chain(spec, SIGNATURES | {"score": score})


def after_no_rows(chain: Chain) -> ChainRun:
    """The chain, once its first stage has found nothing."""
    chain_run = ChainRun(chain, tensors_of([np.zeros((2, 3), np.float32)]), None)
    chain_run.begin(0.0)
    (request,) = chain_run.ready
    chain_run.ready = []
    chain_run.answered(request, run("pick", request.tensors), 1.0)
    assert [] == chain_run.ready
    return chain_run


@pytest.mark.parametrize("skips", [False, True], ids=["fail", "skip"])
@pytest.mark.parametrize("shape", ["", "10", "2, 3", "1.., 3", "1..5"])
def test_an_output_that_is_never_empty_fails_the_request(shape: str, skips: bool) -> None:
    """The message names the stage, the output and the remedy; the drawing has told it."""
    chain = chain_of(shape, skips=skips)
    assert "  a batch without rows in score fails the request: score.o is never empty" in [*chain.lines()]
    chain_run = after_no_rows(chain)
    assert RunState.FAILED is chain_run.state
    assert chain_run.failure is not None
    assert (
        "invalid",
        f"stage 'score': pick.rows has no rows, and the output 'o', f32 [{shape}], cannot be empty "
        "(write each: row of pick.rows in the chain, or give the output an axis for rows)",
    ) == (chain_run.failure.code, chain_run.failure.message)


def test_the_remedy_for_a_list_is_a_request_per_item() -> None:
    """Its arrays are no rows."""
    total = ModelSignature(
        "total",
        (InputPort("x", "f32", NamedShape.parse("n, k")),),
        (OutputPort("o", "f32", NamedShape.parse(""), Whole()),),
    )
    stages = [
        StageSpec(name="cut", model="split", inputs={"x": "x"}),
        StageSpec(name="total", model="total", inputs={"x": "cut.parts"}, each=["batch of cut.parts"]),
    ]
    spec = ChainSpec(name="c", inputs={"x": "cut.x"}, stages=stages, outputs={"o": "total.o"})
    chain = plan_chain(spec, SIGNATURES | {"total": total})
    chain_run = ChainRun(chain, tensors_of([np.zeros((0, 3), np.float32)]), None)
    chain_run.begin(0.0)
    (request,) = chain_run.ready
    chain_run.answered(request, run("split", request.tensors), 1.0)
    assert chain_run.failure is not None
    assert "(write each: item of cut.parts in the chain" in chain_run.failure.message


@pytest.mark.parametrize(
    ("shape", "rows", "told", "empty"),
    [
        ("batch, 3", "batch:1..9", "?, 3", (0, 3)),
        ("3, batch", "batch:1..9", "3, ?", (3, 0)),
        ("batch:1..9, 2..5", "batch:1..9", "..9, 2..5", (0, 2)),
        ("1..4, n:1..9", "n:1..9", "1..4, ..9", (1, 0)),
        ("?, 4", "n:1..9", "?, 4", (0, 4)),
        ("4, 2..3, ..7, ?", "n:1..9", "4, 2..3, ..7, ?", (4, 2, 0, 0)),
    ],
)
def test_an_empty_output_has_its_rows_where_they_would_be(
    shape: str, rows: str, told: str, empty: tuple[int, ...]
) -> None:
    """The fixed dimensions are the signature's, the others as small as it allows; the chain's signature admits it."""
    chain = chain_of(shape, rows=rows)
    assert not [line for line in chain.lines() if "without rows" in line]
    (port,) = chain.signature.outputs
    assert told == str(port.shape)
    chain_run = after_no_rows(chain)
    assert RunState.DONE is chain_run.state, chain_run.failure
    assert chain_run.outputs is not None
    assert ((0, "f32", empty),) == chain_run.outputs.layout
    assert port.shape.admits(empty)


def test_a_source_that_always_has_rows_needs_no_warning() -> None:
    """Its signature says that it has one at least."""
    always = ModelSignature(
        "always",
        (InputPort("x", "f32", NamedShape.parse("n, w")),),
        (OutputPort("rows", "f32", NamedShape.parse("1..5, ?"), Whole()),),
    )
    total = ModelSignature(
        "total",
        (InputPort("x", "f32", NamedShape.parse("n, w")),),
        (OutputPort("o", "f32", NamedShape.parse(""), Whole()),),
    )
    stages = [
        StageSpec(name="find", model="always", inputs={"x": "x"}),
        StageSpec(name="total", model="total", inputs={"x": "find.rows"}, each=["batch of find.rows"]),
    ]
    spec = ChainSpec(name="c", inputs={"x": "find.x"}, stages=stages, outputs={"o": "total.o"})
    chain = plan_chain(spec, {"always": always, "total": total})
    assert not [line for line in chain.lines() if "without rows" in line]


def test_a_skipped_row_of_a_list_has_the_fixed_dimensions() -> None:
    """Of pictures [height, width, 3], one without height and width."""
    tint = ModelSignature(
        "tint",
        (InputPort("x", "f32", NamedShape.parse("h, w")),),
        (OutputPort("o", "f32", NamedShape.parse("h, 2.., 3"), Whole()),),
    )
    stages = [
        StageSpec(name="cut", model="blocks", inputs={"x": "x"}),
        StageSpec(name="tint", model="tint", inputs={"x": "cut.tables"}, each=["item of cut.tables"]),
    ]
    spec = ChainSpec(
        name="c",
        inputs={"x": "cut.x"},
        stages=stages,
        outputs={"o": "tint.o", "ok": "tint.ok"},
        skips=True,
    )
    chain = plan_chain(spec, SIGNATURES | {"tint": tint})
    chain_run = ChainRun(chain, tensors_of([np.ones((2, 4), np.float32)]), None)
    chain_run.begin(0.0)
    (request,) = chain_run.ready
    chain_run.ready = []
    chain_run.answered(request, run("blocks", request.tensors), 1.0)
    first, second = chain_run.ready
    chain_run.ready = []
    chain_run.failed(first, "model_error", "no", 2.0)
    chain_run.answered(second, tensors_of([np.ones((1, 4, 3), np.float32)]), 3.0)
    assert chain_run.outputs is not None
    elements, shapes, ok = arrays_of(chain_run.outputs).values()
    assert [(0, 2, 3), (1, 4, 3)] == [array.shape for array in lists_of(elements, shapes)]
    assert [False, True] == ok.tolist()
    item = chain.signature.outputs[0].item
    assert item is not None
    assert item.admits((0, 2, 3))
