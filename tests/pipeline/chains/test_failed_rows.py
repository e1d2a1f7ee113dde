"""A row that fails: which failures are the row's own, and that nothing follows from the others of a chain that failed."""

from __future__ import annotations

import numpy as np
import pytest
from tests.pipeline.chains.models import SIGNATURES, arrays_of, run, tensors_of

from shapestream.chains.plan import plan_chain
from shapestream.chains.run import ChainRun, RunState
from shapestream.chains.spec import ChainSpec, StageSpec

OF_A_ROW = ["invalid", "model_error", "poisoned", "too_large", "worker_lost"]
OF_THE_REQUEST = ["cancelled", "deadline_exceeded", "draining", "internal", "overloaded", "unavailable"]


def begun(*, skips: bool) -> ChainRun:
    """Three rows, each a request that is to be answered."""
    outputs = {"b": "read.b", "ok": "read.ok"} if skips else {"b": "read.b"}
    stages = [StageSpec(name="read", model="norm", inputs={"x": "x"}, each=["row of x"])]
    spec = ChainSpec(name="c", inputs={"x": "read.x"}, stages=stages, outputs=outputs, skips=skips)
    chain = plan_chain(spec, SIGNATURES)
    x = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    chain_run = ChainRun(chain, tensors_of([x]), None)
    chain_run.begin(0.0)
    return chain_run


@pytest.mark.parametrize("code", OF_A_ROW)
def test_a_failure_of_a_row_alone_is_marked(code: str) -> None:
    """Zeros are in its place, and the others have their results."""
    chain_run = begun(skips=True)
    first, second, third = chain_run.ready
    chain_run.answered(third, run("norm", third.tensors), 1.0)
    chain_run.failed(second, code, "no", 2.0)
    chain_run.answered(first, run("norm", first.tensors), 3.0)
    assert RunState.DONE is chain_run.state
    assert chain_run.outputs is not None
    values = arrays_of(chain_run.outputs)
    assert [[3.0, 1.0, 7.0], [0.0, 0.0, 0.0], [11.0, 5.0, 7.0]] == values[0].tolist()
    assert [True, False, True] == values[1].tolist()


@pytest.mark.parametrize(
    ("skips", "code"),
    [*[(True, code) for code in OF_THE_REQUEST], *[(False, code) for code in OF_A_ROW + OF_THE_REQUEST]],
)
def test_any_other_failure_ends_the_request_once(skips: bool, code: str) -> None:
    """It names the stage and the row; answers and failures that come later change nothing."""
    chain_run = begun(skips=skips)
    first, second, third = chain_run.ready
    chain_run.ready = []
    chain_run.failed(second, code, "no", 1.0)
    chain_run.failed(third, "model_error", "too late", 2.0)
    chain_run.answered(first, run("norm", first.tensors), 3.0)
    assert RunState.FAILED is chain_run.state
    assert chain_run.failure is not None
    assert (code, "stage 'read', row 1: no") == (chain_run.failure.code, chain_run.failure.message)
    assert (None, [], {}) == (chain_run.outputs, chain_run.ready, chain_run.live)
