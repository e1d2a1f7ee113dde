"""Random chains against a sequential reference: any order of answers, failing rows, no rows, skip and fail.

Stages have one source or two: lists side by side, rows beside items, and what goes whole beside both. `CHAINS=3000` tries as
many by hand.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import given, note, settings
from hypothesis import strategies as st
from tests.pipeline.chains.models import BAD, SIGNATURES, Array, arrays_of, lists_of, run, tensors_of
from tests.pipeline.chains.reference import BY_ROW, Failed, Fed, Step, evaluate

from shapestream.chains.plan import Chain, plan_chain
from shapestream.chains.run import ChainRun, RunState
from shapestream.chains.spec import ChainSpec, StageSpec
from shapestream_engine.errors import ShapeError

CHAINS = int(os.environ.get("CHAINS", "300"))
INPUTS = {"x": "table", "y": "table", "z": "vector"}

# How what an input is made of may go to it, by the input's kind: rows of a batch, a table, or a vector.
WAYS: dict[str, dict[str, list[str]]] = {
    "rows": {"table": ["whole", "batch", "row"], "vectors": ["item", "batch"], "tables": ["item"]},
    "table": {"table": ["whole", "batch"], "vectors": ["batch"], "tables": ["item"]},
    "vector": {"table": ["row"], "vectors": ["item"], "vector": ["whole", "batch"]},
}
PORTS: dict[str, dict[str, str]] = {
    "norm": {"x": "rows"},
    "split": {"x": "table"},
    "blocks": {"x": "table"},
    "pick": {"x": "table"},
    "flat": {"v": "vector"},
    "mix": {"x": "rows", "y": "rows"},
    "weigh": {"v": "vector", "t": "table"},
    "join": {"v": "vector", "u": "vector"},
    "both": {"x": "table", "y": "table"},
}
# What a stage gives that has one request, and what it gives where it has several.
ONE = {"a": "table", "b": "table", "parts": "vectors", "tables": "tables", "rows": "table", "o": "vector"}
SEVERAL = {"a": "tables", "b": "tables", "rows": "tables", "o": "table", "total": "vector"}
ROW_BY_ROW = {"a": "vectors", "b": "table"}


@st.composite
def steps(draw: st.DrawFn, *, skips: bool) -> list[Step]:
    """One to five stages, each of any sources before it."""
    kinds = dict(INPUTS)
    found: list[Step] = []
    for number in range(draw(st.integers(1, 5))):
        step = draw(_step(f"s{number}", kinds, skips=skips))
        found.append(step)
        kinds |= {f"{step.name}.{output}": kind for output, kind in step.outputs.items()}
    return found


@st.composite
def _step(draw: st.DrawFn, name: str, kinds: Mapping[str, str], *, skips: bool) -> Step:
    """A model whose every input has a source, lists rather than tables, and these rather than the chain's inputs.

    A source goes one way, and there is no batch beside rows or items.
    """
    model = draw(st.sampled_from(sorted(PORTS)))
    fed: list[Fed] = []
    for port, wanted in PORTS[model].items():
        others = {each.how for each in fed} - {"whole"}
        known = {each.source: each.how for each in fed}
        choices = [
            (source, how)
            for source, kind in sorted(kinds.items())
            for how in WAYS[wanted].get(kind, []) * (1 if source in INPUTS else 3 if kind == "table" else 9)
            if known.get(source, how) == how
            and (how == "whole" or not others or (how == "batch") == (others == {"batch"}))
        ]
        fed.append(Fed(port, *draw(st.sampled_from(choices))))
    several = [each for each in fed if each.how in ("row", "item")]
    one_row = (
        bool(several)
        and model in BY_ROW
        and all(kinds[each.source] in ("table", "vectors") for each in several)
    )
    outputs = {port.name: "" for port in SIGNATURES[model].outputs if not port.name.endswith(".shapes")}
    table = ROW_BY_ROW if one_row else SEVERAL if several else ONE
    outputs = {output: table.get(output, "scalar") for output in outputs if not several or output in table}
    if several and skips:
        outputs["ok"] = "marks"
    return Step(name, model, tuple(fed), one_row, outputs)


@st.composite
def drawn_chains(draw: st.DrawFn) -> tuple[list[Step], list[str], bool]:
    """Stages, the outputs that the chain gives, and whether it skips rows. Stages that need not give one have none."""
    skips = draw(st.booleans())
    made = draw(steps(skips=skips).filter(lambda each: any(step.outputs for step in each)))
    every = [f"{step.name}.{output}" for step in made for output in step.outputs]
    given_away = (
        draw(st.lists(st.sampled_from(every), min_size=1, unique=True)) if draw(st.booleans()) else every
    )
    return made, given_away, skips


def _spec(made: Sequence[Step], outputs: Sequence[str], *, skips: bool) -> ChainSpec:
    stages = []
    for step in made:
        each = dict.fromkeys(f"{fed.how} of {fed.source}" for fed in step.fed if fed.how != "whole")
        inputs = {fed.port: fed.source for fed in step.fed}
        stages.append(StageSpec(name=step.name, model=step.model, inputs=inputs, each=[*each]))
    inputs = {}
    for step in made:
        for fed in step.fed:
            if fed.source in INPUTS:
                inputs.setdefault(fed.source, f"{step.name}.{fed.port}")
    named = {source.replace(".", "_"): source for source in outputs}
    return ChainSpec(name="c", inputs=inputs, stages=stages, outputs=named, skips=skips)


def _play(chain: Chain, inputs: Mapping[str, Array], order: st.DataObject) -> ChainRun:
    """Run a chain's requests in any order, until none is left."""
    tensors = tensors_of([inputs[name] for name in chain.inputs])
    chain_run = ChainRun(chain, tensors, None)
    chain_run.begin(0.0)
    pending = []
    for now in range(1, 10_000):
        pending += chain_run.ready
        chain_run.ready = []
        if not pending:
            break
        place = order.draw(st.integers(0, len(pending) - 1)) if len(pending) > 1 else 0
        request = pending.pop(place)
        try:
            result = run(request.stage.stage.model, request.tensors)
        except (ValueError, ShapeError) as error:
            chain_run.failed(request, "model_error", str(error), float(now))
        else:
            chain_run.answered(request, result, float(now))
    assert not chain_run.live or chain_run.state is RunState.FAILED
    return chain_run


