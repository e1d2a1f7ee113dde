"""Random chains against a sequential reference: any order of answers, failing rows, no rows, skip and fail."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, note, settings
from hypothesis import strategies as st
from tests.pipeline.chains.models import BAD, SIGNATURES, arrays_of, lists_of, run, tensors_of
from tests.pipeline.chains.reference import Failed, evaluate

from shapestream.chains.lead_times import LeadTimes
from shapestream.chains.plan import Chain, plan_chain
from shapestream.chains.run import ChainRun, RunState
from shapestream.chains.spec import ChainSpec, StageSpec
from shapestream_engine.errors import ShapeError

# What a source's kind may become: a model, how, and the rank of one row where there are several.
WAYS: dict[str, list[tuple[str, str, int]]] = {
    "table": [
        ("norm", "whole", 0),
        ("norm", "batch", 0),
        ("norm", "row", 1),
        ("split", "whole", 0),
        ("blocks", "whole", 0),
        ("pick", "whole", 0),
        ("flat", "row", 1),
    ],
    "vectors": [("norm", "item", 1), ("norm", "batch", 0), ("flat", "item", 1)],
    "tables": [("norm", "item", 2), ("pick", "item", 2)],
}


def _outputs(model: str, how: str, rank: int) -> dict[str, str]:
    """The kinds of a stage's outputs."""
    if how in ("whole", "batch"):
        return {
            "norm": {"a": "table", "b": "table"},
            "split": {"parts": "vectors"},
            "blocks": {"tables": "tables"},
            "pick": {"rows": "table"},
            "flat": {},
        }[model]
    if model == "flat":
        return {"o": "table"}
    if model == "pick":
        return {"rows": "tables"}
    return {"a": "vectors", "b": "table"} if rank == 1 else {"a": "tables", "b": "tables"}


@st.composite
def chains(draw: st.DrawFn) -> list[dict[str, Any]]:
    """One to five stages, each of any source before it."""
    kinds = {"x": "table"}
    stages = []
    for number in range(draw(st.integers(1, 5))):
        source = draw(st.sampled_from(sorted(kinds)))
        model, how, rank = draw(st.sampled_from(WAYS[kinds[source]]))
        name = f"s{number}"
        outputs = _outputs(model, how, rank)
        stages.append(
            {"name": name, "model": model, "source": source, "how": how, "rank": rank, "outputs": outputs}
        )
        kinds |= {f"{name}.{output}": kind for output, kind in outputs.items()}
    return stages


def _spec(stages: list[dict[str, Any]], *, skips: bool) -> ChainSpec:
    input_of = {"flat": "v"}
    specs = []
    for stage in stages:
        each = [] if stage["how"] == "whole" else [f"{stage['how']} of {stage['source']}"]
        port = input_of.get(stage["model"], "x")
        specs.append(
            StageSpec(name=stage["name"], model=stage["model"], inputs={port: stage["source"]}, each=each)
        )
    first = next(stage for stage in stages if stage["source"] == "x")
    outputs = {
        f"{stage['name']}_{output}": f"{stage['name']}.{output}"
        for stage in stages
        for output in stage["outputs"]
    }
    if skips:
        outputs |= {f"{s['name']}_ok": f"{s['name']}.ok" for s in stages if s["how"] in ("row", "item")}
    port = input_of.get(first["model"], "x")
    return ChainSpec(
        name="c", inputs={"x": f"{first['name']}.{port}"}, stages=specs, outputs=outputs, skips=skips
    )


def _play(chain: Chain, x: np.ndarray[Any, Any], order: st.DataObject) -> ChainRun:
    """Run a chain's requests in any order, until none is left."""
    chain_run = ChainRun(chain, tensors_of([x]), None, LeadTimes(chain))
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


# Rows of small whole numbers, now and then one that makes a model fail.
TABLES = st.tuples(st.integers(0, 4), st.integers(1, 5)).flatmap(
    lambda shape: st.lists(
        st.lists(st.sampled_from([*map(float, range(-3, 5)), BAD]), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    ).map(lambda rows: np.array(rows, np.float32).reshape(shape))
)


@settings(deadline=None)
@given(stages=chains(), x=TABLES, skips=st.booleans(), order=st.data())
def test_a_chain_equals_its_stages_run_one_after_the_other(
    stages: list[dict[str, Any]], x: np.ndarray[Any, Any], skips: bool, order: st.DataObject
) -> None:
    """Every output, to the bit; and it fails just where the reference does."""
    chain = plan_chain(_spec(stages, skips=skips), SIGNATURES)
    note("\n".join(chain.lines()))
    chain_run = _play(chain, x, order)
    try:
        expected = evaluate(stages, x, skips=skips)
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
        if isinstance(value, list):
            found = lists_of(arrays[port], arrays[port + 1])
            assert len(value) == len(found)
            for one, other in zip(value, found, strict=True):
                np.testing.assert_array_equal(one, other)
        elif value.size or arrays[port].size:
            np.testing.assert_array_equal(value, arrays[port])
        assert len(value) == (len(found) if isinstance(value, list) else len(arrays[port]))