def _tables(rows: st.SearchStrategy[int], columns: st.SearchStrategy[int]) -> st.SearchStrategy[Array]:
    """Rows of small whole numbers, now and then one that makes a model fail."""
    numbers = st.sampled_from([*map(float, range(-3, 5)), *map(float, range(-3, 5)), BAD])
    return st.tuples(rows, columns).flatmap(
        lambda shape: st.lists(numbers, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]).map(
            lambda flat: np.array(flat, np.float32).reshape(shape)
        )
    )


@st.composite
def inputs_of_chains(draw: st.DrawFn) -> dict[str, Array]:
    """Two tables, which often have equal numbers of rows, and a vector."""
    x = draw(_tables(st.integers(0, 4), st.integers(1, 5)))
    rows = st.just(len(x)) | st.integers(0, 4)
    y = draw(_tables(rows, st.just(3) | st.integers(1, 5)))
    (z,) = draw(_tables(st.just(1), st.just(len(x)) | st.integers(0, 4)))
    return {"x": x, "y": y, "z": z}


@settings(deadline=None, max_examples=CHAINS)
@given(drawn=drawn_chains(), inputs=inputs_of_chains(), order=st.data())
def test_a_chain_equals_its_stages_run_one_after_the_other(
    drawn: tuple[list[Step], list[str], bool], inputs: dict[str, Array], order: st.DataObject
) -> None:
    """Every output, to the bit and to the shape; and it fails just where the reference does."""
    made, outputs, skips = drawn
    chain = plan_chain(_spec(made, outputs, skips=skips), SIGNATURES)
    note("\n".join(chain.lines()))
    chain_run = _play(chain, inputs, order)
    used = {*outputs, *(fed.source for step in made for fed in step.fed)}
    try:
        expected = evaluate(made, inputs, used, skips=skips)
    except Failed:
        assert RunState.FAILED is chain_run.state
        assert chain_run.failure is not None
        return
    assert RunState.DONE is chain_run.state, chain_run.failure
    assert chain_run.outputs is not None
    arrays = arrays_of(chain_run.outputs)
    names = [port.name for port in chain.signature.outputs]
    for name, source in chain.outputs.items():
        value = expected[str(source)]
        port = names.index(name)
        assert chain.signature.outputs[port].shape.admits(arrays[port].shape)
        if isinstance(value, list):
            _assert_same_lists(value, lists_of(arrays[port], arrays[port + 1]))
        else:
            _assert_same(value, arrays[port])


def _assert_same(value: Any, array: Array) -> None:
    assert np.shape(value) == array.shape
    np.testing.assert_array_equal(value, array)


def _assert_same_lists(value: list[Array], found: list[Array]) -> None:
    assert len(value) == len(found)
    for one, other in zip(value, found, strict=True):
        _assert_same(one, other)
